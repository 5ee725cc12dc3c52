"""The circuit breaker in the agent: a peer that keeps failing is left alone, others are not."""

from __future__ import annotations

import pickle

import pytest
from agent_rig import Node, Rig, at

from kvxfer.agent import TransferHandle
from kvxfer.agent.config import AgentConfig
from kvxfer.backends.loopback import LoopbackConfig, LoopbackTransport
from kvxfer.core.events import Failed, Received
from kvxfer.core.verdict import EngineError
from kvxfer.errors import CircuitOpenError, ConfigError, ErrorKind
from kvxfer.policies.breaker import BreakerPolicy, Circuit
from kvxfer.policies.retry import Budget, RetryPolicy
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport

BROKEN = EngineError(backend="moriio", code=13, message="local length error")
"""A local completion error: the queue pair is dead."""
DIES = Fault(kind=FaultKind.FAIL_DRAINED, error=BROKEN)
ONCE = RetryPolicy(budget=Budget(rebuilds=0))
"""One post per transfer: one fault each."""


def pull(p: Node, c: Node, name: str, block: int = 1) -> TransferHandle:
    return c.agent.pull(p.agent.hold(name, at(0, 5)), at(0, block))


def fault(rig: Rig, p: Node, c: Node, name: str, block: int = 1) -> TransferHandle:
    """One more transfer that fails with the path."""
    handle = pull(p, c, name, block)
    rig.run(lambda: handle.done)
    assert handle.error is not None
    return handle


def until(rig: Rig, at_: float) -> None:
    rig.run(seconds=max(0.0, at_ - rig.clock.now()))


def touched(c: Node) -> dict[str, int]:
    """Calls that reach for the network."""
    return {k: c.transport.counters.get(k, 0) for k in ("connect", "prepare", "post")}


def test_o07_numbers(rig: Rig) -> None:
    """Report O07: faults at 0, 1, 2, 3, 4: open at 4. At 5 and 9 transfers fail without touching
    the network; at 14.1 one goes through, and that closes it."""
    p, c = rig.node("p"), rig.node("c", posts=[DIES] * 5, retry=ONCE)
    pull(p, c, "warm")
    c.agent.abort("warm")
    rig.pass_time(1.0)
    began = rig.clock.now()
    for i in range(5):
        until(rig, began + i)
        assert fault(rig, p, c, f"f{i}").error.kind is ErrorKind.CONNECTION  # type: ignore[union-attr]
    opened = rig.clock.now()
    assert opened - began == pytest.approx(4.0, abs=0.3)  # the network takes its time
    assert c.counters["breakers.opened"] == 1
    (state,) = c.agent.snapshot().breakers
    assert (state.name, state.state) == (p.agent.incarnation, Circuit.OPEN)
    assert "local length error" in state.reason
    assert c.agent.health().ready
    assert "left alone for" in c.agent.health().warnings[0]
    before = touched(c)
    for moment in (5.0, 9.0):
        until(rig, began + moment)
        handle = pull(p, c, f"at{moment}")
        assert rig.run(lambda handle=handle: handle.done) < 0.15
        assert handle.error is not None
        assert handle.error.kind is ErrorKind.CONNECTION
        assert handle.drained
    assert touched(c) == before
    assert c.counters["breakers.rejected"] == 2
    until(rig, opened + 10.1)
    assert c.agent.snapshot().breakers[0].state is Circuit.HALF_OPEN
    handle = pull(p, c, "probe")
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert c.counters["breakers.closed"] == 1
    assert c.agent.snapshot().breakers == ()
    assert c.agent.health().warnings == ()


def test_o07_old_faults_age_out(rig: Rig) -> None:
    """Report O07: faults at 0, 1, 2, 8, 9: it never opens."""
    p, c = rig.node("p"), rig.node("c", posts=[DIES] * 5, retry=ONCE)
    began = rig.clock.now()
    for i, moment in enumerate((0.0, 1.0, 2.0, 8.0, 9.0)):
        until(rig, began + moment)
        fault(rig, p, c, f"f{i}")
    assert c.counters["breakers.faults"] == 5
    assert "breakers.opened" not in c.counters
    handle = pull(p, c, "well")
    rig.run(lambda: handle.done)
    assert handle.error is None


def test_one_storm_is_bounded(rig: Rig) -> None:
    """A path that breaks as soon as it is made: five times, then nothing for the pause, however
    many transfers want it."""
    p, c = rig.node("p"), rig.node("c", plan=FaultPlan(posts=[DIES] * 1000))
    handles = [pull(p, c, f"t{i}", block=i) for i in range(12)]
    rig.run(lambda: all(h.done for h in handles))
    assert all(h.error is not None for h in handles)
    assert any(h.error.history for h in handles if h.error is not None)
    prepared = c.transport.counters["prepare"]
    assert prepared <= 5
    for i in range(20):
        rig.pass_time(0.4)
        handle = pull(p, c, f"u{i}", block=i % 12)
        rig.run(lambda handle=handle: handle.done)
    assert c.transport.counters["prepare"] == prepared
    assert c.counters["breakers.rejected"] == 20


def test_one_failure_of_many_calls_is_one_fault(rig: Rig) -> None:
    """A queue pair that dies takes all that is on it along: that is one fault, not eight."""
    transport = FaultyTransport(
        LoopbackTransport(LoopbackConfig(max_pieces=1)),
        FaultPlan(posts=[DIES] * 8),
        clock=rig.clock,
    )
    p, c = rig.node("p"), rig.node("c", transport=transport)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5, 7)), at(0, 1, 3))
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert c.transport.counters["post.fail_drained"] == 8
    assert c.counters["breakers.faults"] == 1
    assert c.counters["paths.rebuilt"] == 1


def test_others_are_not_concerned(rig: Rig) -> None:
    """Promise 7: while one peer is left alone, another is served without delay."""
    bad, good = rig.node("bad"), rig.node("good")
    c = rig.node("c", posts=[DIES] * 5, retry=ONCE)
    for i in range(5):
        fault(rig, bad, c, f"f{i}")
    assert c.agent.snapshot().breakers
    handle = pull(good, c, "t", block=2)
    assert rig.run(lambda: handle.done) < 0.5
    assert handle.error is None
    # And the peer that is left alone can still be served by us, and reach us.
    back = pull(c, bad, "u", block=3)
    rig.run(lambda: back.done)
    assert back.error is None


def test_a_probe_that_fails_opens_it_again(rig: Rig) -> None:
    """Half open: one fault is enough for another pause."""
    p, c = rig.node("p"), rig.node("c", posts=[DIES] * 6, retry=ONCE)
    for i in range(5):
        fault(rig, p, c, f"f{i}")
    rig.pass_time(10.1)
    fault(rig, p, c, "probe")
    assert c.counters["breakers.opened"] == 2
    assert c.agent.snapshot().breakers[0].state is Circuit.OPEN
    before = touched(c)
    fault(rig, p, c, "rejected")
    assert touched(c) == before


def test_handshakes_that_fail_are_faults(rig: Rig) -> None:
    """Connecting that is refused again and again opens it too; hellos stop as well."""
    refused = Fault(kind=FaultKind.FAIL)  # HANDSHAKE: permanent
    p, c = rig.node("p"), rig.node("c", plan=FaultPlan(connects=[refused] * 50))
    for i in range(5):
        assert fault(rig, p, c, f"f{i}").error.kind is ErrorKind.HANDSHAKE  # type: ignore[union-attr]
    hellos = p.counters["received.hello"]
    last = fault(rig, p, c, "rejected")
    assert last.error is not None
    assert last.error.kind is ErrorKind.HANDSHAKE  # what opened it
    assert "failed too often" in str(last.error)
    assert p.counters["received.hello"] == hellos
    assert c.transport.counters["connect"] == 5


def test_a_restarted_peer_starts_afresh(rig: Rig) -> None:
    """Report O29: another incarnation is another peer, whatever the old one's breaker says."""
    old = rig.node("p")
    c = rig.node("c", posts=[DIES] * 5, retry=ONCE)
    for i in range(5):
        fault(rig, old, c, f"f{i}")
    assert c.agent.snapshot().breakers
    new = rig.node("p")
    handle = pull(new, c, "t", block=2)
    assert rig.run(lambda: handle.done) < 0.5
    assert handle.error is None


def test_a_push_fails_fast_too(rig: Rig) -> None:
    """The producer's side of WRITE is bounded by the same breaker."""
    c = rig.node("c")
    p = rig.node("p", posts=[DIES] * 5, retry=ONCE)
    for i in range(5):
        c.agent.accept(f"f{i}", at(0, i))
        handle = p.agent.push(f"f{i}", at(0, 7), to=c.agent.endpoint)
        rig.run(lambda handle=handle: handle.done)
    assert p.agent.snapshot().breakers
    before = touched(p)
    handle = p.agent.push("u", at(0, 7), to=c.agent.endpoint)
    assert rig.run(lambda: handle.done) < 0.15
    assert handle.error is not None
    assert touched(p) == before


def test_connect_ahead_of_time_is_rejected_too(rig: Rig) -> None:
    """``connect`` does not get around the breaker, and does not disturb the round."""
    p, c = rig.node("p"), rig.node("c", posts=[DIES] * 5, retry=ONCE)
    for i in range(5):
        fault(rig, p, c, f"f{i}")
    before = touched(c)
    c.agent.connect([p.agent.endpoint])
    rig.pass_time(1.0)
    assert touched(c) == before


def test_none_turns_it_off(rig: Rig) -> None:
    """``breaker=None``: every transfer may try."""
    p, c = rig.node("p"), rig.node("c", posts=[DIES] * 8, retry=ONCE, breaker=None)
    for i in range(8):
        fault(rig, p, c, f"f{i}")
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert len(c.of(Failed)) == 8
    assert len(c.of(Received)) == 1
    with pytest.raises(ConfigError, match="breaker"):
        AgentConfig(breaker=5)  # type: ignore[arg-type]
    assert AgentConfig().breaker == BreakerPolicy(faults=5, window=5.0, pause=10.0)


def test_the_error_pickles() -> None:
    """Engines move errors between processes; the kind of the last fault stays with it."""
    error = CircuitOpenError("the peer p failed too often", next_step="wait")
    error.kind = ErrorKind.PEER_LOST
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.kind, str(again)) == (type(error), error.kind, str(error))
