"""What ``Agent.poll`` returns. Values only; all of them pickle.

Every transfer ends in exactly one of Received, Sent, Declined, Failed or Expired per side.
``Drained`` and ``Quarantined`` come after ``Failed(drained=False)``.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from kvxfer.errors import ErrorKind, TransferError

__all__ = [
    "BackendChanged",
    "Declined",
    "Drained",
    "Event",
    "Expired",
    "Failed",
    "Gone",
    "Observation",
    "PeerDown",
    "PeerUp",
    "Quarantined",
    "Received",
    "Role",
    "Sent",
]


class Role(enum.Enum):
    """Which side of a transfer an event speaks for."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


BlockIds = tuple[tuple[int, ...], ...]
"""Block ids per group."""


@attrs.frozen(kw_only=True)
class Observation:
    """Base of everything an observer is told: the events here, and ``kvxfer.core.observations``."""


@attrs.frozen(kw_only=True)
class Event(Observation):
    """Base of all events. ``transfer_id`` is empty for events about peers.

    ``tag`` is what the user gave to ``hold``, ``pull``, ``push`` or ``accept``, untouched; it must
    pickle if events cross processes.  ``owners`` are the requests that share the transfer, where
    they were named: the event is for all of them.
    """

    transfer_id: str = ""
    tag: Any = None
    owners: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Received(Event):
    """Consumer: all bytes are there and visible. ``payload`` is what the producer sealed."""

    nbytes: int
    payload: bytes = b""


@attrs.frozen(kw_only=True)
class Sent(Event):
    """Producer: every rank got the bytes that it needs; the blocks are yours again.

    READ: all readers that had to acknowledge did, and none of them had failed. WRITE: everything
    landed, and every consumer rank said that it received it.
    """

    nbytes: int = 0


@attrs.frozen(kw_only=True)
class Declined(Event):
    """Producer: the consumer will not read; the blocks are yours again."""


@attrs.frozen(kw_only=True)
class Failed(Event):
    """It failed. Destination blocks may be reused only when ``drained``, now or by ``Drained``.

    Of a hold: every reader is finished, one of them without the bytes, and none has tried again
    within ``AgentConfig.retry_window``. ``kind`` is what the reader said, ``drained`` is true, and
    the blocks are yours again.

    ``fresh_blocks``: nothing but the destination blocks stands in the way.  Something that the
    backend which failed has sent may still land in them, so the backend in use now must not write
    there.  Begun again at once into other destination blocks it goes over that one: the consumer
    pulls the same offer again, or accepts another transfer, to which the producer pushes the same
    source blocks.  On a WRITE both sides are told.
    """

    role: Role
    kind: ErrorKind
    error: TransferError
    blocks: BlockIds = ()
    drained: bool = True
    fresh_blocks: bool = False


@attrs.frozen(kw_only=True)
class Drained(Event):
    """After ``Failed(drained=False)``: the proof came; ``blocks`` are yours again."""

    role: Role
    blocks: BlockIds = ()
    drained_by: str = ""


@attrs.frozen(kw_only=True)
class Expired(Event):
    """Producer: the lease and its margin ended before all ACKs came; the blocks are yours again."""

    missing: tuple[int, ...] = ()
    """Ranks that had not got the bytes, where they are known."""


@attrs.frozen(kw_only=True)
class Gone(Event):
    """Consumer: the producer told us that its blocks for this transfer are no longer held."""

    kind: ErrorKind
    message: str = ""


@attrs.frozen(kw_only=True)
class Quarantined(Event):
    """No proof by the drain deadline: ``blocks`` stay out of use until a fence or ``reclaim``."""

    role: Role
    blocks: BlockIds = ()
    reason: str = ""


@attrs.frozen(kw_only=True)
class PeerUp(Event):
    """A peer's hello was accepted."""

    peer: str
    address: str = ""


@attrs.frozen(kw_only=True)
class PeerDown(Event):
    """A peer closed, died, or was replaced by a newer incarnation."""

    peer: str
    reason: str = ""


@attrs.frozen(kw_only=True)
class BackendChanged(Event):
    """What we move to and from a peer goes over another backend from now on.

    ``down``: over a less preferred one, because ``before`` failed as ``reason`` says.  What was
    under way goes on over ``backend`` as soon as nothing of ``before`` can touch its blocks.
    """

    peer: str
    before: str
    backend: str
    down: bool
    reason: str = ""
