"""What has ended is remembered for a while, so that a late word about it is not taken for new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from kvxfer.errors import InvalidInputError

__all__ = ["Remembered"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Bounded by count (oldest out first) and by time. Remembering a key again starts it anew.

    ``expire`` does the latter; nothing is looked at that is not due.

    Args:
        capacity: how many keys are kept.
        ttl: seconds a key is kept.
    """

    __slots__ = ("_capacity", "_ttl", "entries", "evicted")

    def __init__(self, *, capacity: int, ttl: float) -> None:
        if capacity < 1 or not ttl > 0:
            raise InvalidInputError(
                f"capacity {capacity} and ttl {ttl} must be positive: nothing would be remembered"
            )
        self._capacity = capacity
        self._ttl = ttl
        self.entries: OrderedDict[K, tuple[float, V]] = OrderedDict()
        """Since when, and the value; for looking only."""
        self.evicted = 0
        """Keys dropped for lack of room, before their time."""

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def __iter__(self) -> Iterator[K]:
        """Oldest first."""
        return iter(self.entries)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self.entries)

    def add(self, key: K, value: V, now: float) -> None:
        """Remember ``key`` until ``now`` plus the time to live."""
        entries = self.entries
        if key in entries:
            entries.move_to_end(key)
        entries[key] = (now, value)
        if len(entries) > self._capacity:
            entries.popitem(last=False)
            self.evicted += 1

    def get(self, key: K) -> V | None:
        entry = self.entries.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: K) -> V | None:
        """Forget ``key`` now; None if it is not known."""
        entry = self.entries.pop(key, None)
        return None if entry is None else entry[1]

    def expire(self, now: float) -> None:
        """Forget what is older than the time to live."""
        while self.entries:
            key, (since, _) = next(iter(self.entries.items()))
            if now < since + self._ttl:
                return
            del self.entries[key]

    def next_at(self) -> float | None:
        """When ``expire`` has something next."""
        if not self.entries:
            return None
        return next(iter(self.entries.values()))[0] + self._ttl
