"""What the scheduler half tells the worker halves, and what they report. Values; all pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvxfer.core.events import Event
from kvxfer.core.layout import Align, Blocks
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.core.tickets import Tickets
from kvxfer.policies.timeouts import Timeouts

if TYPE_CHECKING:
    from kvxfer.agent.push import Readiness

__all__ = [
    "AbortOrder",
    "AcceptOrder",
    "DeclineOrder",
    "HoldOrder",
    "Order",
    "PullOrder",
    "PushOrder",
    "RenewOrder",
    "Report",
    "SealOrder",
    "WorkerInfo",
]


@attrs.frozen(kw_only=True)
class Order:
    """Base of all orders."""


@attrs.frozen(kw_only=True)
class HoldOrder(Order):
    """Hold a transfer for readers; see ``Agent.hold``."""

    transfer_id: str
    epoch: int
    lease: float
    traceparent: str = ""


@attrs.frozen(kw_only=True)
class PullOrder(Order):
    """Pull an offer into local blocks; see ``Agent.pull``."""

    offer: Offer
    blocks: tuple[Blocks, ...]
    align: Align | None = None
    uncovered_local: int = 0
    owner: str | None = None
    owners: int = 1
    traceparent: str = ""


@attrs.frozen(kw_only=True)
class AcceptOrder(Order):
    """Accept a push into local blocks; see ``Agent.accept``."""

    transfer_id: str
    blocks: tuple[Blocks, ...]
    deadline: float
    producers: tuple[Endpoint, ...] = ()


@attrs.frozen(kw_only=True)
class PushOrder(Order):
    """Push these blocks of some layers; see ``Agent.push``.

    ``ready`` exists in the worker only: whoever makes the order there may fill it in.
    """

    transfer_id: str
    blocks: tuple[Blocks, ...]
    to: tuple[Endpoint, ...]
    layers: tuple[str, ...] | None = None
    ready: Readiness | None = None


@attrs.frozen(kw_only=True)
class SealOrder(Order):
    """No more pushes for this transfer; see ``Agent.seal``."""

    transfer_id: str
    payload: bytes = b""


@attrs.frozen(kw_only=True)
class DeclineOrder(Order):
    """Nobody will read this offer, or ``owner``, one of several, will not."""

    offer: Offer
    owner: str | None = None
    owners: int = 1


@attrs.frozen(kw_only=True)
class RenewOrder(Order):
    """Keep these offers' holds alive."""

    offers: tuple[Offer, ...]


@attrs.frozen(kw_only=True)
class AbortOrder(Order):
    """Give a transfer up, in whatever role."""

    transfer_id: str


@attrs.frozen(kw_only=True)
class WorkerInfo:
    """How one worker can be reached: what a connector's handshake carries to the scheduler."""

    endpoint: Endpoint
    sizes: dict[str, int]
    fingerprint: str
    timeouts: Timeouts | None = None
    """How long the worker gives each phase: after that it has said how a transfer ended."""
    tickets: Tickets | None = None
    """Makes what its offers carry where keys are on. For our own scheduler only: a secret."""

    def offering(self, transfer_id: str, epoch: int) -> Endpoint:
        """The worker as the offer of one hold names it."""
        if self.tickets is None:
            return self.endpoint
        return attrs.evolve(self.endpoint, ticket=self.tickets.of(transfer_id, epoch))


@attrs.frozen(kw_only=True)
class Report:
    """What one worker has to say since its last report."""

    rank: int
    events: tuple[Event, ...]
