"""Peers that close, die, restart and come back: nobody waits for them longer than needed."""

from __future__ import annotations

import itertools

import attrs
import pytest
from agent_rig import Node, Rig, at

from kvxfer.core.events import Drained, Expired, Failed, PeerDown, PeerUp, Received, Sent
from kvxfer.errors import ErrorKind
from kvxfer.testing.faults import Fault, FaultKind


def die(rig: Rig, node: Node) -> None:
    """Gone without a word; its engine goes with it."""
    rig.nodes.remove(node)
    node.agent._channel.close()
    node.transport.close(0.0)


def test_engine_that_sees_its_peer_end(rig: Rig) -> None:
    """Promise 7: what the engine knows fails the transfer at once, long before its deadline."""
    p = rig.node("p", lease=60.0)
    c = rig.node("c", posts=[Fault(kind=FaultKind.NEVER)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    die(rig, p)
    took = rig.run(lambda: handle.done)
    assert took < 0.5
    assert c.of(Failed)[0].kind is ErrorKind.PEER_LOST
    assert len(c.of(PeerDown)) == 1


def test_engine_that_sees_an_idle_peer_end(rig: Rig) -> None:
    """PeerDown comes though nothing is in flight, and once."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.connect([p.agent.endpoint])
    rig.run(lambda: bool(p.of(PeerUp)) and bool(c.of(PeerUp)))
    rig.pass_time(0.2)
    die(rig, p)
    assert rig.run(lambda: bool(c.of(PeerDown))) < 0.5
    rig.pass_time(5)
    assert len(c.of(PeerDown)) == 1
    assert c.agent.snapshot().peers == ()


def test_dead_reader_frees_what_it_was_granted(rig: Rig) -> None:
    """A reader that is proven to have ended reads no more: another one's release suffices."""
    p, quick = rig.node("p", lease=60.0), rig.node("quick")
    slow = rig.node("slow", posts=[Fault(kind=FaultKind.NEVER)])
    # The producer connects as well, as with a push: only then can its engine see the reader.
    p.agent.connect([slow.agent.endpoint])
    offer = p.agent.hold("t", at(0, 5))
    slow.agent.pull(offer, at(0, 1))
    rig.run(lambda: slow.tables["in_flight_pieces"] > 0)
    quick.agent.pull(offer, at(0, 1))
    rig.run(lambda: bool(quick.of(Received)))
    rig.pass_time(1)
    assert not p.of(Sent)
    die(rig, slow)
    assert rig.run(lambda: bool(p.of(Sent))) < 1.0


def test_writer_that_dies(rig: Rig) -> None:
    """An accept fails early with its producer, and its blocks come back by fence."""
    p = rig.node("p", posts=[Fault(kind=FaultKind.NEVER)])
    c = rig.node("c")
    handle = c.agent.accept("w", at(0, 3), deadline=60.0)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.run(lambda: p.tables["in_flight_pieces"] > 0)
    die(rig, p)
    assert rig.run(lambda: handle.done) < 0.5
    assert c.of(Failed)[0].kind is ErrorKind.PEER_LOST
    rig.run(lambda: c.of(Failed)[0].drained or bool(c.of(Drained)))
    rig.pass_time(2)
    assert not any(c.tables.values())


def test_good_bye_is_heard_before_the_engine_ends(rig: Rig) -> None:
    """The peer's engine is seen to end first; its good-bye, on its way, still counts."""
    from interception import intercept

    from kvxfer.core import wire

    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    intercept(c, wire.Sealed, wire.Confirm)
    bye = intercept(c, wire.Bye)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(c.of(Received)))
    rig.nodes.remove(c)
    c.agent.close(0.0)
    rig.pass_time(0.1)
    assert p.counters["peers.ended"] == 1
    assert not p.of(Failed)
    bye.deliver()
    rig.run(lambda: bool(p.of(Sent)))
    assert not p.of(Failed)


def restarted(rig: Rig, node: Node, name: str) -> Node:
    """Another life at the same address."""
    die(rig, node)
    return at_address(rig, name, node.agent.address)


def at_address(rig: Rig, name: str, address: str) -> Node:
    channel = rig.network.channel
    rig.network.channel = lambda _=None: channel(address)  # type: ignore[method-assign]
    try:
        return rig.node(name)
    finally:
        rig.network.channel = channel  # type: ignore[method-assign]


def test_producer_that_restarts_at_its_address(rig: Rig) -> None:
    """Report O29: what the old life held is refused as stale, the new life's offers are served."""
    p, c = rig.node("p"), rig.node("c")
    old = p.agent.hold("t", at(0, 5))
    c.agent.pull(p.agent.hold("warm", at(0, 6)), at(0, 2))
    rig.run(lambda: bool(p.of(Sent, "warm")))
    q = restarted(rig, p, "q")
    stale = c.agent.pull(old, at(0, 1))
    rig.run(lambda: stale.done)
    assert c.of(Failed)[0].kind in (ErrorKind.STALE, ErrorKind.PEER_LOST)
    fresh = c.agent.pull(q.agent.hold("t", at(0, 7)), at(0, 1))
    rig.run(lambda: fresh.done)
    assert c.content([1]) == q.content([7])
    rig.pass_time(15)
    assert not any(c.tables.values())
    assert c.agent.snapshot().peers == (q.agent.incarnation,)


def test_producer_that_restarts_under_a_pull(rig: Rig) -> None:
    """A half-finished pull ends soon, drained, and its blocks can be used for the new life."""
    p = rig.node("p", lease=60.0)
    c = rig.node("c", posts=[Fault(kind=FaultKind.NEVER)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    q = restarted(rig, p, "q")
    assert rig.run(lambda: handle.done) < 3.0
    rig.run(lambda: handle.drained)
    again = c.agent.pull(q.agent.hold("t", at(0, 7)), at(0, 1))
    rig.run(lambda: again.done)
    assert c.content([1]) == q.content([7])


def test_consumer_that_restarts_reads_what_is_still_held(rig: Rig) -> None:
    """Report O53: the hold is not consumed; the consumer's new life is another reader of it."""
    p = rig.node("p", lease=20.0)
    c = rig.node("c", posts=[Fault(kind=FaultKind.NEVER)])
    offer = p.agent.hold("t", at(0, 5))
    c.agent.pull(offer, at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    d = restarted(rig, c, "d")
    d.agent.pull(offer, at(0, 3))
    rig.run(lambda: bool(d.of(Received)))
    assert d.content([3]) == p.content([5])
    rig.run(lambda: bool(p.of(Sent)))
    rig.pass_time(10)
    assert not any(p.tables.values())


def test_consumer_that_restarts_under_a_push(rig: Rig) -> None:
    """The push fails early; the same id can be pushed to the new life."""
    p = rig.node("p", posts=[Fault(kind=FaultKind.NEVER)])
    c = rig.node("c")
    c.agent.accept("w", at(0, 3))
    push = p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: p.tables["in_flight_pieces"] > 0)
    d = restarted(rig, c, "d")
    assert rig.run(lambda: push.done) < 3.0
    rig.run(lambda: push.drained)
    d.agent.accept("w", at(0, 4))
    p.agent.push("w", at(0, 7), to=d.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(p.of(Sent)))
    assert d.content([4]) == p.content([7])


def cut(rig: Rig, *nodes: Node) -> list[object]:
    """Nothing gets through between these until it is let through again."""
    from interception import Intercepted

    return [Intercepted(node, lambda body: True) for node in nodes]


@pytest.mark.parametrize("op", ["read", "write"])
def test_half_finished_transfer_survives_a_short_cut(rig: Rig, op: str) -> None:
    """The control network is gone for a while, shorter than the lease: all completes afterwards."""
    slow = [Fault(kind=FaultKind.LATE, after=0.5)]
    p = rig.node("p", lease=6.0, posts=slow if op == "write" else [])
    c = rig.node("c", posts=slow if op == "read" else [])
    if op == "read":
        c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    else:
        c.agent.accept("t", at(0, 1))
        p.agent.push("t", at(0, 5), to=c.agent.endpoint)
        p.agent.seal("t")
    rig.run(lambda: p.tables["in_flight_pieces"] + c.tables["in_flight_pieces"] > 0)
    walls = cut(rig, p, c)
    for channel, node in ((p.agent._channel, p), (c.agent._channel, c)):
        channel.lost.extend(link.mailbox.route for link in node.agent._engine.links)  # type: ignore[attr-defined]
    rig.pass_time(1.5)
    assert not p.of(Sent)
    for wall in walls:
        wall.active = False  # type: ignore[attr-defined]
    rig.run(lambda: bool(p.of(Sent)) and bool(c.of(Received)))
    assert c.content([1]) == p.content([5])
    assert not p.of(PeerDown)
    assert not c.of(PeerDown)


def test_hellos_to_nobody_back_off(rig: Rig) -> None:
    """Promise 7: an address where nobody answers is dialled less and less often, and given up."""
    from interception import sniff

    from kvxfer.core import wire
    from kvxfer.errors import HandshakeError

    c = rig.node("c")
    frames = sniff(c)
    times: list[float] = []
    c.agent.connect(["10.0.0.99:1"])
    before = rig.clock.now()
    while rig.clock.now() < before + 10.0:
        rig.step()
        if len(frames) > len(times):
            times.extend([rig.clock.now() - before] * (len(frames) - len(times)))
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert 4 <= len(times) <= 12
    assert pauses == sorted(pauses)
    assert max(times) <= 2.0
    assert not any(c.tables.values())
    _ = (wire, HandshakeError)


def test_eager_connect_to_all_ranks(rig: Rig) -> None:
    """Report O32: everybody is met before anybody is needed; the first pull only asks and reads."""
    from test_ranks import instance

    _, ps = instance(rig, "p", 4)
    _, (c,) = instance(rig, "c", 1)
    c.agent.connect([node.agent.endpoint for node in ps])
    rig.run(lambda: len(c.of(PeerUp)) == 4)
    rig.pass_time(0.5)
    hellos = c.counters["received.hello"]
    from kvxfer.agent import SchedulerAgent

    prefill = SchedulerAgent([node.agent.info for node in ps])
    offer = prefill.hold("t", at(0, 5))
    orders = prefill.take_orders()
    for node in ps:
        node.agent.execute(orders)
    c.agent.pull(offer, at(0, 1))
    took = rig.run(lambda: all(node.of(Sent) for node in ps))
    assert took < 0.2  # of which up to 0.1 until the next round
    assert c.counters["received.hello"] == hellos
    assert {e.peer for e in c.of(PeerUp)} == {node.agent.incarnation for node in ps}


def test_offers_of_several_lives_are_told_apart(rig: Rig) -> None:
    """Promise 10: equal ids and epochs in three lives at one address: each reads its own."""
    c = rig.node("c")
    p = rig.node("p0")
    offers = []
    for n in range(3):
        offers.append(p.agent.hold("t", at(0, 5)))
        handle = c.agent.pull(offers[-1], at(0, n))
        rig.run(lambda h=handle: h.done)
        assert c.content([n]) == p.content([5])
        if n < 2:
            p = restarted(rig, p, f"p{n + 1}")
    assert [o.epoch for o in offers] == [1, 1, 1]
    rig.pass_time(1)
    old = c.agent.pull(attrs.evolve(offers[0], transfer_id="t"), at(0, 9))
    rig.run(lambda: old.done)
    assert old.error is not None
    assert old.error.kind is ErrorKind.STALE


def test_nothing_is_sent_to_a_life_that_has_ended(rig: Rig) -> None:
    """A decline for a peer that said good-bye is dropped and counted, not repeated for a lease."""
    p, c = rig.node("p", lease=60.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.connect([p.agent.endpoint])
    rig.run(lambda: bool(c.of(PeerUp)))
    rig.pass_time(0.2)
    rig.nodes.remove(p)
    p.agent.close(0.0)
    rig.run(lambda: bool(c.of(PeerDown)))
    c.agent.decline(offer)
    rig.pass_time(0.1)
    assert c.tables["unconfirmed"] == 0
    assert c.counters["messages.undeliverable"] == 1


def test_expired_hold_of_a_reader_that_died_without_proof(rig: Rig) -> None:
    """Promise 5: no proof that the reader ended: its hold is kept to the end of its lease."""
    p = rig.node("p", lease=3.0, lease_margin=0.5)
    c = rig.node("c", posts=[Fault(kind=FaultKind.NEVER)])
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    granted = rig.clock.now()
    rig.nodes.remove(c)
    c.agent._channel.close()  # its engine lives, as far as anybody can tell
    rig.run(lambda: bool(p.of(Expired)))
    assert rig.clock.now() - granted >= 3.0


def test_a_peer_that_dies_while_its_connection_is_made_anew(rig: Rig) -> None:
    """Whoever was told that a peer came is told that it went, also when it goes while a connection
    to it that had failed is being made again."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.connect([p.agent.endpoint])
    rig.run(lambda: bool(c.of(PeerUp)))
    rig.nodes.remove(p)
    p.agent._channel.close()  # its engine tells nobody
    link = c.agent._engine.links.of(p.agent.incarnation)
    assert link is not None
    link._renew(rig.clock.now())
    rig.run(lambda: bool(c.of(PeerDown)), seconds=60)
    rig.pass_time(10)
    assert len(c.of(PeerUp)) == len(c.of(PeerDown)) == 1
    assert c.agent.snapshot().peers == ()
