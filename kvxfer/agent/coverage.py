"""How many bytes of a destination several batches write, each byte counted once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvxfer.core.batch import Batch

__all__ = ["distinct_nbytes"]


def distinct_nbytes(batches: Sequence[Batch]) -> int:
    """Bytes of remote memory that ``batches``, all over one path, write.

    What is written twice counts once: a repeated layer must not stand for one that is missing.
    """
    pair = np.concatenate([b.pair for b in batches]) if batches else np.empty(0, np.int32)
    total = 0
    for p in np.unique(pair):
        mine = pair == p
        start = np.concatenate([b.remote for b in batches])[mine]
        size = np.concatenate([b.size for b in batches])[mine]
        order = np.argsort(start, kind="stable")
        start, end = start[order], start[order] + size[order]
        # Each piece adds what lies behind everything before it.
        behind = np.maximum.accumulate(end)
        start[1:] = np.maximum(start[1:], behind[:-1])
        total += int(np.maximum(end - start, 0).sum())
    return total
