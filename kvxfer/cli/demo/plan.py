"""What a demo run does: its settings, its requests and its faults, all from one seed."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import validators as v

from kvxfer.cli.demo.geometry import GEOMETRIES, Scaled
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ConfigError
from kvxfer.testing.faults import Fault, FaultKind

__all__ = ["FAULT_LEVELS", "Action", "DemoPlan", "FaultLevel", "Request", "Sabotage"]


class Sabotage(enum.Enum):
    """One promise broken on purpose."""

    EARLY_FREE = "early-free"
    """The producer reuses blocks before they were released."""
    FLIP_BYTE = "flip-byte"
    """One byte of a destination is changed after it was received."""
    DROP_RELEASE = "drop-release"
    """Releases never reach the producer."""


class Action(enum.Enum):
    """What decode does with a request."""

    PULL = "pull"
    ABORT = "abort"
    """Pull, and abort at once."""
    DECLINE = "decline"
    FULL_HIT = "full hit"
    """Decode has the whole prefix: it only releases."""


@attrs.frozen(kw_only=True)
class Request:
    """One request. ``early``: decode hears of it before the producer's worker is told to hold."""

    index: int
    blocks: int
    prefix: int
    action: Action
    early: bool

    @property
    def transfer_id(self) -> str:
        return f"req-{self.index}"


@attrs.frozen(kw_only=True)
class FaultLevel:
    """Probabilities: of engine faults per post, of control messages per message."""

    posts: Mapping[FaultKind, float] = attrs.field(factory=dict)
    lose: float = 0.0
    duplicate: float = 0.0
    odd_requests: float = 0.0
    """Of aborts, of declines, of full hits and of early ACKs, each."""


_SQ_FULL = "SQ full (batch): ep=0 depth=4351 requested=128 max=4351"
_SAID = {
    FaultKind.REFUSE: (13, _SQ_FULL),
    FaultKind.REFUSE_VALUE: (13, _SQ_FULL),
    FaultKind.PARTIAL: (
        13,
        "ibv_post_send failed with 12: Cannot allocate memory (posted 3/6 WRs)",
    ),
    FaultKind.FAIL_DRAINED: (13, "Work Request Flushed Error"),
}
"""What mori says in these cases, so that the real rules and retries are at work."""

_POSTS = (
    FaultKind.REFUSE,
    FaultKind.REFUSE_VALUE,
    FaultKind.PARTIAL,
    FaultKind.FAIL_DRAINED,
    FaultKind.LATE,
    FaultKind.LATE_REPORT,
)

FAULT_LEVELS = {
    "none": FaultLevel(),
    "default": FaultLevel(
        posts=dict.fromkeys(_POSTS, 0.04), lose=0.03, duplicate=0.03, odd_requests=0.05
    ),
    "heavy": FaultLevel(
        posts=dict.fromkeys(_POSTS, 0.08), lose=0.15, duplicate=0.15, odd_requests=0.08
    ),
}


@attrs.frozen(kw_only=True)
class DemoPlan:
    """Settings of one run. Sizes are bytes, durations seconds."""

    backend: str = "shm"
    requests: int = attrs.field(default=400, validator=v.ge(1))
    model: str = attrs.field(default="llama-3.1-8b", validator=v.in_(GEOMETRIES))
    faults: str = attrs.field(default="default", validator=v.in_(FAULT_LEVELS))
    seed: int = 1
    sabotage: Sabotage | None = None
    memory_nbytes: int = 192 << 20
    """Per process."""
    max_blocks: int = 12
    """Longest request."""
    in_flight: int = 24
    """Requests under way at once."""
    lease: float = 10.0
    failover: str | None = None
    """The backend to go on over when prefill's engine dies, half-way through the requests."""
    metrics_port: int | None = attrs.field(
        default=None, validator=v.optional(v.and_(v.ge(0), v.le(65534)))
    )
    """Of the prefill process, decode has the next one; 0: any."""

    def __attrs_post_init__(self) -> None:
        if self.failover == self.backend:
            raise ConfigError(
                f"the demo cannot fail over from {self.backend} to itself",
                next_step="name another --backend, such as nixl",
            )

    def status_port(self, role: str) -> int | None:
        """Where a process serves its metrics and health."""
        if not self.metrics_port:
            return self.metrics_port
        return self.metrics_port + (role == "decode")

    @property
    def level(self) -> FaultLevel:
        return FAULT_LEVELS[self.faults]

    @property
    def scaled(self) -> Scaled:
        return GEOMETRIES[self.model].scaled(self.memory_nbytes)

    def faults_per_post(self) -> dict[Fault, float]:
        """For ``FaultPlan.chances``."""
        chances: dict[Fault, float] = {}
        for kind, chance in self.level.posts.items():
            code, message = _SAID.get(kind, (None, ""))
            error = EngineError(backend="moriio", code=code, message=message) if message else None
            chances[Fault(kind=kind, error=error, after=0.03)] = chance
        return chances

    def make_requests(self) -> list[Request]:
        """All requests of the run."""
        rng = random.Random(self.seed)  # noqa: S311
        odd = self.level.odd_requests
        requests = []
        for index in range(self.requests):
            blocks = rng.randint(1, self.max_blocks)
            prefix = rng.randint(0, blocks - 1) if rng.random() < 0.3 else 0
            draw = rng.random()
            early = False
            action = Action.PULL
            if draw < odd:
                action = Action.ABORT
            elif draw < 2 * odd:
                action = Action.DECLINE
            elif draw < 3 * odd:
                action, prefix = Action.FULL_HIT, blocks
            elif draw < 4 * odd:
                early = True
                action = rng.choice((Action.DECLINE, Action.FULL_HIT))
                prefix = blocks if action is Action.FULL_HIT else 0
            requests.append(
                Request(index=index, blocks=blocks, prefix=prefix, action=action, early=early)
            )
        return requests

    def to_dict(self) -> dict[str, Any]:
        """For the child processes."""
        data = attrs.asdict(self)
        data["sabotage"] = None if self.sabotage is None else self.sabotage.value
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DemoPlan:
        sabotage = data.pop("sabotage")
        return cls(sabotage=None if sabotage is None else Sabotage(sabotage), **data)
