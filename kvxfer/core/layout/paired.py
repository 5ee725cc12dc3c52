"""Plans over several regions: flat vectors with a pair index, and the factored form of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from kvxfer.core.layout._checks import Int32Array, Int64Array
from kvxfer.core.layout._cutting import Borders, cut, group_ends, merge_order
from kvxfer.core.layout._sharing import apart, fused, gaps_of
from kvxfer.core.layout.plan import Plan, checked_address
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from kvxfer.core.layout.plan import Uncovered

__all__ = ["LayersPlan", "PairedPlan", "PlanGroup"]

T = TypeVar("T")

MAX_WRITTEN = 2**24
"""Most pieces of several layers that are written out one by one. How finely blocks fall apart, and
whether layers seem to overlap, is up to the peer's layouts as well: with what joining or comparing
takes, these are over a gigabyte and some six seconds."""
MAX_JOINED = 2**22
"""Most pieces that are written out only to find some that can be joined: beyond, that costs the
thread more than a second, and the engine is given a few pieces more."""


class PairedPlan:
    """Pieces between several pairs of regions; ``pair[i]`` says between which.

    Attributes:
        pair: int32[n], index of the pair of regions.
        local, remote, size: int64[n], as in ``Plan``.
        nbytes: sum of all sizes.
    """

    __slots__ = ("_lists", "_vectors", "nbytes")

    _vectors: tuple[Int32Array, Int64Array, Int64Array, Int64Array] | None
    nbytes: int

    def __init__(
        self, pair: Int32Array, local: Int64Array, remote: Int64Array, size: Int64Array
    ) -> None:
        if not len(pair) == len(local) == len(remote) == len(size):
            raise InvalidInputError(
                f"pair, local, remote and size have lengths {len(pair)}, {len(local)}, "
                f"{len(remote)} and {len(size)}"
            )
        self._set((pair, local, remote, size))
        self.nbytes = int(size.sum())

    def _set(self, vectors: tuple[Int32Array, Int64Array, Int64Array, Int64Array]) -> None:
        for vector in vectors:
            vector.flags.writeable = False
        self._vectors = vectors
        self._lists: tuple[list[int], list[int], list[int], list[int]] | None = None

    def _get(self) -> tuple[Int32Array, Int64Array, Int64Array, Int64Array]:
        assert self._vectors is not None
        return self._vectors

    @property
    def pair(self) -> Int32Array:
        return self._get()[0]

    @property
    def local(self) -> Int64Array:
        return self._get()[1]

    @property
    def remote(self) -> Int64Array:
        return self._get()[2]

    @property
    def size(self) -> Int64Array:
        return self._get()[3]

    def __len__(self) -> int:
        return len(self._get()[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} pieces, {self.nbytes} bytes)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PairedPlan):
            return NotImplemented
        return (
            np.array_equal(self.pair, other.pair)
            and np.array_equal(self.local, other.local)
            and np.array_equal(self.remote, other.remote)
            and np.array_equal(self.size, other.size)
        )

    def __hash__(self) -> int:
        return hash((self.local.tobytes(), self.remote.tobytes(), self.nbytes))

    def __reduce__(self) -> Any:
        return (_paired, tuple(np.array(vector) for vector in self._get()))

    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """``(pair, local, remote, size)`` as Python lists. Cached."""
        if self._lists is None:
            pair, local, remote, size = self._get()
            self._lists = (pair.tolist(), local.tolist(), remote.tolist(), size.tolist())
        return self._lists

    def merged(self) -> PairedPlan:
        """The same bytes in as few pieces as possible, ordered by pair and local offset.

        Joins across layers too, where several of them share a row of one storage on both sides.
        """
        pair, local, remote, size = self._get()
        found = merge_order(local, remote, size, pair)
        if found is None:
            return self
        order, first, sizes = found
        take = first if order is None else order[first]
        return PairedPlan(pair[take], local[take], remote[take], sizes)

    def cut(
        self, *, max_piece_nbytes: int | None = None, borders: Borders | None = None
    ) -> PairedPlan:
        """The same bytes, each piece cut at borders of either side and at ``max_piece_nbytes``."""
        pair, local, remote, size = self._get()
        found = cut(local, remote, size, max_piece_nbytes, borders)
        if found is None:
            return self
        index, local, remote, size = found
        return PairedPlan(pair[index], local, remote, size)

    def split(
        self,
        *,
        max_pieces: int | None = None,
        max_nbytes: int | None = None,
        borders: Borders | None = None,
    ) -> list[PairedPlan]:
        """This plan in order, as plans of at most that many pieces and bytes.

        Raises:
            InvalidInputError: a limit is below 1.
        """
        whole = self.cut(max_piece_nbytes=max_nbytes, borders=borders)
        pair, local, remote, size = whole._get()
        ends = group_ends(size, max_pieces, max_nbytes)
        if len(ends) <= 1:
            return [whole] if len(whole) else []
        starts = [0, *ends[:-1]]
        return [
            PairedPlan(pair[a:b], local[a:b], remote[a:b], size[a:b])
            for a, b in zip(starts, ends, strict=True)
        ]

    def by_pair(self) -> list[tuple[int, Plan]]:
        """One plan for each pair of regions, for engines that open a session per pair."""
        pair, local, remote, size = self._get()
        return [
            (p, Plan(local[pair == p], remote[pair == p], size[pair == p]))
            for p in np.unique(pair).tolist()
        ]


@attrs.frozen(eq=False)
class PlanGroup:
    """Layers (or parts of states) of equal geometry, which share one plan.

    Attributes:
        plan: the pieces with both layouts at offset 0.
        names: what is moved, in the order of the vectors below.
        pair: int32[m], index of the pair of regions.
        local, remote: int64[m], the layouts' offsets in their regions.
        group, remote_group: index of the id list on either side.
        local_row, remote_row: the layouts' block strides in bytes, 0 if not known.
        gaps: least distance in bytes between two layers of one pair, on either side.
        kept: what ``keep`` has made; the same for all requests of these layers.
    """

    plan: Plan
    names: tuple[str, ...]
    pair: Int32Array
    local: Int64Array
    remote: Int64Array
    group: int
    remote_group: int
    local_row: int = 0
    remote_row: int = 0
    gaps: tuple[int, int] = attrs.field()

    @gaps.default
    def _measured(self) -> tuple[int, int]:
        return gaps_of(self.pair, self.local, self.remote)

    kept: dict[Any, Any] = attrs.field(factory=dict, repr=False)

    def keep(self, make: Callable[[PlanGroup], T]) -> T:
        """``make(self)``, made once for these layers: of their pairs and offsets, not of the plan.

        ``make`` must be the same object each time.
        """
        found: T | None = self.kept.get(make)
        if found is None:
            found = self.kept[make] = make(self)
        return found

    def __len__(self) -> int:
        return len(self.pair) * len(self.plan)

    def with_plan(self, plan: Plan) -> PlanGroup:
        return self if plan is self.plan else attrs.evolve(self, plan=plan)

    def plans(self) -> Iterator[tuple[int, Plan]]:
        """``(pair, plan)`` of each layer. Layers at equal offsets share one plan object."""
        shared: dict[tuple[int, int], Plan] = {}
        for pair, local, remote in zip(
            self.pair.tolist(), self.local.tolist(), self.remote.tolist(), strict=True
        ):
            at = (local, remote)
            plan = shared.get(at)
            if plan is None:
                plan = shared[at] = self.plan.shifted(local, remote)
            yield pair, plan


class LayersPlan(PairedPlan):
    """The plan of several layers, kept factored until somebody asks for the flat vectors."""

    __slots__ = ("groups",)

    groups: tuple[PlanGroup, ...]

    def __init__(self, groups: Sequence[PlanGroup]) -> None:
        self.groups = tuple(groups)
        self.nbytes = sum(len(group.pair) * group.plan.nbytes for group in self.groups)
        self._vectors = None
        self._lists = None

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def _get(self) -> tuple[Int32Array, Int64Array, Int64Array, Int64Array]:
        if self._vectors is None:
            total = len(self)
            if total > MAX_WRITTEN:
                raise InvalidInputError(
                    f"the plan would have {total} pieces of all layers written out, over "
                    f"{MAX_WRITTEN}",
                    next_step="plan fewer blocks or layers at a time, or use one token order on "
                    "both sides",
                )
            pair = np.empty(total, np.int32)
            local = np.empty(total, np.int64)
            remote = np.empty(total, np.int64)
            size = np.empty(total, np.int64)
            start = 0
            for group in self.groups:
                shape = (len(group.pair), len(group.plan))
                part = slice(start, start + len(group))
                pair[part].reshape(shape)[:] = group.pair[:, None]
                np.add(group.local[:, None], group.plan.local, out=local[part].reshape(shape))
                np.add(group.remote[:, None], group.plan.remote, out=remote[part].reshape(shape))
                constant = group.plan.piece_nbytes
                size[part].reshape(shape)[:] = constant if constant is not None else group.plan.size
                start += len(group)
            self._set((pair, local, remote, size))
        assert self._vectors is not None
        return self._vectors

    @property
    def uncovered(self) -> dict[int, Uncovered]:
        """By local group: what of the destination's list its layers do not write, if anything."""
        found: dict[int, Uncovered] = {}
        for group in self.groups:
            if len(group.plan.uncovered):
                found.setdefault(group.group, group.plan.uncovered)
        return found

    def merged(self) -> PairedPlan:
        """The same bytes in as few pieces as possible, still factored where that can be.

        Pieces are joined inside a layer, and across layers that share a row on both sides; both
        cost the shared plan, not all pieces.  Only if layers interleave in another way, or touch at
        their ends, all pieces are written out, joined and ordered by pair and local offset; unless
        they are more than ``MAX_JOINED``, which stay as they are.
        """
        groups, before = self.groups, -1
        while before != (before := sum(len(group) for group in groups)):
            joined = [group.with_plan(group.plan.merged()) for group in groups]
            groups = tuple(part for group in joined for part in fused(group))
        whole = self if before == len(self) else LayersPlan(groups)
        if len(whole) > MAX_JOINED or apart(whole.groups):
            return whole
        return PairedPlan.merged(whole)

    def plans(self) -> Iterator[tuple[int, Plan]]:
        """``(pair, plan)`` of every layer, without building the flat vectors.

        Where layers lie at equal offsets of their regions, they share one plan object and its
        cached lists: for engines that take one call per layer, the lists are then made once.
        """
        for group in self.groups:
            yield from group.plans()

    def descriptors(
        self,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        *,
        local_device: int = 0,
        remote_device: int = 0,
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Two uint64[n, 3] arrays of (address, length, device): what NIXL takes.

        ``local_addresses[pair]`` and ``remote_addresses[pair]`` are where the regions of each pair
        begin.
        """
        total = len(self)
        ours, theirs = np.empty((total, 3), np.int64), np.empty((total, 3), np.int64)
        start = 0
        for group in self.groups:
            m, n = len(group.pair), len(group.plan)
            # Layers are filled in steps that stay in the processor's cache.
            step = max(2**15 // max(n, 1), 1)
            pattern = np.empty((n, 3), np.int64)
            pattern[:, 1] = group.plan.piece_nbytes or group.plan.size
            for rows, offsets, bases, addresses, device in (
                (ours, group.plan.local, group.local, local_addresses, local_device),
                (theirs, group.plan.remote, group.remote, remote_addresses, remote_device),
            ):
                pattern[:, 0] = offsets
                pattern[:, 2] = device
                begin = [checked_address(addresses[pair]) for pair in group.pair.tolist()]
                at = bases + np.array(begin, np.int64)
                out = rows[start : start + m * n].reshape(m, n, 3)
                for first in range(0, m, step):
                    part = out[first : first + step]
                    part[:] = pattern
                    part[:, :, 0] += at[first : first + step, None]
            start += len(group)
        return ours.view(np.uint64), theirs.view(np.uint64)


def _paired(
    pair: Int32Array, local: Int64Array, remote: Int64Array, size: Int64Array
) -> PairedPlan:
    return PairedPlan(pair, local, remote, size)
