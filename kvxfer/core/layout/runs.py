"""Pairing by runs of cells, where blocks do not pair whole.

That is so where block sizes differ, where the two sides deal tokens out to context-parallel ranks
differently, and where kernel blocks of the two sides do not nest.  A *run* is a stretch of cells
that lies inside one block, and one kernel block, on both sides.  Both sides' cells are put on the
request's own axis, cut wherever a run of either side begins or ends, and looked up again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvxfer.core.layout._checks import MAX_PIECES, Int64Array
from kvxfer.core.layout.pairing import check_cover, starts_of
from kvxfer.core.layout.plan import NOTHING_UNCOVERED, Uncovered
from kvxfer.core.layout.rule import Rule, Side
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.core.layout.blocks import Blocks, TokenShare

__all__ = ["Runs", "pair_runs"]

MAX_CUTS = 2**22
"""Most borders of runs in one pairing, unless our own list has more cells. Tokens that are dealt
out one by one make one each: four million are beyond today's requests, and take about a second."""


@attrs.frozen(eq=False)
class Runs:
    """Runs of cells inside one block on both sides, in the order of the request's tokens.

    ``local_cell`` and ``remote_cell`` count cells inside the block.
    """

    local_ids: Int64Array
    local_cell: Int64Array
    remote_ids: Int64Array
    remote_cell: Int64Array
    cells: Int64Array


@attrs.frozen(eq=False)
class _Stretch:
    """One side's cells on the request's own axis.

    Cell ``k`` of this side (``position * per_block + cell``) is the request's cell
    ``(k // turn * ranks + rank) * turn + k % turn``; without a share that is ``k`` itself.
    """

    positions: Int64Array
    ids: Int64Array
    index: Int64Array  # entry of the caller's list
    per_block: int
    cell_tokens: int
    turn: int
    ranks: int
    rank: int

    def to_request(self, cells: Int64Array) -> Int64Array:
        if self.ranks == 1:
            return cells
        turns, rest = np.divmod(cells, self.turn)
        out: Int64Array = (turns * self.ranks + self.rank) * self.turn + rest
        return out

    def from_request(self, cells: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(own cell, whether this side holds it)``."""
        if self.ranks == 1:
            return cells, np.ones(len(cells), np.bool_)
        turns, rest = np.divmod(cells, self.turn)
        rounds, rank = np.divmod(turns, self.ranks)
        return rounds * self.turn + rest, rank == self.rank

    def find(self, cells: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """``(entry in positions, cell inside the block, whether it is held)``."""
        own, held = self.from_request(cells)
        position, cell = np.divmod(own, self.per_block)
        if not len(self.positions):
            return np.zeros(len(cells), np.int64), cell, np.zeros(len(cells), np.bool_)
        at = np.minimum(np.searchsorted(self.positions, position), len(self.positions) - 1)
        return at, cell, held & (self.positions[at] == position)

    def hull(self) -> tuple[int, int]:
        """From the first of the request's cells that this side holds to past the last."""
        if not len(self.positions):
            return 0, 0
        ends = np.array([self.positions[0], self.positions[-1] + 1]) * self.per_block
        first, last = self.to_request(ends - [0, 1]).tolist()
        return first, last + 1

    def own_range(self, hull: tuple[int, int]) -> tuple[int, int]:
        """Own cells outside of which none is one of the request's cells in ``hull``."""
        if self.ranks == 1:
            return hull
        whole = self.turn * self.ranks
        return hull[0] // whole * self.turn, (hull[1] // whole + 1) * self.turn

    def cuts(self, steps: tuple[int, ...], other: _Stretch, most: int) -> Int64Array:
        """The request's cells at which a run of this side begins or ends.

        The steps inside a block count only where ``other`` may hold the cells as well: how long
        they are is what a peer says of itself, what they meet is bounded by our own list.
        """
        if not len(self.positions):
            return np.empty(0, np.int64)
        starts = self.positions * self.per_block
        ends = starts + self.per_block
        parts = [starts, ends]
        if self.ranks > 1:
            parts.append(_multiples_inside(starts, ends, self.turn, most))
        if steps:
            low, high = self.own_range(other.hull())
            met = (starts < high) & (ends > low)
            base = starts[met]
            begin = np.maximum(base, low) - base
            end = np.minimum(ends[met], high) - base
            parts += [_multiples_inside(begin, end, step, most, base) for step in steps]
        own = _distinct(np.concatenate(parts))
        if self.ranks == 1:
            return own
        # A run begins at the image of its first cell and ends one past that of its last.
        begin = self.to_request(own[:-1])
        end = self.to_request(own[1:] - 1) + 1
        return _distinct(np.concatenate((begin, end)))


def _distinct(values: Int64Array) -> Int64Array:
    """Sorted, each once. ``np.unique`` hashes them, which takes many times as long."""
    ordered = np.sort(values)
    if len(ordered) < 2:
        return ordered
    new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


def _multiples_inside(
    starts: Int64Array, ends: Int64Array, step: int, most: int, base: Int64Array | None = None
) -> Int64Array:
    """Every multiple of ``step`` strictly inside one of the intervals, each counted from its base.

    Raises:
        InvalidInputError: they are more than ``most``.
    """
    first = starts // step + 1
    counts = np.maximum((ends - 1) // step - first + 1, 0)
    total = int(counts.sum())
    if total > most:
        raise InvalidInputError(
            f"pairing would take {total} cuts, over {most}",
            next_step="plan fewer blocks at a time",
        )
    skipped = np.repeat(np.cumsum(counts) - counts, counts)
    out: Int64Array = (np.repeat(first, counts) + np.arange(total) - skipped) * step
    if base is not None:
        out += np.repeat(base, counts)
    return out


def pair_runs(
    local: Blocks,
    remote: Blocks,
    rule: Rule,
    *,
    local_cells: int,
    remote_cells: int,
    cell_tokens: int = 1,
    local_steps: tuple[int, ...] = (),
    remote_steps: tuple[int, ...] = (),
) -> tuple[Runs, Uncovered]:
    """Pair by runs of cells.

    ``local_cells`` and ``remote_cells`` are cells per block; runs are also cut at multiples of the
    steps inside each block (where a kernel block ends and the stride changes).
    """
    first, second = starts_of(local, remote, rule, equal_size=local_cells == remote_cells)
    ours = _stretch(local, first, local_cells, cell_tokens)
    theirs = _stretch(remote, second, remote_cells, cell_tokens)
    most = min(max(MAX_CUTS, len(ours.ids) * ours.per_block * ours.ranks), MAX_PIECES)
    cuts = _distinct(
        np.concatenate(
            (ours.cuts(local_steps, theirs, most), theirs.cuts(remote_steps, ours, most))
        )
    )
    source, target = (theirs, ours) if rule.destination is Side.LOCAL else (ours, theirs)
    if source.ranks > 1 and len(cuts):
        # Beyond the source's own list, the report still has to tell its tokens from other ranks'.
        # What the destination does not hold, such as gaps in its positions, is in no report.
        _, _, held = target.find(cuts[:-1])
        more = _multiples_inside(cuts[:-1][held], cuts[1:][held], source.turn, most)
        cuts = _distinct(np.concatenate((cuts, more)))
    begin, length = cuts[:-1], np.diff(cuts)
    at_local, local_cell, in_local = ours.find(begin)
    at_remote, remote_cell, in_remote = theirs.find(begin)
    both = in_local & in_remote
    runs = Runs(
        ours.ids[at_local[both]],
        local_cell[both],
        theirs.ids[at_remote[both]],
        remote_cell[both],
        length[both],
    )
    if rule.destination is Side.LOCAL:
        dest, stretch = local, ours
        at, cell, held = at_local, local_cell, in_local
    else:
        dest, stretch = remote, theirs
        at, cell, held = at_remote, remote_cell, in_remote
    # What another rank of the source holds is not this plan's to write.
    _, mine = source.from_request(begin)
    open_ = held & ~both & mine
    if not open_.any():
        return runs, NOTHING_UNCOVERED
    report = _run_report(
        dest,
        stretch,
        rule,
        np.stack((at[open_], cell[open_], length[open_], begin[open_])),
        int(begin[both].max()) if both.any() else -1,
    )
    return runs, report


def _stretch(blocks: Blocks, start: int | None, per_block: int, cell_tokens: int) -> _Stretch:
    if start is None:
        placed = blocks.positions
        assert placed is not None  # starts_of lets only placed lists through without a start
        positions = placed
    else:
        positions = np.arange(start, start + len(blocks.ids), dtype=np.int64)
    index = np.arange(len(blocks.ids))
    ids = blocks.ids
    if blocks.holes is not None:
        real = ~blocks.holes
        positions, ids, index = positions[real], ids[real], index[real]
    share: TokenShare | None = blocks.share
    turn, ranks, rank = (1, 1, 0) if share is None else (share.interleave, share.size, share.rank)
    if share is not None and turn % cell_tokens:
        raise InvalidInputError(
            f"an interleave of {turn} tokens cuts through opaque cells of {cell_tokens} tokens"
        )
    turn = max(turn // cell_tokens, 1)
    return _Stretch(positions, ids, index, per_block, cell_tokens, turn, ranks, rank)


def _run_report(
    dest: Blocks, stretch: _Stretch, rule: Rule, found: Int64Array, last: int
) -> Uncovered:
    """Join open runs that touch inside one block, check them, and report them in cells.

    ``found`` holds their entries, first cells, lengths and the request's cells; ``last`` is the
    last request's cell that is written.
    """
    at, cell, length, begin = found
    breaks = (at[1:] != at[:-1]) | (cell[1:] != cell[:-1] + length[:-1])
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    start = cell[first]
    stop = start + np.add.reduceat(length, first)
    index = stretch.index[at[first]]
    whole = (stop - start) == stretch.per_block
    late = begin[first] > last
    check_cover(dest, index[~late], index[late & whole], rule)
    return Uncovered(
        index,
        dest.ids[index],
        start * stretch.cell_tokens,
        stop * stretch.cell_tokens,
        stretch.per_block * stretch.cell_tokens,
    )
