"""Batches as NIXL takes them: indices into prepared lists, or rows of addresses.

Picking from a list that was prepared once costs a fraction of describing every piece again.  That
works for pieces of one size, which KV-cache blocks are.  Pure: addresses in, arrays out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvxfer.core.batch import Int64Array

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Grid", "Side", "rows_of"]

MAX_PHASES = 64
"""Rows per region of a prepared list. Beyond it the pieces are described one by one."""

Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]


@attrs.frozen(kw_only=True, eq=False)
class Side:
    """The regions of one side of a path, by pair. Addresses and sizes in bytes."""

    address: UInt64Array
    nbytes: Int64Array
    device: UInt64Array

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]]) -> Side:
        """From ``(address, nbytes, device)`` per pair."""
        return cls(
            address=np.array([r[0] for r in rows], np.uint64),
            nbytes=np.array([r[1] for r in rows], np.int64),
            device=np.array([r[2] for r in rows], np.uint64),
        )


@attrs.frozen(kw_only=True, eq=False)
class Grid:
    """Where pieces of ``size`` bytes can begin: at multiples of ``step`` in every region.

    NIXL's strided rows may not overlap themselves, so a step below the size takes ``size / step``
    rows, one per phase.
    """

    size: int
    step: int
    first: Int64Array
    """Index of the first piece of ``[pair, phase]``."""

    @classmethod
    def over(cls, side: Side, size: int, offset: Int64Array, finer: int = 0) -> Grid | None:
        """The coarsest grid that ``offset`` and the step ``finer`` lie on; None if there is none
        within ``MAX_PHASES`` or with indices that fit."""
        step = int(np.gcd.reduce(offset, initial=np.gcd(size, finer)))
        if size // step > MAX_PHASES:
            return None
        counts = _counts(side, size, step)
        first = np.cumsum(counts.ravel()) - counts.ravel()
        if int(first[-1]) + int(counts[-1, -1]) > 2**31 - 1:
            return None
        return cls(size=size, step=step, first=first.reshape(counts.shape))

    def holds(self, offset: Int64Array) -> bool:
        """Whether every offset lies on the grid."""
        return self.step == 1 or not bool((offset % self.step).any())

    def rows(self, side: Side) -> UInt64Array:
        """The prepared list: address, length, device, stride, count."""
        counts = _counts(side, self.size, self.step)
        phases = np.arange(counts.shape[1], dtype=np.uint64) * np.uint64(self.step)
        rows = np.empty((*counts.shape, 5), np.uint64)
        rows[..., 0] = side.address[:, None] + phases
        rows[..., 1] = rows[..., 3] = self.size
        rows[..., 2] = side.device[:, None]
        rows[..., 4] = counts
        flat = rows.reshape(-1, 5)
        return flat[flat[:, 4] > 0]

    def index(self, pair: Int32Array, offset: Int64Array) -> Int32Array:
        """The index of each piece in the prepared list."""
        block, rest = np.divmod(offset, self.size)
        found: Int64Array = self.first[pair, rest // self.step] + block
        return found.astype(np.int32)


def _counts(side: Side, size: int, step: int) -> Int64Array:
    """How many pieces fit, as ``[pair, phase]``."""
    room = side.nbytes[:, None] - np.arange(0, size, step, dtype=np.int64)
    counts: Int64Array = np.maximum(room // size, 0)
    return counts


def rows_of(side: Side, pair: Int32Array, offset: Int64Array, size: Int64Array) -> UInt64Array:
    """Every piece for itself: address, length, device."""
    rows = np.empty((len(pair), 3), np.uint64)
    rows[:, 0] = side.address[pair] + offset.astype(np.uint64)
    rows[:, 1] = size
    rows[:, 2] = side.device[pair]
    return rows
