"""From a request's plan to the batch that moves it, without writing every layer's pieces out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.batch import Batch, Members, Pieces
from kvxfer.core.layout import LayersPlan

if TYPE_CHECKING:
    from kvxfer.core.layout import PairedPlan, Plan, PlanGroup

__all__ = ["PLAN_PIECES", "batch_of"]

PLAN_PIECES = 2**20
"""Pieces that the plan cache of one role holds: 24 bytes each, and about 150 once an engine has
taken them as lists."""
_WORTH_A_CALL = 256
"""Pieces of one group from which on it gets calls of its own. Smaller groups share calls."""


def batch_of(plan: PairedPlan) -> Batch:
    """The pieces of ``plan``, merged; factored where layers share a plan.

    Raises:
        InvalidInputError: offsets that no batch can hold.
    """
    merged = plan.merged()
    if not isinstance(merged, LayersPlan):
        return Batch(merged.pair, merged.local, merged.remote, merged.size)
    groups = [group for group in merged.groups if len(group)]
    if len(groups) == 1:
        return _repeated(groups[0])
    large = [group for group in groups if len(group) >= _WORTH_A_CALL]
    small = LayersPlan([group for group in groups if len(group) < _WORTH_A_CALL])
    batches = [_repeated(group) for group in large]
    if len(small):
        batches.append(Batch(small.pair, small.local, small.remote, small.size))
    return Batch.concat(batches)


def _repeated(group: PlanGroup) -> Batch:
    # The pieces are kept with the plan, and so with the plan cache: pushes of one layer each share
    # them.  The members are kept with the layers, for all requests.
    return Batch.repeated_pieces(group.keep(_members), group.plan.keep(_pieces))


def _members(group: PlanGroup) -> Members:
    return Members(group.pair, group.local, group.remote)


def _pieces(plan: Plan) -> Pieces:
    return Pieces(plan.local, plan.remote, plan.piece_nbytes or plan.size, bounds=plan.bounds)
