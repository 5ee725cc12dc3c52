"""Pairing blocks of equal size one to one: by position, or by a stated assumption."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvxfer.core.layout.plan import NOTHING_UNCOVERED, Uncovered
from kvxfer.core.layout.rule import Align, Rule, Side
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.core.layout._checks import Int64Array
    from kvxfer.core.layout.blocks import Blocks

__all__ = ["check_cover", "pair_whole", "starts_of"]


def pair_whole(
    local: Blocks, remote: Blocks, rule: Rule, tokens: int
) -> tuple[Int64Array, Int64Array, Uncovered]:
    """``(local ids, remote ids, uncovered)`` of blocks of equal size, paired one to one.

    ``tokens`` per block are only needed for the report.
    """
    n_local, n_remote = len(local.ids), len(remote.ids)
    first, second = starts_of(local, remote, rule, equal_size=True)
    no_holes = local.holes is None and remote.holes is None
    if no_holes and n_local == n_remote and first == second and first is not None:
        return local.ids, remote.ids, NOTHING_UNCOVERED
    if first is None or second is None:
        return _pair_gapped(local, remote, rule, tokens)
    begin = max(first, second)
    end = max(min(first + n_local, second + n_remote), begin)
    lo, hi = begin - first, end - first
    ro, rh = begin - second, end - second
    local_ids, remote_ids = local.ids[lo:hi], remote.ids[ro:rh]
    to_local = rule.destination is Side.LOCAL
    dest, lead, done = (local, lo, hi) if to_local else (remote, ro, rh)
    if no_holes:
        if lead == 0 and done == len(dest):
            return local_ids, remote_ids, NOTHING_UNCOVERED
        if begin == end:  # nothing pairs: all of it is tail
            missing = np.arange(len(dest))
        else:
            missing = np.concatenate((np.arange(lead), np.arange(done, len(dest))))
        return local_ids, remote_ids, _whole_report(dest, missing, rule, tokens)
    real = np.ones(end - begin, np.bool_)
    if local.holes is not None:
        real &= ~local.holes[lo:hi]
    if remote.holes is not None:
        real &= ~remote.holes[ro:rh]
    written = np.zeros(len(dest), np.bool_)
    written[lead:done] = real
    if dest.holes is not None:
        written |= dest.holes
    return (
        local_ids[real],
        remote_ids[real],
        _whole_report(dest, np.flatnonzero(~written), rule, tokens),
    )


def starts_of(
    local: Blocks, remote: Blocks, rule: Rule, *, equal_size: bool
) -> tuple[int | None, int | None]:
    """First positions on both sides; None where positions have gaps."""
    if local.is_placed and remote.is_placed:
        return local.start, remote.start
    n_local, n_remote = len(local.ids), len(remote.ids)
    if not n_local or not n_remote:
        return 0, 0
    for side, blocks in ((Side.LOCAL, local), (Side.REMOTE, remote)):
        if blocks.is_placed and blocks.start is None:
            raise InvalidInputError(
                f"the {side.value} list has gaps in its positions, the other side's list has none",
                next_step="place both lists (Blocks.at, Blocks.placed)",
            )
    if rule.align is None:
        if local.is_placed or remote.is_placed:
            which = "remote" if local.is_placed else "local"
            raise InvalidInputError(
                f"the {which} list has no positions, the other side's list has",
                next_step="place both lists (Blocks.at), or pass align",
            )
        if not equal_size or n_local != n_remote:
            sizes = "" if equal_size else " of unequal block sizes"
            raise InvalidInputError(
                f"lists of {n_local} local and {n_remote} remote blocks{sizes} have no positions",
                next_step='place them (Blocks.at), or state the assumption with align="head" or '
                '"tail"',
            )
        return 0, 0
    if rule.align is Align.HEAD:
        return 0, 0
    if not equal_size:
        raise InvalidInputError(
            "align=TAIL cannot pair lists of unequal block sizes: their ends need not coincide",
            next_step="place both lists (Blocks.at)",
        )
    # The destination's surplus is an allocation ahead of the source's end, not a missing prefix.
    n_dest, n_source = n_local, n_remote
    if rule.destination is Side.REMOTE:
        n_dest, n_source = n_remote, n_local
    lead = max(n_source - n_dest, 0)
    return (lead, 0) if rule.destination is Side.LOCAL else (0, lead)


def _pair_gapped(
    local: Blocks, remote: Blocks, rule: Rule, tokens: int
) -> tuple[Int64Array, Int64Array, Uncovered]:
    ours, theirs = local.positions, remote.positions
    assert ours is not None  # starts_of refuses anything else
    assert theirs is not None
    _, at_local, at_remote = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    real = np.ones(len(at_local), np.bool_)
    if local.holes is not None:
        real &= ~local.holes[at_local]
    if remote.holes is not None:
        real &= ~remote.holes[at_remote]
    at_local, at_remote = at_local[real], at_remote[real]
    dest, at = (local, at_local) if rule.destination is Side.LOCAL else (remote, at_remote)
    written = np.zeros(len(dest), np.bool_)
    written[at] = True
    if dest.holes is not None:
        written |= dest.holes
    report = _whole_report(dest, np.flatnonzero(~written), rule, tokens)
    return local.ids[at_local], remote.ids[at_remote], report


def _whole_report(dest: Blocks, missing: Int64Array, rule: Rule, tokens: int) -> Uncovered:
    if not len(missing):
        return NOTHING_UNCOVERED
    n = len(dest)
    written = np.ones(n, np.bool_)
    written[missing] = False
    if dest.holes is not None:
        written &= ~dest.holes
    last = int(np.flatnonzero(written)[-1]) if written.any() else -1
    check_cover(dest, missing[missing < last], missing[missing > last], rule)
    return Uncovered(
        missing,
        dest.ids[missing],
        np.zeros(len(missing), np.int64),
        np.full(len(missing), tokens, np.int64),
        tokens,
    )


def check_cover(dest: Blocks, gaps: Int64Array, tail: Int64Array, rule: Rule) -> None:
    """Refuse what the rule does not let go unwritten; both vectors are entries of the list.

    Raises:
        InvalidInputError: naming side, first block and allowance.
    """
    side = rule.destination.value
    if len(gaps) and not rule.gaps:
        i = int(gaps[0])
        raise InvalidInputError(
            f"the {side} block {int(dest.ids[i])} (index {i}) would receive nothing though later "
            f"ones do; {len(gaps)} such blocks",
            next_step="mark blocks that need nothing as placeholders, or pass allow_gaps=True",
        )
    if len(tail) > rule.tail:
        raise InvalidInputError(
            f"{len(tail)} {side} blocks lie beyond what the source holds, from id "
            f"{int(dest.ids[int(tail[0])])} (index {int(tail[0])}) on; at most "
            f"uncovered_{side}={rule.tail} may",
            next_step="check the lists, or allow a longer uncovered tail",
        )
