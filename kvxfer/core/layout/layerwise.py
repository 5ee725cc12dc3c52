"""``plan_layers``: all layers of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.core.layout._overlay import refuse_overlap
from kvxfer.core.layout.blocks import Blocks
from kvxfer.core.layout.layers import Layers, Shared
from kvxfer.core.layout.paired import LayersPlan, PlanGroup
from kvxfer.core.layout.pairing import pair_whole
from kvxfer.core.layout.planner import check_ids, emit_runs, emit_whole, runs_of
from kvxfer.core.layout.recipe import recipe_of
from kvxfer.core.layout.rule import Align, Rule, Side, make_rule
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.layout._checks import Int64Array
    from kvxfer.core.layout.cache import PlanCache
    from kvxfer.core.layout.layers import LayerPair
    from kvxfer.core.layout.plan import Plan, Uncovered

__all__ = ["Request", "plan_layers"]


def plan_layers(
    layers: Sequence[LayerPair],
    local_blocks: Sequence[Blocks],
    remote_blocks: Sequence[Blocks],
    *,
    align: Align | str | None = None,
    uncovered_local: int = 0,
    uncovered_remote: int = 0,
    destination: Side = Side.LOCAL,
    allow_gaps: bool = False,
    cache: PlanCache | None = None,
) -> LayersPlan:
    """Plan all layers of one request; one ``Blocks`` per group on either side.

    Layers of equal geometry share one plan.  Pass what ``match_layers`` returned: it carries the
    grouping and the geometry checks, so that a request pays for its ids only.

    A group whose lists are empty on both sides moves nothing.  Recurrent state takes exactly one
    slot on each side, wherever in the list it stands among placeholders.

    Raises:
        GeometryError: a layer cannot be mapped.
        InvalidInputError: as for ``plan_blocks``; or a group has no list; or two groups that share
            memory would write the same bytes.
    """
    rule = make_rule(
        align=align,
        destination=destination,
        uncovered_local=uncovered_local,
        uncovered_remote=uncovered_remote,
        allow_gaps=allow_gaps,
    )
    table = layers if isinstance(layers, Layers) else Layers(layers)
    request = Request(local_blocks, remote_blocks, rule)
    groups: list[PlanGroup] = []
    owners: list[int] = []
    for owner, shared in enumerate(table.shared):
        ours, theirs = request.lists(shared)
        if not len(ours) and not len(theirs):
            continue
        plan: Plan | None = None
        key: Any = None
        if cache is not None:
            key = (
                shared.local.geometry,
                shared.remote.geometry,
                shared.heads,
                ours.key,
                theirs.key,
                rule,
            )
            plan = cache.get(key)
        if plan is None:
            plan = request.plan(shared, ours, theirs)
            if cache is not None:
                cache.put(key, plan, ids=len(ours) + len(theirs))
        if len(plan) or len(plan.uncovered):
            groups.append(
                PlanGroup(
                    plan,
                    shared.names,
                    shared.pair,
                    shared.local_base,
                    shared.remote_base,
                    shared.group,
                    shared.remote_group,
                    shared.local.block_stride,
                    shared.remote.block_stride,
                    shared.gaps,
                    shared.kept,
                )
            )
            owners.append(owner)
    suspects = table.overlaid_local if destination is Side.LOCAL else table.overlaid_remote
    if suspects:
        _compare_bytes(
            [group for owner, group in zip(owners, groups, strict=True) if owner in suspects],
            table,
            destination,
        )
    return LayersPlan(groups)


class Request:
    """One request's lists, and what several groups of layers can share: checks and pairings."""

    def __init__(
        self,
        local_blocks: Sequence[Blocks],
        remote_blocks: Sequence[Blocks],
        rule: Rule,
    ) -> None:
        for side, lists in (("local_blocks", local_blocks), ("remote_blocks", remote_blocks)):
            if isinstance(lists, Blocks):
                raise _not_lists(side, lists)
            for entry in lists:
                if not isinstance(entry, Blocks):
                    raise _not_lists(side, entry)
        self._local = local_blocks
        self._remote = remote_blocks
        self._rule = rule
        self._checked: set[tuple[int, bool, int]] = set()
        self._pairings: dict[Any, Any] = {}
        self._slots: dict[tuple[int, int], tuple[Blocks, Blocks]] = {}

    def lists(self, shared: Shared) -> tuple[Blocks, Blocks]:
        """Both sides' blocks for these layers; the single slot for recurrent state."""
        ours = _list_of(self._local, shared.group, Side.LOCAL)
        theirs = _list_of(self._remote, shared.remote_group, Side.REMOTE)
        if not shared.is_state:
            return ours, theirs
        key = (shared.group, shared.remote_group)
        found = self._slots.get(key)
        if found is None:
            written = self._local if self._rule.destination is Side.LOCAL else self._remote
            found = self._slots[key] = _slots(ours, theirs, shared, any(map(len, written)))
        return found

    def check(self, shared: Shared, ours: Blocks, theirs: Blocks) -> None:
        """Range and duplicates of the ids, once for each list and number of blocks."""
        mine, others = shared.checks
        if mine not in self._checked:
            check_ids(mine[2], ours, Side.LOCAL, self._rule.destination)
            self._checked.add(mine)
        if others not in self._checked:
            check_ids(others[2], theirs, Side.REMOTE, self._rule.destination)
            self._checked.add(others)

    def whole(
        self, shared: Shared, ours: Blocks, theirs: Blocks
    ) -> tuple[Int64Array, Int64Array, Uncovered]:
        """The pairing of blocks that pair one to one.

        Raises:
            GeometryError: they do not, because their shares of the tokens differ.
        """
        if ours.share != theirs.share:
            raise GeometryError(
                f"the blocks of layer {shared.names[0]!r} hold different shares of the tokens, "
                f"{ours.share} and {theirs.share}, and do not pair whole"
            )
        self.check(shared, ours, theirs)
        found = self._pairings.get(shared.pairing)
        if found is None:
            found = pair_whole(ours, theirs, self._rule, shared.local.tokens_per_block)
            self._pairings[shared.pairing] = found
        return found

    def plan(self, shared: Shared, ours: Blocks, theirs: Blocks) -> Plan:
        """The plan of one group of layers, at offset 0 of both sides."""
        local, remote, recipe = shared.local, shared.remote, shared.recipe
        if not recipe.by_runs and ours.share == theirs.share:
            return emit_whole(recipe, local, remote, self.whole(shared, ours, theirs))
        self.check(shared, ours, theirs)
        key: Any = shared.pairing
        if not recipe.by_runs:
            recipe = recipe_of(local, remote, shared.heads, unequal_shares=True)
            key = (*key, recipe.local_steps, recipe.remote_steps)
        found = self._pairings.get(key)
        if found is None:
            found = runs_of(recipe, local, remote, (ours, theirs), self._rule)
            self._pairings[key] = found
        return emit_runs(recipe, local, remote, found)


def _not_lists(side: str, found: object) -> InvalidInputError:
    return InvalidInputError(
        f"{side} must hold one Blocks per group; found {type(found).__name__}",
        next_step="wrap the ids: [Blocks.at(start, ids) for each group]",
    )


def _list_of(lists: Sequence[Blocks], group: int, side: Side) -> Blocks:
    if group >= len(lists):
        raise InvalidInputError(
            f"a layer belongs to {side.value} group {group}, but there are {len(lists)} "
            f"{side.value} block lists",
            next_step="pass one Blocks per group",
        )
    return lists[group]


def _slots(ours: Blocks, theirs: Blocks, shared: Shared, anything: bool) -> tuple[Blocks, Blocks]:
    """The one slot on each side; placeholders around it and its position mean nothing.

    ``anything`` says whether any group's destination list holds something.
    """
    local, remote = ours.real_ids, theirs.real_ids
    if not anything:
        return Blocks.unplaced([]), Blocks.unplaced([])  # nothing to write at all: release only
    if len(local) != 1 or len(remote) != 1:
        raise InvalidInputError(
            f"recurrent state {shared.names[0]!r} takes exactly one slot on each side, not "
            f"{len(local)} local and {len(remote)} remote ones"
        )
    return Blocks.at(0, local), Blocks.at(0, remote)


def _compare_bytes(groups: Sequence[PlanGroup], table: Layers, destination: Side) -> None:
    side = 0 if destination is Side.LOCAL else 1
    plan = LayersPlan(groups)
    if not len(plan):
        return
    regions = np.array([pair[side] for pair in table.regions], np.int64)
    names = ", ".join(sorted({name for group in groups for name in group.names})[:6])
    refuse_overlap(
        regions[plan.pair],
        plan.local if side == 0 else plan.remote,
        plan.size,
        f"{destination.value} memory of layers {names}",
    )
