"""How an agent is set up. Durations are seconds."""

from __future__ import annotations

import enum
import math
from typing import Any

import attrs
from attrs import validators as v

from kvxfer.errors import ConfigError

__all__ = ["AgentConfig", "Limits", "Progress", "seconds_of"]


class Progress(enum.Enum):
    """Who drives the agent."""

    THREAD = "thread"
    """A thread of ours; ``poll`` only collects."""
    MANUAL = "manual"
    """Everything happens inside ``poll``: tests and simulation."""


def seconds_of(name: str, value: object) -> float:
    """A positive, finite number of seconds.

    Raises:
        ConfigError: it is none; names the value.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ConfigError(f"{name} must be a positive, finite number of seconds, not {value!r}")
    return float(value)


def _duration(_: Any, attribute: attrs.Attribute[float], value: object) -> None:
    seconds_of(attribute.name, value)


def _count(_: Any, attribute: attrs.Attribute[int], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{attribute.name} must be an integer of at least 1, not {value!r}")


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds of the agent's tables. What exceeds one is refused or evicted, and counted."""

    transfers: int = attrs.field(default=65536, validator=_count)
    """Transfers of one role that have not ended."""
    holds: int = attrs.field(default=262144, validator=_count)
    peers: int = attrs.field(default=4096, validator=_count)
    early: int = attrs.field(default=4096, validator=_count)
    """Transfer ids with messages that came before our own orders."""
    early_ttl: float = attrs.field(default=30.0, validator=_duration)
    queued_pushes: int = attrs.field(default=65536, validator=_count)
    """Pushes that wait for a grant or for their data."""
    quarantined: int = attrs.field(default=64, validator=_count)
    """Transfers in quarantine from which on the agent is not ready and refuses new ones."""
    events: int = attrs.field(default=1_000_000, validator=_count)
    """Events nobody collected; beyond it ``health`` is not ready. None is dropped."""


@attrs.frozen(kw_only=True)
class AgentConfig:
    """Everything but the strategies, which are arguments of ``Agent`` themselves.

    Attributes:
        name: for people: logs and ``PeerUp``. Need not be unique.
        fingerprint: of model, dtype and KV quantisation; both sides must agree.
        lease: how long a hold lasts unless ``hold`` says otherwise. 30 s is what engines use today.
        lease_margin: how long after lease end the producer still keeps the blocks.
        min_lease: a reader does not post when less than this is left of its grant.
        abort_lease: what is left of a hold's lease when it is aborted.
        pump_interval: the progress thread looks at polled engines this often while active.
        idle_interval: and this rarely while nothing is in flight.
    """

    name: str = attrs.field(default="kvxfer", validator=v.instance_of(str))
    fingerprint: str = attrs.field(default="", validator=v.and_(v.instance_of(str), v.max_len(512)))
    progress: Progress = attrs.field(default=Progress.THREAD, converter=Progress)
    lease: float = attrs.field(default=30.0, validator=_duration)
    lease_margin: float = attrs.field(default=2.0, validator=_duration)
    min_lease: float = attrs.field(default=0.05, validator=_duration)
    abort_lease: float = attrs.field(default=5.0, validator=_duration)
    grant_interval: float = attrs.field(default=0.2, validator=_duration)
    """How often an unanswered request for a grant is repeated."""
    pump_interval: float = attrs.field(default=0.001, validator=_duration)
    idle_interval: float = attrs.field(default=0.1, validator=_duration)
    limits: Limits = attrs.field(factory=Limits, validator=v.instance_of(Limits))
