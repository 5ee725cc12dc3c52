"""Leases and liveness with keepers, in virtual time: the shipped code but for the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from agent_rig import at
from keeper_rig import KEEPER, LEASE, LONG, MARGIN, KeeperRig, KeptNode

from kvxfer.core import wire
from kvxfer.core.channel import Inbound
from kvxfer.core.events import Expired, Failed, PeerDown, Received, Sent
from kvxfer.core.observations import KeeperDied, KeeperStarted, Observation
from kvxfer.errors import ErrorKind
from kvxfer.testing.faults import Fault, FaultKind
from kvxfer.testing.keeper import StopAt

SLOW = [Fault(kind=FaultKind.LATE, after=2.6 * LEASE)]
"""A read that takes longer than two leases."""


@pytest.fixture
def rig() -> Iterator[KeeperRig]:
    rig = KeeperRig()
    yield rig
    for node in rig.kept:
        node.agent.close(0.0)


def begin(rig: KeeperRig, p: KeptNode, c: KeptNode) -> None:
    """A pull whose bytes are under way."""
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)


@pytest.mark.parametrize("held", ["producer", "consumer", "both"])
def test_lease_survives_a_held_gil(rig: KeeperRig, held: str) -> None:
    """A GIL held for more than twice the lease, on either side or both, ends no lease."""
    p, c = rig.pair(posts=SLOW)
    begin(rig, p, c)
    rig.pass_time(0.05)
    for node in (p, c):
        if held in ("both", {"p": "producer", "c": "consumer"}[node.name]):
            node.hold_gil(2.3 * LEASE)
    rig.run(lambda: bool(c.of(Received)))
    assert c.content([1]) == p.content([5])
    rig.run(lambda: bool(p.of(Sent)))
    assert not p.of(Expired)


@pytest.mark.parametrize("held", ["p", "c"])
def test_without_a_keeper_it_does_not(rig: KeeperRig, held: str) -> None:
    """What it is for: without a keeper the same transfer fails, with EXPIRED."""
    p, c = rig.pair(posts=SLOW, keeper=None)
    begin(rig, p, c)
    (p if held == "p" else c).hold_gil(2.3 * LEASE)
    rig.run(lambda: bool(c.of(Failed)))
    assert c.of(Failed)[0].kind is ErrorKind.EXPIRED


def test_first_grant_while_the_gil_is_held(rig: KeeperRig) -> None:
    """Between peers that know each other a producer's keeper gives the first grant as well."""
    p, c = rig.pair()
    offer = p.agent.hold("t", at(0, 5))
    rig.pass_time(0.1)
    p.hold_gil(2 * LEASE)
    c.agent.pull(offer, at(0, 1))
    took = rig.run(lambda: bool(c.of(Received)))
    assert took < 1.0
    assert c.content([1]) == p.content([5])
    rig.run(lambda: bool(p.of(Sent)))


def test_waiting_request_outlives_a_held_gil(rig: KeeperRig) -> None:
    """A renewed offer that waits for its pull is kept while the reader's GIL is held."""
    p, c = rig.pair()
    offer = p.agent.hold("t", at(0, 5))
    rig.pass_time(LEASE / 2)
    c.agent.renew([offer])
    rig.pass_time(0.3)
    c.hold_gil(2 * LEASE)
    rig.pass_time(2 * LEASE + 0.1)
    assert not p.of(Expired)
    c.agent.pull(offer, at(0, 1))
    rig.run(lambda: bool(c.of(Received)))
    rig.run(lambda: bool(p.of(Sent)))


def test_a_renewed_offer_that_is_forgotten_ends(rig: KeeperRig) -> None:
    """Promise 4: nobody pulls what was renewed once: its bound ends, and so does the hold."""
    p, c = rig.pair()
    c.agent.renew([p.agent.hold("t", at(0, 5))])
    took = rig.run(lambda: bool(p.of(Expired)), seconds=80)
    assert LONG.transfer <= took <= LONG.transfer + LEASE + MARGIN + 0.2
    assert not c.keeping._watched


def test_a_declined_offer_is_watched_no_more(rig: KeeperRig) -> None:
    """Declining ends the watch with the hold."""
    p, c = rig.pair()
    offer = p.agent.hold("t", at(0, 5))
    c.agent.renew([offer])
    rig.pass_time(0.3)
    c.agent.decline(offer)
    rig.run(lambda: p.tables["holds"] == 0, seconds=1)
    rig.pass_time(0.1)
    assert not c.keeping._watched
    assert len(c.kept.keeper.watches) == 0  # type: ignore[union-attr]
    assert len(p.kept.keeper.holds) == 0  # type: ignore[union-attr]


def test_a_stopped_producer_holds_until_the_deadline(rig: KeeperRig) -> None:
    """A worker under SIGSTOP keeps its leases; transfers that need it end by their deadline."""
    p, c = rig.pair(posts=[Fault(kind=FaultKind.NEVER)])
    begin(rig, p, c)
    p.hold_gil(1000)
    took = rig.run(lambda: bool(c.of(Failed)), seconds=60)
    assert took <= LONG.transfer + 0.1
    assert c.of(Failed)[0].kind is ErrorKind.TIMEOUT
    assert not c.of(PeerDown)


# ---- agreement --------------------------------------------------------------------------------


def test_abort_keeps_what_the_keeper_granted(rig: KeeperRig) -> None:
    """An aborted hold is not free before the end of a grant that only the keeper knew of."""
    p, c = rig.pair(posts=[Fault(kind=FaultKind.LATE, after=2 * LEASE)], abort_lease=0.2)
    begin(rig, p, c)
    p.hold_gil(LEASE * 1.5)
    rig.pass_time(LEASE * 1.5)
    c.hold_gil(LEASE * 0.2)
    p.agent.abort("t")
    rig.run(lambda: bool(c.of(Failed) or c.of(Received)))
    rig.run(lambda: p.tables["holds"] == 0)


def test_expiry_waits_for_the_keepers_word(rig: KeeperRig) -> None:
    """Nobody reads: the hold ends at its lease and margin, after one question to the keeper."""
    p, _ = rig.pair()
    p.agent.hold("t", at(0, 5))
    took = rig.run(lambda: bool(p.of(Expired)))
    assert LEASE + MARGIN <= took <= LEASE + MARGIN + 0.2
    assert p.counters["keeper.asked"] == 1
    assert len(p.kept.keeper.holds) == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("where", list(StopAt))
def test_a_stopped_keeper_delays_and_does_not_lie(rig: KeeperRig, where: StopAt) -> None:
    """A keeper stopped at any instruction neither frees early nor holds for ever.

    It is killed after ``hang_timeout``; what it may have promised lasts for one more lease.
    """
    p, c = rig.pair(posts=[Fault(kind=FaultKind.LATE, after=1.0 * LEASE)])
    begin(rig, p, c)
    p.hold_gil(0.6 * LEASE)  # so that the keeper grants
    p.kept.stop(where)
    took = rig.run(lambda: p.tables["holds"] == 0, seconds=60)
    assert took <= LEASE + KEEPER.hang_timeout + LEASE + MARGIN + 1.5
    rig.run(lambda: bool(c.of(Received) or c.of(Failed)))
    assert p.counters["keeper.hung"] >= 1


@pytest.mark.parametrize("where", list(StopAt))
def test_a_keeper_that_goes_on_grants_nothing_stale(rig: KeeperRig, where: StopAt) -> None:
    """After SIGCONT it hears the orders first: what was closed meanwhile is not granted."""
    p, c = rig.pair(posts=[Fault(kind=FaultKind.NEVER)])
    begin(rig, p, c)
    p.kept.stop(where)
    p.agent.abort("t")
    rig.pass_time(0.4)
    before = p.counters.get("keeper.grants.given", 0)
    p.kept.go_on()
    rig.run(lambda: p.tables["holds"] == 0, seconds=20)
    rig.pass_time(1.1)
    assert p.counters.get("keeper.grants.given", 0) - before <= 1
    assert not p.counters.get("keeper.hung")


@pytest.mark.parametrize("when", [0.0, 0.3, 0.9])
def test_what_a_dead_keeper_granted_is_respected(rig: KeeperRig, when: float) -> None:
    """The producer frees nothing before the last moment that its dead keeper can have promised."""
    p, c = rig.pair(posts=[Fault(kind=FaultKind.LATE, after=1.8 * LEASE)])
    begin(rig, p, c)
    p.hold_gil(LEASE * 1.2)
    rig.pass_time(LEASE * when)
    p.kept.kill()
    rig.run(lambda: p.tables["holds"] == 0, seconds=30)
    assert p.counters["keeper.died"] == 1
    rig.run(lambda: bool(c.of(Received) or c.of(Failed)))


def test_keeper_death_is_named_and_repaired(rig: KeeperRig) -> None:
    """Behaviour 20: a dead keeper is named by ``health``, with the signal that ended it, and
    replaced; the next one knows all holds."""
    p, c = rig.pair(posts=SLOW)
    begin(rig, p, c)
    assert p.agent.health().ready
    seen: list[Observation] = []
    p.agent.add_observer(seen.append)
    p.kept.kill()
    rig.pass_time(0.05)
    (died,) = (x for x in seen if isinstance(x, KeeperDied))
    assert "signal 9" in died.reason
    health = p.agent.health()
    assert not health.ready
    assert any("keeper was killed by signal 9" in reason for reason in health.reasons)
    rig.run(lambda: p.agent.health().ready, seconds=2)
    assert KeeperStarted() in seen
    rig.pass_time(0.2)
    p.hold_gil(2.1 * LEASE)
    rig.run(lambda: bool(c.of(Received)))
    rig.run(lambda: bool(p.of(Sent)))
    assert p.counters["keeper.died"] == 1


def test_the_readers_keeper_may_die_as_well(rig: KeeperRig) -> None:
    """The agent renews by itself when its keeper does not."""
    p, c = rig.pair(posts=SLOW)
    begin(rig, p, c)
    for _ in range(4):
        c.kept.kill()
        rig.pass_time(0.5 * LEASE)
    rig.run(lambda: bool(c.of(Received)))


@pytest.mark.parametrize("side", ["p", "c"])
def test_a_peer_without_a_keeper(rig: KeeperRig, side: str) -> None:
    """Where only one side has one, its keeper asks the other's agent, or is not asked."""
    p = rig.make("p", timeouts=LONG, keeper=None if side == "p" else KEEPER)
    c = rig.make("c", timeouts=LONG, posts=SLOW, keeper=None if side == "c" else KEEPER)
    rig.meet(p, c)
    begin(rig, p, c)
    if side == "p":
        c.hold_gil(2.2 * LEASE)  # its keeper renews with the producer's agent
    rig.run(lambda: bool(c.of(Received)))
    rig.run(lambda: bool(p.of(Sent)))


# ---- liveness ---------------------------------------------------------------------------------


def test_peer_down_without_any_traffic(rig: KeeperRig) -> None:
    """A peer that vanished is down within ``peer_timeout``, although nobody sends anything."""
    p, c = rig.pair()
    p.die()
    took = rig.run(lambda: bool(c.of(PeerDown)), seconds=20)
    assert took <= KEEPER.peer_timeout + 2 * KEEPER.beat_interval
    assert "keeper was not heard of" in c.of(PeerDown)[0].reason


def test_a_held_gil_is_not_death(rig: KeeperRig) -> None:
    """A peer whose GIL is held for long is not down, even if its connection drops meanwhile."""
    p, c = rig.pair()
    p.hold_gil(8 * KEEPER.peer_timeout)
    rig.pass_time(KEEPER.peer_timeout)
    for link in c.agent._engine.links:
        link.suspect(rig.clock.now())
    rig.pass_time(6 * KEEPER.peer_timeout)
    assert not c.of(PeerDown)
    assert c.counters["peers.busy"] >= 1
    rig.pass_time(3 * KEEPER.peer_timeout)
    assert not c.of(PeerDown)


def test_a_dead_keeper_is_not_a_dead_peer(rig: KeeperRig) -> None:
    """Only the keeper died: the peer says so itself, and nothing fails."""
    p, c = rig.pair()
    for _ in range(3):
        p.kept.kill()
        rig.pass_time(KEEPER.peer_timeout)
    assert not c.of(PeerDown)
    assert not p.of(PeerDown)


def test_own_stall_accuses_nobody(rig: KeeperRig) -> None:
    """A keeper that was stopped itself gives its peers the time to be heard again."""
    p, c = rig.pair(keeper=KEEPER.__class__(beat_interval=0.5, peer_timeout=4.0, hang_timeout=100))
    c.kept.stop()
    rig.pass_time(3 * KEEPER.peer_timeout)
    c.kept.go_on()
    rig.pass_time(2 * KEEPER.peer_timeout)
    assert not c.of(PeerDown)
    assert not c.counters.get("peers.suspected")
    assert not p.of(PeerDown)


def test_patience_ends(rig: KeeperRig) -> None:
    """A keeper does not speak for ever for an agent that does not speak to it."""
    config = KEEPER.__class__(beat_interval=0.5, peer_timeout=4.0, hang_timeout=1.0, patience=20.0)
    p, c = rig.pair(keeper=config)
    p.hold_gil(1000)
    took = rig.run(lambda: bool(c.of(PeerDown)), seconds=60)
    assert 20.0 <= took <= 20.0 + 2 * config.peer_timeout


# ---- costs ------------------------------------------------------------------------------------


def calls_of(action: Callable[[], object]) -> int:
    """How many Python and C functions ``action`` calls: the same on a busy machine."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def costs(held: int) -> tuple[float, float]:
    """Calls per idle round, and per renewal by the keeper, with that many other holds."""
    rig = KeeperRig()
    try:
        p, c = rig.pair(posts=[Fault(kind=FaultKind.NEVER)] * 10, lease=1000.0)
        for number in range(held):
            p.agent.hold(f"h{number}", at(0, 5))
        for number in range(10):
            c.agent.pull(p.agent.hold(f"t{number}", at(0, 5)), at(0, number))
        rig.run(lambda: c.tables["in_flight_pieces"] == 20)
        rig.run(lambda: len(p.kept.keeper.holds) == held + 10, seconds=20)  # type: ignore[union-attr]
        rig.pass_time(0.5)
        rounds = calls_of(lambda: [p.agent.poll() for _ in range(200)]) / 200
        keeper = p.kept.keeper
        assert keeper is not None
        ref = wire.Ref("t3", p.agent.incarnation, p.agent._engine.producer.leases.get("t3").epoch)  # type: ignore[union-attr]
        frame = wire.encode(c.agent.incarnation, wire.Open(2**62, [ref]))

        def renew() -> None:
            for _ in range(50):
                keeper.turn([Inbound("nowhere", frame)], [], rig.clock.now())

        return rounds, calls_of(renew) / 50
    finally:
        for node in rig.kept:
            node.agent.close(0.0)


def test_what_is_held_costs_nothing() -> None:
    """Rounds without renewals, and one renewal, cost the same with 5,000 holds as with none."""
    few, many = costs(0), costs(5000)
    assert many[0] <= 1.2 * few[0]
    assert many[1] <= 1.2 * few[1]
