"""What a simulated world is made of, and how often what goes wrong. Durations are seconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import validators as v

__all__ = ["NodeFault", "PostFault", "SimConfig"]


class PostFault(enum.Enum):
    """What can happen to one engine post."""

    REFUSED = "refused"
    """``post`` raises: the send queue is full."""
    REFUSED_VALUE = "refused_value"
    """``post`` returns a failed attempt of which the engine took nothing."""
    PARTIAL = "partial"
    """Failed at once, half posted: some of its bytes land later."""
    FAILED = "failed"
    """Fails in mid-flight; the rest may land later."""
    FAILED_DRAINED = "failed_drained"
    """Fails in mid-flight with the proof that nothing follows."""
    LATE = "late"
    """Everything happens seconds later than usual."""
    LATE_REPORT = "late_report"
    """The bytes land in time, the report comes seconds later."""
    NEVER = "never"
    """The bytes land; no report ever comes."""
    DUPLICATE = "duplicate"
    """The report comes twice."""


class NodeFault(enum.Enum):
    """What can happen to a whole process."""

    KILL = "kill"
    """Gone without a word; bytes of its WRITEs may land after its death."""
    RESTART = "restart"
    """Killed, and another incarnation answers at the same address."""
    STALL = "stall"
    """Stopped for a while; its engine goes on."""
    PAUSE = "pause"
    """Stopped in the middle of a round: time passes between two looks at the clock."""
    JUMP = "jump"
    """Its clock jumps ahead, by less than the margin of a lease."""
    SLOW = "slow"
    """For some seconds it looks for news rarely."""
    CUT = "cut"
    """It can neither send nor hear anything for a while."""
    DEAF = "deaf"
    """It hears no message for a while; what it sends arrives, and its engine goes on."""
    MUTE = "mute"
    """What it sends is lost for a while; it hears, and its engine goes on."""
    CROWD = "crowd"
    """Hundreds of messages about unknown transfers fill its tables."""


def _posts() -> dict[PostFault, float]:
    return {
        PostFault.REFUSED: 0.05,
        PostFault.REFUSED_VALUE: 0.03,
        PostFault.PARTIAL: 0.01,
        PostFault.FAILED: 0.01,
        PostFault.FAILED_DRAINED: 0.02,
        PostFault.LATE: 0.01,
        PostFault.LATE_REPORT: 0.01,
        PostFault.NEVER: 0.01,
        PostFault.DUPLICATE: 0.03,
    }


def _nodes() -> dict[NodeFault, float]:
    return {
        NodeFault.KILL: 0.004,
        NodeFault.RESTART: 0.004,
        NodeFault.STALL: 0.008,
        NodeFault.PAUSE: 0.008,
        NodeFault.JUMP: 0.008,
        NodeFault.SLOW: 0.004,
        NodeFault.CUT: 0.006,
        NodeFault.DEAF: 0.006,
        NodeFault.MUTE: 0.006,
        NodeFault.CROWD: 0.004,
    }


_chance = v.and_(v.ge(0.0), v.le(1.0))


@attrs.frozen(kw_only=True)
class SimConfig:
    """How many of what, and how likely each fault is.

    Attributes:
        lease: how long a hold lasts; ``margin``: how long after it the producer keeps the blocks.
        late: the longest that anything of an engine comes late.
        lose, duplicate: per message. ``delay``: mean of its exponential travel time, so that
            messages overtake each other.
        posts: chance of each fault per engine post.
        nodes: chance of each fault per request, at a random moment of its life, on either side.
        writes: share of requests that are WRITE.
        lose_offer: the router loses an offer or a destination: one side waits in vain.
        retry_elsewhere: a READ that failed is tried again by another consumer.
    """

    producers: int = attrs.field(default=2, validator=v.ge(1))
    consumers: int = attrs.field(default=3, validator=v.ge(1))
    transfers: int = attrs.field(default=200, validator=v.ge(1))
    rate: float = attrs.field(default=20.0, validator=v.gt(0))
    """New requests per second."""
    lease: float = attrs.field(default=3.0, validator=v.gt(0))
    margin: float = attrs.field(default=0.5, validator=v.gt(0))
    late: float = attrs.field(default=8.0, validator=v.gt(0.3))
    lose: float = attrs.field(default=0.02, validator=_chance)
    duplicate: float = attrs.field(default=0.02, validator=_chance)
    delay: float = attrs.field(default=0.02, validator=v.gt(0))
    posts: Mapping[PostFault, float] = attrs.field(factory=_posts)
    nodes: Mapping[NodeFault, float] = attrs.field(factory=_nodes)
    writes: float = attrs.field(default=0.4, validator=_chance)
    abort: float = attrs.field(default=0.05, validator=_chance)
    abort_producer: float = attrs.field(default=0.03, validator=_chance)
    decline: float = attrs.field(default=0.04, validator=_chance)
    lose_offer: float = attrs.field(default=0.02, validator=_chance)
    renew: float = attrs.field(default=0.1, validator=_chance)
    """A consumer renews an offer some time before it pulls."""
    layerwise: float = attrs.field(default=0.15, validator=_chance)
    """A READ asks for its layers one after the other; sometimes the last ones never come."""
    retry_elsewhere: float = attrs.field(default=0.3, validator=_chance)
    fence_impossible: float = attrs.field(default=0.1, validator=_chance)
    aim: float = attrs.field(default=0.1, validator=_chance)
    """Per request: a fault of a process waits for the transfer to be in one certain phase."""
    max_violations: int = attrs.field(default=1, validator=v.ge(1))
    """The run ends with that many."""

    def harsher(self, factor: float) -> SimConfig:
        """The same with every fault that many times as likely, within reason."""

        def more(chance: float, most: float) -> float:
            return max(chance, min(most, chance * factor))

        return attrs.evolve(
            self,
            posts={fault: more(chance, 0.1) for fault, chance in self.posts.items()},
            nodes={fault: more(chance, 0.5) for fault, chance in self.nodes.items()},
            fence_impossible=more(self.fence_impossible, 0.5),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = attrs.asdict(self)
        values["posts"] = {k.value: p for k, p in self.posts.items()}
        values["nodes"] = {k.value: p for k, p in self.nodes.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SimConfig:
        """Inverse of ``to_dict``."""
        given = dict(values)
        given["posts"] = {PostFault(k): p for k, p in given["posts"].items()}
        given["nodes"] = {NodeFault(k): p for k, p in given["nodes"].items()}
        return cls(**given)
