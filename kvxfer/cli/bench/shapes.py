"""Which blocks a transfer moves."""

from __future__ import annotations

import numpy as np

from kvxfer.cli.bench.memory import WORD, Words
from kvxfer.cli.bench.plan import Cell
from kvxfer.core.batch import Batch

__all__ = ["batch_of", "wrong_words"]


def batch_of(cell: Cell, buffer: int, rng: np.random.Generator) -> Batch:
    """Blocks of ``cell`` in buffers of ``buffer`` bytes: a new place each time.

    "contiguous": one run of blocks on both sides.  "random": blocks at random places, different
    ones on both sides, none twice.
    """
    slots = buffer // cell.size
    sides = []
    for _ in range(2):
        if cell.pattern == "contiguous":
            first = int(rng.integers(0, slots - cell.count + 1))
            sides.append(np.arange(first, first + cell.count, dtype=np.int64))
        else:
            sides.append(rng.permutation(slots)[: cell.count].astype(np.int64))
    local, remote = (side * cell.size for side in sides)
    sizes = np.full(cell.count, cell.size, np.int64)
    return Batch(np.zeros(cell.count, np.int32), local, remote, sizes)


def wrong_words(here: Words, batch: Batch) -> int:
    """Words of ``here`` that are not what a READ of ``batch`` brings: their index over there."""
    local, remote, size = batch.local // WORD, batch.remote // WORD, batch.size // WORD
    wrong = 0
    for a, b, n in zip(local.tolist(), remote.tolist(), size.tolist(), strict=True):
        wrong += int((here[a : a + n] != np.arange(b, b + n, dtype=np.uint64)).sum())
    return wrong
