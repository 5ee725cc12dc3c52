"""What a factored batch is made of: members, and the pieces that all of them share.

That form is for layers of equal geometry.  They move the same pieces, each from offsets of its own:
61 layers of 16384 pieces are 61 bases and 16384 offsets, not a million of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "INT64",
    "Int32Array",
    "Int64Array",
    "Members",
    "Pieces",
    "as_list",
    "chop",
    "exact_sum",
    "greatest",
    "least",
    "stretches",
    "used",
    "vector",
]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

T = TypeVar("T")

INT64 = np.iinfo(np.int64)
_VERY_FEW = 4
_FEW = 64
"""Up to so many numbers Python is quicker than numpy."""
_PARTS_KEPT = 64
"""Stretches of shared pieces that are remembered, for the members that come next."""


class Members:
    """Where the shared pieces of a batch are repeated: equal-length vectors, one entry per member.

    Member ``m`` moves every shared piece between offset ``local_base[m]`` plus the piece's own of
    the local region, and ``remote_base[m]`` plus the piece's own of the remote region, of pair
    ``pair[m]`` of the path.
    """

    __slots__ = ("_extremes", "_rows", "_start", "_stop", "_vectors")

    def __init__(
        self, pair: npt.ArrayLike, local_base: npt.ArrayLike, remote_base: npt.ArrayLike
    ) -> None:
        """Raises: InvalidInputError: not vectors of integers, or not equally long."""
        self._vectors: tuple[Int32Array, Int64Array, Int64Array] = (
            vector("pair", pair, np.int32),
            vector("local_base", local_base, np.int64),
            vector("remote_base", remote_base, np.int64),
        )
        m, here, there = (len(v) for v in self._vectors)
        if not m == here == there:
            raise InvalidInputError(
                f"pair, local_base and remote_base have lengths {m}, {here} and {there}: "
                "they must be equal"
            )
        self._start = 0
        self._stop = m
        self._rows: list[tuple[int, int, int]] | None = None
        self._extremes: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None

    @property
    def pair(self) -> Int32Array:
        return self._vectors[0][self._start : self._stop]

    @property
    def local_base(self) -> Int64Array:
        return self._vectors[1][self._start : self._stop]

    @property
    def remote_base(self) -> Int64Array:
        return self._vectors[2][self._start : self._stop]

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """``(pair, local_base, remote_base)`` of each. Cached."""
        if self._rows is None:
            columns = (self.pair.tolist(), self.local_base.tolist(), self.remote_base.tolist())
            self._rows = list(zip(*columns, strict=True))
        return self._rows

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Over ``rows``."""
        return iter(self.rows)

    @property
    def extremes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Least and greatest of each column, of members that are not none. Cached."""
        if self._extremes is None:
            columns = list(zip(*self.rows, strict=True))
            low, high = ([f(column) for column in columns] for f in (min, max))
            self._extremes = ((low[0], low[1], low[2]), (high[0], high[1], high[2]))
        return self._extremes

    def part(self, start: int, stop: int) -> Members:
        """Members ``start`` to ``stop``, without copying."""
        part = Members.__new__(Members)
        part._vectors = self._vectors
        part._start = self._start + start
        part._stop = min(self._start + stop, self._stop)
        part._rows = None if self._rows is None else self._rows[start:stop]
        part._extremes = None
        return part


class Pieces:
    """What the members of a batch share: pieces whose offsets count from a member's bases.

    Immutable by convention.  Whatever is worked out of the vectors is kept: hand the same object
    to every batch that moves these pieces.

    Raises:
        InvalidInputError: the vectors are not of integers, or not equally long.
    """

    __slots__ = (
        "_cut",
        "_ends",
        "_extremes",
        "_kept",
        "_lists",
        "_nbytes",
        "_one",
        "_parts",
        "_size",
        "local",
        "remote",
    )

    def __init__(
        self,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        size: npt.ArrayLike | int,
        *,
        bounds: tuple[tuple[int, int], tuple[int, int]] | None = None,
    ) -> None:
        """``size`` may be one for all. ``bounds``: least and greatest offset of both sides, for
        callers that know them."""
        ours: Int64Array = vector("local", local, np.int64)
        theirs: Int64Array = vector("remote", remote, np.int64)
        one = size if type(size) is int and 0 < size <= INT64.max else None
        sizes: Int64Array | None = None
        if one is None:
            sizes = vector("size", [size] * len(ours) if type(size) is int else size, np.int64)
        counts = (len(ours), len(theirs), len(ours) if sizes is None else len(sizes))
        if not counts[0] == counts[1] == counts[2]:
            raise InvalidInputError(
                f"local, remote and size have lengths {counts[0]}, {counts[1]} and "
                f"{counts[2]}: they must be equal"
            )
        self._set(ours, theirs, sizes, one)
        if bounds is not None:
            self._extremes.update(local=bounds[0], remote=bounds[1])

    def _set(
        self, local: Int64Array, remote: Int64Array, size: Int64Array | None, one: int | None
    ) -> None:
        self.local = local
        self.remote = remote
        self._size = size
        self._one = one
        self._nbytes: int | None = None
        self._lists: tuple[list[int], list[int], list[int]] | None = None
        self._extremes: dict[str, tuple[int, int]] = {}
        self._ends: dict[str, int] = {}
        self._cut: tuple[tuple[int, int], list[Pieces]] | None = None
        self._parts: dict[tuple[int, int], Pieces] = {}
        self._kept: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.local)

    @property
    def size(self) -> Int64Array:
        """int64[n], bytes."""
        if self._size is None:
            self._size = np.full(len(self.local), self._one, np.int64)
        return self._size

    @property
    def one_size(self) -> int:
        """The size that all pieces have; 0 if they differ, or there are none."""
        if self._one is None:
            low, high = self.extremes("size") if len(self) else (0, 0)
            self._one = low if low == high else 0
        return self._one

    @property
    def nbytes(self) -> int:
        if self._nbytes is None:
            n = len(self)
            self._nbytes = self.one_size * n or (
                exact_sum(self.size, self.extremes("size")[1]) if n else 0
            )
        return self._nbytes

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """``(local, remote, size)`` as Python lists. Made once."""
        if self._lists is None:
            size = [self.one_size] * len(self) if self.one_size else self.size.tolist()
            self._lists = (self.local.tolist(), self.remote.tolist(), size)
        return self._lists

    def extremes(self, name: str) -> tuple[int, int]:
        """Least and greatest value of a vector that is not empty."""
        found = self._extremes.get(name)
        if found is None:
            if name == "size" and self._one:
                found = (self._one, self._one)
            else:
                values: Int64Array = getattr(self, name)
                found = (least(values), greatest(values))
            self._extremes[name] = found
        return found

    def end(self, side: str) -> int:
        """One past the last byte of any piece on that side, from the base. Exact."""
        found = self._ends.get(side)
        if found is None:
            start: Int64Array = getattr(self, side)
            top = self.extremes(side)[1]
            if self.one_size:
                found = top + self.one_size
            elif top + self.extremes("size")[1] <= INT64.max:
                found = int((start + self.size).max())
            else:
                found = max(a + b for a, b in zip(start.tolist(), self.size.tolist(), strict=True))
            self._ends[side] = found
        return found

    def keep(self, make: Callable[[Pieces], T]) -> T:
        """``make(self)``, made once: for what an engine derives of pieces whatever their base is.

        ``make`` must be equal each time.  What it returns must not hold the pieces.
        """
        found: T | None = self._kept.get(make)
        if found is None:
            found = self._kept[make] = make(self)
        return found

    def part(self, start: int, stop: int) -> Pieces:
        """Pieces ``start`` to ``stop``, without copying. The same object if asked again soon."""
        found = self._parts.get((start, stop))
        if found is None:
            found = Pieces.__new__(Pieces)
            one = self.one_size or None
            size = None if one else self.size[start:stop]
            found._set(self.local[start:stop], self.remote[start:stop], size, one)
            if len(self._parts) >= _PARTS_KEPT:
                self._parts.pop(next(iter(self._parts)), None)
            self._parts[start, stop] = found
        return found

    def cut(self, max_pieces: int, max_nbytes: int) -> list[Pieces]:
        """These pieces in order, in stretches within both bounds. The last answer is kept."""
        key = (max_pieces, max_nbytes)
        if self._cut is None or self._cut[0] != key:
            whole = self
            if len(self) and self.extremes("size")[1] > max_nbytes:
                index, step, size = chop(self.size, max_nbytes)
                whole = Pieces(self.local[index] + step, self.remote[index] + step, size)
            # Even stretches: 4097 pieces in calls of at most 4096 are not 4096 and 1.
            even = -(-len(whole) // max(-(-len(whole) // max_pieces), 1))
            parts = [whole.part(a, b) for a, b in stretches(whole.size, even, max_nbytes)]
            # Not itself: that would be a cycle.
            self._cut = (key, [] if whole is self and len(parts) < 2 else parts)
        return self._cut[1] or [self]


def vector(name: str, values: npt.ArrayLike, dtype: Any) -> Any:
    """``values`` as a vector of ``dtype``.

    Raises:
        InvalidInputError: another shape, other things than integers, or too large ones.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidInputError(f"{name} has {array.ndim} dimensions: it must be a vector")
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise InvalidInputError(f"{name} has dtype {array.dtype}: it must hold integers")
    info = np.iinfo(dtype)
    if array.size and (int(array.max()) > info.max or int(array.min()) < info.min):
        raise InvalidInputError(f"{name} holds values outside {info.dtype}")
    return array.astype(dtype)


def least(values: npt.NDArray[Any]) -> int:
    """The least value of a vector that is not empty. Many times quicker than ``min``, if short."""
    found: int = values.item(values.argmin()) if len(values) > _VERY_FEW else min(values.tolist())
    return found


def greatest(values: npt.NDArray[Any]) -> int:
    """As ``least``."""
    found: int = values.item(values.argmax()) if len(values) > _VERY_FEW else max(values.tolist())
    return found


def as_list(values: npt.NDArray[Any]) -> list[int]:
    """The values as a Python list; equal ones as one object, which is many times quicker."""
    if len(values) > _FEW and bool((values == values[0]).all()):
        return [int(values[0])] * len(values)
    found: list[int] = values.tolist()
    return found


def used(pair: Int32Array) -> list[int]:
    """The values that occur, rising."""
    if len(pair) <= _FEW:
        return sorted(set(pair.tolist()))
    # Quicker than np.unique, which also loads numpy.ma on first use.
    found: list[int] = np.flatnonzero(np.bincount(pair)).tolist() if len(pair) else []
    return found


def exact_sum(size: Int64Array, greatest: int) -> int:
    """The sum of ``size``, of which ``greatest`` is the greatest."""
    if greatest > (2**62) // max(len(size), 1):  # the int64 sum could wrap: take the slow road
        return sum(size.tolist())
    return int(size.sum())


def chop(size: Int64Array, limit: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut pieces at multiples of ``limit``: ``(index of the old one, bytes skipped, size)``."""
    counts = -(-size // limit)
    index = np.repeat(np.arange(len(size)), counts)
    first = np.cumsum(counts) - counts
    step = (np.arange(len(index)) - np.repeat(first, counts)) * limit
    return index, step, np.minimum(size[index] - step, limit)


def stretches(size: Int64Array, max_pieces: int, max_nbytes: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of consecutive stretches within both bounds."""
    ends = np.cumsum(size)
    start, done = 0, 0
    while start < len(size):
        stop = int(np.searchsorted(ends, done + max_nbytes, side="right"))
        stop = min(max(stop, start + 1), start + max_pieces, len(size))
        yield start, stop
        done = int(ends[stop - 1])
        start = stop
