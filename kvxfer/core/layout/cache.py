"""A bounded cache of plans."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvxfer.core.layout.plan import Plan

__all__ = ["PlanCache"]


class PlanCache:
    """Plans by (geometries, heads, ids, pairing rule), least recently used out first.

    Bounded by entries and by pieces: 24 bytes each, the ids in the key beside them, and what
    was kept with a plan (its merged form, lists, what ``Plan.keep`` made).  Ids beyond those of the
    pieces, and what a plan leaves uncovered, count as pieces too: a peer's list may be long where
    next to nothing of it moves.  Keys hold everything that a plan depends on, so a hit is exact.
    Safe to use from several threads.
    """

    def __init__(self, *, max_plans: int = 256, max_pieces: int = 2**22) -> None:
        if max_plans < 1 or max_pieces < 1:
            raise InvalidInputError(
                f"max_plans={max_plans} and max_pieces={max_pieces} must be at least 1"
            )
        self._max_plans = max_plans
        self._max_pieces = max_pieces
        self._plans: OrderedDict[Hashable, tuple[Plan, int]] = OrderedDict()
        """With what each weighs, in pieces."""
        self._lock = threading.Lock()
        self.pieces = 0
        self.hits = 0
        self.misses = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> Plan | None:
        """The plan stored under an equal key, or None."""
        with self._lock:
            entry = self._plans.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            self._plans.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, plan: Plan, *, ids: int = 0) -> None:
        """Store a plan; one that alone exceeds ``max_pieces`` is not kept.

        ``ids``: how many block ids the key holds. Two of them, one of each side, come with a piece;
        where there are more, they count.
        """
        weight = max(len(plan), ids // 2) + 2 * len(plan.uncovered)
        if weight > self._max_pieces:
            return
        with self._lock:
            old = self._plans.pop(key, None)
            if old is not None:
                self.pieces -= old[1]
            self._plans[key] = (plan, weight)
            self.pieces += weight
            while len(self._plans) > self._max_plans or self.pieces > self._max_pieces:
                _, gone = self._plans.popitem(last=False)
                self.pieces -= gone[1]
                self.evicted += 1

    def clear(self) -> None:
        """Forget all plans; the counters stay."""
        with self._lock:
            self._plans.clear()
            self.pieces = 0

    def snapshot(self) -> dict[str, Any]:
        """Sizes and counters, for metrics."""
        with self._lock:
            return {
                "plans": len(self._plans),
                "pieces": self.pieces,
                "hits": self.hits,
                "misses": self.misses,
                "evicted": self.evicted,
            }
