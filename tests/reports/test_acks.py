"""Reports O09 to O17 and O19: acks that come early, twice, from strangers or never; ids, routes.

O18 belongs to the vLLM connector, O20 is in ``test_lifetime``; what needs no agent is in
``tests/core/test_acks.py`` and ``tests/topology``.
"""

from __future__ import annotations

import attrs
import pytest
from agent_rig import Node, at

from kvxfer.agent.config import Limits
from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.agent.orders import Report
from kvxfer.core import wire
from kvxfer.core.acks import Ack, AckOutcome, AckReconciler
from kvxfer.core.events import Drained, Failed, Received, Role, Sent
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.core.topology import Ranks
from kvxfer.errors import ErrorKind, InvalidInputError, TransferError
from reports.report_rig import Instance, ReportRig, late


def release(rig: ReportRig, p: Node, offer: Offer, sizes: dict[str, int], rank: int = 0) -> None:
    """The ack of one reader rank arrives at ``p``."""
    (endpoint,) = [e for e in offer.endpoints if e.incarnation == p.agent.incarnation]
    ranks = {**sizes, "tp_rank": rank}
    rig.inject(p, wire.Release(offer.ref(endpoint), ranks, True), mid=-1)


def reader(tp_size: int, heads: int) -> dict[str, int]:
    """What a reader says of its sizes."""
    return ranks_to_wire(Ranks(tp_size=tp_size, total_kv_heads=heads))


# ---- O09: the ack comes first ----------------------------------------------------------------


def test_o09_ack_before_the_mapping(rig: ReportRig) -> None:
    """Report O09: the ack of t1 at 0 s, held at 0.4 s, polled at 0.5 s: ended once, never again."""
    p = rig.node("p", lease=30.0)
    offer = attrs.evolve(p.agent.hold("other", at(0, 4)), transfer_id="t1", epoch=7)
    rig.begin()
    release(rig, p, offer, reader(1, 2))
    rig.until(0.4)
    assert p.agent.snapshot().early == 1
    p.agent._hold("t1", 7, 30.0)
    rig.until(0.5)
    assert p.of(Sent) == [Sent(transfer_id="t1")]
    rig.until(5.0)
    assert len(p.of(Sent)) == 1
    assert p.agent.snapshot().early == 0


def test_o09_late_unmap_removes_only_its_own() -> None:
    """Report O09: t1 belonged to r1, now to r2; a late unmap of r1 leaves t1 with r2."""
    acks = AckReconciler()
    acks.expect("t1", sources={0}, owners=["r1"], deadline=9.0, now=0.0)
    acks.record(Ack(transfer_id="t1", source=0), 0.1)
    acks.expect("t1", sources={0}, owners=["r2"], deadline=9.0, now=0.2)
    assert not acks.unmap("t1", owner="r1")
    assert acks.record(Ack(transfer_id="t1", source=0), 0.3).owners == ("r2",)


# ---- O10 to O12: which ranks -----------------------------------------------------------------


def test_o10_two_producers_six_readers(rig: ReportRig) -> None:
    """Report O10: P=2, D=6: three acks per producer rank; two free nothing, the third does, and a
    fourth is late."""
    p = Instance(rig, "p", 2, heads=6, lease=30.0)
    offer = p.scheduler.hold("t", at(0, 5))
    p.hand_down()
    rig.settle(0.1)
    first = p.nodes[0]
    for rank in (0, 1):
        release(rig, first, offer, reader(6, 6), rank)
        rig.settle(0.1)
        assert not first.of(Sent)
    release(rig, first, offer, reader(6, 6), 2)
    rig.settle(0.1)
    assert len(first.of(Sent)) == 1
    release(rig, first, offer, reader(6, 6), 2)
    rig.settle(0.1)
    assert first.counters["acks.stale"] == 1
    assert len(first.of(Sent)) == 1
    assert p.nodes[1].tables["holds"] == 1


def test_o10_six_producers_two_readers(rig: ReportRig) -> None:
    """Report O10: P=6, D=2: one ack frees a producer rank."""
    p = Instance(rig, "p", 6, heads=6, lease=30.0)
    offer = p.scheduler.hold("t", at(0, 5))
    p.hand_down()
    rig.settle(0.1)
    release(rig, p.nodes[4], offer, reader(2, 6), 1)
    rig.settle(0.1)
    assert [len(node.of(Sent)) for node in p.nodes] == [0, 0, 0, 0, 1, 0]


def test_o10_sizes_that_do_not_divide(rig: ReportRig) -> None:
    """Report O10: P=2, D=5: refused, as an ack and at the handshake; nothing is freed."""
    p = Instance(rig, "p", 2, heads=10, lease=30.0)
    offer = p.scheduler.hold("t", at(0, 5))
    p.hand_down()
    rig.settle(0.1)
    release(rig, p.nodes[0], offer, reader(5, 10), 0)
    rig.settle(0.1)
    assert p.nodes[0].counters["messages.rejected"] == 1
    assert p.nodes[0].tables["holds"] == 1
    d = Instance(rig, "d", 5, heads=10)
    handle = d.nodes[0].agent.pull(offer, at(0, 1))
    rig.run(lambda: handle.done)
    assert "multiple" in str(handle.error)


def test_o10_ranks_are_a_set(rig: ReportRig) -> None:
    """Report O10: P=1, D=3, acks of ranks 0, 0, 1, 2: complete with the last; the repeated 0 is
    counted as a duplicate."""
    p = Instance(rig, "p", 1, heads=3, lease=30.0)
    (node,) = p.nodes
    offer = p.scheduler.hold("t", at(0, 5))
    p.hand_down()
    rig.settle(0.1)
    for n, rank in enumerate((0, 0, 1, 2)):
        assert not node.of(Sent), f"after {n} acks"
        release(rig, node, offer, reader(3, 3), rank)
        rig.settle(0.1)
    assert len(node.of(Sent)) == 1
    assert node.counters["acks.duplicate"] == 1


@pytest.mark.parametrize(
    ("mine", "peer", "rank", "targets"),
    [(8, 4, 0, {0}), (8, 4, 7, {3}), (2, 4, 0, {0, 1}), (2, 4, 1, {2, 3})],
)
def test_o11_releases_follow_the_peers_size(
    rig: ReportRig, mine: int, peer: int, rank: int, targets: set[int]
) -> None:
    """Report O11: TP 8 against 4 releases ports 7000 to 7003 only; TP 2 against 4 releases
    7000, 7001 and 7002, 7003: no gap, no repeat, and no port where nobody listens."""
    nodes = []
    for n in range(peer):
        rig.at_address(f"tcp://10.0.0.9:{7000 + n}")
        nodes.append(rig.node(f"unused{n}"))
    for node in nodes:
        rig.kill(node)
    addresses = [node.agent.address for node in nodes]
    reading = Instance(rig, "d", mine, heads=8)
    holding = Instance(rig, "p", peer, heads=8)
    offer = holding.scheduler.hold("t", at(0, 5))
    endpoints = [
        Endpoint(address=a, incarnation=e.incarnation, rank=e.rank)
        for a, e in zip(addresses, offer.endpoints, strict=True)
    ]
    offer = attrs.evolve(offer, endpoints=tuple(endpoints))
    reading.nodes[rank].agent.pull(offer, at(0))  # nothing to read: only the releases
    rig.settle(0.5)
    to = {c.to for c in rig.carried if isinstance(c.body, wire.Release)}
    assert to == {f"tcp://10.0.0.9:{7000 + n}" for n in targets}


def test_o12_no_guessed_size(rig: ReportRig) -> None:
    """Report O12: an ack, and an offer, whose sizes lack the TP size, or with 0, -1 or text for it,
    are refused; none is taken for 1."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    rig.settle(0.1)
    whole = reader(1, 2)
    for n, tp_size in enumerate((None, 0, -1, "8"), start=1):
        sizes = {k: v for k, v in whole.items() if k != "tp_size"}
        if tp_size is not None:
            sizes["tp_size"] = tp_size  # type: ignore[assignment]
        (endpoint,) = offer.endpoints
        rig.inject(p, wire.Release(offer.ref(endpoint), sizes, True), mid=-1)
        rig.settle(0.1)
        assert p.counters["messages.rejected"] == n
        described = {**offer.to_dict(), "transfer_id": f"t{n}", "sizes": sizes}
        try:
            wrong = c.agent.pull(Offer.from_dict(described), at(0, 1))
        except InvalidInputError:
            continue  # refused where the offer came in
        rig.run(lambda wrong=wrong: wrong.done)
        assert wrong.error is not None
        assert wrong.error.kind is ErrorKind.INVALID
        assert "tp_size" in str(wrong.error)
    assert p.tables["holds"] == 1


# ---- O13 to O16: ids -------------------------------------------------------------------------


def test_o13_request_ids_stay_at_home(rig: ReportRig) -> None:
    """Report O13: P calls it cmpl-9-0-aaaa1111, D cmpl-9-0-bbbb2222; the ack of x-9 completes each
    side's own request, and no request id crosses the wire."""
    p, c = rig.node("p"), rig.node("c")
    owners = {Role.PRODUCER: "cmpl-9-0-aaaa1111", Role.CONSUMER: "cmpl-9-0-bbbb2222"}
    sides = {role: AckReconciler() for role in owners}
    for role, acks in sides.items():
        acks.expect("x-9", sources={0}, owners=[owners[role]], deadline=9.0, now=0.0)
    c.agent.pull(Offer.from_json(p.agent.hold("x-9", at(0, 5)).to_json()), at(0, 1))
    rig.run(lambda: bool(p.of(Sent)) and bool(c.of(Received)))
    for role, events in ((Role.PRODUCER, p.of(Sent)), (Role.CONSUMER, c.of(Received))):
        result = sides[role].record(Ack(transfer_id=events[0].transfer_id, source=0), 1.0)
        assert (result.outcome, result.owners) == (AckOutcome.COMPLETE, (owners[role],))
    assert rig.carried
    assert not any("cmpl" in repr(carried.body) for carried in rig.carried)


def test_o14_unmap_by_transfer_id() -> None:
    """Report O14: a transfer id is unmapped by itself, whatever the request is called by then; one
    that only begins alike, or is not known, removes nothing and is no error."""
    acks = AckReconciler()
    acks.expect("t", sources={0}, owners=["a-1"], deadline=9.0, now=0.0)
    assert not acks.unmap("t", owner="a-1-zz")
    assert not acks.unmap("t", owner="a-12")
    assert not acks.unmap("t-0f3c9d2e")
    assert not acks.unmap("")
    assert len(acks) == 1
    assert acks.unmap("t")
    assert len(acks) == 0
    assert not acks.unmap("t")


def test_o15_one_transfer_many_owners() -> None:
    """Report O15: three samples own t: one ack completes all three, once. Another use of t at the
    same time is refused, and the caller is told."""
    acks = AckReconciler()
    owners = ("0_c", "1_c", "2_c")
    for owner in owners:
        acks.expect("t", sources={0}, owners=[owner], deadline=9.0, now=0.0, epoch=1)
    with pytest.raises(InvalidInputError, match="already expected"):
        acks.expect("t", sources={0}, owners=["x"], deadline=9.0, now=0.0, epoch=2)
    assert acks.record(Ack(transfer_id="t", source=0), 1.0).owners == owners
    assert acks.record(Ack(transfer_id="t", source=0), 1.0).outcome is AckOutcome.STALE
    assert acks.poll(2.0) == []


def test_o15_second_hold_is_refused(rig: ReportRig) -> None:
    """Report O15: an agent's transfer has one owner; a second hold of the id says so at once."""
    p = rig.node("p")
    p.agent.hold("t", at(0, 5))
    with pytest.raises(InvalidInputError, match="under way already"):
        p.agent.hold("t", at(0, 6))


def test_o16_acks_nobody_waits_for(rig: ReportRig) -> None:
    """Report O16: TTL 5 s, capacity 3: u1 to u5 at 0 to 4 s leave u3 to u5; at 7.5 s u3 is gone;
    10,000 acks for one unknown id are one entry, for a terminal id none."""
    p = rig.node("p", lease=60.0, limits=Limits(early=3, early_ttl=5.0))
    offer = p.agent.hold("other", at(0, 5))
    terminal = p.agent.hold("ended", at(0, 6))
    rig.begin()
    release(rig, p, terminal, reader(1, 2))
    unknown = {n: attrs.evolve(offer, transfer_id=f"u{n}") for n in range(1, 7)}
    acks = p.agent._engine.producer.acks
    for n in range(1, 6):
        rig.until(float(n - 1))
        release(rig, p, unknown[n], reader(1, 2))
    rig.until(4.5)
    assert acks.early == ("u3", "u4", "u5")
    assert p.counters["acks.evicted_capacity"] == 2
    rig.until(7.5)
    assert acks.early == ("u4", "u5")
    assert p.counters["acks.evicted_ttl"] == 1
    rig.until(7.6)
    p.agent._hold("u4", unknown[4].epoch, 60.0)
    rig.until(7.7)
    assert [e.transfer_id for e in p.of(Sent)] == ["ended", "u4"]
    for _ in range(10_000):
        release(rig, p, unknown[6], reader(1, 2))
        release(rig, p, terminal, reader(1, 2))
    rig.until(8.0)
    assert acks.early == ("u5", "u6")
    assert p.counters["acks.duplicate"] == 9_999
    assert p.counters["acks.stale"] == 10_000
    rig.until(60.0)
    assert p.agent.snapshot().early == 0, "nothing stays for ever, with no further message"


# ---- O17, O19: whom to tell, and what to tell twice ------------------------------------------


def test_o17_each_transfer_has_its_own_address(rig: ReportRig) -> None:
    """Report O17: A goes to 10.1.0.1, then B to 10.1.0.2; A ends after B was submitted: its
    message goes to 10.1.0.1. The same holds of behaviour 53, two requests with two hosts."""
    rig.at_address("tcp://10.1.0.1:7000")
    a = rig.node("a")
    rig.at_address("tcp://10.1.0.2:7000")
    b = rig.node("b")
    p = rig.node("p", posts=[late(1.0)])
    for name, node in (("A", a), ("B", b)):
        node.agent.accept(name, at(0, 3))
        p.agent.push(name, at(0, 7), to=node.agent.endpoint)
        p.agent.seal(name)
        rig.settle(0.2)
    rig.run(lambda: len(p.of(Sent)) == 2)
    assert [e.transfer_id for e in p.of(Sent)] == ["B", "A"]
    seals = [(c.body.ref.transfer, c.to) for c in rig.carried if isinstance(c.body, wire.Seal)]
    assert seals == [("B", "tcp://10.1.0.2:7000"), ("A", "tcp://10.1.0.1:7000")]


def test_o19_both_lists_name_a_forgotten_request(rig: ReportRig) -> None:
    """Report O19: received={r7}, sent={r7} in one poll after r7 was forgotten: two stale events,
    no exception; while r7 is known, it ends once."""
    engine = Instance(rig, "e", 1)
    both = (Received(transfer_id="r7", nbytes=1), Sent(transfer_id="r7"))
    assert engine.scheduler.apply(Report(rank=0, events=both)) == []
    assert engine.scheduler.stale == 2
    engine.scheduler.accept("r7", at(0, 1))
    aborted = Failed(
        transfer_id="r7",
        role=Role.CONSUMER,
        kind=ErrorKind.ABORTED,
        error=TransferError("aborted", kind=ErrorKind.ABORTED),
        blocks=((1,),),
        drained=False,
    )
    drained = Drained(transfer_id="r7", role=Role.CONSUMER, blocks=((1,),))
    assert engine.scheduler.apply(Report(rank=0, events=(aborted,))) == [aborted]
    assert engine.scheduler.apply(Report(rank=0, events=(*both, drained))) == [drained]
    assert len(engine.scheduler) == 0


def test_o19_aborted_as_it_completes(rig: ReportRig) -> None:
    """Report O19: an abort in the same round as the completion: one terminal event per side."""
    p, c = rig.node("p"), rig.node("c", posts=[late(0.5)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    rig.clock.advance(0.5)
    handle.abort()
    p.agent.abort("t")
    rig.settle(10.0)
    c.agent.abort("t")
    p.agent.abort("t")
    rig.settle(1.0)
    assert len(c.of(Received)) + len(c.of(Failed)) == 1
    assert len(p.of(Sent)) + len(p.of(Failed)) == 1
