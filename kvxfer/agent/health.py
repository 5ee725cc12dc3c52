"""Health and snapshots: what a person or a probe sees of an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvxfer.core.inflight import QuarantineEntry
from kvxfer.policies.breaker import BreakerState
from kvxfer.policies.credit_queue import QueueState
from kvxfer.policies.failover import BackendState

if TYPE_CHECKING:
    from kvxfer.agent.engine import Engine
    from kvxfer.agent.pump import Pump

__all__ = ["Health", "Snapshot", "health_of", "snapshot_of"]

_STALLED_AFTER = 5.0
"""Seconds without a round after which the progress thread counts as stalled."""


@attrs.frozen(kw_only=True)
class Health:
    """``ready``: new requests make sense here. ``reasons`` says why not.

    ``warnings`` says what concerns some peers only: they do not make the agent unready.
    """

    ready: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Snapshot:
    """Sizes of all tables; every one but the quarantine is 0 when nothing is under way."""

    pulls: int
    accepts: int
    holds: int
    pushes: int
    pinned_blocks: int
    in_flight_pieces: int
    unconfirmed: int
    draining: int
    early: int
    peers: tuple[str, ...]
    quarantine: tuple[QuarantineEntry, ...]
    counters: dict[str, int]
    asking: int = 0
    """Requests for grants that are not answered."""
    grants: int = 0
    """Grants obtained ahead of their pulls; they age."""
    remembered: int = 0
    """Ended transfers and messages seen, kept so that late words about them are not taken for new;
    they age (``Limits.remembered_ttl``), so this is 0 only after a time of rest."""
    wakeups: int = 0
    """Timers that are set."""
    waiting_for_credits: int = 0
    """Calls."""
    queues: tuple[QueueState, ...] = ()
    """Send queues that something is in or waits for, with their credits."""
    breakers: tuple[BreakerState, ...] = ()
    """Peers that failed too often and are left alone, or probed."""
    backends: tuple[BackendState, ...] = ()
    """Peers that are not reached through their preferred backend."""
    stuck_threads: dict[str, int] = attrs.field(factory=dict)
    """Engine calls that did not return in time and still have not, by peer."""

    @property
    def tables(self) -> dict[str, int]:
        """What must be empty when nothing is under way."""
        return {
            "pulls": self.pulls,
            "accepts": self.accepts,
            "holds": self.holds,
            "pushes": self.pushes,
            "pinned_blocks": self.pinned_blocks,
            "in_flight_pieces": self.in_flight_pieces,
            "unconfirmed": self.unconfirmed,
            "draining": self.draining,
            "asking": self.asking,
            "waiting_for_credits": self.waiting_for_credits,
        }


def health_of(engine: Engine, pump: Pump | None, now: float, *, closed: bool) -> Health:
    reasons: list[str] = []
    limits = engine.ctx.config.limits
    if closed:
        reasons.append("the agent is closed")
    if engine.consumer.quarantine.full:
        reasons.append(f"{len(engine.consumer.quarantine)} transfers are in quarantine")
    if engine.ctx.counters["transports.failed"]:
        reasons.append(
            f"progress of a transport failed {engine.ctx.counters['transports.failed']} times; "
            "see the log"
        )
    if len(engine.ctx.events) > limits.events:
        reasons.append(f"{len(engine.ctx.events)} events were not collected")
    if pump is not None and not closed:
        if not pump.alive:
            reasons.append("the progress thread has ended")
        elif now - pump.last_round > _STALLED_AFTER:
            reasons.append(f"the progress thread made no round for {now - pump.last_round:.1f} s")
        if pump.errors:
            reasons.append(f"{pump.errors} rounds of the progress thread failed; see the log")
    if not closed:
        reasons.extend(engine.ctx.keeping.reasons(now))
    return Health(ready=not reasons, reasons=tuple(reasons), warnings=tuple(_warnings(engine, now)))


def _warnings(engine: Engine, now: float) -> list[str]:
    found = []
    for breaker in engine.ctx.breakers.states(now):
        pause = "being probed" if not breaker.wait else f"left alone for {breaker.wait:.1f} s"
        found.append(f"peer {breaker.name} failed too often and is {pause}: {breaker.reason}")
    for state in _backends(engine, now):
        found.append(
            f"peer {state.peer} is reached over {state.backend}, not {state.preferred}: "
            f"{state.reason}"
        )
    most = engine.ctx.config.limits.stuck_threads
    for peer, count in engine.ctx.stuck.peers.items():
        refused = "; nothing more is posted to it" if count >= most else ""
        found.append(f"{count} engine calls towards peer {peer} do not return{refused}")
    return found


def _backends(engine: Engine, now: float) -> tuple[BackendState, ...]:
    states = [x.switching.state(now) for x in engine.links if x.switching is not None and x.usable]
    return tuple(state for state in states if state is not None)


def snapshot_of(engine: Engine) -> Snapshot:
    counters = dict(engine.ctx.counters)
    for reason in ("evicted_ttl", "evicted_capacity"):
        counters[f"acks.{reason}"] = engine.producer.acks.counters[reason]
    counters.update({f"keeper.{k}": v for k, v in engine.ctx.keeping.counters.items()})
    counters.update({f"channel.{k}": v for k, v in engine.ctx.channel.counters.items()})
    return Snapshot(
        pulls=len(engine.consumer.pulls),
        accepts=len(engine.consumer.accepts),
        holds=len(engine.producer.leases),
        pushes=len(engine.producer.pushes),
        pinned_blocks=engine.consumer.pins.pinned_blocks,
        in_flight_pieces=engine.ctx.in_flight,
        unconfirmed=engine.links.mailboxes.unconfirmed,
        draining=len(engine.consumer.drainings) + len(engine.producer.drainings),
        early=engine.producer.early + engine.consumer.early,
        asking=engine.consumer.asking,
        grants=len(engine.consumer.grants),
        remembered=engine.remembered,
        wakeups=engine.ctx.scheduled,
        peers=tuple(link.incarnation for link in engine.links if link.up),
        quarantine=engine.consumer.quarantine.entries,
        counters=counters,
        waiting_for_credits=len(engine.ctx.desk),
        queues=engine.ctx.desk.states,
        breakers=engine.ctx.breakers.states(engine.ctx.clock.now()),
        backends=_backends(engine, engine.ctx.clock.now()),
        stuck_threads=engine.ctx.stuck.peers,
    )
