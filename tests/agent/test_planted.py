"""Hazards planted on purpose: each is shown to do no harm.

A reused process id is planted in ``tests/backends/shm/test_shm_identity.py``.
"""

from __future__ import annotations

import pytest
from agent_rig import Node, Rig, at

from kvxfer.core import wire
from kvxfer.core.channel import Inbound
from kvxfer.core.events import Declined, Drained, Failed, Quarantined, Received, Sent
from kvxfer.core.reliable import Inbox
from kvxfer.errors import InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan


def in_flight(rig: Rig, p: Node, c: Node, block: int) -> None:
    """A push whose bytes land only when the test releases the fault."""
    c.agent.accept("w", at(0, block), deadline=2.0)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: p.tables["in_flight_pieces"] > 0)


def die(rig: Rig, node: Node) -> None:
    """No good-bye: its channel is silent, but what its engine has in hand still goes out."""
    node.agent._channel.close()
    rig.nodes.remove(node)


def test_late_write_after_the_writers_death(rig: Rig) -> None:
    """Promise 3: a writer dies with a write in flight, which lands seconds later.  Its destination
    is not handed out before the reader's own fence has cut it off; nothing changes after that."""
    p, c = rig.node("p", posts=[Fault(kind=FaultKind.LATE)]), rig.node("c")
    in_flight(rig, p, c, 3)
    die(rig, p)
    rig.run(lambda: bool(c.of(Failed)))
    assert not c.of(Failed)[0].drained
    with pytest.raises(InvalidInputError, match="bytes may still land"):
        c.agent.accept("v", at(0, 3))
    rig.run(lambda: bool(c.of(Drained)))
    assert c.of(Drained)[0].drained_by == "fence"
    next_owner = c.agent.accept("v", at(0, 3))
    before = c.content([3])
    p.transport.release()  # the dead writer's bytes come now
    p.transport.progress()
    rig.pass_time(1.0)
    assert c.content([3]) == before
    assert not next_owner.done
    p.transport.close(0.0)


def test_late_write_where_no_fence_can_be_had(rig: Rig) -> None:
    """Promise 3: the same with an engine that cannot fence: the blocks stay in quarantine, visibly,
    and what lands late lands in nobody's memory."""
    no_fence = FaultPlan(fences=[Fault(kind=FaultKind.FAIL)] * 99)
    p, c = rig.node("p", posts=[Fault(kind=FaultKind.LATE)]), rig.node("c", plan=no_fence)
    in_flight(rig, p, c, 3)
    die(rig, p)
    rig.run(lambda: bool(c.of(Quarantined)))
    before = c.content([3])
    p.transport.release()
    p.transport.progress()
    rig.pass_time(30.0)
    assert c.content([3]) != before, "the hazard is real: it did land"
    assert not c.of(Drained)
    with pytest.raises(InvalidInputError, match="bytes may still land"):
        c.agent.accept("v", at(0, 3))
    p.transport.close(0.0)


def test_producer_reclaims_without_proof(rig: Rig) -> None:
    """Promise 3: a producer's user takes quarantined source blocks back on their own
    responsibility: that is no proof for the consumer, which is not told "drained"."""
    plan = FaultPlan(posts=[Fault(kind=FaultKind.LATE)], fences=[Fault(kind=FaultKind.FAIL)] * 99)
    p, c = (
        rig.node("p", plan=plan),
        rig.node("c", plan=FaultPlan(fences=[Fault(kind=FaultKind.FAIL)] * 99)),
    )
    in_flight(rig, p, c, 3)
    rig.run(lambda: bool(p.of(Quarantined)))
    p.agent.reclaim("w")
    rig.run(lambda: bool(p.of(Drained)))
    assert p.of(Drained)[0].drained_by == "reclaim"
    rig.pass_time(5.0)
    assert not c.of(Drained)
    with pytest.raises(InvalidInputError, match="bytes may still land"):
        c.agent.accept("v", at(0, 3))


@pytest.mark.parametrize("what", ["release", "seal"])
def test_last_word_lost_ten_times(rig: Rig, what: str) -> None:
    """Promise 6: the word that ends a transfer is lost ten times and then comes twice: each side
    ends exactly once, and nothing is left to send."""
    p, c = rig.node("p", lease=60.0), rig.node("c")
    kind = {"release": wire.Release, "seal": wire.Seal}[what]
    carry, lost = rig.network.carry, []

    def lossy(*args: object) -> None:
        data = args[-1]
        last = isinstance(wire.decode(data).body, kind)  # type: ignore[arg-type]
        if last and len(lost) < 10:
            lost.append(data)
            return
        for _ in range(2 if last else 1):
            carry(*args)  # type: ignore[arg-type]

    rig.network.carry = lossy  # type: ignore[assignment, method-assign]
    if what == "release":
        c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    else:
        c.agent.accept("t", at(0, 1), deadline=60.0)
        p.agent.push("t", at(0, 5), to=c.agent.endpoint)
        p.agent.seal("t")
    rig.run(lambda: bool(p.of(Sent)) and bool(c.of(Received)))
    rig.pass_time(5.0)
    assert len(lost) == 10
    assert len(set(lost)) == 1, "the same message, not ten new ones"
    assert len(p.of(Sent)) == len(c.of(Received)) == 1
    assert c.content([1]) == p.content([5])
    assert not any(p.tables.values())
    assert not any(c.tables.values())


@pytest.mark.parametrize("forgotten", [False, True], ids=["remembered", "forgotten"])
def test_duplicate_release_after_reuse_of_the_id(rig: Rig, forgotten: bool) -> None:
    """Promises 6 and 10: a copy of a release turns up after its id is in use again: the new hold is
    not freed, whether or not the copy is still known as one."""
    p, c = rig.node("p", lease=60.0), rig.node("c")
    frames: list[bytes] = []
    carry = rig.network.carry

    def tapped(*args: object) -> None:
        if isinstance(wire.decode(args[-1]).body, wire.Release):  # type: ignore[arg-type]
            frames.append(args[-1])  # type: ignore[arg-type]
        carry(*args)  # type: ignore[arg-type]

    rig.network.carry = tapped  # type: ignore[assignment, method-assign]
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(p.of(Sent)))
    new = p.agent.hold("t", at(0, 6))
    rig.pass_time(0.2)
    if forgotten:
        p.agent._engine._inbox = Inbox()
    route = p.agent._engine.links.of(c.agent.incarnation).mailbox.route  # type: ignore[union-attr]
    for _ in range(3):
        p.agent._channel.inbox.append(Inbound(route, frames[0]))  # type: ignore[attr-defined]
    rig.pass_time(1.0)
    assert len(p.of(Sent)) == 1
    assert p.tables["holds"] == 1
    if forgotten:
        assert p.counters["acks.stale"] == 1
    handle = c.agent.pull(new, at(0, 2))
    rig.run(lambda: handle.done)
    assert c.content([2]) == p.content([6])
    rig.run(lambda: len(p.of(Sent)) == 2)


def test_duplicate_decline_after_reuse_of_the_id(rig: Rig) -> None:
    """Promise 10: the same with a decline, which would have freed at once."""
    p, c = rig.node("p", lease=60.0), rig.node("c")
    old = p.agent.hold("t", at(0, 5))
    c.agent.decline(old)
    rig.run(lambda: bool(p.of(Declined)))
    p.agent.hold("t", at(0, 6))
    c.agent.decline(old)
    rig.pass_time(1.0)
    assert p.tables["holds"] == 1
    assert len(p.of(Declined)) == 1
