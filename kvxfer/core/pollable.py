"""Things that can take a while, without anything that waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kvxfer.errors import KvxferError

__all__ = ["Deferred", "Pollable", "Ready"]

T = TypeVar("T")


class Pollable(ABC, Generic[T]):
    """The answer to something slow. ``poll`` never waits and may be called from any thread."""

    @abstractmethod
    def poll(self) -> tuple[T | None, KvxferError | None]:
        """``(None, None)`` while pending, then ``(value, None)`` or ``(None, error)`` for ever."""


class Ready(Pollable[T]):
    """Already answered."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: T | None = None, error: KvxferError | None = None) -> None:
        if (value is None) == (error is None):
            raise ValueError("exactly one of value and error must be given")
        self._value = value
        self._error = error

    def poll(self) -> tuple[T | None, KvxferError | None]:
        return self._value, self._error


class Deferred(Pollable[T]):
    """Answered later, from any thread. The first answer wins; later ones are ignored."""

    __slots__ = ("_answer",)

    def __init__(self) -> None:
        self._answer: tuple[T | None, KvxferError | None] = (None, None)

    def poll(self) -> tuple[T | None, KvxferError | None]:
        return self._answer

    def resolve(self, value: T) -> None:
        if self._answer == (None, None):
            self._answer = (value, None)

    def fail(self, error: KvxferError) -> None:
        if self._answer == (None, None):
            self._answer = (None, error)
