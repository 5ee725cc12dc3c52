"""Observers of an agent, as it keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.core.observations import Observation, Observer

__all__ = ["Watching", "events_only"]


class Watching:
    """One observer that was added, and may be again."""

    __slots__ = ("_observer",)

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, observation: Observation) -> None:
        self._observer(observation)


def events_only(on_event: Callable[[Event], object]) -> Observer:
    def told(observation: Observation) -> None:
        if isinstance(observation, Event):
            on_event(observation)

    return told
