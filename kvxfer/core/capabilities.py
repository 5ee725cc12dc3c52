"""What an engine can do and what its DONE means."""

from __future__ import annotations

import enum

import attrs
from attrs import validators as v

from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import Op

__all__ = [
    "Cancel",
    "Capabilities",
    "DataPathAuth",
    "FenceScope",
    "Signal",
    "Visibility",
]


class Visibility(enum.IntEnum):
    """What DONE says about the destination, in rising order."""

    ACCEPTED = 1
    """The engine took the bytes; they may still be under way."""
    ACKED = 2
    """The other side's engine acknowledged them."""
    VISIBLE = 3
    """The destination's owner can read them."""


class Signal(enum.Enum):
    """Whether the engine can notify the peer by itself."""

    NONE = "none"
    KEYED = "keyed"
    PAYLOAD = "payload"


class Cancel(enum.Enum):
    NONE = "none"
    BEST_EFFORT = "best_effort"


class FenceScope(enum.Enum):
    """What has to go so that nothing lands any more: the smallest thing that proves it."""

    PEER = "peer"
    REGION = "region"
    ENGINE = "engine"
    NONE = "none"


class DataPathAuth(enum.Enum):
    """Whether the engine's own ports admit strangers (NONE) or only holders of a secret."""

    NONE = "none"
    SECRET = "secret"  # noqa: S105 - a word of the vocabulary, not a password


@attrs.frozen(kw_only=True)
class Capabilities:
    """Constant facts about an engine. Sizes are bytes."""

    ops: frozenset[tuple[Op, MemoryKind, MemoryKind]]
    """(op, local kind, remote kind) that work."""
    visibility: Visibility
    """What DONE says of a WRITE, and of a READ too unless ``read_visibility`` says more."""
    read_visibility: Visibility | None = None
    """Where a READ promises more: its destination is our own memory."""
    signal: Signal = Signal.NONE
    cancel: Cancel = Cancel.NONE
    fence: FenceScope = FenceScope.NONE
    max_pieces: int = attrs.field(default=2**31 - 1, validator=v.ge(1))
    """Most pieces one post takes."""
    max_nbytes: int = attrs.field(default=2**62, validator=v.ge(1))
    """Most bytes one post takes."""
    credits: int | None = attrs.field(default=None, validator=v.optional(v.ge(1)))
    """Pieces in flight per queue (``Path.queues``; by default one per connection) before the engine
    refuses; None where it does not."""
    atomic_refusal: bool = True
    """A refused post has posted nothing."""
    may_block_in_post: bool = False
    """``post`` may wait inside the engine: the agent posts from a thread of its own."""
    data_path_auth: DataPathAuth = DataPathAuth.NONE
    ip_versions: frozenset[int] = frozenset({4, 6})
    """IP versions the engine can reach peers over; empty where it uses no network."""
    process_local: bool = False
    """Only peers inside the same process can be reached."""

    def visible(self, op: Op) -> Visibility:
        """What DONE says of ``op``."""
        if op is Op.READ and self.read_visibility is not None:
            return self.read_visibility
        return self.visibility

    def supports(self, op: Op, local: MemoryKind, remote: MemoryKind) -> bool:
        return (op, local, remote) in self.ops
