"""Many deadlines, little work: a heap of keys that is only looked at when one is due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Timers"]

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """One due time per key. Setting a key again moves it; cancelled entries are dropped lazily.

    The heap holds at most twice as many entries as there are keys (plus a constant): moving
    deadlines for ever does not grow it.
    """

    __slots__ = ("_count", "_due", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._due: dict[K, tuple[float, int]] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: object) -> bool:
        return key in self._due

    def set(self, key: K, at: float) -> None:
        """Have ``key`` come due at ``at`` seconds."""
        serial = next(self._count)
        self._due[key] = (at, serial)
        heapq.heappush(self._heap, (at, serial, key))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(a, s, k) for a, s, k in self._heap if self._due.get(k) == (a, s)]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Forget ``key``; unknown keys are fine."""
        self._due.pop(key, None)

    def due_at(self, key: K) -> float | None:
        entry = self._due.get(key)
        return None if entry is None else entry[0]

    def pop_due(self, now: float) -> list[K]:
        """Keys that came due, earliest first; each is forgotten."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            at, serial, key = heapq.heappop(self._heap)
            if self._due.get(key) == (at, serial):
                del self._due[key]
                due.append(key)
        return due

    def next_at(self) -> float | None:
        """When the earliest key comes due, or None."""
        while self._heap:
            at, serial, key = self._heap[0]
            if self._due.get(key) == (at, serial):
                return at
            heapq.heappop(self._heap)
        return None
