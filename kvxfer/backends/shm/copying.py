"""Copying between addresses of this process, as fast as Python and numpy allow.

Addresses are absolute and belong to memory that is mapped for as long as the call runs; the
caller has checked every piece against its region.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvxfer.core.batch import Int64Array

__all__ = ["SCRATCH_BYTES", "copy_pieces", "join"]

SCRATCH_BYTES = 256 * 1024
"""Staging area of ``copy_pieces``. Fits an L2 cache; twice that is no faster."""
_STAGED_UP_TO = 8 * 1024
"""CPU time of a C loop over that of both ways: at 4 KiB 0.67 staged and 0.46 with a memmove per
piece, at 8 KiB 0.64 and 0.58, at 16 KiB 0.64 and 0.72, at 64 KiB 0.65 and 0.91."""
_STAGED_FROM = 16
"""Fewer pieces than this do not pay for setting up the staged copy."""

# As ctypes.memmove, without an int object made of each result. Lets go of the GIL for each piece.
_memmove = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value or 0
)


def join(
    target: Int64Array, source: Int64Array, size: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same copies, with neighbours that follow each other on both sides as one.

    Random ids gain nothing, runs a lot.  The compiled copier does so by itself.
    """
    joined = (target[1:] == target[:-1] + size[:-1]) & (source[1:] == source[:-1] + size[:-1])
    if not joined.any():
        return target, source, size
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return target[first], source[first], np.add.reduceat(size, first)


def copy_pieces(target: Int64Array, source: Int64Array, size: Int64Array, scratch: Any) -> None:
    """Copy ``size[i]`` bytes from ``source[i]`` to ``target[i]``.

    ``scratch`` is a ``uint8`` vector of ``SCRATCH_BYTES`` that nobody else uses meanwhile.  Pieces
    that overlap each other give the bytes of one of them.
    """
    if not len(size):
        return
    target, source, size = join(target, source, size)
    n = len(size)
    unit = int(size[0])
    equal = bool((size == unit).all())
    if equal and n >= _STAGED_FROM and unit <= _STAGED_UP_TO:
        to = _slots(target, unit)
        of = None if to is None else _slots(source, unit)
        if to is not None and of is not None and not _holds(to[0], scratch):
            # Neighbours share page tables, and reads wait for those: a tenth faster.
            order = _rising(of[1])
            _copy_staged((to[0], to[1][order]), (of[0], of[1][order]), unit, scratch)
            return
    # The whole loop runs without bytecode.
    # The object is made once: a quarter of what a call costs is to make it of an int.
    sizes = itertools.repeat(ctypes.c_size_t(unit)) if equal else size.tolist()
    collections.deque(map(_memmove, target.tolist(), source.tolist(), sizes), maxlen=0)


def _slots(address: Int64Array, unit: int) -> tuple[Any, Int64Array] | None:
    """Memory as items of ``unit`` bytes, and which of them the addresses are; None if none are."""
    base = int(address.min())
    offset = address - base
    if unit & (unit - 1):
        slot, rest = np.divmod(offset, unit)
    else:  # five times quicker
        slot, rest = offset >> (unit.bit_length() - 1), offset & (unit - 1)
    return None if rest.any() else (_items(base, int(slot.max()) + 1, unit), slot)


def _rising(slot: Int64Array) -> Int64Array:
    """The order in which they rise. numpy sorts 16 bits by radix, three times quicker."""
    if int(slot.max()) < 1 << 16:
        return np.argsort(slot.astype(np.uint16), kind="stable")
    return np.argsort(slot)


def _holds(items: Any, scratch: Any) -> bool:
    """Whether the staging area lies somewhere between the pieces.

    numpy would then take the two for one array that overlaps itself, and copy all that lies between
    the pieces first: memory of others, or none.
    """
    first, begin = items.ctypes.data, scratch.ctypes.data
    return bool(begin < first + items.nbytes and first < begin + scratch.nbytes)


def _copy_staged(
    target: tuple[Any, Int64Array], source: tuple[Any, Int64Array], unit: int, scratch: Any
) -> None:
    """Gather into the cache, scatter from there: two C loops that run without the GIL."""
    (there, to), (here, of) = target, source
    step = max(1, len(scratch) // unit)
    staged = scratch[: step * unit].view(here.dtype)
    for start in range(0, len(to), step):
        index = of[start : start + step]
        part = staged[: len(index)]
        # Indexes are in range by construction; mode="raise" would copy through a buffer.
        here.take(index, out=part, mode="clip")
        there.put(to[start : start + step], part, mode="clip")


class _Exposed:
    def __init__(self, address: int, count: int, unit: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{unit}",
            "shape": (count,),
            "data": (address, False),
        }


def _items(address: int, count: int, unit: int) -> Any:
    """``count`` items of ``unit`` bytes. May span memory that is not ours: it is never touched."""
    return np.asarray(_Exposed(address, count, unit))
