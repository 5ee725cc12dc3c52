"""Grants obtained ahead of a pull, and until when they last."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvxfer.core.timers import Timers

if TYPE_CHECKING:
    from kvxfer.core.wire import Ref

__all__ = ["Grants"]


class Grants:
    """Bounded by count (oldest out first) and by their own end. Progress thread only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._until: dict[Ref, float] = {}
        self._timers: Timers[Ref] = Timers()
        self.evicted = 0
        """Dropped for lack of room: their pulls ask again."""

    def __len__(self) -> int:
        return len(self._until)

    def add(self, ref: Ref, until: float) -> None:
        """Remember a grant; a later end counts."""
        until = max(until, self._until.get(ref, until))
        self._until[ref] = until
        self._timers.set(ref, until)
        if len(self._until) > self._capacity:
            self.take(next(iter(self._until)))
            self.evicted += 1

    def take(self, ref: Ref) -> float:
        """Until when it lasts; minus infinity if there is none. Forgets it."""
        self._timers.cancel(ref)
        return self._until.pop(ref, -math.inf)

    def expire(self, now: float) -> None:
        """Forget those that have ended."""
        for ref in self._timers.pop_due(now):
            del self._until[ref]

    def next_at(self) -> float | None:
        """When ``expire`` has something next."""
        return self._timers.next_at()
