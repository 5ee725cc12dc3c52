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
from kvxfer.core.pieces import Pieces, chop

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Grid", "Places", "Scratch", "SharedPlaces", "Side", "rows_of", "unit_of"]

_MORE = 4
"""Pieces are parted for a prepared list if that makes them more by at most a fourth."""
_STEP = 2**15
"""Rows that are filled at a time, so that they stay in the processor's cache."""
_SCRATCH_ROWS = 2**20
"""Rows that are kept allocated; more are made anew each time."""
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
        if self.step == 1:
            return True
        if _shift(self.step) is not None:  # a power of two: no division
            return not int(np.bitwise_or.reduce(offset)) & (self.step - 1)
        return not bool((offset % self.step).any())

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
        if self.step == self.size:  # whole blocks, as KV caches have them
            shift = _shift(self.size)
            block = offset // self.size if shift is None else offset >> shift
            first = self.first[:, 0]
            return (block + (first[0] if len(first) == 1 else first[pair])).astype(np.int32)
        block, rest = np.divmod(offset, self.size)
        found: Int64Array = self.first[pair, rest // self.step] + block
        return found.astype(np.int32)


class Scratch:
    """Memory for rows that are used up before the next ones are made. One thread at a time.

    NIXL copies what it is given, and fresh pages would cost more than filling them.
    """

    def __init__(self) -> None:
        self._rows: UInt64Array = np.empty((0, 3), np.uint64)

    def take(self, count: int) -> UInt64Array:
        """uint64[count, 3] of whatever was there, until it is asked for again."""
        if count > _SCRATCH_ROWS:
            return np.empty((count, 3), np.uint64)
        if count > len(self._rows):
            self._rows = np.empty((count, 3), np.uint64)
        return self._rows[:count]


@attrs.frozen(kw_only=True, eq=False)
class Places:
    """Where the pieces of a batch begin on one side: pair and offset of each."""

    pair: Int32Array
    offset: Int64Array

    def in_units(self, size: Int64Array, unit: int) -> Places:
        """The same bytes in pieces of ``unit`` bytes each; see ``unit_of``."""
        if int(size.max()) == unit:
            return self
        index, step, _ = chop(size, unit)
        return Places(pair=self.pair[index], offset=self.offset[index] + step)

    @property
    def sample(self) -> Int64Array:
        """Offsets that have the common divisors of all."""
        return self.offset

    def lie_on(self, grid: Grid) -> bool:
        """Whether all pieces do."""
        return grid.holds(self.offset)

    def index(self, grid: Grid) -> Int32Array:
        """The index of each piece in the list that was prepared from ``grid``."""
        return grid.index(self.pair, self.offset)

    def rows(self, side: Side, size: Int64Array, out: Scratch) -> UInt64Array:
        """Every piece for itself: address, length, device."""
        return rows_of(side, self.pair, self.offset, size, out)


@attrs.frozen(kw_only=True, eq=False)
class SharedPlaces:
    """As ``Places``, where every member has the same pieces from its base on.

    What does not depend on the members is kept with the pieces: other posts of the request have
    other members.
    """

    pair: Int32Array
    base: Int64Array
    pieces: Pieces
    side: str
    """``"local"`` or ``"remote"``."""

    def in_units(self, _: Int64Array, unit: int) -> SharedPlaces:
        if self.pieces.one_size == unit:
            return self
        return attrs.evolve(self, pieces=self.pieces.keep(_InUnits(unit)))

    @property
    def sample(self) -> Int64Array:
        offset: Int64Array = getattr(self.pieces, self.side)
        return np.concatenate((self.base[0] + offset, self.base + offset[0]))

    def lie_on(self, grid: Grid) -> bool:
        step = grid.step
        rest = self.pieces.keep(_Rest(self.side, step))
        return rest >= 0 and all((base + rest) % step == 0 for base in self.base.tolist())

    def index(self, grid: Grid) -> Int32Array:
        found = np.empty((len(self.base), len(self.pieces)), np.int32)
        # Layers begin at multiples of their pieces, or all at the same distance from one.
        by_rest: dict[int, list[tuple[int, int, int]]] = {}
        for member, (pair, base) in enumerate(
            zip(self.pair.tolist(), self.base.tolist(), strict=True)
        ):
            block, rest = divmod(base, grid.size)
            by_rest.setdefault(rest, []).append((member, pair, block))
        for rest, members in by_rest.items():
            more, phase = self.pieces.keep(_Divided(self.side, rest, grid.size, grid.step))
            if phase is None and len(members) == len(found):
                first = np.array([grid.first.item(p, 0) + block for _, p, block in members])
                np.add(first.astype(np.int32)[:, None], more, out=found)
                continue
            for member, pair, block in members:
                first = grid.first[pair, 0 if phase is None else phase] + block
                np.add(first, more, out=found[member], casting="unsafe")
        return found.reshape(-1)

    def rows(self, side: Side, _: Int64Array, out: Scratch) -> UInt64Array:
        pattern = self.pieces.keep(_Rows(self.side))
        rows = out.take(len(self.base) * len(pattern)).reshape(len(self.base), *pattern.shape)
        start = side.address[self.pair] + self.base.astype(np.uint64)
        device = side.device[self.pair]
        step = max(_STEP // max(len(pattern), 1), 1)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            part[:] = pattern
            part[:, :, 0] += start[first : first + step, None]
            if device.any():
                part[:, :, 2] = device[first : first + step, None]
        return rows.reshape(-1, 3)


@attrs.frozen
class _InUnits:
    unit: int

    def __call__(self, pieces: Pieces) -> Pieces:
        index, step, _ = chop(pieces.size, self.unit)
        return Pieces(pieces.local[index] + step, pieces.remote[index] + step, self.unit)


@attrs.frozen
class _Rest:
    """What every offset leaves when divided by ``step``; -1 if they differ."""

    side: str
    step: int

    def __call__(self, pieces: Pieces) -> int:
        rest = getattr(pieces, self.side) % self.step
        return int(rest[0]) if bool((rest == rest[0]).all()) else -1


@attrs.frozen
class _Divided:
    """Offsets as blocks and phases, for members whose base leaves ``rest``."""

    side: str
    rest: int
    size: int
    step: int

    def __call__(self, pieces: Pieces) -> tuple[Int32Array, Int64Array | None]:
        more, phase = np.divmod(getattr(pieces, self.side) + self.rest, self.size)
        phase //= self.step
        return more.astype(np.int32), phase if phase.any() else None


@attrs.frozen
class _Rows:
    side: str

    def __call__(self, pieces: Pieces) -> UInt64Array:
        pattern = np.zeros((len(pieces), 3), np.uint64)
        # Below zero it wraps, and back again.
        pattern[:, 0] = getattr(pieces, self.side).astype(np.uint64)
        pattern[:, 1] = pieces.one_size or pieces.size
        return pattern


def unit_of(size: Int64Array) -> int:
    """The size of which all pieces can be taken to be; 0 if that would be many more pieces.

    Prepared lists hold pieces of one size.  Where some blocks of a request happen to follow each
    other on both sides, so that they were joined, it pays to part them again.
    """
    unit, most = int(size.min()), int(size.max())
    if unit == most:
        return unit
    if (size % unit).any() or int((size // unit).sum()) > len(size) + len(size) // _MORE:
        return 0
    return unit


def _shift(size: int) -> int | None:
    """By how many bits to shift in place of a division by ``size``; None: it is no power of two."""
    return None if size & (size - 1) else size.bit_length() - 1


def _counts(side: Side, size: int, step: int) -> Int64Array:
    """How many pieces fit, as ``[pair, phase]``."""
    room = side.nbytes[:, None] - np.arange(0, size, step, dtype=np.int64)
    counts: Int64Array = np.maximum(room // size, 0)
    return counts


def rows_of(
    side: Side, pair: Int32Array, offset: Int64Array, size: Int64Array, out: Scratch
) -> UInt64Array:
    """Every piece for itself: address, length, device."""
    rows = out.take(len(pair))
    rows[:, 0] = side.address[pair] + offset.astype(np.uint64)
    rows[:, 1] = size
    rows[:, 2] = side.device[pair]
    return rows
