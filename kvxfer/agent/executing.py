"""The scheduler half's orders, carried out by the worker half."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.agent import orders as o
from kvxfer.agent.accept import destinations
from kvxfer.agent.config import seconds_of
from kvxfer.core.events import Failed, Role
from kvxfer.errors import InvalidInputError, KvxferError, TransferError

if TYPE_CHECKING:
    from kvxfer.agent.agent import Agent

__all__ = ["execute", "refusal"]


def execute(agent: Agent, order: o.Order) -> None:
    """Carry out one order.

    Raises:
        KvxferError: it cannot be; ``refusal`` is what to tell the scheduler half.
    """
    match order:
        case o.HoldOrder():
            agent._hold(
                order.transfer_id,
                order.epoch,
                seconds_of("lease", order.lease),
                trace=agent._trace(order.traceparent),
            )
        case o.PullOrder():
            agent.pull(
                order.offer,
                order.blocks,
                align=order.align,
                uncovered_local=order.uncovered_local,
                owner=order.owner,
                owners=order.owners,
                traceparent=order.traceparent,
            )
        case o.AcceptOrder():
            agent.accept(
                order.transfer_id,
                order.blocks,
                deadline=order.deadline,
                producers=order.producers,
            )
        case o.PushOrder():
            agent.push(
                order.transfer_id,
                order.blocks,
                to=order.to,
                layers=order.layers,
                ready=order.ready,
            )
        case o.SealOrder():
            agent.seal(order.transfer_id, order.payload)
        case o.DeclineOrder():
            agent.decline(order.offer, owner=order.owner, owners=order.owners)
        case o.RenewOrder():
            agent.renew(order.offers)
        case o.AbortOrder():
            agent.abort(order.transfer_id)
        case _:
            raise InvalidInputError(f"{order!r} is no order")


def refusal(order: o.Order, error: KvxferError) -> Failed:
    """The event for an order that was not carried out: nothing was begun, its blocks are free."""
    consumer = isinstance(order, (o.PullOrder, o.AcceptOrder))
    blocks: tuple[tuple[int, ...], ...] = ()
    if isinstance(order, (o.PullOrder, o.AcceptOrder)):
        blocks = tuple(tuple(ids.tolist()) for ids in destinations(order.blocks))
    transfer_id = (
        order.offer.transfer_id
        if isinstance(order, (o.PullOrder, o.DeclineOrder))
        else getattr(order, "transfer_id", "")
    )
    return Failed(
        transfer_id=transfer_id,
        role=Role.CONSUMER if consumer else Role.PRODUCER,
        kind=error.kind,
        error=TransferError(str(error), kind=error.kind),
        blocks=blocks,
        drained=True,
    )
