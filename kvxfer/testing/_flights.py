"""What ``FaultyTransport`` keeps of an attempt, of an answer, and of a fault that holds them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from kvxfer.core.pollable import Pollable
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.batch import Batch
    from kvxfer.core.clock import Clock
    from kvxfer.testing.faults import Fault

__all__ = ["Flight", "Hold", "Mapped", "Never"]

S = TypeVar("S")
T = TypeVar("T")


class Hold:
    """Until when a fault holds something back."""

    def __init__(self, fault: Fault, clock: Clock) -> None:
        self.released = False
        self._clock = clock
        self._until = None if fault.after is None else clock.now() + fault.after

    @property
    def over(self) -> bool:
        return self.released or (self._until is not None and self._clock.now() >= self._until)


class Never(Hold):
    @property
    def over(self) -> bool:
        return False


class Flight:
    """One attempt of ours and what the wrapped engine does for it."""

    __slots__ = ("fault", "hold", "inner", "launching", "outer", "to_post")

    def __init__(self, outer: Attempt, fault: Fault | None, hold: Hold | None) -> None:
        self.outer = outer
        self.fault = fault
        self.hold = hold
        self.inner: Attempt | None = None
        self.launching = False
        """Another thread is inside the engine's ``post``."""
        self.to_post: Batch | None = None
        """What the engine gets once the fault is released."""

    @property
    def released(self) -> bool:
        return self.hold is None or self.hold.over

    @property
    def landed(self) -> bool:
        """Nothing of it can land any more, as far as the wrapped engine goes."""
        if self.to_post is not None or (self.launching and self.inner is None):
            return False
        return self.inner is None or self.inner.drained


class Mapped(Pollable[T], Generic[S, T]):
    """The wrapped transport's answer, in our terms, not before the hold is over."""

    def __init__(self, inner: Pollable[S], convert: Callable[[S], T], hold: Hold | None) -> None:
        self._inner = inner
        self._convert = convert
        self._hold = hold
        self._answer: tuple[T | None, KvxferError | None] = (None, None)
        self._lock = threading.Lock()

    def poll(self) -> tuple[T | None, KvxferError | None]:
        if self._hold is not None and not self._hold.over:
            return None, None
        with self._lock:
            if self._answer == (None, None):
                value, error = self._inner.poll()
                if error is not None:
                    self._answer = (None, error)
                elif value is not None:
                    self._answer = self._converted(value)
            return self._answer

    def _converted(self, value: S) -> tuple[T | None, KvxferError | None]:
        try:
            return self._convert(value), None
        except KvxferError as error:
            return None, error
