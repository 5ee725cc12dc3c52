"""Reports O50 to O53: what success means, sentinel slots, counters, references."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from agent_rig import TIMEOUTS, Node, at

from kvxfer.agent.config import Limits
from kvxfer.backends.loopback import LoopbackConfig, LoopbackTransport
from kvxfer.core import wire
from kvxfer.core.attempt import Attempt
from kvxfer.core.capabilities import Capabilities, Visibility
from kvxfer.core.events import Declined, Expired, Failed, Received, Sent
from kvxfer.core.layout import Blocks
from kvxfer.core.leases import Hold, LeaseTable, Refusal
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport
from reports.report_rig import INVALID, SQ_FULL, ReportRig, late, refused

# ---- O50: complete means applied -------------------------------------------------------------

REJECTED = EngineError(backend="moriio", code=13, message="remote access error")


def write(p: Node, c: Node, name: str, block: int) -> None:
    c.agent.accept(name, at(0, block))
    p.agent.push(name, at(0, 7), to=c.agent.endpoint)
    p.agent.seal(name)


def test_o50_complete_not_before_it_is_applied(rig: ReportRig) -> None:
    """Report O50: the target's memory changes 50 ms after the write was taken: neither side says
    complete before that."""
    p, c = rig.node("p", posts=[late(0.05)]), rig.node("c")
    write(p, c, "w", 3)
    rig.run(lambda: p.tables["in_flight_pieces"] > 0)
    rig.begin()
    rig.until(0.049)
    assert c.content([3]) != p.content([7])
    assert not c.of(Received)
    assert not p.of(Sent)
    rig.run(lambda: bool(c.of(Received)))
    assert rig.now >= 0.05
    assert c.content([3]) == p.content([7])


class Buffered(FaultyTransport):
    """Says DONE once the bytes are in a socket's buffer; and says that it does."""

    @property
    def capabilities(self) -> Capabilities:
        return attrs.evolve(super().capabilities, visibility=Visibility.ACCEPTED)

    def _post(self, attempt: Attempt) -> None:
        attempt.complete(by="the last byte is in the buffer")
        self._report(attempt)


def test_o50_accepted_is_not_received(rig: ReportRig) -> None:
    """Report O50: an engine whose DONE means "accepted", which nothing confirms: the push fails and
    says so; never a silent success."""
    p, c = rig.node("p", transport=Buffered(LoopbackTransport(), clock=rig.clock)), rig.node("c")
    write(p, c, "w", 3)
    rig.run(lambda: bool(p.of(Failed)) and bool(c.of(Failed)))
    assert "accepted" in str(p.of(Failed)[0].error)
    assert not c.of(Received)
    assert not p.of(Sent)


def test_o50_rejected_by_the_target(rig: ReportRig) -> None:
    """Report O50: the target rejects the region: failed, not a success; the next transfer goes
    over a connection that was prepared anew."""
    rejected = Fault(kind=FaultKind.FAIL_DRAINED, error=REJECTED, fraction=0.0)
    p, c = rig.node("p", posts=[rejected] * 99), rig.node("c")
    paths = []
    post = p.transport.post

    def recorded(*args: Any, **kwargs: Any) -> Attempt:
        attempt = post(*args, **kwargs)
        paths.append(attempt.path)
        return attempt

    p.transport.post = recorded  # type: ignore[method-assign]
    write(p, c, "w", 3)
    rig.run(lambda: bool(p.of(Failed)) and bool(c.of(Failed)))
    assert p.of(Failed)[0].kind is ErrorKind.STALE
    assert "remote access error" in str(c.of(Failed)[0].error)
    assert not c.of(Received)
    failed = set(map(id, paths))
    assert all(path.closed for path in paths)
    p.transport.plan = FaultPlan()
    write(p, c, "v", 4)
    rig.run(lambda: bool(c.of(Received, "v")))
    assert id(paths[-1]) not in failed
    assert c.content([4]) == p.content([7])


# ---- O51: slots that are used again ----------------------------------------------------------


def test_o51_slot_shows_an_older_room() -> None:
    """Report O51: slot 5 held room 71 and is reused for 88: read before it is written: not ready;
    it shows 88: ready; it shows 90: an error."""
    slots = LeaseTable(margin=0.5)
    slots.hold("slot-5", epoch=71, lease=9.0, now=0.0)
    slots.end("slot-5", Refusal(ErrorKind.STALE, "freed"))
    assert slots.open("slot-5", epoch=88, now=1.0) is None
    slots.hold("slot-5", epoch=88, lease=9.0, now=2.0)
    ready = slots.open("slot-5", epoch=88, now=3.0)
    assert isinstance(ready, Hold)
    assert ready.epoch == 88
    slots.end("slot-5", Refusal(ErrorKind.STALE, "freed"))
    slots.hold("slot-5", epoch=90, lease=9.0, now=4.0)
    other = slots.open("slot-5", epoch=88, now=5.0)
    assert isinstance(other, Refusal)
    assert other.kind is ErrorKind.STALE


def test_o51_the_same_through_agents(rig: ReportRig) -> None:
    """Report O51: a reader of room 88 waits while the slot shows 71, reads 88, and is refused when
    the slot shows 90."""
    p, c = rig.node("p", lease=30.0), rig.node("c")

    def room(epoch: int) -> None:
        p.agent._hold("slot-5", epoch, 30.0)

    offer = p.agent.hold("other", at(0, 5))
    rooms = {n: attrs.evolve(offer, transfer_id="slot-5", epoch=n) for n in (71, 88)}
    room(71)
    rig.settle(0.1)
    c.agent.decline(rooms[71])
    rig.run(lambda: bool(p.of(Declined)))
    early = c.agent.pull(rooms[88], at(0, 1))
    rig.settle(0.5)
    assert not early.done
    assert c.transport.counters.get("post", 0) == 0
    room(88)
    rig.run(lambda: early.done)
    assert early.error is None
    rig.settle(0.5)
    room(90)
    rig.settle(0.1)
    wrong = c.agent.pull(rooms[88], at(0, 2))
    rig.run(lambda: wrong.done)
    assert wrong.error is not None
    assert wrong.error.kind is ErrorKind.STALE
    assert p.tables["holds"] == 2  # "other" and room 90


# ---- O52: counters ---------------------------------------------------------------------------


def test_o52_counters_by_kind(rig: ReportRig) -> None:
    """Report O52: 3 ok, 1 handshake failure, 1 notify failure, 2 expired, 1 retry then ok: five
    got their data, and every failure has a counter of its own kind."""
    p1, p2 = rig.node("p1", lease=2.0, lease_margin=0.5), rig.node("p2", lease=20.0)
    p3 = rig.node("p3")
    full = Fault(kind=FaultKind.REFUSE, error=SQ_FULL)
    plan = FaultPlan(posts=[None] * 3 + [full], connects=[None, Fault(kind=FaultKind.FAIL)])
    c = rig.node("c", plan=plan)
    begun = 0

    def pull(producer: Node, name: str) -> None:
        nonlocal begun
        handle = c.agent.pull(producer.agent.hold(f"zq-{name}", at(0, 5)), at(0, begun))
        rig.run(lambda: handle.done)
        begun += 1

    for name in ("ok1", "ok2", "ok3", "retried"):
        pull(p1, name)
    pull(p3, "handshake")
    expired = [p1.agent.hold(f"zq-expired{n}", at(0, 5)) for n in range(2)]
    rig.lose = lambda carried: isinstance(carried.body, wire.Release)
    pull(p2, "notify")
    rig.settle(25.0)
    rig.lose = lambda carried: False
    for offer in expired:
        handle = c.agent.pull(offer, at(0, begun))
        rig.run(lambda handle=handle: handle.done)
        begun += 1
    counters = c.counters
    assert counters["pulls.begun"] == begun == 8
    assert counters["events.received"] == 5
    assert counters["pull.failed.handshake"] == 1
    assert counters["messages.given_up"] == 1
    assert counters["pull.failed.expired"] == 2
    assert p1.counters["holds.expired"] == 2
    assert counters["posts.retried.backpressure"] == 1
    failed = {name for name in counters if name.startswith(("pull.failed", "posts.failed"))}
    assert failed == {"pull.failed.handshake", "pull.failed.expired"}
    assert counters["pull.bytes"] == counters["posts.bytes"] == 5 * 256
    assert counters["posts"] == 5
    assert counters["posts.pieces"] == 5 * 4
    for node in (c, p1, p2):
        assert not any("zq" in name for name in node.counters), "never keyed by request"
        assert {"acks.evicted_ttl", "acks.evicted_capacity"} <= set(node.counters)


def test_o52_stale_and_duplicate_acks(rig: ReportRig) -> None:
    """Report O52: acks that come late or twice, or that nobody waits for, have counters, and so
    does what is evicted."""
    p = rig.node("p", lease=30.0, limits=Limits(early=3))
    offer = p.agent.hold("t", at(0, 5), readers=[0, 1])
    rig.settle(0.1)
    sizes = dict(rig.node("c").agent.info.sizes)
    (endpoint,) = offer.endpoints
    for rank in (0, 0, 1, 1):
        ranks = {**sizes, "tp_size": 2, "tp_rank": rank}
        rig.inject(p, wire.Release(offer.ref(endpoint), ranks, True), mid=-1)
        rig.settle(0.1)
    for n in range(5):
        ref = wire.Ref(f"unknown-{n}", p.agent.incarnation, 1)
        rig.inject(p, wire.Release(ref, sizes, True), mid=-1)
    rig.settle(0.1)
    counters = p.counters
    assert counters["acks.duplicate"] == 1
    assert counters["acks.complete"] == 1
    assert counters["acks.stale"] == 1
    assert counters["acks.early"] == 5
    assert counters["acks.evicted_capacity"] == 2
    assert p.agent.snapshot().early == 3


# ---- O53: references -------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["producer", "consumer", "reader"])
def test_o53_ids_out_of_range(rig: ReportRig, side: str) -> None:
    """Report O53: 16 blocks, ids [3,16]: an error that names the id, on both sides; and where an
    offer was tampered with, before anything is posted."""
    p, c = rig.node("p"), rig.node("c")
    bad = at(0, 3, 16)
    if side == "producer":
        with pytest.raises(InvalidInputError, match=r"block id 16 of group 0 is outside 0\.\.15"):
            p.agent.hold("t", bad)
        return
    offer = p.agent.hold("t", at(0, 5, 6))
    if side == "consumer":
        with pytest.raises(InvalidInputError, match=r"block id 16 of group 0 is outside 0\.\.15"):
            c.agent.pull(offer, bad)
        return
    handle = c.agent.pull(attrs.evolve(offer, groups=(Blocks.at(0, [3, 16]),)), at(0, 1, 2))
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.INVALID
    assert c.transport.counters.get("post", 0) == 0


def test_o53_reference_of_epoch_4_when_it_is_5(rig: ReportRig) -> None:
    """Report O53: (t, epoch 4) after the producer freed t and holds it as epoch 5: refused."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    four = attrs.evolve(p.agent.hold("other", at(0, 5)), transfer_id="t", epoch=4)
    p.agent._hold("t", 4, 30.0)
    rig.settle(0.1)
    c.agent.decline(four)
    rig.run(lambda: bool(p.of(Declined)))
    p.agent._hold("t", 5, 30.0)
    rig.settle(0.1)
    handle = c.agent.pull(four, at(0, 1))
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.STALE
    assert "epoch 4" in str(handle.error)
    assert c.transport.counters.get("post", 0) == 0
    assert p.tables["holds"] == 2


def test_o53_used_twice_and_expired(rig: ReportRig) -> None:
    """Report O53: the same reference used twice: the second is refused as consumed. A lease that
    ended: refused as expired, counted once."""
    p, c = rig.node("p", lease=2.0, lease_margin=0.5), rig.node("c")
    used = p.agent.hold("used", at(0, 5))
    first = c.agent.pull(used, at(0, 1))
    rig.run(lambda: bool(p.of(Sent)))
    assert first.error is None
    second = c.agent.pull(used, at(0, 2))
    rig.run(lambda: second.done)
    assert second.error is not None
    assert (second.error.kind, "consumed" in str(second.error)) == (ErrorKind.STALE, True)
    old = p.agent.hold("old", at(0, 6))
    rig.run(lambda: bool(p.of(Expired)))
    third = c.agent.pull(old, at(0, 3))
    rig.run(lambda: third.done)
    assert third.error is not None
    assert third.error.kind is ErrorKind.EXPIRED
    assert p.counters["holds.expired"] == p.counters["grants.refused.expired"] == 1
    assert c.counters["pull.failed.expired"] == 1


def test_o53_one_failed_piece_fails_the_transfer(rig: ReportRig) -> None:
    """Report O53: any failed piece fails the whole transfer, whatever else has arrived."""
    p = rig.node("p")
    inner = LoopbackTransport(LoopbackConfig(max_pieces=1))
    plan = FaultPlan(posts=[None] * 7 + [refused(INVALID)])
    c = rig.node("c", transport=FaultyTransport(inner, plan, clock=rig.clock), timeouts=TIMEOUTS)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5, 7)), at(0, 1, 3))
    rig.run(lambda: handle.done)
    assert c.transport.counters["post"] == 8
    assert [f.blocks for f in c.of(Failed)] == [((1, 3),)]
    rig.settle(5.0)
    assert not c.of(Received)
    assert len(c.of(Failed)) == 1
