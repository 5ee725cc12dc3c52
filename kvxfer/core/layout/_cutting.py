"""Merging and splitting of pieces, on plain int64 vectors. Both keep every byte where it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvxfer.core.layout._checks import Int32Array, Int64Array, int64_vector
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Borders", "cut", "group_ends", "merge_order"]


def _border(value: object) -> int | Int64Array:
    if value is None:
        return np.empty(0, np.int64)
    if type(value) is int:
        if value < 1:
            raise InvalidInputError(f"a border step must be at least 1 byte, not {value}")
        return value
    return np.unique(int64_vector("borders", value))


@attrs.frozen(kw_only=True, eq=False)
class Borders:
    """Offsets that no piece may cross, on either side.

    Each side is a step in bytes (borders at all its multiples), a list of offsets, or None.
    """

    local: int | Sequence[int] | Int64Array | None = attrs.field(default=None, converter=_border)
    remote: int | Sequence[int] | Int64Array | None = attrs.field(default=None, converter=_border)


def merge_order(
    local: Int64Array, remote: Int64Array, size: Int64Array | int, pair: Int32Array | None
) -> tuple[Int64Array | None, Int64Array, Int64Array] | None:
    """How to merge: ``(order or None, index of each run's first piece, run sizes)``.

    ``order`` sorts the pieces by pair and local offset; None if they are sorted.  Returns None if
    nothing can be merged.
    """
    n = len(local)
    if n < 2:
        return None
    if isinstance(size, int):
        if pair is None and _nothing_touches(local, remote, size):
            return None
        size = np.full(n, size, np.int64)
    order: Int64Array | None = None
    rises = local[1:] > local[:-1]
    if pair is not None:
        step = pair[1:] - pair[:-1]
        rises = (step > 0) | ((step == 0) & rises)
    if not rises.all():
        order = np.argsort(local, kind="stable") if pair is None else np.lexsort((local, pair))
        local, remote, size = local[order], remote[order], size[order]
        pair = None if pair is None else pair[order]
    end_local = local[:-1] + size[:-1]
    end_remote = remote[:-1] + size[:-1]
    breaks = (local[1:] != end_local) | (remote[1:] != end_remote)
    if pair is not None:
        breaks |= pair[1:] != pair[:-1]
    if breaks.all():
        return None
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return order, first, np.add.reduceat(size, first)


def _nothing_touches(local: Int64Array, remote: Int64Array, size: int) -> bool:
    """Whether that is certain for pieces of one size, at a fraction of the cost of sorting them.

    Random block ids are the usual case: neighbours on one side, but not on both.
    """
    n = len(local)
    bits = n.bit_length()
    low = int(local.min())
    if int(local.max()) - low >= 1 << (63 - bits):
        return False
    # Offset and index in one number: sorting those is many times quicker than sorting indices.
    key = local - low
    key <<= bits
    key |= np.arange(n, dtype=np.int64)
    key.sort()
    offsets = key >> bits
    rises = offsets[1:] - offsets[:-1]
    if not int(rises.min()):
        return False  # two at one offset (a source may be read twice) stand in no order
    after = np.flatnonzero(rises == size) + 1
    if not len(after):
        return True
    key &= (1 << bits) - 1
    return not bool((remote[key[after]] == remote[key[after - 1]] + size).any())


def cut(
    local: Int64Array,
    remote: Int64Array,
    size: Int64Array,
    limit: int | None,
    borders: Borders | None,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array] | None:
    """``(index of the old piece, local, remote, size)`` after cutting; None if nothing was cut."""
    if limit is not None and limit < 1:
        raise InvalidInputError(f"a limit in bytes must be at least 1, not {limit}")
    index: Int64Array | None = None
    sides = () if borders is None else ((borders.local, True), (borders.remote, False))
    for border, is_local in sides:
        found = _at_borders(local if is_local else remote, size, border)
        if found is not None:
            piece, skip, size = found
            local, remote = local[piece] + skip, remote[piece] + skip
            index = piece if index is None else index[piece]
    if limit is not None and len(size) and int(size.max()) > limit:
        counts = -(-size // limit)
        piece = np.repeat(np.arange(len(size)), counts)
        skip = (np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)) * limit
        size = np.minimum(size[piece] - skip, limit)
        local, remote = local[piece] + skip, remote[piece] + skip
        index = piece if index is None else index[piece]
    return None if index is None else (index, local, remote, size)


def _at_borders(
    offsets: Int64Array, size: Int64Array, border: object
) -> tuple[Int64Array, Int64Array, Int64Array] | None:
    """``(old piece, bytes skipped from its start, size)``; None if no border is crossed."""
    if not len(offsets):
        return None
    ends = offsets + size
    if isinstance(border, int):
        first = offsets // border + 1  # number of the first border inside, if any
        counts = np.maximum((ends - 1) // border - first + 1, 0)
    else:
        assert isinstance(border, np.ndarray)
        first = np.searchsorted(border, offsets, side="right")
        counts = np.searchsorted(border, ends, side="left") - first
        counts = np.maximum(counts, 0)
    total = int(counts.sum())
    if not total:
        return None
    pieces = counts + 1
    piece = np.repeat(np.arange(len(offsets)), pieces)
    rank = np.arange(len(piece)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    number = first[piece] + rank - 1  # the border at which this part begins; rank 0: the piece
    inner = rank > 0
    start = offsets[piece]
    inside = number[inner]
    start[inner] = inside * border if isinstance(border, int) else border[inside]
    stop = ends[piece]
    last = np.concatenate((piece[1:] != piece[:-1], [True]))
    stop[~last] = start[1:][~last[:-1]]
    return piece, start - offsets[piece], stop - start


def group_ends(size: Int64Array, max_pieces: int | None, max_nbytes: int | None) -> list[int]:
    """Ends of consecutive groups within both limits; no single piece may exceed ``max_nbytes``."""
    for name, limit in (("max_pieces", max_pieces), ("max_nbytes", max_nbytes)):
        if limit is not None and limit < 1:
            raise InvalidInputError(f"{name} must be at least 1, not {limit}")
    n = len(size)
    if max_nbytes is None:
        step = max_pieces if max_pieces is not None else max(n, 1)
        return [*range(step, n, step), n] if n else []
    ends = np.cumsum(size)
    out: list[int] = []
    start, done = 0, 0
    while start < n:
        stop = int(np.searchsorted(ends, done + max_nbytes, side="right"))
        if max_pieces is not None:
            stop = min(stop, start + max_pieces)
        out.append(stop)
        done = int(ends[stop - 1])
        start = stop
    return out
