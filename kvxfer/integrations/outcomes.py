"""In an engine's worker: what has become of each request, from what becomes of its transfer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import attrs

from kvxfer.agent.config import Limits
from kvxfer.core.clock import Clock
from kvxfer.core.events import (
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    Quarantined,
    Received,
    Role,
    Sent,
)
from kvxfer.core.remembered import Remembered

__all__ = ["LoadEnd", "Outcomes"]

L = TypeVar("L")


@attrs.frozen
class LoadEnd(Generic[L]):
    """One load that has ended, well or not."""

    load: L
    seconds: float
    """From its order."""
    nbytes: int | None
    """None: it failed."""
    drained: bool
    """Nothing lands in its blocks any more. False: they are in quarantine."""


class Outcomes(Generic[L]):
    """Each request once, in whatever order orders and events come. Not thread-safe.

    A failed load ends when nothing can land in its blocks any more, or when they are in quarantine.
    ``L`` is what an engine wants to know of a load again.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._clock = clock
        self.holds: dict[str, str] = {}
        """By transfer id: the finished request whose blocks wait for its end."""
        self.loads: dict[str, tuple[L, float]] = {}
        """By transfer id, with when it began."""
        self._over: Remembered[str, bool] = Remembered(
            capacity=limits.early, ttl=limits.remembered_ttl
        )
        """Pushes that ended before their requests did."""
        self._sent: set[str] = set()

    def begin(self, holds: Mapping[str, str], loads: Mapping[str, L]) -> None:
        """Requests that have ended and whose blocks are held, and loads, by transfer id."""
        now = self._clock.now()
        for transfer_id, request_id in holds.items():
            if self._over.pop(transfer_id):
                self._sent.add(request_id)
            else:
                self.holds[transfer_id] = request_id
        self.loads.update({transfer_id: (load, now) for transfer_id, load in loads.items()})

    def of(self, events: Iterable[Event]) -> tuple[set[str], list[LoadEnd[L]]]:
        """Requests whose blocks are free again, and loads that have ended, since the last call."""
        now = self._clock.now()
        self._over.expire(now)
        loads: list[LoadEnd[L]] = []
        for event in events:
            match event:
                case Sent() | Declined() | Expired() | Failed(role=Role.PRODUCER):
                    if event.transfer_id in self.holds:
                        self._sent.add(self.holds.pop(event.transfer_id))
                    else:
                        self._over.add(event.transfer_id, True, now)
                case Received():
                    loads += self._ended(event, now, nbytes=event.nbytes)
                case Failed(drained=True) | Drained(role=Role.CONSUMER):
                    loads += self._ended(event, now)
                case Quarantined(role=Role.CONSUMER):
                    loads += self._ended(event, now, drained=False)
        sent, self._sent = self._sent, set()
        return sent, loads

    def _ended(
        self, event: Event, now: float, *, nbytes: int | None = None, drained: bool = True
    ) -> list[LoadEnd[L]]:
        """Nothing if it has ended before."""
        load, began = self.loads.pop(event.transfer_id, (None, now))
        if load is None:
            return []
        return [LoadEnd(load=load, seconds=now - began, nbytes=nbytes, drained=drained)]
