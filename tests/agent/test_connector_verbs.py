"""What connectors of engines need beside the transfers: pushes as orders, holds kept alive for a
queue, pushes given up in time, caches let go."""

from __future__ import annotations

import pickle

import attrs
import pytest
from agent_rig import Node, Rig, at, layout

from kvxfer.agent import AgentConfig, SchedulerAgent
from kvxfer.agent.config import Limits
from kvxfer.agent.orders import DeclineOrder, PushOrder, RenewOrder, SealOrder
from kvxfer.core.events import Failed, Received, Role, Sent
from kvxfer.core.offer import Endpoint
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan


def scheduler(node: Node, rig: Rig) -> SchedulerAgent:
    return SchedulerAgent([node.agent.info], clock=rig.clock)


def test_pushes_and_seals_are_orders(rig: Rig) -> None:
    """Layer by layer, through pickles as orders travel, sealed by the last."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3, 1))
    to = (c.agent.endpoint,)
    orders = [
        PushOrder(transfer_id="w", blocks=(at(0, 7, 8),), to=to, layers=(name,))
        for name in ("layer0", "layer1")
    ]
    sealing = SealOrder(transfer_id="w", payload=b"token")
    p.agent.execute(pickle.loads(pickle.dumps([*orders, sealing])))
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content([3, 1]) == p.content([7, 8])
    assert c.of(Received)[0].payload == b"token"


def test_a_push_order_that_is_refused_fails_its_transfer(rig: Rig) -> None:
    """The first submit refused: one Failed. A later one: the transfer fails, with one Failed too,
    and the consumer is told."""
    p, c = rig.node("p"), rig.node("c")
    to = (c.agent.endpoint,)
    bad = PushOrder(transfer_id="w", blocks=(at(0, 99),), to=to)
    p.agent.execute([bad])
    rig.pass_time(0.1)
    assert [(e.transfer_id, e.kind) for e in p.of(Failed)] == [("w", ErrorKind.INVALID)]

    c.agent.accept("x", at(0, 3))
    good = PushOrder(transfer_id="x", blocks=(at(0, 7),), to=to, layers=("layer0",))
    p.agent.execute([good])
    rig.pass_time(0.2)
    p.agent.execute([PushOrder(transfer_id="x", blocks=(at(0, 99),), to=to, layers=("layer1",))])
    rig.run(lambda: bool(c.of(Failed, "x")))
    rig.pass_time(1.0)
    (failed,) = p.of(Failed, "x")
    assert failed.role is Role.PRODUCER
    assert "99" in str(failed.error)
    assert not any(p.tables.values())


def test_a_kept_hold_outlives_its_lease(rig: Rig) -> None:
    """Renewed at once and by and by, for five leases; then the pull finds it. Let go, it ends."""
    p, c = rig.node("p", lease=2.0), rig.node("c")
    prefill, decode = scheduler(p, rig), scheduler(c, rig)
    offers = [prefill.hold(name, at(0, i), lease=2.0) for i, name in enumerate(("kept", "left"))]
    p.agent.execute(prefill.take_orders())
    for offer in offers:
        decode.keep(offer)
    decode.let_go("left")
    renewals, began = 0, rig.clock.now()
    for _ in range(100):
        orders = decode.take_orders()
        renewals += sum(isinstance(order, RenewOrder) for order in orders)
        c.agent.execute(orders)
        rig.pass_time(0.1)
    every = 2.0 / 3
    assert renewals == pytest.approx((rig.clock.now() - began) / every, abs=5)
    assert p.tables["holds"] == 1
    decode.pull(offers[0], at(0, 5))
    c.agent.execute(decode.take_orders())
    rig.run(lambda: bool(c.of(Received, "kept")))
    assert c.content([5]) == p.content([0])
    rig.clock.advance(10.0)
    assert not decode.take_orders()


def test_a_declined_hold_is_not_renewed(rig: Rig) -> None:
    """Nor one that waited longer than anybody's patience: nothing is renewed for ever."""
    p, c = rig.node("p"), rig.node("c")
    prefill = scheduler(p, rig)
    decode = SchedulerAgent([c.agent.info], clock=rig.clock, longest=5.0)
    declined, forgotten = (prefill.hold(name, at(0, 1), lease=3.0) for name in ("a", "b"))
    decode.keep(declined)
    decode.keep(forgotten)
    decode.decline(declined)
    (decline, renewal) = decode.take_orders()
    assert isinstance(decline, DeclineOrder)
    assert renewal == RenewOrder(offers=(forgotten,))
    times = 0
    while (due := decode.next_at()) is not None:
        rig.clock.advance(max(0.0, due - rig.clock.now()))
        times += len(decode.take_orders())
    assert times == 4, "after 1, 2, 3 and 4 s"
    assert not decode._kept


def test_a_lease_of_nothing_is_not_renewed_all_the_time(rig: Rig) -> None:
    """A router may write any lease into an offer: it is renewed no more often than a request for a
    grant is repeated, instead of in every round."""
    p, c = rig.node("p"), rig.node("c")
    offer = attrs.evolve(scheduler(p, rig).hold("a", at(0, 1)), lease=0.0)
    decode = SchedulerAgent([c.agent.info], clock=rig.clock, longest=5.0)
    decode.keep(offer)
    times = 0
    while (due := decode.next_at()) is not None and times < 100:
        rig.clock.advance(max(0.0, due - rig.clock.now()))
        times += len(decode.take_orders())
    assert times == pytest.approx(5.0 / AgentConfig().grant_interval, abs=2)


@pytest.mark.parametrize("verb", ["decline", "release"])
def test_a_lease_for_ever_does_not_keep_a_place_for_ever(rig: Rig, verb: str) -> None:
    """Promise 8: whoever never confirms that we are finished is told for as long as what has ended
    is remembered, whatever lease a router wrote into the offer; then its place is free."""
    limits = Limits(peers=4, remembered_ttl=20.0)
    p, c = rig.node("p"), rig.node("c", limits=limits)
    offer = p.agent.hold("t", at(0, 5))
    for i in range(4):
        gone = Endpoint(address=f"10.0.0.{90 + i}:1", incarnation="gone")
        forged = attrs.evolve(offer, transfer_id=f"t{i}", lease=1e9, endpoints=(gone,))
        if verb == "decline":
            c.agent.decline(forged)
        else:
            c.agent.abort(c.agent.pull(forged, at(0, i)).transfer_id)
    rig.pass_time(15.0)
    assert c.tables["unconfirmed"] == 4
    rig.pass_time(10.0)
    assert c.tables["unconfirmed"] == 0
    assert len(c.agent._engine.links.mailboxes) == 0


def test_an_aborted_push_is_not_sealed_afterwards(rig: Rig) -> None:
    """Given up while its data is under way: when it returns, no success can follow, whatever
    lands; and what was complete before stays so."""
    p = rig.node("p", posts=[Fault(kind=FaultKind.LATE_REPORT)])
    c = rig.node("c")
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.pass_time(0.3)
    p.agent.abort_push("w")
    p.memory["layer0"][:, 7] = 0  # somebody else's from here on
    p.transport.release()  # type: ignore[attr-defined]
    rig.run(lambda: bool(c.of(Failed, "w")) and bool(p.of(Failed, "w")))
    assert not c.of(Received)

    c.agent.accept("x", at(0, 4))
    p.agent.push("x", at(0, 8), to=c.agent.endpoint)
    p.agent.seal("x")
    rig.run(lambda: bool(p.of(Sent, "x")))
    p.agent.abort_push("x")
    p.agent.abort_push("unknown")
    assert c.of(Received, "x")


def test_a_push_settles_before_its_blocks_are_overwritten(rig: Rig) -> None:
    """Once what was pushed is out of the source blocks they may be another's, and the push goes on
    from others. What is not out of them in time, or waits for a consumer, is given up."""
    p, c = rig.node("p"), rig.node("c")
    to = c.agent.endpoint
    content = p.content([7, 8])
    c.agent.accept("w", at(0, 3, 4))
    p.agent.push("w", at(0, 7), to=to)
    rig.pass_time(0.3)
    assert p.agent.settle_push("w", 0.0)
    for tensor in p.memory.values():
        tensor[:, 7] = 0  # somebody else's from here on
    p.agent.push("w", at(1, 8), to=to)
    p.agent.seal("w")
    rig.run(lambda: bool(c.of(Received, "w")) and bool(p.of(Sent, "w")))
    assert c.content([3, 4]) == content

    p.transport.plan = FaultPlan(posts=[Fault(kind=FaultKind.LATE)])  # type: ignore[attr-defined]
    c.agent.accept("late", at(0, 5))
    p.agent.push("late", at(0, 8), to=to)
    rig.pass_time(0.3)
    assert not p.agent.settle_push("late", 0.0)
    p.agent.push("early", at(0, 8), to=to)
    rig.pass_time(0.3)
    assert not p.agent.settle_push("early", 5.0), "no consumer has accepted it"
    p.transport.release()  # type: ignore[attr-defined]
    rig.run(lambda: bool(p.of(Failed, "late")) and bool(p.of(Failed, "early")))
    assert p.agent.settle_push("unknown", 0.0)


def test_caches_can_be_let_go_and_registered_again(rig: Rig) -> None:
    """Refused while a hold needs them. Without them nothing can be held; registered again, at
    other addresses, they are what peers read."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("a", at(0, 7))
    rig.pass_time(0.1)
    with pytest.raises(InvalidInputError, match="still use"):
        p.agent.unregister_kv_caches()
    c.agent.pull(offer, at(0, 3))
    rig.run(lambda: bool(c.of(Received, "a")) and bool(p.of(Sent, "a")))
    rig.pass_time(0.5)
    p.agent.unregister_kv_caches()
    with pytest.raises(InvalidInputError, match="no KV caches"):
        p.agent.hold("b", at(0, 7))
    p.memory = {name: tensor.copy() + 1 for name, tensor in p.memory.items()}
    p.agent.register_kv_caches(p.memory, layout(16))
    offer = p.agent.hold("b", at(0, 7))
    c.agent.pull(offer, at(0, 4))
    rig.run(lambda: bool(c.of(Received, "b")))
    assert c.content([4]) == p.content([7])
