"""The planner: two layouts and two block lists in, a ``Plan`` out.

One algorithm serves every pair of layouts.  It walks the axes that both sides share (plane, token,
head, bytes), grows the longest run that is contiguous on both sides (``recipe``), pairs the blocks
by position (``pairing``), and emits one piece per run and per index of the axes that are left, by
broadcasting.  Which cache layout an engine uses shows in the strides only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvxfer.core.layout._checks import MAX_PIECES, Int64Array
from kvxfer.core.layout.pairing import pair_whole
from kvxfer.core.layout.plan import Plan, Uncovered
from kvxfer.core.layout.recipe import Recipe, recipe_of, token_view
from kvxfer.core.layout.rule import Align, Rule, Side, make_rule
from kvxfer.core.layout.runs import Runs, pair_runs
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.core.layout.blocks import Blocks
    from kvxfer.core.layout.heads import HeadSlice
    from kvxfer.core.layout.kv import KVLayout

__all__ = ["check_ids", "emit_runs", "emit_whole", "inner_offsets", "plan_blocks", "runs_of"]


def plan_blocks(
    local: KVLayout,
    local_blocks: Blocks,
    remote: KVLayout,
    remote_blocks: Blocks,
    *,
    heads: HeadSlice | None = None,
    align: Align | str | None = None,
    uncovered_local: int = 0,
    uncovered_remote: int = 0,
    destination: Side = Side.LOCAL,
    allow_gaps: bool = False,
) -> Plan:
    """Plan one layer of one request: which bytes of which blocks go where.

    Offsets are bytes from the start of each layout's region.  Pieces are the longest runs that are
    contiguous on both sides inside one pair of blocks; ``Plan.merged`` joins across blocks.

    Args:
        heads: the heads to move; None means all, which must be equally many on both sides.
        align: how lists without positions pair; has no effect where both lists are placed.
        uncovered_local: how many whole blocks at the end of the local list may have no partner
            (READ). What is not written is reported in ``Plan.uncovered`` in any case.
        uncovered_remote: the same for the remote list, where that is the destination (WRITE).
        destination: whose blocks are written; READ writes local ones, WRITE remote ones.
        allow_gaps: let blocks, or parts of them, that lie before the last one written go
            unwritten.

    Raises:
        GeometryError: the two layouts cannot be mapped onto each other exactly.
        InvalidInputError: an id is out of range or twice in the destination, or the lists do not
            pair.
    """
    rule = make_rule(
        align=align,
        destination=destination,
        uncovered_local=uncovered_local,
        uncovered_remote=uncovered_remote,
        allow_gaps=allow_gaps,
    )
    recipe = recipe_of(
        local, remote, heads, unequal_shares=local_blocks.share != remote_blocks.share
    )
    check_ids(local.num_blocks, local_blocks, Side.LOCAL, destination)
    check_ids(remote.num_blocks, remote_blocks, Side.REMOTE, destination)
    blocks = (local_blocks, remote_blocks)
    at = (local.offset, remote.offset)
    if recipe.by_runs:
        paired = runs_of(recipe, local, remote, blocks, rule)
        return emit_runs(recipe, local, remote, paired, at)
    whole = pair_whole(local_blocks, remote_blocks, rule, local.tokens_per_block)
    return emit_whole(recipe, local, remote, whole, at)


def check_ids(num_blocks: int, blocks: Blocks, side: Side, destination: Side) -> None:
    """Refuse ids outside ``0..num_blocks-1``, and duplicates in the destination.

    Raises:
        InvalidInputError: naming side, value and range.
    """
    if blocks.top >= num_blocks:  # negative ids count as huge there
        real = blocks.real_ids
        bad = int(real[(real < 0) | (real >= num_blocks)][0])
        raise InvalidInputError(
            f"{side.value} block id {bad} lies outside 0..{num_blocks - 1}",
            next_step="check that the id lists belong to these groups",
        )
    if side is destination:
        twice = blocks.duplicate(num_blocks)
        if twice is not None:
            raise InvalidInputError(
                f"{side.value} block id {twice} occurs twice: its bytes would be written twice"
            )


def emit_whole(
    recipe: Recipe,
    local: KVLayout,
    remote: KVLayout,
    paired: tuple[Int64Array, Int64Array, Uncovered],
    at: tuple[int, int] = (0, 0),
) -> Plan:
    """The pieces of blocks that pair one to one, as ``pair_whole`` found them.

    ``at`` takes the place of the layouts' own offsets.
    """
    local_ids, remote_ids, uncovered = paired
    _check_pieces(recipe, len(local_ids))
    return Plan.of(
        _expand(local_ids, local.block_stride, at[0] + recipe.local, recipe, 1),
        _expand(remote_ids, remote.block_stride, at[1] + recipe.remote, recipe, 2),
        recipe.run_nbytes,
        uncovered,
    )


def runs_of(
    recipe: Recipe,
    local: KVLayout,
    remote: KVLayout,
    blocks: tuple[Blocks, Blocks],
    rule: Rule,
) -> tuple[Runs, Uncovered]:
    """Pair the (local, remote) blocks of two layouts by runs of cells."""
    return pair_runs(
        *blocks,
        rule,
        local_cells=local.cells_per_block,
        remote_cells=remote.cells_per_block,
        cell_tokens=local.cell_tokens,
        local_steps=recipe.local_steps,
        remote_steps=recipe.remote_steps,
    )


def emit_runs(
    recipe: Recipe,
    local: KVLayout,
    remote: KVLayout,
    paired: tuple[Runs, Uncovered],
    at: tuple[int, int] = (0, 0),
) -> Plan:
    """The pieces of blocks that pair by runs of cells, as ``pair_runs`` found them."""
    runs, uncovered = paired
    ours = runs.local_ids * local.block_stride + _cell_offset(local, runs.local_cell)
    theirs = runs.remote_ids * remote.block_stride + _cell_offset(remote, runs.remote_cell)
    size: Int64Array | int = recipe.run_nbytes
    if recipe.flat:
        _check_pieces(recipe, len(ours))
        planes = recipe.planes[0] if recipe.planes else 1
        size = np.tile(np.repeat(runs.cells * recipe.run_nbytes, recipe.factor // planes), planes)
    else:  # one piece per cell: inside a run each side has one stride
        total = int(runs.cells.sum())
        _check_pieces(recipe, total)
        run = np.repeat(np.arange(len(runs.cells)), runs.cells)
        step = np.arange(total) - np.repeat(np.cumsum(runs.cells) - runs.cells, runs.cells)
        ours = ours[run] + step * token_view(local)[1]
        theirs = theirs[run] + step * token_view(remote)[1]
    return Plan.of(
        _expand(ours, 1, at[0] + recipe.local, recipe, 1),
        _expand(theirs, 1, at[1] + recipe.remote, recipe, 2),
        size,
        uncovered,
    )


def _cell_offset(layout: KVLayout, cell: Int64Array) -> Int64Array:
    cells, stride, kernels, kernel_stride = token_view(layout)
    if kernels == 1:
        return cell * stride
    kernel, token = np.divmod(cell, cells)
    out: Int64Array = kernel * kernel_stride + token * stride
    return out


def _check_pieces(recipe: Recipe, units: int) -> None:
    if units * recipe.factor > MAX_PIECES:
        raise InvalidInputError(
            f"the plan would have {units * recipe.factor} pieces, over {MAX_PIECES}",
            next_step="plan fewer blocks at a time, or use one token order on both sides",
        )


def _expand(units: Int64Array, stride: int, start: int, recipe: Recipe, side: int) -> Int64Array:
    """Offsets of all pieces: planes outermost, then units, then the inner axes."""
    planes = recipe.planes
    if not recipe.inner:
        if planes is None:
            out = units * stride
            if start:
                out += start
            return out
        n = len(units)
        count, step = planes[0], planes[side]
        out = np.empty(count * n, np.int64)
        first = out[:n]
        np.multiply(units, stride, first)
        for p in range(1, count):
            np.add(first, start + p * step, out[p * n : (p + 1) * n])
        if start:
            np.add(first, start, first)
        return out
    base = units * stride
    base += start
    table = inner_offsets(recipe, side)
    if planes:
        offsets = np.arange(planes[0], dtype=np.int64) * planes[side]
        base = np.add.outer(offsets, base)
    pieces: Int64Array = np.add.outer(base, table).reshape(-1)
    return pieces


def inner_offsets(recipe: Recipe, side: int) -> Int64Array:
    """Offsets of the axes left inside a block against each other, outermost axis first.

    ``side`` is 1 for local and 2 for remote, the place of the stride in an axis.
    """
    table = np.zeros(1, np.int64)
    for axis in recipe.inner:
        line = np.arange(axis[0], dtype=np.int64) * axis[side]
        table = np.add.outer(table, line).reshape(-1)
    return table
