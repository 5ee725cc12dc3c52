"""Whose turn it is: deficit round robin among keys that wait."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Turns"]

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """Keys in the order of their turns; each may spend about one ``quantum`` per turn.

    A key that comes in goes to the end, so however many come after it, it waits for those before
    it only.  A key that left and comes back keeps nothing of its old turn.  Constant time per
    operation, averaged over what is served.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: collections.OrderedDict[K, int] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, key: object) -> bool:
        return key in self._left

    def __iter__(self) -> Iterator[K]:
        return iter(self._left)

    def enter(self, key: K) -> None:
        """``key`` waits from now on; nothing changes if it does already."""
        if key not in self._left:
            self._left[key] = 0

    def leave(self, key: K) -> None:
        """``key`` waits no more; unknown keys are fine."""
        self._left.pop(key, None)

    def first(self, cost: Callable[[K], int], quantum: int) -> K | None:
        """Whose turn it is, None if nobody waits. The answer stays until ``spend`` or ``leave``.

        ``cost`` says what serving a key costs: at least 1 and at most ``quantum``.
        """
        left = self._left
        if len(left) == 1:  # the usual case: nobody to take turns with
            return next(iter(left))
        while left:
            key = next(iter(left))
            if left[key] >= cost(key):
                return key
            left[key] += quantum
            left.move_to_end(key)
        return None

    def spend(self, key: K, cost: int) -> None:
        """``key`` was served."""
        if key in self._left:
            # Below 0 only where it was alone: it owes nothing to who was not there.
            self._left[key] = max(0, self._left[key] - cost)
