"""``DescriptorTable``: for engines that take descriptors once and indices per request.

NIXL's prepared lists are such: every piece that a request can ever move is described when the peer
is met, and a request then costs one index per piece.  This works where blocks pair whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvxfer.core.layout._checks import MAX_PIECES, Int32Array, Int64Array
from kvxfer.core.layout.layerwise import Request
from kvxfer.core.layout.plan import checked_address
from kvxfer.core.layout.planner import inner_offsets
from kvxfer.core.layout.rule import Align, Side, make_rule
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.layout.blocks import Blocks
    from kvxfer.core.layout.layers import Layers, Shared

__all__ = ["DescriptorTable"]


class DescriptorTable:
    """All pieces that requests between two ranks can move, numbered.

    Rows are ordered by layer, then plane, then block, then what is left inside a block.  Build it
    once per peer, hand ``local_rows`` and ``remote_rows`` to the engine, then ask ``indices`` for
    every request.

    Raises:
        GeometryError: blocks of some layer do not pair whole (unequal block sizes, for instance);
            ``plan_layers`` plans those.
        InvalidInputError: a table would have more than 2**26 rows.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._first: dict[tuple[int, Side], Int32Array] = {}
        rows = {Side.LOCAL: 0, Side.REMOTE: 0}
        for number, shared in enumerate(layers.shared):
            if shared.recipe.by_runs:
                raise GeometryError(
                    f"layer {shared.names[0]!r} has no fixed pieces, its blocks do not pair whole: "
                    f"local {shared.local.describe()}, remote {shared.remote.describe()}",
                    next_step="use plan_layers",
                )
            for side, blocks in (
                (Side.LOCAL, shared.local.num_blocks),
                (Side.REMOTE, shared.remote.num_blocks),
            ):
                planes, inner = _counts(shared)
                bands = len(shared.names) * planes
                step = blocks * inner
                first = rows[side]
                rows[side] += bands * step
                if rows[side] > MAX_PIECES:
                    raise InvalidInputError(
                        f"the table would have over {MAX_PIECES} {side.value} rows",
                        next_step="use plan_layers",
                    )
                self._first[number, side] = first + np.arange(bands, dtype=np.int32) * step

    def local_rows(self, addresses: Sequence[int], *, device: int = 0) -> npt.NDArray[np.uint64]:
        """uint64[n, 3] of (address, length, device); ``addresses`` of each pair's local region."""
        return self._rows(Side.LOCAL, addresses, device)

    def remote_rows(self, addresses: Sequence[int], *, device: int = 0) -> npt.NDArray[np.uint64]:
        """uint64[n, 3] of (address, length, device); ``addresses`` of each pair's remote region."""
        return self._rows(Side.REMOTE, addresses, device)

    def _rows(self, side: Side, addresses: Sequence[int], device: int) -> npt.NDArray[np.uint64]:
        parts = [np.empty((0, 3), np.int64)]
        for shared in self._layers.shared:
            is_local = side is Side.LOCAL
            layout, base = (
                (shared.local, shared.local_base)
                if is_local
                else (shared.remote, shared.remote_base)
            )
            recipe, axis = shared.recipe, 1 if is_local else 2
            planes, _ = _counts(shared)
            starts = np.array(
                [
                    checked_address(addresses[pair]) + offset
                    for pair, offset in zip(shared.pair.tolist(), base.tolist(), strict=True)
                ],
                np.int64,
            ) + (recipe.local if is_local else recipe.remote)
            plane = np.arange(planes, dtype=np.int64) * (
                recipe.planes[axis] if recipe.planes else 0
            )
            block = np.arange(layout.num_blocks, dtype=np.int64) * layout.block_stride
            offsets = (
                starts[:, None, None, None]
                + plane[:, None, None]
                + block[:, None]
                + inner_offsets(recipe, axis)
            )
            rows = np.empty((offsets.size, 3), np.int64)
            rows[:, 0] = offsets.reshape(-1)
            rows[:, 1] = recipe.run_nbytes
            rows[:, 2] = device
            parts.append(rows)
        return np.concatenate(parts).view(np.uint64)

    def indices(
        self,
        local_blocks: Sequence[Blocks],
        remote_blocks: Sequence[Blocks],
        *,
        align: Align | str | None = None,
        uncovered_local: int = 0,
        uncovered_remote: int = 0,
        destination: Side = Side.LOCAL,
        allow_gaps: bool = False,
    ) -> tuple[Int32Array, Int32Array]:
        """``(local, remote)``: int32[n] row numbers of one request's pieces, checked as a plan is.

        Where groups share memory, use ``plan_layers``: only it compares their bytes.

        Raises:
            InvalidInputError: as for ``plan_layers``.
            GeometryError: context-parallel shares that do not pair whole.
        """
        rule = make_rule(
            align=align,
            destination=destination,
            uncovered_local=uncovered_local,
            uncovered_remote=uncovered_remote,
            allow_gaps=allow_gaps,
        )
        request = Request(local_blocks, remote_blocks, rule)
        found: list[tuple[tuple[Int32Array, Int32Array], tuple[Int32Array, Int32Array]]] = []
        for number, shared in enumerate(self._layers.shared):
            ours, theirs = request.lists(shared)
            if not len(ours) and not len(theirs):
                continue
            local_ids, remote_ids, _ = request.whole(shared, ours, theirs)
            inner = _counts(shared)[1]
            found.append(
                (
                    (self._first[number, Side.LOCAL], _rows_of(local_ids, inner)),
                    (self._first[number, Side.REMOTE], _rows_of(remote_ids, inner)),
                )
            )
        total = sum(len(first) * len(ids) for (first, ids), _ in found)
        # One piece of memory for both: a large one costs few page faults, two halves cost many.
        out = np.empty((2, total), np.int32)
        start = 0
        for both in found:
            for (first, ids), row in zip(both, out, strict=True):
                stop = start + len(first) * len(ids)
                np.add(first[:, None], ids, out=row[start:stop].reshape(len(first), len(ids)))
            start = stop
        return out[0], out[1]


def _counts(shared: Shared) -> tuple[int, int]:
    """Pieces of one block: planes, and those of each plane."""
    planes = shared.recipe.planes[0] if shared.recipe.planes else 1
    return planes, shared.recipe.factor // planes


def _rows_of(ids: Int64Array, inner: int) -> Int32Array:
    """The rows of blocks in one band: ``inner`` for each."""
    small: Int32Array = ids.astype(np.int32)
    if inner > 1:
        small = np.add.outer(small * np.int32(inner), np.arange(inner, dtype=np.int32)).reshape(-1)
    return small
