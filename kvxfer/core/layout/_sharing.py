"""Joining pieces of several layers without writing all of them out.

Layers of equal geometry share one plan (``PlanGroup``).  Most of what can be joined touches inside
that plan.  The rest are layers that lie side by side in one row of a storage: every piece of one is
followed, on both sides, by the same piece of the next.  Whether anything else might touch is
decided from where the layers lie, and if it might, somebody has to look at every piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvxfer.core.layout._checks import INT64_MAX, Int32Array, Int64Array
from kvxfer.core.layout.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.layout.paired import PlanGroup

__all__ = ["apart", "fused", "gaps_of"]

_CLUSTERS = 16
"""Stretches of one plan that are told apart: one per plane, and some to spare."""
_PLACES = 2**14
"""Places in a row that are compared with each other: more layers than that times pieces per block
of a layer are not."""


def gaps_of(pair: Int32Array, local: Int64Array, remote: Int64Array) -> tuple[int, int]:
    """The least distance between the bases of two layers of one pair, local and remote."""
    if len(pair) < 2:
        return INT64_MAX, INT64_MAX
    gaps = []
    for bases in (local, remote):
        order = np.lexsort((bases, pair))
        steps = np.diff(bases[order])[np.diff(pair[order]) == 0]
        gaps.append(int(steps.min()) if len(steps) else INT64_MAX)
    return gaps[0], gaps[1]


def fused(group: PlanGroup) -> list[PlanGroup]:
    """The same bytes, where layers side by side in a row are one layer with larger pieces."""
    plan = group.plan
    size = plan.piece_nbytes
    if size is None or size < max(group.gaps):
        return [group]
    order = np.lexsort((group.local, group.pair))
    pair, local, remote = group.pair[order], group.local[order], group.remote[order]
    follows = (
        (pair[1:] == pair[:-1])
        & (local[1:] == local[:-1] + size)
        & (remote[1:] == remote[:-1] + size)
    )
    if not follows.any():
        return [group]
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    count = np.diff(first, append=len(pair))
    names = [group.names[i] for i in order.tolist()]
    found = []
    for together in np.unique(count).tolist():
        heads = first[count == together]
        larger = Plan(plan.local, plan.remote, size * together, uncovered=plan.uncovered)
        found.append(
            attrs.evolve(
                group,
                plan=larger if together > 1 else plan,
                names=tuple(
                    names[i] if together == 1 else f"{names[i]}..{names[i + together - 1]}"
                    for i in heads.tolist()
                ),
                pair=pair[heads],
                local=local[heads],
                remote=remote[heads],
                gaps=gaps_of(pair[heads], local[heads], remote[heads]),
                kept={},
            )
        )
    return found


def apart(groups: Sequence[PlanGroup]) -> bool:
    """Whether no piece of one layer touches one of another on both sides.

    False also means that it could not be told.
    """
    groups = [group for group in groups if len(group)]
    if not groups:
        return True  # nothing moves between these two ranks
    if len(groups) == 1 and _fits_gaps(groups[0]):
        return True
    for local in (True, False):
        bounds = _whole(groups, local=local)
        if not _disjoint(*bounds[:3]):
            clusters = _clusters(groups, local=local)
            if clusters is None or not _disjoint(*clusters[:3]):
                continue
            bounds = clusters
        return not _touch(groups, bounds, local=local)
    return _apart_in_rows(groups)


def _fits_gaps(group: PlanGroup) -> bool:
    """Whether each layer ends before the next one begins, on one side at least."""
    if min(group.gaps) == INT64_MAX:
        return True
    plan = group.plan
    for offsets, (low, high), gap in zip(
        (plan.local, plan.remote), plan.bounds, group.gaps, strict=True
    ):
        end = high + plan.piece_nbytes if plan.piece_nbytes else int((offsets + plan.size).max())
        if end - low < gap:
            return True
    return False


_Bounds = tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]
"""Of stretches of layers: pair, begin, end, index of the group, index of the layer in it."""


def _side(group: PlanGroup, *, local: bool) -> tuple[Int64Array, Int64Array]:
    return (group.plan.local, group.local) if local else (group.plan.remote, group.remote)


def _sorted(
    parts: list[tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]],
) -> _Bounds:
    pair, begin, end, owner, member = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    order = np.lexsort((begin, pair))
    return pair[order], begin[order], end[order], owner[order], member[order]


def _whole(groups: Sequence[PlanGroup], *, local: bool) -> _Bounds:
    """Every layer as one stretch, from its first piece to its last."""
    parts = []
    for number, group in enumerate(groups):
        offsets, bases = _side(group, local=local)
        low, high = (
            int(offsets.min()),
            int((offsets + (group.plan.piece_nbytes or group.plan.size)).max()),
        )
        parts.append(_stretch(group, number, bases, low, high))
    return _sorted(parts)


def _stretch(
    group: PlanGroup, number: int, bases: Int64Array, low: int, high: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
    m = len(bases)
    pair = group.pair.astype(np.int64)
    return pair, bases + low, bases + high, np.full(m, number), np.arange(m)


def _clusters(groups: Sequence[PlanGroup], *, local: bool) -> _Bounds | None:
    """Every layer as stretches, parted where there is room for another layer; None if too many."""
    pair = np.concatenate([group.pair for group in groups])
    bases = np.concatenate([_side(group, local=local)[1] for group in groups])
    room = gaps_of(pair, bases, bases)[0]
    if not room:
        return None
    parts = []
    for number, group in enumerate(groups):
        offsets, at = _side(group, local=local)
        by_start = np.argsort(offsets, kind="stable")
        start = offsets[by_start]
        end = np.maximum.accumulate(start + (group.plan.piece_nbytes or group.plan.size[by_start]))
        first = np.flatnonzero(start[1:] - end[:-1] >= room) + 1
        if len(first) >= _CLUSTERS:
            return None
        lows = [0, *first.tolist()]
        highs = [*first.tolist(), len(start)]
        for a, b in zip(lows, highs, strict=True):
            parts.append(_stretch(group, number, at, int(start[a]), int(end[b - 1])))
    return _sorted(parts)


def _disjoint(pair: Int64Array, begin: Int64Array, end: Int64Array) -> bool:
    return not bool(((pair[1:] == pair[:-1]) & (begin[1:] < end[:-1])).any())


def _touch(groups: Sequence[PlanGroup], bounds: _Bounds, *, local: bool) -> bool:
    """Whether pieces at the ends of neighbouring stretches touch on the other side too."""
    pair, begin, end, owner, member = bounds
    for i in np.flatnonzero((pair[1:] == pair[:-1]) & (begin[1:] == end[:-1])).tolist():
        border = int(end[i])
        before = groups[owner[i]], int(member[i])
        after = groups[owner[i + 1]], int(member[i + 1])
        theirs = _other_side(*before, border, local=local, ends=True)
        if not theirs.isdisjoint(_other_side(*after, border, local=local, ends=False)):
            return True
    return False


def _other_side(group: PlanGroup, member: int, border: int, *, local: bool, ends: bool) -> set[int]:
    """Where, on the other side, the pieces end (or begin) that end (or begin) at ``border``."""
    offsets, bases = _side(group, local=local)
    others, other_bases = _side(group, local=not local)
    size = (group.plan.piece_nbytes or group.plan.size) if ends else 0
    there = offsets + size == border - int(bases[member])
    found: list[int] = ((others + size)[there] + int(other_bases[member])).tolist()
    return set(found)


def _apart_in_rows(groups: Sequence[PlanGroup]) -> bool:
    """Whether the places of pieces in rows, block after block, prove that no two layers touch.

    What touches ends and begins at one place of the row on both sides.
    """
    rows = [
        (steps.pop() if len(steps) == 1 else 0) or 1
        for steps in ({group.local_row for group in groups}, {group.remote_row for group in groups})
    ]
    if rows == [1, 1]:
        return False
    places = []
    for group in groups:
        size = group.plan.piece_nbytes or group.plan.size
        begin = _distinct(group.plan.local % rows[0], group.plan.remote % rows[1])
        end = _distinct((group.plan.local + size) % rows[0], (group.plan.remote + size) % rows[1])
        places.append((begin, end))
    total = sum(
        len(group.pair) * (len(begin) + len(end))
        for group, (begin, end) in zip(groups, places, strict=True)
    )
    if total > _PLACES:
        return False
    begins: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
    ends: list[tuple[tuple[int, int, int], tuple[int, int]]] = []
    for number, (group, (begin, end)) in enumerate(zip(groups, places, strict=True)):
        bases = zip(group.pair.tolist(), group.local.tolist(), group.remote.tolist(), strict=True)
        for member, (pair, local, remote) in enumerate(bases):
            for a, b in begin:
                place = (pair, (a + local) % rows[0], (b + remote) % rows[1])
                begins.setdefault(place, set()).add((number, member))
            for a, b in end:
                place = (pair, (a + local) % rows[0], (b + remote) % rows[1])
                ends.append((place, (number, member)))
    return all(begins.get(place, {me}) <= {me} for place, me in ends)


def _distinct(local: Int64Array, remote: Int64Array) -> set[tuple[int, int]]:
    order = np.lexsort((remote, local))
    local, remote = local[order], remote[order]
    new = np.ones(len(local), np.bool_)
    new[1:] = (local[1:] != local[:-1]) | (remote[1:] != remote[:-1])
    return set(zip(local[new].tolist(), remote[new].tolist(), strict=True))
