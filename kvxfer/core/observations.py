"""What observers are told besides the events: how transfers come along, what goes wrong below.

An observer is a callable that takes one ``Observation``: each event that ``Agent.poll`` returns,
and each of the values below.  ``Agent(observers=...)`` and ``Agent.add_observer`` take them.

- It is called on the agent's progress thread as things happen; with manual progress on the thread
  that drives the agent; at the very end on the thread that calls ``close``.  Never two calls at a
  time, unless ``close`` gave up on a progress thread that is stuck in an engine.
- It must not wait: while it runs, the agent does nothing else.
- It may raise: that is counted (``observers.failed``), logged, and changes nothing.
- Where there is none, nothing is made for it.

An observer should ignore what it does not know: later releases tell of more.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import attrs

from kvxfer.core.events import Observation, Role
from kvxfer.core.verdict import Action, Op
from kvxfer.errors import ErrorKind

__all__ = [
    "BreakerClosed",
    "BreakerOpened",
    "ConnectFailed",
    "KeeperDied",
    "KeeperStarted",
    "Observation",
    "Observer",
    "Outcome",
    "PeerSuspected",
    "PostFailed",
    "QuarantineLeft",
    "TransferBegan",
    "TransferEnded",
    "TransferPosted",
    "Verb",
]

Observer = Callable[[Observation], object]
"""What it returns is ignored."""


class Verb(enum.Enum):
    """What the user called. READ is hold and pull, WRITE is push and accept."""

    HOLD = "hold"
    PULL = "pull"
    PUSH = "push"
    ACCEPT = "accept"

    @property
    def role(self) -> Role:
        return Role.PRODUCER if self in (Verb.HOLD, Verb.PUSH) else Role.CONSUMER


class Outcome(enum.Enum):
    """How a transfer ended on this side."""

    DONE = "done"
    FAILED = "failed"
    DECLINED = "declined"
    EXPIRED = "expired"


@attrs.frozen(kw_only=True)
class TransferBegan(Observation):
    """The agent has taken a transfer up.

    Attributes:
        waited: seconds since the user's call.
        traceparent: the trace it belongs to (``kvxfer.core.trace``); empty if none is known.
        offered: the trace context of the offer that is pulled, where it is another one.
    """

    verb: Verb
    transfer_id: str
    waited: float
    traceparent: str = ""
    offered: str = ""


@attrs.frozen(kw_only=True)
class TransferPosted(Observation):
    """Its first engine call is being made. ``queued``: seconds since the user's call."""

    verb: Verb
    transfer_id: str
    queued: float


@attrs.frozen(kw_only=True)
class TransferEnded(Observation):
    """It is terminal; follows the event that says so. Once per transfer.

    A transfer that was refused before it began ends without a ``TransferBegan``.

    Attributes:
        kind: why it failed; None if it did not fail.
        nbytes: payload bytes; 0 unless it is a pull, push or accept that is DONE.
        seconds: since the user's call.
        queued: seconds from the call to the first post; None if nothing was posted from this side.
        drained: no engine can touch the blocks any more.
        message: of the error; empty if there is none.
    """

    verb: Verb
    transfer_id: str
    outcome: Outcome
    kind: ErrorKind | None = None
    nbytes: int = 0
    seconds: float = 0.0
    queued: float | None = None
    drained: bool = True
    message: str = ""


@attrs.frozen(kw_only=True)
class PostFailed(Observation):
    """One engine call was refused (nothing was posted) or failed (something may have been).

    Attributes:
        transfer_id: empty where the owner has none.
        action: what is done about it.
        again: whether it is posted again; otherwise its transfer fails.
        delay: seconds until then.
        rule: the rule that classified it.
    """

    transfer_id: str
    backend: str
    op: Op
    kind: ErrorKind
    refused: bool
    action: Action
    again: bool
    delay: float
    rule: str
    message: str


@attrs.frozen(kw_only=True)
class ConnectFailed(Observation):
    """A connect to a peer, or the preparation of a path to it, failed.

    ``again``: it is tried again in ``delay`` seconds; otherwise the peer is given up.
    """

    peer: str
    kind: ErrorKind
    again: bool
    delay: float
    message: str


@attrs.frozen(kw_only=True)
class PeerSuspected(Observation):
    """The connection dropped, or its keeper fell silent. ``PeerDown`` follows unless it is back."""

    peer: str
    reason: str


@attrs.frozen(kw_only=True)
class BreakerOpened(Observation):
    """A peer failed too often: nothing is tried with it for a while.

    ``peer``: its incarnation, or its address while that is not known.
    """

    peer: str
    kind: ErrorKind
    reason: str


@attrs.frozen(kw_only=True)
class BreakerClosed(Observation):
    """A probe got through: the peer is used again."""

    peer: str


@attrs.frozen(kw_only=True)
class QuarantineLeft(Observation):
    """Blocks came out of quarantine. ``Quarantined`` told of their way in.

    Attributes:
        by: ``proof``, ``fence`` or ``reclaim``.
        seconds: for which they were in it.
    """

    transfer_id: str
    role: Role
    by: str
    seconds: float


@attrs.frozen(kw_only=True)
class KeeperStarted(Observation):
    """The keeper answers: leases no longer depend on this process's GIL."""


@attrs.frozen(kw_only=True)
class KeeperDied(Observation):
    """The keeper ended; another one is being started."""

    reason: str
