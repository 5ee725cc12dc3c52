"""Both sides say the same of one transfer: seals and releases are answered, good-byes included."""

from __future__ import annotations

import pytest
from agent_rig import Node, Rig, at
from interception import intercept

from kvxfer.core import wire
from kvxfer.core.events import Expired, Failed, PeerDown, Received, Sent
from kvxfer.errors import ErrorKind, PeerLostError

# ---- good-byes ---------------------------------------------------------------------------------


def push(p: Node, c: Node, transfer_id: str = "w") -> None:
    p.agent.push(transfer_id, at(0, 7), to=c.agent.endpoint)
    p.agent.seal(transfer_id, b"token")


def test_good_bye_that_overtakes_the_answer(rig: Rig) -> None:
    """Promise 4: the consumer received and closed; its answers are late, its good-bye is not."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    late = intercept(c, wire.Sealed, wire.Confirm)
    push(p, c)
    rig.run(lambda: bool(c.of(Received)))
    assert not p.of(Sent)
    rig.nodes.remove(c)
    c.agent.close(0.0)
    rig.run(lambda: bool(p.of(Sent) or p.of(Failed)))
    assert p.of(Sent)
    assert not p.of(Failed)
    late.deliver()
    rig.pass_time(2)
    assert len(p.of(Sent)) == 1
    assert len(p.of(PeerDown)) == 1
    assert not any(p.tables.values())


def test_good_bye_carries_the_release(rig: Rig) -> None:
    """Promise 6: a reader that closes with its release unconfirmed has released all the same."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    intercept(c, wire.Release)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Received)))
    rig.nodes.remove(c)
    c.agent.close(0.0)
    rig.run(lambda: bool(p.of(Sent)), seconds=1.0)


def test_release_of_a_reader_that_was_forgotten(rig: Rig) -> None:
    """Promise 6: a release that leaves its ranks to the hello is not lost with the hello."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    caught = intercept(c, wire.Release)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Received)))
    assert not wire.decode(caught.frames[0][1]).body.ranks  # type: ignore[union-attr]
    links = p.agent._engine.links
    links.of(c.agent.incarnation).fail(PeerLostError("gone"), rig.clock.now())  # type: ignore[union-attr]
    assert links.of(c.agent.incarnation) is None
    caught.deliver()
    rig.run(lambda: bool(p.of(Sent)), seconds=10.0)
    assert p.counters["messages.from_strangers"] >= 1
    assert not any(p.tables.values())


def test_release_without_ranks_from_a_stranger(rig: Rig) -> None:
    """Promise 10: it is asked who it is, and frees nothing."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.connect([p.agent.endpoint])
    rig.pass_time(0.2)
    release = wire.Release(offer.ref(offer.endpoints[0]), {}, True)
    route = c.agent._engine.links.of(p.agent.incarnation).mailbox.route  # type: ignore[union-attr]
    c.agent._channel.send(route, wire.encode("somebody", release, 77))
    rig.pass_time(0.5)
    assert p.counters["messages.from_strangers"] == 1
    assert p.tables["holds"] == 1


@pytest.mark.parametrize("size", ["tp_size", "pp_size"])
@pytest.mark.parametrize("number", [2**20, 2**62])
def test_release_of_more_ranks_than_there_can_be(rig: Rig, size: str, number: int) -> None:
    """Promise 9: a peer that has a key cannot have us count to a million, and frees nothing."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.connect([p.agent.endpoint])
    rig.pass_time(0.2)
    ranks = {**offer.sizes, size: number}
    release = wire.Release(offer.ref(offer.endpoints[0]), ranks, True)
    route = c.agent._engine.links.of(p.agent.incarnation).mailbox.route  # type: ignore[union-attr]
    c.agent._channel.send(route, wire.encode(c.agent.incarnation, release, 77))
    rig.pass_time(0.5)
    assert p.counters["messages.rejected"] == 1
    assert p.tables["holds"] == 1
    assert not p.agent._engine.producer._readers


def test_good_bye_without_an_answer_is_a_failure(rig: Rig) -> None:
    """The consumer closes before everything was sealed: both sides have failed."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.pass_time(0.5)
    rig.nodes.remove(c)
    c.agent.close(0.0)
    p.agent.seal("w")
    rig.run(lambda: bool(p.of(Failed)))
    assert not p.of(Sent)
    rig.pass_time(1)
    assert not any(p.tables.values())


def test_last_words_are_only_the_senders(rig: Rig) -> None:
    """Promise 10: a good-bye does not speak for somebody else, nor carry hellos or good-byes."""
    p, c = rig.node("p", lease=20.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.connect([p.agent.endpoint])
    rig.pass_time(0.2)
    ref = offer.ref(offer.endpoints[0])
    ranks = {**offer.sizes}
    foreign = wire.encode("somebody", wire.Release(ref, ranks, True), 77)
    nested = wire.encode(c.agent.incarnation, wire.Bye(), 0)
    route = c.agent._engine.links.of(p.agent.incarnation).mailbox.route  # type: ignore[union-attr]
    bye = wire.encode(c.agent.incarnation, wire.Bye([], [foreign, nested, b"\x00"]))
    c.agent._channel.send(route, bye)
    rig.pass_time(0.5)
    assert p.counters["messages.rejected"] == 3
    assert p.tables["holds"] == 1


# ---- seals -------------------------------------------------------------------------------------


def test_seal_that_comes_after_the_consumer_failed(rig: Rig) -> None:
    """Promise 12: confirmed is not received; the producer learns that it was in vain."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3), deadline=1.0)
    seal = intercept(p, wire.Seal)
    cancel = intercept(c, wire.Cancel)  # it would tell as well, but is lost
    push(p, c)
    rig.run(lambda: bool(c.of(Failed)))
    seal.deliver()
    rig.run(lambda: bool(p.of(Sent) or p.of(Failed)))
    assert not p.of(Sent)
    assert p.of(Failed)[0].kind is ErrorKind.TIMEOUT
    assert "did not receive it" in str(p.of(Failed)[0].error)
    assert cancel.frames
    cancel.deliver()
    rig.pass_time(12)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_seal_of_an_accept_that_has_ended(rig: Rig) -> None:
    """The accept is over and drained before the seal comes: refused, with the reason it ended."""
    p, c = rig.node("p"), rig.node("c")
    handle = c.agent.accept("w", at(0, 3))
    seal = intercept(p, wire.Seal)
    push(p, c)
    rig.pass_time(0.5)
    cancel = intercept(c, wire.Cancel)
    handle.abort()
    rig.run(lambda: handle.drained)  # by fence: nobody told the producer
    assert c.tables["accepts"] == 0
    cancel.active = False
    seal.deliver()
    rig.run(lambda: bool(p.of(Sent) or p.of(Failed)))
    assert not p.of(Sent)


def test_every_rank_waits_for_the_whole(rig: Rig) -> None:
    """Promise 4: one rank sealed, the other failed: neither of the two is told that it was sent."""
    from test_ranks import instance

    _, ps = instance(rig, "p", 2)
    _, (c,) = instance(rig, "c", 1)
    c.agent.accept("w", at(0, 3))
    for node in ps:
        node.agent.push("w", at(0, 8), to=c.agent.endpoint)
    ps[0].agent.seal("w")
    rig.pass_time(1)
    assert not ps[0].of(Sent)
    ps[1].agent.abort("w")
    rig.run(lambda: bool(ps[0].of(Failed)) and bool(c.of(Failed)))
    assert ps[0].of(Failed)[0].kind is ErrorKind.ABORTED
    rig.pass_time(1)
    assert not any(any(node.tables.values()) for node in rig.nodes)


def test_silence_after_the_seal_ends_by_its_deadline(rig: Rig) -> None:
    """Promise 4: the consumer never answers: the push ends in Timeouts.ack after its own time."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    intercept(c, wire.Sealed)
    push(p, c)
    took = rig.run(lambda: bool(p.of(Failed)))
    assert took == pytest.approx(5.0 + 8.0, abs=0.5)
    assert "it may have" in str(p.of(Failed)[0].error)
    assert c.of(Received)
    rig.pass_time(10)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_two_producers_that_both_seal(rig: Rig) -> None:
    """Promise 12: two sealed the same blocks: nobody knows whose bytes they hold."""
    p1, p2, c = rig.node("p1"), rig.node("p2"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    for p in (p1, p2):
        p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.pass_time(0.5)
    cancel = intercept(c, wire.Cancel)
    seal = intercept(p2, wire.Seal)
    for p in (p1, p2):
        p.agent.seal("w")
    rig.pass_time(0.5)
    assert not c.of(Received)  # the second may still write
    seal.deliver()
    rig.run(lambda: bool(c.of(Received) or c.of(Failed)))
    assert c.of(Failed)[0].kind is ErrorKind.STALE
    rig.run(lambda: bool(p1.of(Failed)) and bool(p2.of(Failed)))
    assert cancel.frames


# ---- readers that fail -------------------------------------------------------------------------


def fail_one_pull(rig: Rig, p: Node, c: Node, offer: object) -> None:
    """A pull that fails with INVALID and releases."""
    import attrs

    from kvxfer.core.layout import Blocks

    broken = attrs.evolve(offer, groups=(Blocks.at(0, [99]),))  # type: ignore[misc]
    handle = c.agent.pull(broken, at(0, 1))
    rig.run(lambda: handle.done)
    rig.pass_time(0.3)


def test_hold_whose_reader_failed_is_not_sent(rig: Rig) -> None:
    """Promise 12: never a silent success; the producer says what its reader said."""
    p, c = rig.node("p", lease=20.0, retry_window=2.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    fail_one_pull(rig, p, c, offer)
    took = rig.run(lambda: bool(p.of(Failed) or p.of(Sent) or p.of(Expired)))
    assert took == pytest.approx(2.0 - 0.3, abs=0.1)
    assert p.of(Failed)[0].kind is ErrorKind.INVALID
    assert p.of(Failed)[0].drained
    assert "reader rank 0 did not get the bytes" in str(p.of(Failed)[0].error)
    rig.pass_time(1)
    assert not any(p.tables.values())


def test_failed_reader_may_try_again(rig: Rig) -> None:
    """Report O53: retries before the ack are served; the same rank, and another instance."""
    p, c, other = rig.node("p", lease=20.0), rig.node("c"), rig.node("other")
    for transfer_id, second in (("t", c), ("u", other)):
        offer = p.agent.hold(transfer_id, at(0, 5))
        fail_one_pull(rig, p, c, offer)
        second.agent.pull(offer, at(0, 2))
        rig.run(lambda t=transfer_id: bool(p.of(Sent, t)))
        assert second.content([2]) == p.content([5])
    assert p.counters["holds.retried"] == 2
    assert not p.of(Failed)
    rig.pass_time(7)
    assert not any(p.tables.values())


def test_failed_reader_without_a_window_ends_it(rig: Rig) -> None:
    """``retry_window=0``: the blocks are free at once, and a retry is refused as consumed."""
    p, c = rig.node("p", lease=20.0, retry_window=0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    fail_one_pull(rig, p, c, offer)
    assert p.of(Failed)
    again = c.agent.pull(offer, at(0, 2))
    rig.run(lambda: again.done)
    assert again.error is not None
    assert again.error.kind is ErrorKind.STALE


def test_aborted_reader_ends_it_at_once(rig: Rig) -> None:
    """Behaviour 62: freed on abort as well; the reader said that it will not try again."""
    p, c = rig.node("p", lease=20.0), rig.node("c")
    intercept(p, wire.Grant)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.pass_time(0.5)
    handle.abort()
    took = rig.run(lambda: bool(p.of(Failed)))
    assert took < 0.2
    assert p.of(Failed)[0].kind is ErrorKind.ABORTED


def test_nothing_is_freed_under_another_reader(rig: Rig) -> None:
    """Promise 5: two instances read one hold; it is not free while the slower one reads."""
    from kvxfer.testing.faults import Fault, FaultKind

    p, quick = rig.node("p"), rig.node("quick")
    slow = rig.node("slow", posts=[Fault(kind=FaultKind.LATE, after=4.0)])
    offer = p.agent.hold("t", at(0, 5))
    slow.agent.pull(offer, at(0, 1))
    rig.run(lambda: slow.tables["in_flight_pieces"] > 0)
    quick.agent.pull(offer, at(0, 1))
    rig.run(lambda: bool(quick.of(Received)))
    rig.pass_time(1)
    assert not p.of(Sent)
    late = quick.agent.pull(offer, at(0, 2))
    rig.run(lambda: late.done)
    assert late.error is not None
    assert late.error.kind is ErrorKind.STALE
    rig.run(lambda: bool(slow.of(Received)))
    rig.run(lambda: bool(p.of(Sent)))
    assert slow.content([1]) == p.content([5])


def test_declining_takes_nothing_from_another_reader(rig: Rig) -> None:
    """A decline speaks for its own instance: whoever is reading goes on."""
    from kvxfer.testing.faults import Fault, FaultKind

    p, c = rig.node("p"), rig.node("c")
    slow = rig.node("slow", posts=[Fault(kind=FaultKind.LATE, after=1.0)])
    offer = p.agent.hold("t", at(0, 5))
    slow.agent.pull(offer, at(0, 1))
    rig.run(lambda: slow.tables["in_flight_pieces"] > 0)
    c.agent.decline(offer)
    rig.run(lambda: bool(slow.of(Received)))
    rig.run(lambda: p.tables["holds"] == 0)
    assert slow.content([1]) == p.content([5])


def test_late_request_is_no_new_try(rig: Rig) -> None:
    """A repeated request for a grant that arrives after the release opens nothing again."""
    p, c = rig.node("p", lease=20.0, retry_window=1.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    late = intercept(c, wire.Open)
    handle = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: handle.done)
    assert late.frames
    rig.run(lambda: "t" in p.agent._engine.producer.leases and not c.tables["unconfirmed"])
    late.deliver()
    rig.run(lambda: bool(p.of(Failed)), seconds=2.0)
    assert p.counters["opens.late"] or not p.counters.get("grants.given")


def test_expired_names_the_ranks_that_are_missing(rig: Rig) -> None:
    """Promise 4: two ranks were expected, one read: Expired says who did not."""
    from test_ranks import instance

    _, (p,) = instance(rig, "p", 1)
    _, cs = instance(rig, "c", 2)
    offer = p.agent.hold("t", at(0, 5), readers=[0, 1])
    cs[1].agent.pull(offer, at(0, 1))
    rig.run(lambda: bool(p.of(Expired)))
    assert p.of(Expired)[0].missing == (0,)
