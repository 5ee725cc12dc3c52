"""How an agent is set up. Durations are seconds."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.core.checks import at_least, seconds
from kvxfer.core.wire import WIRE_MAX, WIRE_MIN
from kvxfer.errors import ConfigError
from kvxfer.keeper.config import KeeperConfig
from kvxfer.policies.admission import AdmissionPolicy, FixedAdmission
from kvxfer.policies.breaker import BreakerPolicy
from kvxfer.policies.failover import Failover

if TYPE_CHECKING:
    from kvxfer.policies.retry import RetryPolicy

__all__ = ["AgentConfig", "Limits", "Progress", "seconds_of"]


class Progress(enum.Enum):
    """Who drives the agent."""

    THREAD = "thread"
    """A thread of ours; ``poll`` only collects."""
    MANUAL = "manual"
    """Everything happens inside ``poll``: tests and simulation."""


_MOST_SECONDS = sys.float_info.max


def seconds_of(name: str, value: object) -> float:
    """A positive, finite number of seconds.

    Raises:
        ConfigError: it is none; names the value.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= _MOST_SECONDS
    ):
        raise ConfigError(f"{name} must be a positive, finite number of seconds, not {value!r:.60}")
    return float(value)


def _period(_: Any, attribute: attrs.Attribute[float], value: object) -> None:
    if value != 0 or isinstance(value, bool):
        seconds_of(attribute.name, value)


def _versions(_: Any, attribute: attrs.Attribute[tuple[int, int]], value: object) -> None:
    if (
        not isinstance(value, tuple)
        or [type(v) for v in value] != [int, int]
        or not WIRE_MIN <= value[0] <= value[1] <= WIRE_MAX
    ):
        raise ConfigError(
            f"{attribute.name} must be (oldest, newest) within ({WIRE_MIN}, {WIRE_MAX}), "
            f"not {value!r}"
        )


def _admission(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, AdmissionPolicy):
        raise ConfigError(f"{attribute.name} must be an AdmissionPolicy, not {value!r}")


def _breaker(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, BreakerPolicy):
        raise ConfigError(f"{attribute.name} must be a BreakerPolicy or None, not {value!r}")


def _retry_policy(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    from kvxfer.policies.retry import RetryPolicy  # loads tenacity, as whoever made the value did

    if not isinstance(value, RetryPolicy):
        raise ConfigError(f"{attribute.name} must be a RetryPolicy, not {value!r}")


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds of the agent's tables. What exceeds one is refused or evicted, and counted."""

    transfers: int = attrs.field(default=65536, validator=at_least(1))
    """Transfers of one role that have not ended."""
    holds: int = attrs.field(default=262144, validator=at_least(1))
    """Transfers for which a producer keeps blocks at once."""
    peers: int = attrs.field(default=4096, validator=at_least(1))
    """Peers that are known at once; one more that dials us is refused."""
    early: int = attrs.field(default=4096, validator=at_least(1))
    """Transfer ids with messages that came before our own orders."""
    early_ttl: float = attrs.field(default=30.0, validator=seconds)
    """For how many seconds such a message waits for the orders."""
    remembered_ttl: float = attrs.field(default=300.0, validator=seconds)
    """For how many seconds what has ended is remembered, so that a late word about it is not taken
    for new. Ten times the default lease: nothing is re-sent for so long."""
    queued_pushes: int = attrs.field(default=65536, validator=at_least(1))
    """Pushes that wait for a grant or for their data."""
    quarantined: int = attrs.field(default=64, validator=at_least(1))
    """Transfers in quarantine from which on the agent is not ready and refuses new ones."""
    stuck_threads: int = attrs.field(default=2, validator=at_least(1))
    """Engine calls towards one peer that do not return, from which on nothing more is posted to
    it."""
    events: int = attrs.field(default=1_000_000, validator=at_least(1))
    """Events nobody collected; beyond it ``health`` is not ready. None is dropped."""


@attrs.frozen(kw_only=True)
class AgentConfig:
    """Everything but the strategies, which are arguments of ``Agent`` themselves.

    Attributes:
        name: for people: logs and ``PeerUp``. Need not be unique.
        fingerprint: of model, dtype and KV quantisation; both sides must agree.
        progress: who drives the agent: a thread of ours, or ``poll``.
        lease: how long a hold lasts unless ``hold`` says otherwise. 30 s is what engines use today.
        lease_margin: how long after lease end the producer still keeps the blocks.
        min_lease: a reader does not post when less than this is left of its grant.
        abort_lease: what is left of a hold's lease when it is aborted.
        retry_window: how long a hold is kept for another try after all its readers have finished
            and one of them without the bytes; never beyond its lease. 0: it ends at once.
        keeper: the process that keeps leases and liveness while the GIL is held; None for none.
            Without effect where the control channel is not the real one.
        pump_interval: the progress thread looks at polled engines this often while active.
        idle_interval: and this rarely while nothing is in flight.
        admission: credits per send queue, and how they are found.
        breaker: when a peer that keeps failing is left alone for a while; None: never.
        failover: when a peer is moved to the next of its backends, and when back; None: a transfer
            fails with the backend that it is on. Needs an agent of several backends.
        retry: used where ``Agent`` got no ``retry``; takes tenacity objects.
        limits: bounds of the agent's tables.
        data_network_trusted: nobody but our own workers reaches the network over which the engines
            move bytes. With keys on, a backend whose own ports admit strangers needs this said.
        wire_versions: the oldest and newest wire version to speak. Narrow it to roll an upgrade out
            step by step, or to test against an older release.
    """

    name: str = attrs.field(default="kvxfer", validator=v.instance_of(str))
    fingerprint: str = attrs.field(default="", validator=v.and_(v.instance_of(str), v.max_len(512)))
    progress: Progress = attrs.field(default=Progress.THREAD, converter=Progress)
    lease: float = attrs.field(default=30.0, validator=seconds)
    lease_margin: float = attrs.field(default=2.0, validator=seconds)
    min_lease: float = attrs.field(default=0.05, validator=seconds)
    abort_lease: float = attrs.field(default=5.0, validator=seconds)
    retry_window: float = attrs.field(default=5.0, validator=_period)
    grant_interval: float = attrs.field(default=0.2, validator=seconds)
    """How often an unanswered request for a grant is repeated."""
    keeper: KeeperConfig | None = attrs.field(
        factory=KeeperConfig, validator=v.optional(v.instance_of(KeeperConfig))
    )
    pump_interval: float = attrs.field(default=0.001, validator=seconds)
    idle_interval: float = attrs.field(default=0.1, validator=seconds)
    data_network_trusted: bool = attrs.field(default=False, validator=v.instance_of(bool))
    wire_versions: tuple[int, int] = attrs.field(default=(WIRE_MIN, WIRE_MAX), validator=_versions)
    admission: AdmissionPolicy = attrs.field(factory=FixedAdmission, validator=_admission)
    breaker: BreakerPolicy | None = attrs.field(factory=BreakerPolicy, validator=_breaker)
    failover: Failover | None = attrs.field(
        default=None, validator=v.optional(v.instance_of(Failover))
    )
    retry: RetryPolicy | None = attrs.field(default=None, validator=_retry_policy)
    limits: Limits = attrs.field(factory=Limits, validator=v.instance_of(Limits))
