"""Promise 6 beyond the end of a link: what matters still arrives, whoever had dialled."""

from __future__ import annotations

import pytest
from agent_rig import Node, Rig, at
from interception import intercept, mails, sniff

from kvxfer.core import wire
from kvxfer.core.events import Drained, Failed, PeerUp, Received, Sent
from kvxfer.errors import ErrorKind, PeerLostError


def met(rig: Rig, dialler: Node, other: Node) -> None:
    """They know each other, over a connection that ``dialler`` made."""
    dialler.agent.connect([other.agent.endpoint])
    rig.run(lambda: bool(dialler.of(PeerUp)) and bool(other.of(PeerUp)))
    rig.pass_time(0.2)


def give_up(node: Node, peer: Node) -> None:
    """``node``'s link to ``peer`` fails, as when its circuit breaker opens."""
    link = node.agent._engine.links.of(peer.agent.incarnation)
    assert link is not None
    link.fail(PeerLostError("too many faults"), node.agent.clock.now())


@pytest.mark.parametrize("both", [False, True], ids=["one side", "both sides"])
@pytest.mark.parametrize("reader_dials", [False, True], ids=["inbound", "dialled"])
def test_release_of_a_reader_whose_link_fails(rig: Rig, reader_dials: bool, both: bool) -> None:
    """It was lost once; its repeats must not end with the link: the hold would wait for its end."""
    p, c = rig.node("p", lease=60.0), rig.node("c")
    met(rig, *((c, p) if reader_dials else (p, c)))
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    lost = intercept(c, wire.Release)
    rig.run(lambda: bool(c.of(Received)))
    give_up(c, p)
    if both:
        give_up(p, c)
    assert lost.frames
    assert not p.of(Sent)
    lost.active = False
    assert rig.run(lambda: bool(p.of(Sent))) < 2.0
    rig.pass_time(30)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


@pytest.mark.parametrize("consumer_dials", [False, True], ids=["inbound", "dialled"])
def test_answer_to_a_producer_whose_link_fails(rig: Rig, consumer_dials: bool) -> None:
    """What was received is Sent, although the consumer's link ended before its answer arrived."""
    p, c = rig.node("p"), rig.node("c")
    met(rig, *((c, p) if consumer_dials else (p, c)))
    c.agent.accept("w", at(0, 3))
    lost = intercept(c, wire.Sealed)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(c.of(Received)))
    give_up(c, p)
    assert lost.frames
    lost.active = False
    assert rig.run(lambda: bool(p.of(Sent))) < 2.0


@pytest.mark.parametrize("consumer_dials", [False, True], ids=["inbound", "dialled"])
def test_answer_that_is_made_after_the_end_of_the_link(rig: Rig, consumer_dials: bool) -> None:
    """Found by the simulator: it needs wire version 2, which a new connection has not agreed on."""
    p, c = rig.node("p"), rig.node("c")
    met(rig, *((c, p) if consumer_dials else (p, c)))
    c.agent.accept("w", at(0, 3))
    rig.run(lambda: bool(c.agent._engine.consumer.accepts))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    (accepting,) = c.agent._engine.consumer.accepts.values()
    rig.run(lambda: bool(c.of(Received)))
    give_up(c, p)
    sent = sniff(c)
    accepting._tell_sealed(None, c.agent.clock.now())
    (answer,) = mails(sent, wire.Sealed)
    assert answer.ok
    rig.pass_time(20)
    assert not any(c.tables.values())


def test_cancel_for_a_writer_whose_link_failed(rig: Rig) -> None:
    """The consumer gives up with its link: the writer hears of it, long before its deadline."""
    p, c = rig.node("p"), rig.node("c")
    met(rig, p, c)
    c.agent.accept("w", at(0, 3))
    sent = sniff(p)
    handle = p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.run(lambda: bool(mails(sent, wire.Ask)))
    rig.pass_time(0.2)
    give_up(c, p)
    assert rig.run(lambda: handle.done) < 1.0
    assert p.of(Failed)[0].kind is ErrorKind.PEER_LOST
    rig.pass_time(20)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_grant_to_write_ends_with_its_link(rig: Rig) -> None:
    """Its blocks may be another's once the link has ended: it is not sent any more."""
    p, c = rig.node("p"), rig.node("c")
    met(rig, p, c)
    lost = intercept(c, wire.Accept)
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.run(lambda: bool(lost.frames))
    give_up(c, p)
    lost.frames.clear()
    rig.pass_time(10)
    assert not lost.frames
    assert len(p.of(Failed)) == len(c.of(Failed)) == 1


def test_late_grant_from_before_a_fence(rig: Rig) -> None:
    """Found by the simulator. A grant is overtaken by the fence that ends it, and by the hello of
    the next connection: its blocks are free by then, and nothing is written into them."""
    p, c = rig.node("p"), rig.node("c")
    met(rig, p, c)
    late = intercept(c, wire.Accept)
    cancelled = intercept(c, wire.Cancel)
    c.agent.accept("w", at(0, 3))
    push = p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.run(lambda: bool(late.frames))
    give_up(c, p)
    rig.run(lambda: bool(c.of(Drained)))
    assert c.of(Drained)[0].drained_by == "fence"
    assert cancelled.frames
    rig.run(lambda: p.counters["peers.reconnected"] > 0)
    rig.pass_time(0.2)
    assert not push.done
    before = c.content([3])
    late.deliver()
    rig.run(lambda: push.done)
    assert c.content([3]) == before
    assert p.counters["accepts.other_session"] > 0


def test_mail_for_an_earlier_life_is_given_up(rig: Rig) -> None:
    """Another incarnation answers where the mail goes: it is told nothing, and nothing is kept."""
    p, c = rig.node("p", lease=60.0), rig.node("c")
    met(rig, p, c)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    intercept(c, wire.Release)
    rig.run(lambda: bool(c.of(Received)))
    give_up(c, p)
    address = p.agent.address
    rig.nodes.remove(p)
    p.agent._channel.close()
    channel = rig.network.channel
    rig.network.channel = lambda _=None: channel(address)  # type: ignore[method-assign]
    q = rig.node("q")
    who = q.agent._channel
    who.send(_route_of(c), wire.encode(q.agent.incarnation, wire.Who()))
    rig.pass_time(1.0)
    assert c.tables["unconfirmed"] == 0
    assert c.counters["messages.undeliverable"] == 1


def _route_of(node: Node) -> object:
    """The one route that it has dialled."""
    (route,) = node.agent._channel.routes
    return route
