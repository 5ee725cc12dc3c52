"""Failover in the agent: a peer whose backend fails is reached through the next one.

Two backends of one process, under virtual time: ``first`` is preferred and gets the faults, and
``loopback`` is the second.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
from agent_rig import TIMEOUTS, Node, Rig, at

from kvxfer.agent import Agent, TransferHandle
from kvxfer.agent.config import AgentConfig
from kvxfer.backends.loopback import LoopbackConfig, LoopbackTransport
from kvxfer.core.attempt import Attempt
from kvxfer.core.events import BackendChanged, Drained, Failed, PeerDown, Received
from kvxfer.core.transport import Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import ConfigError, ErrorKind
from kvxfer.policies.failover import Failover
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint
from kvxfer.testing.faulty import FaultyTransport

DEAD = EngineError(backend="moriio", code=13, message="local length error")
"""A local completion error: the queue pair is dead."""
DIES = Fault(kind=FaultKind.FAIL_DRAINED, error=DEAD, fraction=0.5)
LEAVES_BYTES = Fault(kind=FaultKind.FAIL, error=DEAD, fraction=0.5, lands_late=True)
"""It fails, and half of its bytes land only when the fault is released."""
SLOW = Fault(kind=FaultKind.LATE_REPORT, after=0.5)
"""The bytes land at once, and the engine says so half a second later."""
POLICY = Failover(faults=2, pause=2.0, probes=2, spacing=0.2, longest_pause=10.0)


class First(LoopbackTransport):
    """Another engine, as far as anybody can tell."""

    name: ClassVar[str] = "first"


class Watched(LoopbackTransport):
    """The second engine; it looks at what the first one has in flight whenever it is posted to."""

    def __init__(self, first: FaultyTransport, config: LoopbackConfig | None = None) -> None:
        super().__init__(config)
        self.first = first
        self.trespasses: list[str] = []

    def _post(self, attempt: Attempt) -> None:
        mine = ranges(attempt)
        for path in self.first._paths:
            for other in path.undrained:
                if mine & ranges(other):
                    self.trespasses.append(f"{attempt} beside {other}")
        super()._post(attempt)


def ranges(attempt: Attempt) -> set[tuple[int, int]]:
    """Where it writes: addresses on the side that is written."""
    found = set()
    for pair, local, remote, size in zip(*attempt.batch.lists(), strict=True):
        region, descriptor = attempt.path.pairs[pair]
        if attempt.op is Op.READ:
            found.add((region.span.address + local, size))
        else:
            found.add((descriptor.region_id, remote))
    return found


class Two(Node):
    """An agent with both backends."""

    def __init__(self, rig: Rig, name: str, **options: Any) -> None:
        posts = options.pop("posts", [])
        plan = options.pop("plan", None) or FaultPlan(posts=posts)
        self.first = FaultyTransport(First(), plan, clock=rig.clock)
        self.second = Watched(self.first, options.pop("second", None))
        self.second_faulty = FaultyTransport(
            self.second, options.pop("second_plan", None), clock=rig.clock
        )
        both: Any = [self.first, self.second_faulty]
        options.setdefault("failover", POLICY)
        super().__init__(rig, name, transport=both, **options)


def two(rig: Rig, name: str, **options: Any) -> Two:
    return Two(rig, name, **options)


def pull(p: Node, c: Node, name: str, source: int = 5, block: int = 1) -> TransferHandle:
    return c.agent.pull(p.agent.hold(name, at(0, source)), at(0, block))


def push(p: Node, c: Node, name: str, source: int = 5, block: int = 1) -> TransferHandle:
    c.agent.accept(name, at(0, block))
    handle = p.agent.push(name, at(0, source), to=c.agent.endpoint)
    p.agent.seal(name, b"")
    return handle


def changes(node: Node) -> list[tuple[str, str, bool]]:
    return [(e.before, e.backend, e.down) for e in node.of(BackendChanged)]


def settled(rig: Rig, *nodes: Node) -> None:
    rig.run(lambda: not any(sum(node.tables.values()) for node in nodes))


def test_a_read_survives_the_death_of_its_backend(rig: Rig) -> None:
    """Nothing lost: every pull that was under way is received over the second backend, whole; the
    change is an event, counters, a warning, and the snapshot names the reason."""
    p, c = two(rig, "p"), two(rig, "c", plan=FaultPlan(posts=[DIES] * 1000))
    handles = [pull(p, c, f"t{i}", source=i, block=i + 6) for i in range(6)]
    rig.run(lambda: all(h.done for h in handles))
    assert [h.error for h in handles] == [None] * 6
    assert c.content(list(range(6, 12))) == p.content(list(range(6)))
    assert changes(c) == [("first", "loopback", True)]
    (event,) = c.of(BackendChanged)
    assert event.peer == p.agent.incarnation
    assert "local length error" in event.reason
    counters = c.counters
    assert counters["failover.downgrades"] == counters["failover.to.loopback"] == 1
    assert counters["failover.reposted"] >= 1
    assert "breakers.opened" not in counters
    (state,) = c.agent.snapshot().backends
    assert (state.peer, state.backend, state.preferred) == (
        p.agent.incarnation,
        "loopback",
        "first",
    )
    assert "reached over loopback, not first" in c.agent.health().warnings[0]
    assert c.agent.health().ready
    assert not c.second.trespasses
    settled(rig, p, c)


def test_a_write_survives_it_too(rig: Rig) -> None:
    """The producer chooses: what its engine proves drained goes out again over the next one."""
    c, p = two(rig, "c"), two(rig, "p", plan=FaultPlan(posts=[DIES] * 1000))
    handles = [push(p, c, f"t{i}", source=i, block=i + 6) for i in range(6)]
    rig.run(lambda: all(h.done for h in handles) and len(c.of(Received)) == 6)
    assert [h.error for h in handles] == [None] * 6
    assert c.content(list(range(6, 12))) == p.content(list(range(6)))
    assert changes(p) == [("first", "loopback", True)]
    assert changes(c) == []
    assert not p.second.trespasses
    settled(rig, p, c)


def test_without_a_policy_nothing_moves(rig: Rig) -> None:
    """Failover is explicit: an agent of two backends that was not asked for it fails as ever."""
    p = two(rig, "p")
    c = two(rig, "c", plan=FaultPlan(posts=[DIES] * 1000), failover=None)
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert changes(c) == []
    assert not [name for name in c.counters if name.startswith("failover")]


def test_it_waits_until_nothing_of_the_first_can_land(rig: Rig) -> None:
    """Promise 3, never two engines writing one block: while half-posted bytes of the first may
    still land, the second is not posted for these blocks; others go ahead."""
    p = two(rig, "p")
    c = two(rig, "c", plan=FaultPlan(posts=[LEAVES_BYTES]), failover=Failover(faults=1))
    late = pull(p, c, "late", source=3, block=1)
    rig.run(lambda: bool(changes(c)))
    other = pull(p, c, "other", source=4, block=2)
    rig.run(lambda: other.done)
    assert other.error is None
    assert not late.done
    assert c.counters["failover.waited_for_drained"] == 1
    assert c.first.release() == 1
    rig.run(lambda: late.done)
    assert late.error is None
    assert c.content([1, 2]) == p.content([3, 4])
    assert not c.second.trespasses
    settled(rig, p, c)


def test_the_fence_of_what_was_left_is_proof_enough(rig: Rig) -> None:
    """Where the first says nothing for ``Timeouts.drain``, its fence is asked for; once it has
    answered, the second goes on and the request is received within its deadline."""
    p = two(rig, "p")
    c = two(rig, "c", plan=FaultPlan(posts=[LEAVES_BYTES]), failover=Failover(faults=1))
    handle = pull(p, c, "t", source=3)
    waited = rig.run(lambda: handle.done)
    assert handle.error is None
    assert TIMEOUTS.drain <= waited < TIMEOUTS.transfer
    assert c.counters["failover.fences"] == 1
    assert c.content([1]) == p.content([3])
    assert not c.second.trespasses
    settled(rig, p, c)


def test_what_nothing_proves_fails_with_fresh_blocks_as_the_next_step(rig: Rig) -> None:
    """No fence to be had: the transfer fails undrained, in time, and says what to do; the same
    offer pulled again into fresh blocks is received over the second backend."""
    p = two(rig, "p", lease=20.0)
    no_fence = [Fault(kind=FaultKind.FAIL)] * 9
    plan = FaultPlan(posts=[LEAVES_BYTES], fences=no_fence)
    c = two(rig, "c", plan=plan, failover=Failover(faults=1))
    offer = p.agent.hold("t", at(0, 3))
    first = c.agent.pull(offer, at(0, 1))
    took = rig.run(lambda: first.done)
    assert took < TIMEOUTS.transfer
    assert first.error is not None
    assert first.error.kind is ErrorKind.CONNECTION
    assert "fresh destination blocks" in str(first.error)
    assert not first.drained
    (failed,) = c.of(Failed)
    assert failed.blocks == ((1,),)
    assert failed.fresh_blocks
    assert first.error.fresh_blocks
    assert c.counters["failover.fresh_blocks"] == 1
    c.first.release()
    rig.run(lambda: first.drained)
    again = c.agent.pull(offer, at(0, 2))
    rig.run(lambda: again.done)
    assert again.error is None
    assert c.content([2]) == p.content([3])
    settled(rig, p, c)


def test_a_write_that_may_still_land_is_not_written_twice(rig: Rig) -> None:
    """WRITE: the producer waits for the same proof, and a fence of its own covers both sides."""
    c = two(rig, "c")
    p = two(rig, "p", plan=FaultPlan(posts=[LEAVES_BYTES]), failover=Failover(faults=1))
    handle = push(p, c, "t", source=3)
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert p.counters["failover.fences"] == 1
    assert not p.second.trespasses
    assert c.content([1]) == p.content([3])
    settled(rig, p, c)


def test_what_an_ended_engine_leaves_unproven_still_counts(rig: Rig) -> None:
    """The engine that left a WRITE undrained has ended and keeps no track of it.  The second does
    not write those blocks all the same: both sides are asked for fresh ones, and the source is
    fenced too."""
    c = two(rig, "c", lease=20.0)
    no_fence = [Fault(kind=FaultKind.FAIL)] * 9
    plan = FaultPlan(posts=[LEAVES_BYTES], fences=no_fence)
    p = two(rig, "p", plan=plan, failover=Failover(faults=1))
    handle = push(p, c, "t", source=3)
    rig.run(lambda: bool(changes(p)))
    for path in tuple(p.first._paths):
        for attempt in tuple(path.undrained):
            path.settled(attempt)
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert handle.error.fresh_blocks
    rig.run(lambda: bool(p.counters.get("fences.begun")))
    p.first.release()
    rig.run(lambda: handle.drained)
    settled(rig, p, c)


def test_a_write_that_nothing_proves_asks_both_sides_for_fresh_blocks(rig: Rig) -> None:
    """Nothing proves to the producer that its first backend does not write any more: both sides
    are told, by a field, that only fresh blocks are missing.  Pushed into such blocks it goes over
    the second backend.  The consumer fences that first backend alone, which brings the old blocks
    back and costs no connection."""
    c = two(rig, "c", lease=20.0)
    no_fence = [Fault(kind=FaultKind.FAIL)] * 9
    plan = FaultPlan(posts=[LEAVES_BYTES], fences=no_fence)
    p = two(rig, "p", plan=plan, failover=Failover(faults=1))
    handle = push(p, c, "t", source=3)
    rig.run(lambda: handle.done and bool(c.of(Failed)))
    assert handle.error is not None
    assert handle.error.fresh_blocks
    (theirs,), (ours,) = p.of(Failed), c.of(Failed)
    assert theirs.fresh_blocks
    assert ours.fresh_blocks
    assert ours.blocks == ((1,),)
    assert not ours.drained
    assert "fresh destination blocks" in str(ours.error)
    again = push(p, c, "again", source=3, block=2)
    rig.run(lambda: again.done)
    assert again.error is None
    assert c.content([2]) == p.content([3])
    assert not p.second.trespasses
    rig.run(lambda: bool(c.of(Drained)), seconds=30.0)
    assert [e.drained_by for e in c.of(Drained)] == ["fence"]
    before = c.content([1])
    p.first.release()
    rig.pass_time(5.0)
    assert c.content([1]) == before
    assert not c.of(PeerDown)
    assert not p.of(PeerDown)
    rig.run(lambda: not c.tables["draining"])


def test_back_after_probes(rig: Rig) -> None:
    """The first works again: it is probed after a pause, with bytes that belong to no request, and
    used again after two good probes; new requests go over it."""
    p, c = two(rig, "p"), two(rig, "c", plan=FaultPlan(posts=[DIES] * 2))
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    before = c.content(list(range(16)))
    left = rig.clock.now()
    rig.run(lambda: len(changes(c)) == 2, seconds=20.0)
    assert changes(c)[1] == ("loopback", "first", False)
    assert rig.clock.now() - left >= POLICY.pause + POLICY.spacing
    assert c.content(list(range(16))) == before
    counters = c.counters
    assert (counters["failover.probes"], counters["failover.upgrades"]) == (2, 1)
    assert "failover.probes_failed" not in counters
    assert c.agent.snapshot().backends == ()
    posts = c.first.counters["post"]
    again = pull(p, c, "u", source=7, block=2)
    rig.run(lambda: again.done)
    assert again.error is None
    assert c.first.counters["post"] > posts
    assert c.content([2]) == p.content([7])
    settled(rig, p, c)


def test_probes_that_fail_bring_nothing_back(rig: Rig) -> None:
    """While its posts fail the first stays left, ever more rarely probed; requests are not
    concerned."""
    p, c = two(rig, "p"), two(rig, "c", plan=FaultPlan(posts=[DIES] * 1000))
    for i in range(30):
        handle = pull(p, c, f"t{i}", source=i % 8, block=8 + i % 8)
        rig.run(lambda handle=handle: handle.done)
        assert handle.error is None
        rig.pass_time(2.0)
    counters = c.counters
    assert 4 <= counters["failover.probes"] == counters["failover.probes_failed"] <= 12
    assert counters["failover.downgrades"] == 1


def test_in_flight_over_the_second_when_the_first_comes_back(rig: Rig) -> None:
    """Going back up nothing is thrown away: what is in flight over the second ends there, and is
    neither re-posted nor lost."""
    slow = FaultPlan(chances={FaultPoint.POST: {SLOW: 1.0}}, rng=random.Random(1))
    p, c = two(rig, "p"), two(rig, "c", plan=FaultPlan(posts=[DIES] * 2), second_plan=slow)
    handles = []
    for i in range(60):
        handles.append(pull(p, c, f"t{i}", source=i % 8, block=8 + i % 8))
        rig.pass_time(0.1)
    rig.run(lambda: all(h.done for h in handles))
    assert [h.error for h in handles] == [None] * 60
    assert [down for *_, down in changes(c)] == [True, False]
    assert c.counters["failover.reposted"] == 1
    assert not c.second.trespasses
    settled(rig, p, c)


def test_a_backend_that_cannot_connect(rig: Rig) -> None:
    """Also what never worked: the link comes up over the second."""
    plan = FaultPlan(connects=[Fault(kind=FaultKind.FAIL)] * 99)
    p, c = two(rig, "p"), two(rig, "c", plan=plan)
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert changes(c) == [("first", "loopback", True)]


def test_a_backend_that_never_connects(rig: Rig) -> None:
    """The connect deadline moves on, and the request still has its own."""
    plan = FaultPlan(connects=[Fault(kind=FaultKind.NEVER)] * 99)
    p, c = two(rig, "p", lease=20.0), two(rig, "c", plan=plan)
    handle = pull(p, c, "t")
    took = rig.run(lambda: handle.done)
    assert handle.error is None
    assert TIMEOUTS.connect <= took < TIMEOUTS.connect + TIMEOUTS.queue


def test_a_backend_that_does_not_come_back(rig: Rig) -> None:
    """It worked, broke, and does not connect again: with another one at hand it is waited for no
    longer than ``Failover.window``."""
    plan = FaultPlan(connects=[None, *[Fault(kind=FaultKind.NEVER)] * 99], posts=[DIES] * 9)
    policy = Failover(faults=9, window=0.5)
    p, c = two(rig, "p"), two(rig, "c", plan=plan, failover=policy)
    handle = pull(p, c, "t")
    took = rig.run(lambda: handle.done)
    assert handle.error is None
    assert 0.5 <= took < TIMEOUTS.connect
    assert "did not connect in time" in c.of(BackendChanged)[0].reason


def test_an_engine_that_ended_is_not_offered(rig: Rig) -> None:
    """A peer that meets us after one of our engines ended is told of the others only."""
    p, c = two(rig, "p"), two(rig, "c")
    p.first.close(0.0)
    p.first.inner.close(0.0)
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert changes(c) == []
    assert c.first.counters.get("connect", 0) == 0


def test_our_own_engine_is_closed(rig: Rig) -> None:
    """The engine on this side dies: what is posted to it is refused, and goes over the second."""
    p, c = two(rig, "p"), two(rig, "c")
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    c.first.close(0.0)
    again = pull(p, c, "u", source=6, block=2)
    rig.run(lambda: again.done)
    assert again.error is None
    assert changes(c) == [("first", "loopback", True)]
    rig.pass_time(30.0)
    assert len(changes(c)) == 1


def test_the_engine_of_the_peer_ends(rig: Rig) -> None:
    """One engine of the peer ends, its process does not: the link stays, over the second. What was
    granted to the reader is not taken from it."""
    p, c = two(rig, "p"), two(rig, "c")
    warm = pull(p, c, "warm")
    rig.run(lambda: warm.done)
    p.first.close(0.0)
    p.first.inner.close(0.0)
    handle = pull(p, c, "t", source=6, block=2)
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert changes(c) == [("first", "loopback", True)]
    rig.pass_time(10.0)
    assert not c.of(PeerDown)
    assert not p.of(PeerDown)
    again = pull(p, c, "u", source=7, block=3)
    rig.run(lambda: again.done)
    assert again.error is None


def test_a_dead_peer_is_dead_over_both(rig: Rig) -> None:
    """The process ends: the second backend does not reach it either, and every transfer has ended
    by its deadline."""
    p, c = two(rig, "p", lease=60.0), two(rig, "c")
    warm = pull(p, c, "warm")
    rig.run(lambda: warm.done)
    offer = p.agent.hold("t", at(0, 5))
    for engine in (p.first, p.first.inner, p.second):
        engine.close(0.0)
    p.agent._channel.close()
    rig.nodes.remove(p)
    handle = c.agent.pull(offer, at(0, 1))
    took = rig.run(lambda: handle.done)
    assert handle.error is not None
    assert handle.drained
    assert took <= TIMEOUTS.connect + TIMEOUTS.queue + TIMEOUTS.transfer


def test_a_peer_with_one_backend(rig: Rig) -> None:
    """Where the two sides have one backend in common there is nothing to move to."""
    p = rig.node("p", transport=First())
    c = two(rig, "c", plan=FaultPlan(posts=[DIES] * 1000))
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert changes(c) == []
    only = rig.node("q", transport=LoopbackTransport())
    other = pull(only, c, "u")
    rig.run(lambda: other.done)
    assert other.error is None


def test_a_peer_of_wire_version_1(rig: Rig) -> None:
    """An older peer knows nothing of failover and need not: the side that posts decides."""
    p = two(rig, "p", failover=None, wire_versions=(1, 1))
    c = two(rig, "c", plan=FaultPlan(posts=[DIES] * 1000))
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert c.content([1]) == p.content([5])
    assert changes(c) == [("first", "loopback", True)]
    settled(rig, p, c)


def test_the_order_is_the_policys(rig: Rig) -> None:
    """``Failover.order`` goes before the order in which the agent got its backends."""
    policy = Failover(order=("loopback", "first"))
    p, c = two(rig, "p"), two(rig, "c", failover=policy)
    handle = pull(p, c, "t")
    rig.run(lambda: handle.done)
    assert c.first.counters.get("post", 0) == 0


def test_a_lease_is_renewed_during_the_change(rig: Rig) -> None:
    """Connecting the second takes longer than the lease: renewals go on meanwhile, and the request
    is received."""
    p = two(rig, "p", lease=1.0)
    late = FaultPlan(connects=[Fault(kind=FaultKind.LATE, after=1.7)])
    c = two(rig, "c", plan=FaultPlan(posts=[DIES] * 2), second_plan=late)
    handle = pull(p, c, "t", source=3)
    took = rig.run(lambda: handle.done)
    assert took > 1.7
    assert handle.error is None
    assert p.counters["grants.given"] > 2


def test_the_consumer_fences_what_the_producer_may_use(rig: Rig) -> None:
    """A push is given up with bytes under way over the producer's second backend: the consumer's
    fence covers that one, though it reaches the producer over the first itself."""
    c = two(rig, "c", lease=20.0)
    stuck = FaultPlan(posts=[Fault(kind=FaultKind.LATE)])
    p = two(rig, "p", plan=FaultPlan(posts=[DIES] * 2), second_plan=stuck)
    handle = push(p, c, "t", source=3)
    rig.run(lambda: bool(p.second_faulty.held))
    assert changes(p) == [("first", "loopback", True)]
    assert changes(c) == []
    c.agent.abort("t")
    rig.run(lambda: bool(c.of(Failed)))
    rig.run(lambda: not c.tables["draining"], seconds=30.0)
    before = c.content([1])
    p.second_faulty.release()
    rig.run(lambda: handle.done)
    rig.pass_time(5.0)
    assert c.content([1]) == before


@pytest.mark.parametrize(
    ("backends", "order", "named"),
    [
        (1, (), "several backends"),
        (2, ("first", "nixl"), "nixl"),
    ],
)
def test_wrong_orders_are_refused(backends: int, order: tuple[str, ...], named: str) -> None:
    """Before anything is bound: the error names the backends that there are."""
    made: list[Transport] = [First(), LoopbackTransport()][:backends]
    with pytest.raises(ConfigError, match=named) as caught:
        Agent(made, config=AgentConfig(failover=Failover(order=order), keeper=None))
    assert "first" in str(caught.value)
    assert all(t.closed for t in made)
