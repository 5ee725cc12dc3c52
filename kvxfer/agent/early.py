"""Requests that came before our own orders: kept for a while, answered when the order comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Early"]

T = TypeVar("T")


class Early(Generic[T]):
    """Bounded by number of transfer ids (oldest out first), requests per id, and time."""

    def __init__(self, *, capacity: int, ttl: float, per_id: int = 1024) -> None:
        self._capacity = capacity
        self._ttl = ttl
        self._per_id = per_id
        self._entries: OrderedDict[str, tuple[float, list[T]]] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, transfer_id: str, request: T, now: float) -> None:
        self._drop_old(now)
        entry = self._entries.get(transfer_id)
        if entry is None:
            self._entries[transfer_id] = (now, [request])
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
                self.evicted += 1
        elif len(entry[1]) < self._per_id:
            entry[1].append(request)
        else:
            self.evicted += 1

    def take(self, transfer_id: str, now: float) -> list[T]:
        """What waits for this id, oldest first."""
        self._drop_old(now)
        entry = self._entries.pop(transfer_id, None)
        return [] if entry is None else entry[1]

    def discard(self, transfer_id: str, unwanted: Callable[[T], bool]) -> None:
        """Drop requests for this id that have become pointless."""
        entry = self._entries.get(transfer_id)
        if entry is not None:
            entry[1][:] = [request for request in entry[1] if not unwanted(request)]
            if not entry[1]:
                del self._entries[transfer_id]

    def expire(self, now: float) -> None:
        """Drop what is older than the time to live."""
        self._drop_old(now)

    def next_at(self) -> float | None:
        """When ``expire`` has something next."""
        if not self._entries:
            return None
        return next(iter(self._entries.values()))[0] + self._ttl

    def _drop_old(self, now: float) -> None:
        while self._entries:
            transfer_id, (arrived, _) = next(iter(self._entries.items()))
            if now < arrived + self._ttl:
                return
            del self._entries[transfer_id]
            self.evicted += 1
