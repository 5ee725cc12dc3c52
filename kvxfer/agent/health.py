"""Health and snapshots: what a person or a probe sees of an agent."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.agent.failures import RECENT
from kvxfer.core.inflight import QuarantineEntry
from kvxfer.policies.breaker import BreakerState
from kvxfer.policies.credit_queue import QueueState
from kvxfer.policies.failover import BackendState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.agent.engine import Engine
    from kvxfer.agent.pump import Pump

__all__ = ["PROBLEMS", "Health", "Problem", "Snapshot", "health_of", "snapshot_of"]

PROBLEMS = (
    "closed",
    "quarantine_full",
    "quarantine",
    "transport_failed",
    "thread_ended",
    "thread_stalled",
    "rounds_failed",
    "keeper",
    "events_not_collected",
    "backpressure",
    "observer_failed",
    "breaker_open",
    "failed_over",
    "calls_stuck",
)
"""Names of all problems; stable."""
_CLOSED = "open another agent, or route around this worker"
_LONG_WAIT = 1.0
"""Seconds for which a call may wait for credits before it is worth a warning: many drain times of
a send queue."""
_STALLED_AFTER = 5.0
"""Seconds without a round after which the progress thread counts as stalled."""


@attrs.frozen(kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        name: one of ``PROBLEMS``, for machines.
        message: for people, with the numbers.
        next_step: what to do about it.
        blocking: new requests make no sense here while it lasts. Otherwise it concerns some peers,
            or is on its way to become worse.
        numbers: those of the message, by name; seconds and counts.
    """

    name: str
    message: str
    next_step: str
    blocking: bool = True
    numbers: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Health:
    """``ready``: new requests make sense here. ``reasons`` says why not.

    ``warnings`` says what concerns some peers only, or gets worse: they do not make the agent
    unready.
    """

    agent: str = ""
    incarnation: str = ""
    problems: tuple[Problem, ...] = ()

    @property
    def ready(self) -> bool:
        return not any(problem.blocking for problem in self.problems)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(p.message for p in self.problems if p.blocking)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(p.message for p in self.problems if not p.blocking)

    def to_dict(self) -> dict[str, Any]:
        """Builtins only, for JSON."""
        return {
            "ready": self.ready,
            "agent": self.agent,
            "incarnation": self.incarnation,
            "problems": [attrs.asdict(problem) for problem in self.problems],
        }


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
    longest_wait: float = 0.0
    """Seconds since the one of them that asked first did."""
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

    def to_dict(self) -> dict[str, Any]:
        """Builtins only, for JSON. Of quarantined transfers the blocks are counted, not listed."""
        plain = attrs.asdict(self, recurse=False)
        plain["tables"] = self.tables
        plain["peers"] = list(self.peers)
        plain["counters"] = dict(sorted(self.counters.items()))
        plain["quarantine"] = [
            {"transfer_id": e.transfer_id, "blocks": e.count, "since": e.since, "reason": e.reason}
            for e in self.quarantine
        ]
        for name in ("queues", "breakers", "backends"):
            values = getattr(self, name)
            plain[name] = [attrs.asdict(value, value_serializer=_plain) for value in values]
        return plain


def _plain(_: object, __: object, value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def health_of(engine: Engine, pump: Pump | None, now: float, *, closed: bool) -> Health:
    """What is wrong, the worst first. Any thread."""
    found = [Problem(name="closed", message="the agent is closed", next_step=_CLOSED)]
    if not closed:
        found = [
            *_quarantine(engine, now),
            *_progress(engine, pump, now),
            *_keeper(engine, now),
            *_backlog(engine, now),
            *_peers(engine, now),
        ]
    return Health(
        agent=engine.ctx.config.name,
        incarnation=engine.ctx.incarnation,
        problems=tuple(sorted(found, key=lambda problem: not problem.blocking)),
    )


def _quarantine(engine: Engine, now: float) -> Iterator[Problem]:
    quarantine = engine.consumer.quarantine
    entries = quarantine.entries
    if not entries:
        return
    oldest = max(0.0, now - min(entry.since for entry in entries))
    blocks = sum(entry.count for entry in entries)
    yield Problem(
        name="quarantine_full" if quarantine.full else "quarantine",
        message=(
            f"{len(entries)} transfers are in quarantine, of {quarantine.limit} that may be, with "
            f"{blocks} blocks, the oldest for {oldest:.0f} s: {entries[-1].reason}"
        ),
        next_step="see which peer or engine cannot prove that nothing lands any more; end or fence "
        "it, or restart this worker; reclaim() only if you know",
        blocking=quarantine.full,
        numbers={
            "transfers": len(entries),
            "limit": quarantine.limit,
            "blocks": blocks,
            "oldest_seconds": oldest,
        },
    )


def _progress(engine: Engine, pump: Pump | None, now: float) -> Iterator[Problem]:
    failed = engine.transport_failures
    if failed.count:
        yield Problem(
            name="transport_failed",
            message=f"progress of a transport failed {failed.count} times, last "
            f"{failed.age(now):.0f} s ago; see the log",
            next_step="look for event=transport in the log; restart this worker if it goes on",
            blocking=failed.age(now) < RECENT,
            numbers={"failures": failed.count, "last_seconds": failed.age(now)},
        )
    if pump is None:
        return
    silent = now - pump.last_round
    if not pump.alive:
        yield Problem(
            name="thread_ended",
            message="the progress thread has ended",
            next_step="restart this worker: nothing moves in it any more",
        )
    elif silent > _STALLED_AFTER:
        yield Problem(
            name="thread_stalled",
            message=f"the progress thread made no round for {silent:.1f} s",
            next_step="look for what holds the GIL or stopped the process (py-spy dump), and for "
            "observers that wait",
            numbers={"seconds": silent},
        )
    if pump.failures.count:
        age = pump.failures.age(now)
        yield Problem(
            name="rounds_failed",
            message=f"{pump.failures.count} rounds of the progress thread failed, last {age:.0f} s "
            "ago; see the log",
            next_step="look for event=round in the log, and report it: it is a bug",
            blocking=age < RECENT,
            numbers={"rounds": pump.failures.count, "last_seconds": age},
        )


def _keeper(engine: Engine, now: float) -> Iterator[Problem]:
    for reason in engine.ctx.keeping.reasons(now):
        yield Problem(
            name="keeper",
            message=reason,
            next_step="if it is not back within a second: can this host start another Python "
            "(memory, process limits), and is KeeperConfig.port free?",
            numbers={"deaths": engine.ctx.keeping.deaths},
        )


def _backlog(engine: Engine, now: float) -> Iterator[Problem]:
    ctx = engine.ctx
    limits = ctx.config.limits
    if len(ctx.events) > limits.events:
        yield Problem(
            name="events_not_collected",
            message=f"{len(ctx.events)} events were not collected",
            next_step="call Agent.poll() regularly: blocks are freed by what it returns",
            numbers={"events": len(ctx.events), "limit": limits.events},
        )
    waiting = ctx.desk.longest_wait(now)
    if waiting > _LONG_WAIT:
        full = [queue for queue in ctx.desk.states if queue.waiting]
        names = ", ".join(f"{q.name} {q.in_flight} of {q.limit}" for q in full[:3])
        yield Problem(
            name="backpressure",
            message=(
                f"{len(ctx.desk)} calls wait for credits, the longest for {waiting:.1f} s "
                f"(Timeouts.queue is {ctx.timeouts.queue:.1f} s): {names}"
            ),
            next_step="send fewer requests here, or raise the credits if the engine has more",
            blocking=False,
            numbers={"calls": len(ctx.desk), "seconds": waiting, "queues": len(full)},
        )
    if ctx.counters["observers.failed"]:
        failed = ctx.counters["observers.failed"]
        yield Problem(
            name="observer_failed",
            message=f"observers failed {failed} times",
            next_step="look for event=observer in the log; metrics or traces may be missing",
            blocking=False,
            numbers={"failures": failed},
        )


def _peers(engine: Engine, now: float) -> Iterator[Problem]:
    for breaker in engine.ctx.breakers.states(now):
        pause = "being probed" if not breaker.wait else f"left alone for {breaker.wait:.1f} s"
        yield Problem(
            name="breaker_open",
            message=f"peer {breaker.name} failed too often and is {pause}: {breaker.reason}",
            next_step="see that peer's health and log; it is probed after the pause",
            blocking=False,
            numbers={"wait_seconds": breaker.wait},
        )
    for state in _backends(engine, now):
        yield Problem(
            name="failed_over",
            message=f"peer {state.peer} is reached over {state.backend}, not {state.preferred}: "
            f"{state.reason}",
            next_step=f"repair {state.preferred}; it is probed and used again by itself",
            blocking=False,
            numbers={"wait_seconds": state.wait},
        )
    most = engine.ctx.config.limits.stuck_threads
    for peer, count in engine.ctx.stuck.peers.items():
        refused = "; nothing more is posted to it" if count >= most else ""
        yield Problem(
            name="calls_stuck",
            message=f"{count} engine calls towards peer {peer} do not return{refused}",
            next_step="see whether that peer is stopped; restart this worker if they never return",
            blocking=False,
            numbers={"calls": count, "limit": most},
        )


def _backends(engine: Engine, now: float) -> tuple[BackendState, ...]:
    switches = [link.switching for link in engine.links if link.usable]
    states = [switching.state(now) for switching in switches if switching is not None]
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
        longest_wait=engine.ctx.desk.longest_wait(engine.ctx.clock.now()),
        queues=engine.ctx.desk.states,
        breakers=engine.ctx.breakers.states(engine.ctx.clock.now()),
        backends=_backends(engine, engine.ctx.clock.now()),
        stuck_threads=engine.ctx.stuck.peers,
    )
