"""A node's blocks: who owns each one, and what can still land in it or be read from it.

The checker of promise 3.  Every block knows its owner; everything under way knows whose block it
was meant for.  A block that changes hands while something can still touch it is a violation at that
moment, whether or not a byte is ever wrong.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from kvxfer.core.events import Role

__all__ = ["CELL", "LAYERS", "BlockMemory", "Holder", "content"]

Holder = tuple[Role, str]
"""One side of one transfer."""

LAYERS = 2
CELL = 8
"""Bytes of one block of one layer."""

Cells = npt.NDArray[np.int64]


def content(serial: int, blocks: int) -> Cells:
    """What the blocks of request ``serial`` hold: int64[LAYERS, blocks], all different."""
    layer = np.arange(LAYERS, dtype=np.int64)[:, None]
    position = np.arange(blocks, dtype=np.int64)[None, :]
    cells: Cells = (np.int64(serial + 1) << 20) | (layer << 16) | position
    return cells


class BlockMemory:
    """``cells[layer, block]`` is the memory that is registered."""

    def __init__(self, blocks: int, rng: random.Random) -> None:
        self.blocks = blocks
        self.cells: Cells = np.zeros((LAYERS, blocks), dtype=np.int64)
        self.owner = [0] * blocks
        """Serial number of the ownership of each block; 0 is nobody."""
        self.landing = [0] * blocks
        """How many things under way may still write each block."""
        self.reading = [0] * blocks
        """How many of this node's own posts may still read each block."""
        self.dead = False
        self._rng = rng
        self._free = list(range(blocks))
        self._held: dict[Holder, list[int]] = {}
        self._owners = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def holders(self) -> list[Holder]:
        return list(self._held)

    def take(self, holder: Holder, count: int) -> list[int] | None:
        """Blocks for ``holder``, or None if there are too few."""
        if count > len(self._free):
            return None
        self._owners += 1
        ids = []
        for _ in range(count):
            i = self._rng.randrange(len(self._free))
            self._free[i], self._free[-1] = self._free[-1], self._free[i]
            ids.append(self._free.pop())
        for block in ids:
            self.owner[block] = self._owners
        self._held[holder] = ids
        return ids

    def ids(self, holder: Holder) -> list[int]:
        """What ``holder`` has; the same list as long as it has it."""
        return self._held.get(holder, [])

    def give_back(self, holder: Holder) -> str:
        """Free what ``holder`` has; what was wrong with that, or nothing."""
        wrong = ""
        for block in self._held.pop(holder, ()):
            if self.landing[block]:
                wrong = f"block {block} is handed back while bytes can still land in it"
            elif self.reading[block]:
                wrong = f"block {block} is handed back while its owner still reads from it"
            self.owner[block] = 0
            self._free.append(block)
        return wrong
