"""In which phase of its life a transfer is, so that every fault can be shown to strike in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core import wire
from kvxfer.core.attempt import Attempt
from kvxfer.core.events import Role
from kvxfer.errors import WireError

if TYPE_CHECKING:
    from kvxfer.agent import Agent

__all__ = [
    "MESSAGES",
    "PHASES_OF",
    "POSTS",
    "READ_PHASES",
    "TRANSFERS",
    "WRITE_PHASES",
    "message_phase",
    "post_phase",
    "transfer_phase",
]

TRANSFERS = (
    "hold offered",
    "hold granted",
    "pull asking",
    "pull granted",
    "pull moving",
    "pull draining",
    "accept waiting",
    "accept granted",
    "accept draining",
    "push waiting",
    "push moving",
    "push sealing",
    "push draining",
)
"""Phases of a transfer on one side."""

READ_PHASES = tuple(p for p in TRANSFERS if p.startswith(("hold", "pull")))
WRITE_PHASES = tuple(p for p in TRANSFERS if p.startswith(("accept", "push")))
PHASES_OF = {
    Role.PRODUCER: frozenset(p for p in TRANSFERS if p.startswith(("hold", "push"))),
    Role.CONSUMER: frozenset(p for p in TRANSFERS if p.startswith(("pull", "accept"))),
}
"""By side."""

POSTS = ("read first", "read again", "write first", "write again")
"""Phases of a post."""

MESSAGES = (
    "hello",
    "open",
    "grant",
    "release",
    "decline",
    "gone",
    "ask",
    "accept",
    "seal",
    "push_failed",
    "cancel",
    "confirm",
)
"""Phases of a message: its type."""


def message_phase(data: bytes) -> str:
    """The type of a frame of ours."""
    try:
        return str(type(wire.decode(data).body).__struct_config__.tag)
    except WireError:
        return "malformed"


def post_phase(attempt: Attempt) -> str:
    """Whether a post is the first of its pieces."""
    again = getattr(attempt.tag, "_run", None) is not None
    return f"{attempt.op.value} {'again' if again else 'first'}"


def transfer_phase(agent: Agent, role: Role, transfer_id: str) -> str:
    """Where that transfer is on that side; empty when it is under way no more, or not yet."""
    engine = agent._engine
    if role is Role.PRODUCER:
        hold = engine.producer.leases.get(transfer_id)
        if hold is not None:
            return "hold granted" if hold.readers else "hold offered"
        push = engine.producer.pushes.get(transfer_id)
        if push is not None:
            if push.over:
                return "push draining"
            if any(part.undrained for target in push._targets for part in target.parts):
                return "push moving"
            sealing = any(target.sealing for target in push._targets)
            return "push sealing" if sealing else "push waiting"
        return "push draining" if transfer_id in engine.producer.drainings else ""
    pull = engine.consumer.pulls.get(transfer_id)
    if pull is not None:
        if pull.draining is not None:
            return "pull draining"
        if any(part.undrained for part in pull._parts()):
            return "pull moving"
        granted = any(s.granted_until > float("-inf") for s in pull._sources)
        return "pull granted" if granted else "pull asking"
    accept = engine.consumer.accepts.get(transfer_id)
    if accept is not None:
        if accept.draining is not None:
            return "accept draining"
        return "accept granted" if accept._writers else "accept waiting"
    return ""
