"""Reports O20 to O28 and O54 to O57: how long blocks live, leases, time-outs, aborts, ids."""

from __future__ import annotations

import concurrent.futures
import math
import threading

import attrs
import pytest
from agent_rig import TIMEOUTS, Node, at

from kvxfer.agent import Agent, AgentConfig
from kvxfer.agent.config import Limits, Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core import wire
from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.events import (
    Declined,
    Drained,
    Expired,
    Failed,
    PeerUp,
    Quarantined,
    Received,
    Sent,
)
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import ConfigError, ErrorKind, InvalidInputError
from kvxfer.policies.retry import RetryPolicy
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from reports.report_rig import HELD, INVALID, Instance, ReportRig, end, late

LONG = attrs.evolve(TIMEOUTS, transfer=60.0, drain=30.0, ack=60.0)
A = list(range(3, 10))
"""Report O21: the destination blocks 3..9."""


def reusable(node: Node, ids: list[int], *, proof: str = "probe") -> bool:
    """Whether another transfer gets these blocks. What it would do, it does not do."""
    pins = node.agent._engine.consumer.pins
    try:
        token = pins.pin(proof, [at(0, *ids).ids])
    except InvalidInputError:
        return False
    pins.unpin(token, [at(0, *ids).ids])
    return True


# ---- O21, O22: what may still be written -----------------------------------------------------


def test_o21_read_in_flight_until_six_seconds(rig: ReportRig) -> None:
    """Report O21: abort 2.5 s into a read of 6 s: its blocks are not reusable before 6.0 s."""
    p = rig.node("p", lease=60.0)
    c = rig.node("c", posts=[late(6.0)], timeouts=LONG)
    handle = c.agent.pull(p.agent.hold("t", at(0, *A)), at(0, *A))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    rig.begin()
    rig.until(2.5)
    handle.abort()
    rig.until(2.6)
    assert c.of(Failed)[0].kind is ErrorKind.ABORTED
    assert not c.of(Failed)[0].drained
    for moment in (2.6, 4.0, 5.9):
        rig.until(moment)
        assert not any(reusable(c, [block]) for block in A)
        assert reusable(c, [0, 1, 2, 10])
    rig.until(6.02)
    assert [e.drained_by for e in c.of(Drained)] == ["proof"]
    assert reusable(c, A)


def test_o21_write_in_flight_until_six_seconds(rig: ReportRig) -> None:
    """Report O21: the same where a peer writes: its word that it is drained frees the blocks."""
    p = rig.node("p", posts=[late(6.0)], timeouts=LONG)
    c = rig.node("c", timeouts=LONG)
    handle = c.agent.accept("w", at(0, *A))
    p.agent.push("w", at(0, *A), to=c.agent.endpoint)
    rig.run(lambda: p.tables["in_flight_pieces"] > 0)
    rig.begin()
    rig.until(2.5)
    handle.abort()
    for moment in (2.6, 5.9):
        rig.until(moment)
        assert not c.of(Drained)
        assert not any(reusable(c, [block]) for block in A)
    rig.until(6.05)
    assert reusable(c, A)
    before = c.content(A)
    rig.until(20.0)
    assert c.content(A) == before


def test_o21_silent_engine_is_quarantined(rig: ReportRig) -> None:
    """Report O21: drain time-out 4 s and a silent engine: at 6.5 s quarantined, not free."""
    plan = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    p = rig.node("p", lease=60.0)
    c = rig.node("c", plan=plan, timeouts=attrs.evolve(LONG, drain=4.0))
    handle = c.agent.pull(p.agent.hold("t", at(0, *A)), at(0, *A))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    rig.begin()
    rig.until(2.5)
    handle.abort()
    rig.until(6.4)
    assert not c.of(Quarantined)
    rig.until(6.52)
    assert c.of(Quarantined)[0].blocks == (tuple(A),)
    assert [q.transfer_id for q in c.agent.snapshot().quarantine] == ["t"]
    rig.until(60.0)
    assert not c.of(Drained)
    assert not any(reusable(c, [block]) for block in A)


def test_o22_group_result_is_published_once(rig: ReportRig) -> None:
    """Report O22: four source ranks; (P,P,P,P), (F,P,P,P) and (F,S,P,S) publish nothing,
    (F,S,S,S) publishes once, with all blocks of the request."""
    prefill = Instance(rig, "p", 4, heads=4, lease=60.0)
    decode = Instance(rig, "c", 1, heads=4, posts=[HELD] * 4, timeouts=LONG)
    (c,) = decode.nodes
    offer = prefill.scheduler.hold("t", at(0, 5, 6))
    prefill.hand_down()
    handle = c.agent.pull(offer, at(0, 1, 2))
    rig.run(lambda: c.transport.counters.get("post", 0) == 4)
    h0, h1, h2, h3 = attempts = list(c.transport.held)
    script = [("PPPP", []), ("FPPP", [h0]), ("FDPD", [h1, h3]), ("FDDD", [h2])]
    for states, ending in script:
        for attempt in ending:
            end(c, attempt, INVALID if attempt is h0 else None)
        rig.settle(0.2)
        assert "".join(a.state.name[0] for a in attempts) == states
        assert handle.done == (h2 in ending)
        assert len(c.of(Failed)) == (h2 in ending)
        assert reusable(c, [1]) == (h2 in ending)
    (failed,) = c.of(Failed)
    assert failed.blocks == ((1, 2),)
    assert failed.drained
    assert reusable(c, [1, 2])
    rig.settle(20.0)
    assert len(c.of(Failed)) == 1
    assert not c.of(Received)


# ---- O20, O23 to O28: who frees, and when ----------------------------------------------------


def test_o20_abort_while_held_for_a_peer(rig: ReportRig) -> None:
    """Report O20: aborting what is held for a peer frees nothing; the ack does, once."""
    p, c = rig.node("p", lease=30.0, abort_lease=5.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 1, 2))
    rig.settle(0.1)
    p.agent.abort("t")
    rig.settle(0.5)
    assert p.tables["holds"] == 1
    assert not p.events
    c.agent.decline(offer)
    rig.settle(0.5)
    c.agent.decline(offer)
    rig.settle(30.0)
    assert p.of(Declined) == [Declined(transfer_id="t")]
    assert not p.of(Expired)
    assert p.tables["holds"] == 0


def test_o20_no_ack_is_freed_at_lease_end(rig: ReportRig) -> None:
    """Report O20: with no ack it is freed at the end of its shortened lease plus the margin."""
    p = rig.node("p", lease=30.0, abort_lease=1.0, lease_margin=0.5)
    p.agent.hold("t", at(0, 1, 2))
    rig.settle(0.1)
    rig.begin()
    p.agent.abort("t")
    rig.until(1.4)
    assert p.tables["holds"] == 1
    rig.until(1.6)
    assert p.of(Expired) == [Expired(transfer_id="t")]


def test_o23_one_decline_frees_every_rank(rig: ReportRig) -> None:
    """Report O23: P=4, D=8, so 2 acks per rank: one decline frees at once; later acks are stale."""
    prefill = Instance(rig, "p", 4, heads=8)
    decode = Instance(rig, "c", 8, heads=8)
    offer = prefill.scheduler.hold("t", at(0, 5))
    prefill.hand_down()
    rig.settle(0.1)
    assert all(node.tables["holds"] == 1 for node in prefill.nodes)
    rig.begin()
    decode.scheduler.decline(offer)
    decode.nodes[0].agent.execute(decode.scheduler.take_orders())
    rig.until(0.0)
    rig.run(lambda: bool(prefill.of(Declined)))
    assert rig.now < 0.02, "a few network delays of 1 ms"
    assert not any(node.tables["holds"] for node in prefill.nodes)
    for rank, node in enumerate(prefill.nodes):
        for reader in (2 * rank, 2 * rank + 1):
            ref = offer.ref(offer.endpoints[rank])
            ranks = dict(decode.nodes[reader].agent.info.sizes)
            rig.inject(node, wire.Release(ref, ranks, True), mid=-1)
    rig.settle(0.5)
    assert [node.counters["acks.stale"] for node in prefill.nodes] == [2, 2, 2, 2]
    assert len(prefill.of(Declined)) == 1


def test_o24_receiver_has_a_deadline(rig: ReportRig) -> None:
    """Report O24: no message at all: failed at 1.5 s with blocks [8,9], never a success."""
    c = rig.node("c")
    handle = c.agent.accept("w", at(0, 8, 9), deadline=1.5)
    rig.until(1.49)
    assert not handle.done
    rig.until(1.51)
    (failed,) = c.of(Failed)
    assert (failed.kind, failed.blocks) == (ErrorKind.TIMEOUT, ((8, 9),))
    rig.until(30.0)
    assert not c.of(Received)


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan])
def test_o24_deadlines_are_finite(rig: ReportRig, seconds: float) -> None:
    """Report O24: a deadline or lease of 0, -1, inf or nan is refused; nothing stays behind."""
    node = rig.node("c")
    with pytest.raises(ConfigError, match="deadline"):
        node.agent.accept("w", at(0, 1), deadline=seconds)
    with pytest.raises(ConfigError, match="lease"):
        node.agent.hold("t", at(0, 1), lease=seconds)
    rig.settle(0.1)
    assert not any(node.tables.values())
    node.agent.accept("w", at(0, 1))
    node.agent.hold("t", at(0, 1))


def test_o25_expiry_needs_no_submit(rig: ReportRig) -> None:
    """Report O25: capacity 2, both leaked with deadline 1 s: free at 1.1 s, usable at 1.2 s."""
    c = rig.node("c", limits=Limits(transfers=2))
    rig.begin()
    for n in range(2):
        c.agent.accept(f"w{n}", at(0, n), deadline=1.0)
    refused = c.agent.accept("w2", at(0, 2))
    rig.until(0.1)
    assert refused.error is not None
    assert "2 transfers are under way" in str(refused.error)
    rig.until(1.1)
    assert len(c.of(Failed)) == 3
    assert not any(c.tables.values())
    rig.until(1.2)
    again = c.agent.accept("w2", at(0, 0), deadline=9.0)
    rig.until(1.3)
    assert not again.done


@pytest.mark.parametrize("op", ["read", "write"])
def test_o25_slot_of_what_drains_is_free(rig: ReportRig, op: str) -> None:
    """Report O25: where something may still land, the blocks wait, not the slot."""
    never = Fault(kind=FaultKind.NEVER)
    limits = Limits(transfers=2)
    timeouts = attrs.evolve(TIMEOUTS, transfer=1.0, drain=5.0)
    p = rig.node("p", lease=60.0)
    c = rig.node("c", posts=[never] * 2, limits=limits, timeouts=timeouts)
    for n in range(2):
        if op == "read":
            c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, n))
        else:
            p.agent.accept(f"t{n}", at(0, n), deadline=9.0)
            c.agent.push(f"t{n}", at(0, n), to=p.agent.endpoint)
            c.agent.seal(f"t{n}")
    rig.until(1.1)
    assert [f.drained for f in c.of(Failed)] == [False, False]
    if op == "read":
        assert not reusable(c, [0])
        third = c.agent.pull(p.agent.hold("t2", at(0, 5)), at(0, 2))
    else:
        p.agent.accept("t2", at(0, 2), deadline=9.0)
        third = c.agent.push("t2", at(0, 2), to=p.agent.endpoint)
        c.agent.seal("t2")
    rig.until(1.2)
    rig.run(lambda: third.done)
    assert third.error is None


def test_o26_wait_that_times_out_changes_nothing(rig: ReportRig) -> None:
    """Report O26: wait(0.05) on a never-ending transfer says pending in 0.05 to 0.10 s; a finished
    one is reported by the next poll all the same."""
    p = rig.node("p", lease=60.0)
    c = rig.node("c", posts=[Fault(kind=FaultKind.NEVER)], timeouts=LONG)
    endless = c.agent.pull(p.agent.hold("a", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    second = c.agent.pull(p.agent.hold("b", at(0, 6)), at(0, 2))
    rig.make_waits_virtual(c)
    rig.begin()
    assert not c.agent.wait(endless, timeout=0.05)
    assert 0.0499 <= rig.now <= 0.10
    assert not endless.done
    assert second.done
    assert [e.transfer_id for e in c.agent.poll() if isinstance(e, Received)] == ["b"]
    endless.abort()
    assert c.agent.wait(endless, timeout=1.0)


def test_o27_renewals_keep_a_hold_alive(rig: ReportRig) -> None:
    """Report O27: lease 3 s, renewed every second: alive at 10 s."""
    p, c = rig.node("p", lease=3.0, lease_margin=0.5), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    rig.begin()
    for second in range(1, 11):
        rig.until(float(second))
        c.agent.renew([offer])
    assert p.tables["holds"] == 1
    rig.until(12.9)
    assert p.tables["holds"] == 1


def test_o27_silence_expires_and_tells(rig: ReportRig) -> None:
    """Report O27: renewals stop at 4 s: expired at 7 s plus margin, one "gone", a late reader is
    refused and reads nothing."""
    p, c = rig.node("p", lease=3.0, lease_margin=0.5), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.connect([p.agent.endpoint])
    rig.settle(0.1)
    rig.begin()
    for second in range(1, 5):
        rig.until(float(second))
        c.agent.renew([offer])
    rig.until(7.49)
    assert not p.of(Expired)
    rig.until(7.52)
    assert p.of(Expired) == [Expired(transfer_id="t")]
    rig.settle(5.0)
    assert len({carried.mid for carried in rig.carried if isinstance(carried.body, wire.Gone)}) == 1
    late_reader = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: late_reader.done)
    assert c.of(Failed)[0].kind is ErrorKind.EXPIRED
    assert c.transport.counters.get("post", 0) == 0
    assert p.counters["holds.expired"] == 1
    assert p.counters["grants.refused.expired"] == 1


def test_o28_failed_stays_failed(rig: ReportRig) -> None:
    """Report O28: failed, then a message that would move it on: it stays failed."""
    p, c = rig.node("p"), rig.node("c")
    handle = c.agent.accept("w", at(0, 3), deadline=1.0)
    rig.until(1.1)
    assert handle.error is not None
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.until(4.0)
    ref = wire.Ref("w", c.agent.incarnation, 1)
    rig.inject(c, wire.Seal(ref, {}, 256, b""), sender=p.agent.incarnation, mid=-1)
    rig.settle()
    assert handle.error.kind is ErrorKind.TIMEOUT
    assert [type(e) for e in c.of(Failed) + c.of(Received)] == [Failed]


def test_o28_attempts_do_not_move_on() -> None:
    """Report O28: the same at the level of one engine call."""

    class Path:
        def settled(self, attempt: Attempt) -> None: ...

    attempt = Attempt(Op.READ, Path(), None)  # type: ignore[arg-type]
    assert attempt.fail(INVALID, accepted=Accepted.UNKNOWN)
    attempt.complete()
    assert attempt.state is AttemptState.FAILED
    assert attempt.error is INVALID


# ---- O54 to O57: ids and beginnings ----------------------------------------------------------


def test_o54_completion_of_the_old_job_is_stale_write(rig: ReportRig) -> None:
    """Report O54: start(r, job1), cancel, start(r, job2); job1's completion is stale."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.connect([p.agent.endpoint])
    job1 = c.agent.accept("r", at(0, 3))
    rig.settle(0.1)
    old = c.agent._engine.consumer.accepts["r"].ref
    job1.abort()
    rig.run(lambda: job1.done)
    job2 = c.agent.accept("r", at(0, 4))
    p.agent.push("r", at(0, 8), to=c.agent.endpoint)
    rig.settle(0.2)
    sizes = dict(p.agent.info.sizes)
    rig.inject(c, wire.Seal(old, sizes, 256, b""), sender=p.agent.incarnation, mid=-1)
    rig.settle(0.2)
    assert c.counters["writes.stale"] == 1
    assert not job2.done
    p.agent.seal("r")
    rig.run(lambda: job2.done)
    assert c.content([4]) == p.content([8])
    rig.settle()
    assert not any(c.tables.values())
    assert not any(p.tables.values())


def test_o54_completion_of_the_old_job_is_stale_read(rig: ReportRig) -> None:
    """Report O54: the same id held again: only the ack of the new hold frees it."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    old = p.agent.hold("r", at(0, 5))
    c.agent.decline(old)
    rig.run(lambda: bool(p.of(Declined)))
    new = p.agent.hold("r", at(0, 6))
    sizes = dict(c.agent.info.sizes)
    (endpoint,) = old.endpoints
    rig.inject(p, wire.Release(old.ref(endpoint), sizes, True), mid=-1)
    rig.settle(0.2)
    assert p.counters["acks.stale"] == 1
    assert p.tables["holds"] == 1
    rig.inject(p, wire.Release(new.ref(endpoint), sizes, True), mid=-1)
    rig.settle(0.2)
    assert p.of(Sent) == [Sent(transfer_id="r")]
    assert not any(p.tables.values())


def test_o55_abort_is_not_a_success(rig: ReportRig) -> None:
    """Report O55: abort at 0.2 s, the data completes at 0.3 s: aborted, not a success."""
    p = rig.node("p")
    c = rig.node("c", posts=[late(0.3)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    rig.begin()
    rig.until(0.2)
    handle.abort()
    rig.until(0.35)
    assert handle.drained
    rig.until(5.0)
    assert [e.kind for e in c.of(Failed)] == [ErrorKind.ABORTED]
    assert not c.of(Received)
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.ABORTED


class Steps:
    """Waits 0.1 s, then 0.2 s: tries at 0, 0.1 and 0.3 s."""

    def __call__(self, state: object) -> float:
        return 0.1 * state.attempt_number  # type: ignore[attr-defined]


def connect_policy(tries: int) -> RetryPolicy:
    from tenacity.stop import stop_after_attempt

    return RetryPolicy(stop=stop_after_attempt(tries), connect_wait=Steps())  # type: ignore[arg-type]


NOT_UP = Fault(
    kind=FaultKind.FAIL,
    error=EngineError(backend="shm", message="the peer's handover socket cannot be reached"),
)


def starting_peer(rig: ReportRig, failures: int) -> tuple[Node, Node]:
    p = rig.node("p", lease=60.0)
    c = rig.node("c", plan=FaultPlan(connects=[NOT_UP] * failures))
    c.agent._ctx.retry = connect_policy(3)
    return p, c


def test_o56_peer_that_is_starting(rig: ReportRig) -> None:
    """Report O56: connect fails at 0 and 0.1 s and works at 0.3 s: the transfer queued at 0.05 s
    completes after."""
    p, c = starting_peer(rig, 2)
    offer = p.agent.hold("t", at(0, 5))
    c.agent.connect([p.agent.endpoint])
    rig.run(lambda: c.transport.counters.get("connect", 0) == 1)
    rig.begin()
    rig.until(0.05)
    handle = c.agent.pull(offer, at(0, 1))
    rig.until(0.29)
    assert not c.of(PeerUp)
    assert not handle.done
    rig.until(0.35)
    rig.run(lambda: handle.done)
    assert c.content([1]) == p.content([5])
    assert [round(i.at - rig.began, 2) for i in c.transport.log] == [0.0, 0.1]
    assert c.transport.counters["connect"] == 3


def test_o56_all_tries_fail(rig: ReportRig) -> None:
    """Report O56: all three tries fail: failed(handshake); the next submit starts a fresh one."""
    p, c = starting_peer(rig, 3)
    offer = p.agent.hold("t", at(0, 5))
    handle = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: handle.done)
    (failed,) = c.of(Failed)
    assert (failed.kind, failed.blocks, failed.drained) == (ErrorKind.HANDSHAKE, ((1,),), True)
    assert c.transport.counters["connect"] == 3
    assert c.agent.snapshot().peers == ()
    again = c.agent.pull(p.agent.hold("u", at(0, 5)), at(0, 1))
    rig.run(lambda: again.done)
    assert c.content([1]) == p.content([5])


def test_o57_sixteen_agents_have_sixteen_names() -> None:
    """Report O57: sixteen agents that start in parallel with default ports get sixteen addresses
    and sixteen incarnations."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        barrier = threading.Barrier(16)

        def start(_: int) -> Agent:
            barrier.wait(30)
            return Agent(LoopbackTransport(), config=AgentConfig(progress=Progress.MANUAL))

        agents = list(pool.map(start, range(16)))
    try:
        assert len({agent.address for agent in agents}) == 16
        assert len({agent.incarnation for agent in agents}) == 16
    finally:
        for agent in agents:
            agent.close(0.0)


def twins(rig: ReportRig) -> list[Node]:
    """Two agents that were configured with the same incarnation."""
    first, second = rig.node("p1"), rig.node("p2")
    for node in (first, second):
        agent = node.agent
        agent.incarnation = agent._local.incarnation = agent._ctx.incarnation = "engine-0"
    return [first, second]


def test_o57_second_holder_of_an_id_is_refused_when_dialled(rig: ReportRig) -> None:
    """Report O57: two peers with one incarnation: the second is refused at the handshake, with
    both addresses, and the first is served on."""
    first, second = twins(rig)
    c = rig.node("c")
    offers = [node.agent.hold(f"t{n}", at(0, 5)) for n, node in enumerate((first, second))]
    good = c.agent.pull(offers[0], at(0, 1))
    rig.run(lambda: good.done)
    c.agent.connect([second.agent.address])
    rig.settle(0.5)
    assert c.counters["peers.failed.handshake"] == 1
    assert len(c.agent.snapshot().peers) == 1
    again = c.agent.pull(first.agent.hold("t2", at(0, 6)), at(0, 2))
    rig.run(lambda: again.done)
    assert c.content([1, 2]) == first.content([5, 6])


def test_o57_second_holder_of_an_id_is_refused_when_it_dials(rig: ReportRig) -> None:
    """Report O57: the same when the second dials us: it learns why, and nothing moves to it."""
    first, second = twins(rig)
    c = rig.node("c")
    good = c.agent.pull(first.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: good.done)
    push = second.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.run(lambda: push.done)
    assert push.error is not None
    assert push.error.kind is ErrorKind.HANDSHAKE
    for address in (first.agent.address, second.agent.address):
        assert address in str(push.error)
    again = c.agent.pull(first.agent.hold("t2", at(0, 6)), at(0, 2))
    rig.run(lambda: again.done)
    assert c.content([2]) == first.content([6])
