"""A batch: the pieces of one engine call, as equal-length vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Batch", "Int32Array", "Int64Array"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Batch:
    """Pieces to move over one path.

    Piece ``i`` moves ``size[i]`` bytes between offset ``local[i]`` of the local region and offset
    ``remote[i]`` of the remote region of pair ``pair[i]`` of the path.  Offsets and sizes are
    bytes.  Immutable by convention; ``lists`` is cached: hand the same batch to a retry.

    Raises:
        InvalidInputError: lengths differ, a size is not positive, or an offset is negative.
    """

    __slots__ = ("_lists", "_used", "local", "nbytes", "pair", "remote", "size")

    def __init__(
        self,
        pair: npt.ArrayLike,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        size: npt.ArrayLike,
    ) -> None:
        self.pair: Int32Array = _vector("pair", pair, np.int32)
        self.local: Int64Array = _vector("local", local, np.int64)
        self.remote: Int64Array = _vector("remote", remote, np.int64)
        self.size: Int64Array = _vector("size", size, np.int64)
        n = len(self.pair)
        if not n == len(self.local) == len(self.remote) == len(self.size):
            raise InvalidInputError(
                f"pair, local, remote and size have lengths {n}, {len(self.local)}, "
                f"{len(self.remote)} and {len(self.size)}: they must be equal"
            )
        if n:
            for name, vector, low in (
                ("pair", self.pair, 0),
                ("local", self.local, 0),
                ("remote", self.remote, 0),
                ("size", self.size, 1),
            ):
                if int(vector.min()) < low:
                    i = int(vector.argmin())
                    raise InvalidInputError(f"{name}[{i}] is {int(vector[i])}, below {low}")
        self.nbytes = _exact_sum(self.size)
        self._lists: tuple[list[int], list[int], list[int], list[int]] | None = None
        self._used: list[int] | None = None

    def __len__(self) -> int:
        return len(self.pair)

    def __repr__(self) -> str:
        return f"Batch({len(self)} pieces, {self.nbytes} bytes)"

    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """``(pair, local, remote, size)`` as Python lists: what pybind11 takes fastest. Cached."""
        if self._lists is None:
            self._lists = (
                self.pair.tolist(),
                self.local.tolist(),
                self.remote.tolist(),
                self.size.tolist(),
            )
        return self._lists

    @property
    def used_pairs(self) -> list[int]:
        """The pair indices that occur, rising. Cached."""
        if self._used is None:
            # Quicker than np.unique, which also loads numpy.ma on first use.
            self._used = np.flatnonzero(np.bincount(self.pair)).tolist() if len(self) else []
        return self._used

    def slice(self, start: int, stop: int) -> Batch:
        """Pieces ``start`` to ``stop``, without copying or checking again."""
        part = Batch.__new__(Batch)
        part.pair = self.pair[start:stop]
        part.local = self.local[start:stop]
        part.remote = self.remote[start:stop]
        part.size = self.size[start:stop]
        part.nbytes = _exact_sum(part.size)
        part._lists = None
        part._used = None
        return part

    def cut(self, *, max_pieces: int, max_nbytes: int) -> Sequence[Batch]:
        """This batch in order, as batches of at most that many pieces and bytes.

        A single piece above ``max_nbytes`` is split at multiples of it.
        """
        if max_pieces < 1 or max_nbytes < 1:
            raise InvalidInputError(
                f"max_pieces={max_pieces} and max_nbytes={max_nbytes} must be at least 1"
            )
        whole = (
            self if not len(self) or int(self.size.max()) <= max_nbytes else self._chop(max_nbytes)
        )
        if len(whole) <= max_pieces and whole.nbytes <= max_nbytes:
            return [whole] if len(whole) else []
        ends = np.cumsum(whole.size)
        parts: list[Batch] = []
        start, done = 0, 0
        while start < len(whole):
            stop = int(np.searchsorted(ends, done + max_nbytes, side="right"))
            stop = min(max(stop, start + 1), start + max_pieces, len(whole))
            parts.append(whole.slice(start, stop))
            done = int(ends[stop - 1])
            start = stop
        return parts

    def _chop(self, limit: int) -> Batch:
        counts = -(-self.size // limit)
        index = np.repeat(np.arange(len(self)), counts)
        first = np.cumsum(counts) - counts
        step = (np.arange(len(index)) - np.repeat(first, counts)) * limit
        size = np.minimum(self.size[index] - step, limit)
        return Batch(self.pair[index], self.local[index] + step, self.remote[index] + step, size)

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """All pieces of ``batches``, in order."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            np.concatenate([b.pair for b in batches]) if batches else [],
            np.concatenate([b.local for b in batches]) if batches else [],
            np.concatenate([b.remote for b in batches]) if batches else [],
            np.concatenate([b.size for b in batches]) if batches else [],
        )


def _vector(name: str, values: npt.ArrayLike, dtype: Any) -> Any:
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


def _exact_sum(size: Int64Array) -> int:
    if not len(size):
        return 0
    if int(size.max()) > (2**62) // len(size):  # the int64 sum could wrap: take the slow road
        return sum(size.tolist())
    return int(size.sum())
