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
    "DRAINING",
    "MESSAGES",
    "PHASES_OF",
    "POSTS",
    "READ_AIMS",
    "TRANSFERS",
    "WRITE_AIMS",
    "is_again",
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

_RARE = {"pull asking": 2, "pull granted": 6, "pull moving": 4, "push moving": 2, "push sealing": 4}
"""How much more often than at others a fault is aimed at these: they are short."""
READ_AIMS, WRITE_AIMS = (
    tuple(
        phase
        for phase in TRANSFERS
        if phase.startswith(sides) and not phase.endswith("draining")
        for _ in range(_RARE.get(phase, 1))
    )
    for sides in (("hold", "pull"), ("accept", "push"))
)
"""Phases that a fault can be aimed at from the beginning, by kind of request."""
DRAINING = {
    (Role.CONSUMER, False): "pull draining",
    (Role.CONSUMER, True): "accept draining",
    (Role.PRODUCER, True): "push draining",
}
"""By side, and whether it is a WRITE."""
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
    return f"{attempt.op.value} {'again' if is_again(attempt) else 'first'}"


def is_again(attempt: Attempt) -> bool:
    """Whether an earlier post of the same pieces was refused or failed."""
    return getattr(attempt.tag, "_run", None) is not None


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
