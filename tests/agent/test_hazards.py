"""Orders of events that once broke a promise."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
from agent_rig import Rig, at, layout

from kvxfer.core import wire
from kvxfer.core.channel import Inbound
from kvxfer.core.events import Drained, Expired, Failed, PeerUp, Received, Sent
from kvxfer.core.offer import Endpoint
from kvxfer.core.topology import Ranks
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind

OUT_OF_RANGE = EngineError(backend="moriio", code=11, message="length out of range")


def test_two_producers_in_the_same_blocks(rig: Rig) -> None:
    """Promise 3: a second producer seals while the first may still write: not Received."""
    p1 = rig.node("p1", posts=[Fault(kind=FaultKind.LATE, after=2.0)])
    p2, c = rig.node("p2"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    p1.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.pass_time(0.5)
    p2.agent.push("w", at(0, 8), to=c.agent.endpoint)
    p2.agent.seal("w")
    rig.run(lambda: bool(c.of(Failed) or c.of(Received)))
    assert c.of(Failed)[0].kind is ErrorKind.STALE
    rig.run(lambda: c.of(Failed)[0].drained or bool(c.of(Drained)))
    before = c.content([3])
    rig.pass_time(10)
    assert c.content([3]) == before


def test_aborted_hold_keeps_what_it_granted(rig: Rig) -> None:
    """Promise 5: blocks that a reader was granted are not free before that grant ends."""
    p = rig.node("p", lease=4.0, lease_margin=0.5, abort_lease=0.5)
    c = rig.node("c", posts=[Fault(kind=FaultKind.LATE, after=2.0)])
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: p.counters.get("grants.given", 0) > 0)
    p.agent.abort("t")
    rig.run(lambda: bool(c.of(Received)))
    assert not p.of(Expired)
    assert c.content([1]) == p.content([5])


def test_stopped_between_clock_and_completion(rig: Rig) -> None:
    """Promise 5: a process stopped inside a round does not publish after its lease ended."""
    p = rig.node("p", lease=3.0)
    c = rig.node("c", posts=[Fault(kind=FaultKind.LATE_REPORT)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    progress = c.transport.progress

    def stopped(budget: int) -> object:
        rig.clock.advance(10.0)
        c.transport.release()
        return progress(budget)

    c.transport.progress = stopped  # type: ignore[method-assign]
    c.events += c.agent.poll()
    c.transport.progress = progress  # type: ignore[method-assign]
    rig.run(lambda: handle.done)
    assert c.of(Failed)[0].kind is ErrorKind.EXPIRED


def test_grant_of_somebody_else_does_not_count(rig: Rig) -> None:
    """Promises 9 and 10: a grant counts only from the producer that was asked, for that hold."""
    p, b, c = rig.node("p"), rig.node("b"), rig.node("c")
    c.agent.pull(b.agent.hold("warm", at(0, 5)), at(0, 2))
    rig.run(lambda: bool(c.of(Received)))
    offer = attrs.evolve(p.agent.hold("t", at(0, 5)), epoch=99)  # p will never grant this
    c.agent.pull(offer, at(0, 1))
    rig.pass_time(0.5)
    seqs = list(c.agent._engine.consumer._seqs)
    assert seqs
    route = c.agent._engine.links.of(b.agent.incarnation).mailbox.route  # type: ignore[union-attr]
    for seq in seqs:
        for ref in (wire.Ref("t", b.agent.incarnation, 99), offer.ref(offer.endpoints[0])):
            frame = wire.encode(
                b.agent.incarnation, wire.Grant(seq, [wire.Granted(ref, 100.0)], [])
            )
            c.agent._channel.inbox.append(Inbound(route, frame))  # type: ignore[attr-defined]
    rig.pass_time(0.5)
    assert c.tables["in_flight_pieces"] == 0
    assert not c.of(Received, "t")


def test_caches_cannot_be_replaced_under_a_transfer(rig: Rig) -> None:
    """Promise 12: not under a push, nor under a hold that is only ordered yet."""
    p, c = rig.node("p"), rig.node("c")
    other = {name: np.zeros_like(a) for name, a in p.memory.items()}
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    with pytest.raises(InvalidInputError, match="still use the caches"):
        p.agent.register_kv_caches(other, layout(16))
    p.agent.abort("w")
    rig.run(lambda: bool(p.of(Failed)))
    p.agent.hold("t", at(0, 5))
    with pytest.raises(InvalidInputError, match="still use the caches"):
        p.agent.register_kv_caches(other, layout(16))


def test_refused_orders_begin_nothing(rig: Rig) -> None:
    """ "Raises" means that nothing was begun: no hold and no grant stays behind."""
    p, c = rig.node("p"), rig.node("c")
    p.agent.hold("t", at(0, 5), readers=[])
    rig.run(lambda: bool(p.of(Failed)))
    assert p.tables["holds"] == 0
    p.agent.hold("t", at(0, 5))
    with pytest.raises(InvalidInputError):
        c.agent.accept("w", at(0, 3), producers=[Endpoint(address="1:2:3", incarnation="x")])
    c.agent.accept("w", at(0, 3))


def test_later_submits_of_a_failed_transfer_are_dropped(rig: Rig) -> None:
    """Promise 4: a layer that follows a failure does not begin the transfer again."""
    p = rig.node("p", posts=[Fault(kind=FaultKind.REFUSE_VALUE, error=OUT_OF_RANGE)])
    c = rig.node("c")
    c.agent.accept("w", at(0, 3))
    first = p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=["layer0"])
    rig.run(lambda: first.done and bool(c.of(Failed)))
    c.agent.accept("w", at(0, 4))
    assert p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=["layer1"]) is first
    assert p.agent.seal("w") is first
    rig.pass_time(8)
    assert len(p.of(Failed)) == 1
    assert not p.of(Sent)
    assert not c.of(Received)


def test_sealing_a_part_is_not_received(rig: Rig) -> None:
    """Promise 12: success means all bytes; a layer or block that nobody pushed is a failure."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=["layer0"])
    p.agent.seal("w")
    rig.run(lambda: bool(c.of(Failed)))
    assert "sealed with 128 bytes, but the accepted blocks have 256" in str(c.of(Failed)[0].error)


def test_chunks_of_one_prefill(rig: Rig) -> None:
    """Chunked prefill pushes its blocks chunk by chunk into one accept."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3, 4, 5), uncovered_local=1)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.push("w", at(1, 8), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(c.of(Received)))
    assert c.content([3, 4]) == p.content([7, 8])


def test_users_code_that_raises_stops_nothing(rig: Rig) -> None:
    """Promise 2: readiness, observers and callbacks may raise; poll does not."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error")

    p, c = rig.node("p"), rig.node("c")

    def observe(event: object) -> None:
        raise ValueError("a bug of the user")

    c.agent.add_observer(observe)
    c.agent.accept("w", at(0, 3))
    push = p.agent.push("w", at(0, 7), to=c.agent.endpoint, ready=Broken())
    called: list[int] = []
    push.add_done_callback(lambda: called.append(1 // 0))
    push.add_done_callback(lambda: called.append(2))
    rig.run(lambda: push.done)
    assert "CUDA error" in str(push.error)
    assert called == [2]
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: handle.done)
    assert c.content([1]) == p.content([5])


def test_same_id_while_the_first_use_drains(rig: Rig) -> None:
    """A second use of an id that still drains is refused, and ends; it does not hang."""
    p = rig.node("p")
    c = rig.node("c", posts=[Fault(kind=FaultKind.LATE, after=3.0)])
    offer = p.agent.hold("t", at(0, 5))
    first = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    first.abort()
    rig.run(lambda: first.done)
    second = c.agent.pull(offer, at(0, 2))
    rig.run(lambda: second.done)
    assert "drained already" in str(second.error)
    rig.pass_time(10)
    assert len(c.of(Drained)) == 1
    assert c.tables["pinned_blocks"] == 0


def test_pipeline_stages_that_share_no_layer(rig: Rig) -> None:
    """Two stages on each side: every stage releases every stage, reading only what it shares."""
    from kvxfer.agent import SchedulerAgent

    def stages(name: str) -> list[object]:
        nodes = []
        for stage in range(2):
            node = rig.node(
                f"{name}{stage}",
                layers=1,
                ranks=Ranks(tp_size=1, pp_size=2, pp_rank=stage, total_kv_heads=2),
            )
            array = node.memory["layer0"]
            node.memory = {f"stage{stage}": array}
            node.agent.register_kv_caches(node.memory, layout(16))
            nodes.append(node)
        return nodes

    ps, cs = stages("p"), stages("c")
    prefill = SchedulerAgent([n.agent.info for n in ps])  # type: ignore[attr-defined]
    decode = SchedulerAgent([n.agent.info for n in cs])  # type: ignore[attr-defined]
    offer = prefill.hold("t", at(0, 5))
    orders = prefill.take_orders()
    for node in ps:
        node.agent.execute(orders)  # type: ignore[attr-defined]
    decode.pull(offer, at(0, 1))
    orders = decode.take_orders()
    for node in cs:
        node.agent.execute(orders)  # type: ignore[attr-defined]
    rig.run(lambda: all(n.of(Sent) for n in ps))  # type: ignore[attr-defined]
    for p, c in zip(ps, cs, strict=True):
        assert c.content([1]) == p.content([5])  # type: ignore[attr-defined]


def test_after_a_fence_the_two_sides_meet_anew(rig: Rig) -> None:
    """Promise 7: one fence does not end all traffic between two healthy peers."""
    p, c = rig.node("p", posts=[Fault(kind=FaultKind.NEVER)]), rig.node("c")
    c.agent.accept("w", at(0, 3), deadline=1.0)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.pass_time(12)
    assert c.agent.snapshot().quarantine == ()
    c.agent.accept("v", at(0, 3))
    p.agent.push("v", at(0, 8), to=c.agent.endpoint)
    p.agent.seal("v")
    rig.run(lambda: bool(c.of(Received, "v")))
    assert c.content([3]) == p.content([8])


def test_dialled_by_address_and_known_already(rig: Rig) -> None:
    """Both spellings of an address, and a peer that had dialled us, are one connection."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.connect([p.agent.endpoint])
    rig.run(lambda: bool(p.of(PeerUp)))
    p.agent.connect([c.agent.address.removeprefix("tcp://")])
    rig.pass_time(4)
    assert len(p.agent.snapshot().peers) == 1
    assert not p.counters.get("peers.failed.handshake", 0)


def test_cancel_of_an_old_grant_spares_the_new_push(rig: Rig) -> None:
    """Promise 10: a late Cancel names its grant, and only that."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(p.of(Sent)))
    old = wire.Ref("w", c.agent.incarnation, 1)
    c.agent.accept("w", at(0, 4))
    p.agent.push("w", at(0, 8), to=c.agent.endpoint)
    rig.pass_time(0.3)
    route = p.agent._engine.links.of(c.agent.incarnation).mailbox.route  # type: ignore[union-attr]
    frame = wire.encode(c.agent.incarnation, wire.Cancel(old, "aborted", ""), 10**6)
    p.agent._channel.inbox.append(Inbound(route, frame))  # type: ignore[attr-defined]
    rig.pass_time(0.3)
    p.agent.seal("w")
    rig.run(lambda: len(p.of(Sent)) == 2)
    assert c.content([4]) == p.content([8])


def test_many_hellos_make_no_more_links_than_connections(rig: Rig) -> None:
    """Promise 8: one connection speaks for one peer."""
    p, c = rig.node("p"), rig.node("c")
    hello = c.agent._local.message(answer=False, session=1)
    rng = random.Random(1)
    for _ in range(300):
        frame = wire.encode(f"{rng.getrandbits(60):x}", hello)
        p.agent._channel.inbox.append(Inbound(("tcp://10.9.9.9:1", 0, 0, "x"), frame))  # type: ignore[attr-defined]
    rig.pass_time(1)
    assert len(p.agent._engine.links) <= 1


@pytest.mark.parametrize("kind", [FaultKind.REFUSE, FaultKind.REFUSE_VALUE])
def test_after_a_failed_post_the_rest_is_not_posted(rig: Rig, kind: FaultKind) -> None:
    """Report O46: the second of three posts fails: the third is never posted, all are terminal."""
    from kvxfer.backends.loopback import LoopbackConfig, LoopbackTransport
    from kvxfer.testing.faults import FaultPlan
    from kvxfer.testing.faulty import FaultyTransport

    p = rig.node("p")
    transport = FaultyTransport(
        LoopbackTransport(LoopbackConfig(max_pieces=1)),
        FaultPlan(posts=[None, Fault(kind=kind, error=OUT_OF_RANGE)]),
        clock=rig.clock,
    )
    c = rig.node("c", transport=transport)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5, 7)), at(0, 1, 3))
    rig.run(lambda: handle.done)
    assert handle.drained
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.INVALID
    assert transport.counters["post"] == 2
    rig.pass_time(1)
    assert not any(c.tables.values())
