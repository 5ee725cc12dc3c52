"""A block allocator as engines have one, for counting leaks and noticing what is reused."""

from __future__ import annotations

import collections

import numpy as np
import numpy.typing as npt

__all__ = ["BlockAllocator"]

_SCRUB = 0xDB


class BlockAllocator:
    """Hands out block ids of one cache; blocks that come back are scrubbed, so that use after free
    shows.  Ids are reused as soon as possible: first in, first out would hide mistakes.
    """

    def __init__(self, cache: npt.NDArray[np.uint8]) -> None:
        self._cache = cache
        self.total: int = cache.shape[2]
        self._free = collections.deque(range(self.total))
        self._held: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leaked(self) -> int:
        """Blocks that are not free; at the end there must be none."""
        return self.total - len(self._free)

    def holders(self) -> list[str]:
        return list(self._held)

    def take(self, name: str, count: int) -> list[int] | None:
        """Ids for ``name``, or None if there are too few."""
        if count > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(count)]
        self._held[name] = ids
        return ids

    def ids(self, name: str) -> list[int]:
        return self._held[name]

    def give_back(self, name: str) -> None:
        """Scrub and free what ``name`` holds. A second time it holds nothing."""
        ids = self._held.pop(name, [])
        if ids:
            self._cache[:, :, ids] = _SCRUB
            self._free.extend(ids)
