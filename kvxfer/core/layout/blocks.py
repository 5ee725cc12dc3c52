"""The blocks one request holds in one group: ids, and where in the request each of them lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvxfer.core.layout._checks import INT64_MAX, Int64Array, int64_vector, is_count, is_nonnegative
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Blocks", "TokenShare"]

_MAX_POSITION = 2**32
"""Positions beyond this are refused: times any block size and share they stay within int64."""

_MAX_RATIO = 2**20

_FLAG_LIMIT = 2**20
"""Up to about this many blocks a table of flags finds duplicates faster than sorting."""


@attrs.frozen
class TokenShare:
    """Which tokens of a request a context-parallel rank holds.

    Tokens are dealt out to ``size`` ranks in turns of ``interleave`` tokens, so rank ``rank`` holds
    those with ``(token // interleave) % size == rank``, packed densely into its blocks.
    """

    rank: int = attrs.field(validator=is_nonnegative)
    size: int = attrs.field(validator=is_count)
    interleave: int = attrs.field(default=1, validator=is_count)

    def __attrs_post_init__(self) -> None:
        if self.rank >= self.size:
            raise InvalidInputError(f"rank must lie in 0..{self.size - 1}, not {self.rank}")
        if self.size > 2**10 or self.interleave > 2**20:
            raise InvalidInputError(
                f"size={self.size} and interleave={self.interleave} must be at most 2**10 and 2**20"
            )


class Blocks:
    """Block ids of one request in one group, in the order of its tokens. Immutable.

    Use the constructors ``at``, ``placed`` and ``unplaced``.  Positions count blocks from the start
    of the request, in this side's own block size: with 16 tokens per block, position 3 begins at
    token 48.  A *placeholder* is an entry without memory behind it (engines put one where a
    sliding window has moved on): it keeps its position and takes part in no transfer.

    Attributes:
        ids: int64[n], read-only. Entries that are placeholders hold the placeholder id.
        holes: bool[n], true where the entry is a placeholder; None if there is none.
        share: the part of the request's tokens that these blocks hold; None means all of them.
    """

    __slots__ = ("_key", "_positions", "_start", "_top", "_unique", "holes", "ids", "share")

    ids: Int64Array
    holes: npt.NDArray[np.bool_] | None
    share: TokenShare | None
    _start: int | None
    _positions: Int64Array | None
    _top: int
    _key: tuple[Any, ...] | None
    _unique: bool

    def __init__(self) -> None:
        raise TypeError("use Blocks.at, Blocks.placed or Blocks.unplaced")

    @classmethod
    def at(
        cls,
        start: int,
        ids: npt.ArrayLike,
        *,
        placeholder: int | None = None,
        share: TokenShare | None = None,
    ) -> Blocks:
        """Consecutive blocks, the first of them at position ``start``.

        Raises:
            InvalidInputError: ``start`` is negative or huge, or ``ids`` holds no integers.
        """
        if type(start) is not int or not 0 <= start <= _MAX_POSITION:
            raise InvalidInputError(f"start must be an int in 0..2**32, not {start!r}")
        blocks = cls._of(int64_vector("ids", ids), placeholder, share)
        blocks._start = start
        return blocks

    @classmethod
    def placed(
        cls,
        positions: npt.ArrayLike,
        ids: npt.ArrayLike,
        *,
        placeholder: int | None = None,
        share: TokenShare | None = None,
    ) -> Blocks:
        """Blocks at any positions, which must rise strictly.

        Raises:
            InvalidInputError: lengths differ, or positions are negative, huge or not rising.
        """
        places = int64_vector("positions", positions)
        vector = int64_vector("ids", ids)
        if len(places) != len(vector):
            raise InvalidInputError(f"{len(places)} positions for {len(vector)} ids")
        if len(places):
            if int(places[0]) < 0 or int(places[-1]) > _MAX_POSITION:
                raise InvalidInputError(
                    f"positions must lie in 0..2**32, not {int(places[0])}..{int(places[-1])}"
                )
            steps = np.diff(places)
            if len(steps) and int(steps.min()) < 1:
                i = int(steps.argmin())
                raise InvalidInputError(
                    f"positions must rise strictly: {int(places[i])} is followed by "
                    f"{int(places[i + 1])} at index {i + 1}"
                )
            if int(places[-1]) - int(places[0]) == len(places) - 1:
                return cls.at(int(places[0]), vector, placeholder=placeholder, share=share)
        blocks = cls._of(vector, placeholder, share)
        if len(places):
            blocks._positions = _frozen(places)
        else:
            blocks._start = 0
        return blocks

    @classmethod
    def unplaced(cls, ids: npt.ArrayLike, *, placeholder: int | None = None) -> Blocks:
        """Blocks whose positions are not known.

        Two such lists pair only if they are equally long and of one block size, or through an
        explicit ``align``.
        """
        return cls._of(int64_vector("ids", ids), placeholder, None)

    @classmethod
    def _of(cls, ids: Int64Array, placeholder: int | None, share: TokenShare | None) -> Blocks:
        blocks = cls.__new__(cls)
        blocks.ids = _frozen(ids)
        blocks.share = share if share is not None and share.size > 1 else None
        blocks.holes = None
        blocks._start = blocks._positions = blocks._key = None
        blocks._top = -1
        blocks._unique = False
        if placeholder is not None:
            holes = blocks.ids == placeholder
            if holes.any():
                holes.flags.writeable = False
                blocks.holes = holes
        return blocks

    @property
    def is_placed(self) -> bool:
        """Whether positions are known."""
        return self._start is not None or self._positions is not None

    @property
    def start(self) -> int | None:
        """Position of the first block; None if unplaced or if the positions have gaps."""
        return self._start

    @property
    def positions(self) -> Int64Array | None:
        """int64[n], or None if unplaced."""
        if self._positions is None and self._start is not None:
            self._positions = _frozen(
                np.arange(self._start, self._start + len(self.ids), dtype=np.int64)
            )
        return self._positions

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        ids = np.array2string(self.ids, threshold=8, separator=", ")
        if self._start is not None:
            where = f"at {self._start}"
        else:
            where = "unplaced" if self._positions is None else f"at {self._positions!r}"
        share = f", share={self.share}" if self.share else ""
        return f"Blocks({where}, {ids}{share})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blocks):
            return NotImplemented
        return self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable form, equal for equal values. Holds a copy of the ids; cached."""
        if self._key is None:
            where: int | bytes | None = self._start
            if where is None and self._positions is not None:
                where = self._positions.tobytes()
            holes = None if self.holes is None else self.holes.tobytes()
            self._key = (self.ids.tobytes(), where, holes, self.share)
        return self._key

    def __reduce__(self) -> Any:
        holes = None if self.holes is None else np.array(self.holes)
        places = self._start if self._start is not None else self._positions
        return (_restore, (np.array(self.ids), places, holes, self.share))

    @property
    def real_ids(self) -> Int64Array:
        """The ids that are no placeholders."""
        return self.ids if self.holes is None else self.ids[~self.holes]

    @property
    def top(self) -> int:
        """The largest id, taken as unsigned: a negative id makes it at least 2**63. -1 if empty."""
        if self._top < 0 and len(self.ids):
            ids = self.real_ids
            if len(ids):
                self._top = int(np.maximum.reduce(ids.view(np.uint64)))
        return self._top

    def duplicate(self, num_blocks: int) -> int | None:
        """An id that occurs twice among the entries that are no placeholders, or None.

        ``num_blocks`` bounds the ids, which have been found to lie in range.
        """
        if self._unique:
            return None
        ids = self.real_ids
        if num_blocks <= _FLAG_LIMIT + 64 * len(ids):
            seen = np.zeros(num_blocks, np.bool_)
            seen[ids] = True
            if np.count_nonzero(seen) == len(ids):
                self._unique = True
                return None
        ordered = np.sort(ids)
        same = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(same):
            return int(same[0])
        self._unique = True
        return None

    def split(self, ratio: int) -> Blocks:
        """The same memory counted in blocks ``ratio`` times smaller (manager to kernel ids).

        Block ``b`` at position ``p`` becomes blocks ``b * ratio`` to ``b * ratio + ratio - 1`` at
        positions ``p * ratio`` onwards.

        Raises:
            InvalidInputError: ``ratio`` is below 1, or an id is too large for it.
        """
        if type(ratio) is not int or not 1 <= ratio <= _MAX_RATIO:
            raise InvalidInputError(f"ratio must lie in 1..{_MAX_RATIO}, not {ratio!r}")
        if self.top > INT64_MAX // ratio:
            raise InvalidInputError(f"ids up to {self.top} cannot be split by {ratio}")
        inner = np.arange(ratio, dtype=np.int64)
        ids = np.add.outer(self.real_ids * ratio, inner).reshape(-1)
        blocks = Blocks._of(ids, None, self.share)
        if self.holes is not None:
            holes = np.repeat(self.holes, ratio)
            full = np.zeros(len(holes), np.int64)
            full[~holes] = ids
            holes.flags.writeable = False
            blocks.ids, blocks.holes = _frozen(full), holes
        if self._start is not None:
            blocks._start = self._start * ratio
        elif self._positions is not None:
            positions = np.add.outer(self._positions * ratio, inner).reshape(-1)
            blocks._positions = _frozen(positions)
        return blocks

    def join(self, ratio: int) -> Blocks:
        """The same memory counted in blocks ``ratio`` times larger (kernel to manager ids).

        Raises:
            InvalidInputError: the list is not made of whole larger blocks: it must hold runs of
                ``ratio`` neighbours, the first id (and position) of each a multiple of ``ratio``.
        """
        if type(ratio) is not int or not 1 <= ratio <= _MAX_RATIO:
            raise InvalidInputError(f"ratio must lie in 1..{_MAX_RATIO}, not {ratio!r}")
        if self.holes is not None:
            raise InvalidInputError("lists with placeholders cannot be joined")
        positions = self._positions
        small = [self.ids] if positions is None else [self.ids, positions]
        for what, vector in zip(("ids", "positions"), small, strict=False):
            rows = vector[: len(vector) // ratio * ratio].reshape(-1, ratio)
            whole = np.array_equal(rows, rows[:, :1] // ratio * ratio + np.arange(ratio))
            if rows.size != len(vector) or not whole:
                raise InvalidInputError(
                    f"the {what} are not made of whole runs of {ratio} that begin at a multiple "
                    f"of {ratio}"
                )
        if (self._start or 0) % ratio:
            raise InvalidInputError(f"start {self._start} is no multiple of {ratio}")
        blocks = Blocks._of(self.ids[::ratio] // ratio, None, self.share)
        if self._start is not None:
            blocks._start = self._start // ratio
        elif positions is not None:
            blocks._positions = _frozen(positions[::ratio] // ratio)
        return blocks

    def __getitem__(self, part: slice) -> Blocks:
        """A run of entries, each at its old position. Only slices of step 1."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise InvalidInputError(f"Blocks takes slices of step 1, not {part!r}")
        first, stop, _ = part.indices(len(self))
        blocks = Blocks.__new__(Blocks)
        blocks.ids = self.ids[part]
        blocks.share = self.share
        blocks.holes = None
        if self.holes is not None and self.holes[part].any():
            blocks.holes = self.holes[part]
        blocks._start = None if self._start is None else self._start + min(first, stop)
        blocks._positions = None
        if self._start is None and self._positions is not None:
            blocks._positions = self._positions[part]
        blocks._top = -1
        blocks._unique = self._unique
        blocks._key = None
        return blocks


def _frozen(array: Int64Array) -> Int64Array:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def _restore(
    ids: Int64Array,
    places: int | Int64Array | None,
    holes: npt.NDArray[np.bool_] | None,
    share: TokenShare | None,
) -> Blocks:
    blocks = Blocks._of(ids, None, share)
    if isinstance(places, int):
        blocks._start = places
    elif places is not None:
        blocks._positions = _frozen(places)
    if holes is not None:
        holes.flags.writeable = False
    blocks.holes = holes
    return blocks
