"""``Plan``: the pieces of one transfer between two regions, as int64 vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs
import numpy as np

from kvxfer.core.layout._checks import INT64_MAX, Int64Array
from kvxfer.core.layout._cutting import Borders, cut, group_ends, merge_order
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["NOTHING_UNCOVERED", "Plan", "Uncovered"]

T = TypeVar("T")


@attrs.frozen(eq=False)
class Uncovered:
    """The tokens of the destination's blocks that the plan writes nothing to.

    Entry ``i`` says: of the block at ``index[i]`` of the destination list, which has id ``ids[i]``,
    the tokens ``start[i]`` to ``stop[i]`` (counted inside the block) receive nothing.
    """

    index: Int64Array
    ids: Int64Array
    start: Int64Array
    stop: Int64Array
    tokens_per_block: int

    def __len__(self) -> int:
        return len(self.index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Uncovered):
            return NotImplemented
        return len(self) == len(other) and all(
            np.array_equal(getattr(self, field), getattr(other, field))
            for field in ("index", "ids", "start", "stop")
        )

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.start.tobytes(), self.stop.tobytes()))

    @property
    def tokens(self) -> int:
        """How many tokens receive nothing."""
        return int((self.stop - self.start).sum())

    @property
    def whole_ids(self) -> Int64Array:
        """Ids of the blocks that receive nothing at all."""
        whole: Int64Array = self.ids[(self.start == 0) & (self.stop == self.tokens_per_block)]
        return whole


_NONE = np.empty(0, np.int64)
NOTHING_UNCOVERED = Uncovered(_NONE, _NONE, _NONE, _NONE, 1)


class Plan:
    """Pieces to move between one local and one remote region.

    Piece ``i`` is ``size[i]`` bytes at offset ``local[i]`` of the local and ``remote[i]`` of the
    remote region.  The arrays are int64 and read-only; a plan is a value.

    Attributes:
        local, remote: int64[n], bytes from the start of the region.
        nbytes: sum of all sizes.
        uncovered: what of the destination's list the plan does not write.
    """

    __slots__ = (
        "_bounds",
        "_kept",
        "_lists",
        "_merged",
        "_size",
        "local",
        "nbytes",
        "piece_nbytes",
        "remote",
        "uncovered",
    )

    local: Int64Array
    remote: Int64Array
    nbytes: int
    _size: Int64Array | None
    _lists: tuple[list[int], list[int], list[int]] | None
    _merged: Plan | Literal[False] | None
    _kept: dict[Any, Any]
    _bounds: tuple[tuple[int, int], tuple[int, int]] | None
    piece_nbytes: int | None
    """The size that all pieces have, or None if sizes differ."""
    uncovered: Uncovered

    def __init__(
        self,
        local: Int64Array,
        remote: Int64Array,
        size: Int64Array | int,
        *,
        uncovered: Uncovered = NOTHING_UNCOVERED,
    ) -> None:
        if len(local) != len(remote) or not (isinstance(size, int) or len(size) == len(local)):
            raise InvalidInputError("local, remote and size must be equally long")
        made = Plan.of(local, remote, size, uncovered)
        for slot in Plan.__slots__:
            setattr(self, slot, getattr(made, slot))

    @classmethod
    def of(
        cls, local: Int64Array, remote: Int64Array, size: Int64Array | int, uncovered: Uncovered
    ) -> Plan:
        """The planner's own constructor: takes the arrays over without looking at them."""
        plan = cls.__new__(cls)
        local.flags.writeable = remote.flags.writeable = False
        plan.local = local
        plan.remote = remote
        plan.uncovered = uncovered
        plan._lists = plan._merged = plan._bounds = None
        plan._kept = {}
        if isinstance(size, int):
            plan._size = None
            plan.piece_nbytes = size
            plan.nbytes = len(local) * size
        else:
            size.flags.writeable = False
            plan._size = size
            plan.piece_nbytes = None
            plan.nbytes = int(size.sum())
        return plan

    @property
    def size(self) -> Int64Array:
        """int64[n], bytes of each piece."""
        if self._size is None:
            self._size = np.full(len(self.local), self.piece_nbytes, np.int64)
            self._size.flags.writeable = False
        return self._size

    def __len__(self) -> int:
        return len(self.local)

    def __repr__(self) -> str:
        rest = f", {self.uncovered.tokens} tokens uncovered" if len(self.uncovered) else ""
        return f"Plan({len(self)} pieces, {self.nbytes} bytes{rest})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            np.array_equal(self.local, other.local)
            and np.array_equal(self.remote, other.remote)
            and np.array_equal(self.size, other.size)
            and self.uncovered == other.uncovered
        )

    def __hash__(self) -> int:
        return hash((self.local.tobytes(), self.remote.tobytes(), self.nbytes))

    def __reduce__(self) -> Any:
        size: Any = self.piece_nbytes if self.piece_nbytes is not None else np.array(self.size)
        return (_restore, (np.array(self.local), np.array(self.remote), size, self.uncovered))

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """``(local, remote, size)`` as Python lists: what pybind11 takes fastest. Cached."""
        if self._lists is None:
            n = len(self.local)
            sizes = [self.piece_nbytes] * n if self.piece_nbytes is not None else self.size.tolist()
            self._lists = (self.local.tolist(), self.remote.tolist(), sizes)
        return self._lists

    def shifted(self, local: int, remote: int) -> Plan:
        """The same pieces ``local`` and ``remote`` bytes further on. Sizes are shared."""
        if not local and not remote:
            return self
        plan = Plan.__new__(Plan)
        plan.local = self.local + local if local else self.local
        plan.remote = self.remote + remote if remote else self.remote
        plan.local.flags.writeable = plan.remote.flags.writeable = False
        plan._size = self._size
        plan.piece_nbytes = self.piece_nbytes
        plan.nbytes = self.nbytes
        plan.uncovered = self.uncovered
        plan._lists = plan._merged = plan._bounds = None
        plan._kept = {}
        return plan

    @property
    def bounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Least and greatest offset, local and remote, of a plan that is not empty. Cached."""
        if self._bounds is None:
            local, remote = self.local, self.remote
            self._bounds = (
                (int(local.min()), int(local.max())),
                (int(remote.min()), int(remote.max())),
            )
        return self._bounds

    def keep(self, make: Callable[[Plan], T]) -> T:
        """``make(self)``, made once and kept with this plan, and so with a cache that holds it.

        ``make`` must be the same object each time.  What it returns must not hold the plan.
        """
        found: T | None = self._kept.get(make)
        if found is None:
            found = self._kept[make] = make(self)
        return found

    def merged(self) -> Plan:
        """The same bytes in as few pieces as possible. Cached.

        Pieces are joined where they touch on both sides; if any are, all come out in the order of
        their local offsets.
        """
        if self._merged is None:
            found = merge_order(self.local, self.remote, self.piece_nbytes or self.size, None)
            if found is None:
                self._merged = False  # not itself: that would be a cycle
            else:
                order, first, sizes = found
                take = first if order is None else order[first]
                self._merged = Plan(
                    self.local[take], self.remote[take], _one(sizes), uncovered=self.uncovered
                )
        return self._merged if isinstance(self._merged, Plan) else self

    def cut(self, *, max_piece_nbytes: int | None = None, borders: Borders | None = None) -> Plan:
        """The same bytes, each piece cut at borders of either side and at ``max_piece_nbytes``."""
        found = cut(self.local, self.remote, self.size, max_piece_nbytes, borders)
        if found is None:
            return self
        _, local, remote, size = found
        return Plan(local, remote, size, uncovered=self.uncovered)

    def split(
        self,
        *,
        max_pieces: int | None = None,
        max_nbytes: int | None = None,
        borders: Borders | None = None,
    ) -> list[Plan]:
        """This plan in order, as plans of at most that many pieces and bytes.

        Pieces are cut at the borders, and at multiples of ``max_nbytes`` where one alone exceeds
        it.  Only the last part carries ``uncovered``.

        Raises:
            InvalidInputError: a limit is below 1.
        """
        whole = self.cut(max_piece_nbytes=max_nbytes, borders=borders)
        ends = group_ends(whole.size, max_pieces, max_nbytes)
        if len(ends) <= 1:
            return [whole] if len(whole) else []
        parts = []
        start = 0
        for stop in ends:
            last = stop == ends[-1]
            size: Any = whole.piece_nbytes
            parts.append(
                Plan(
                    whole.local[start:stop],
                    whole.remote[start:stop],
                    size if size is not None else whole.size[start:stop],
                    uncovered=whole.uncovered if last else NOTHING_UNCOVERED,
                )
            )
            start = stop
        return parts

    def descriptors(
        self,
        local_address: int,
        remote_address: int,
        *,
        local_device: int = 0,
        remote_device: int = 0,
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Two uint64[n, 3] arrays of (address, length, device): what NIXL takes."""
        size = self.piece_nbytes or self.size
        return (
            _rows(self.local, size, local_address, local_device),
            _rows(self.remote, size, remote_address, remote_device),
        )


def _one(size: Int64Array) -> Int64Array | int:
    """The size that all pieces have, if they have one."""
    same = len(size) > 0 and bool((size == size[0]).all())
    return int(size[0]) if same else size


def _rows(
    offsets: Int64Array, size: Int64Array | int, address: int, device: int
) -> npt.NDArray[np.uint64]:
    rows = np.empty((len(offsets), 3), np.int64)
    np.add(offsets, checked_address(address), out=rows[:, 0])
    rows[:, 1] = size
    rows[:, 2] = device
    return rows.view(np.uint64)


def checked_address(address: int) -> int:
    """An address that, like the offsets to be added, int64 holds.

    Raises:
        InvalidInputError: it does not.
    """
    if not 0 <= address <= INT64_MAX:
        raise InvalidInputError(f"the address must lie in 0..2**63-1, not {address}")
    return address


def _restore(
    local: Int64Array, remote: Int64Array, size: Int64Array | int, uncovered: Uncovered
) -> Plan:
    return Plan(local, remote, size, uncovered=uncovered)
