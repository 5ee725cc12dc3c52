"""Promises 3 and 4: an abort at any moment, by either side: one terminal event each, nothing left.

The script of one transfer is run step by step; at every step, in a fresh world, somebody aborts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agent_rig import Node, Rig, at

from kvxfer.core.events import (
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    Quarantined,
    Received,
    Sent,
)
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan

TERMINAL = (Received, Sent, Declined, Expired, Failed)

FAULTS: dict[str, Callable[[], FaultPlan]] = {
    "healthy": FaultPlan,
    "late": lambda: FaultPlan(posts=[Fault(kind=FaultKind.LATE, after=0.2)] * 4),
    "silent": lambda: FaultPlan(posts=[Fault(kind=FaultKind.NEVER)] * 4),
    "unfenced": lambda: FaultPlan(
        posts=[Fault(kind=FaultKind.NEVER)] * 4, fences=[Fault(kind=FaultKind.FAIL)] * 20
    ),
}


class World:
    """A producer, a consumer, and one transfer ``t`` of two layers in two submits."""

    def __init__(self, op: str, fault: str) -> None:
        self.rig = Rig()
        mover = {"plan": FAULTS[fault]()}
        self.p = self.rig.node("p", lease=4.0, **(mover if op == "write" else {}))
        self.c = self.rig.node("c", **(mover if op == "read" else {}))
        if op == "read":
            offer = self.p.agent.hold("t", at(0, 5, 6), tag="p")
            for n, last in enumerate((False, True)):
                self.c.agent.pull(offer, at(0, 1, 2), layers=[f"layer{n}"], last=last, tag="c")
        else:
            self.c.agent.accept("t", at(0, 1, 2), tag="c")
            for n in range(2):
                self.p.agent.push(
                    "t", at(0, 5, 6), to=self.c.agent.endpoint, layers=[f"layer{n}"], tag="p"
                )
            self.p.agent.seal("t")

    @property
    def sides(self) -> tuple[Node, Node]:
        return self.p, self.c

    def ended(self) -> bool:
        """Every side that is left has its terminal event."""
        return all(any(isinstance(e, TERMINAL) for e in node.events) for node in self.rig.nodes)

    def close(self) -> None:
        for node in self.sides:
            node.agent.close(0.0)


def steps_of(op: str, fault: str) -> int:
    """How many steps the script takes if nobody aborts."""
    world, count = World(op, fault), 0
    while not world.ended() and count < 400:
        world.rig.step()
        count += 1
    world.close()
    return count


def moments(op: str, fault: str) -> list[int]:
    """Every step of the healthy script; of the others, which mostly wait, every few."""
    count = steps_of(op, fault) + 3
    if fault == "healthy":
        return list(range(count))
    return sorted({*range(0, min(count, 60), 6), *range(60, count, 60), count})


def check_side(world: World, node: Node, when: str) -> None:
    """One terminal event; what may still land is told once, and taken back once."""
    events = [e for e in node.events if e.transfer_id == "t"]
    terminal = [e for e in events if isinstance(e, TERMINAL)]
    assert len(terminal) == 1, (when, events)
    assert all(e.tag == node.name for e in events), when
    after = [e for e in events if isinstance(e, (Drained, Quarantined))]
    first = terminal[0]
    if not isinstance(first, Failed) or first.drained:
        assert after == [], (when, events)
    else:
        kinds = [type(e) for e in after]
        assert kinds in ([Drained], [Quarantined, Drained]), (when, events)
        assert events.index(first) < events.index(after[0]), when
    assert not any(node.tables.values()), (when, node.tables)
    assert node.agent.snapshot().quarantine == (), when


def check(world: World, op: str, when: str) -> None:
    for node in world.sides:
        check_side(world, node, when)
    sent, received = bool(world.p.of(Sent)), bool(world.c.of(Received))
    if op == "write":
        assert not sent or received, f"{when}: sent, but not received"
    elif received:
        assert sent, f"{when}: received, but the producer says otherwise"
    else:
        assert not sent, f"{when}: not received, but the producer says that it was sent"
    if received:
        assert world.c.content([1, 2]) == world.p.content([5, 6]), when


def settled(world: World) -> bool:
    """Everything has ended and nothing is left; what is quarantined is reclaimed on the way."""
    if not world.ended():
        return False
    for node in world.rig.nodes:
        for entry in node.agent.snapshot().quarantine:
            node.agent.reclaim(entry.transfer_id)
    return not any(any(node.tables.values()) for node in world.rig.nodes)


def run_to_the_end(world: World) -> None:
    world.rig.run(lambda: settled(world), seconds=60)
    world.rig.pass_time(1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("who", ["producer", "consumer", "both"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_abort_at_every_step(op: str, who: str, fault: str) -> None:
    """Whoever aborts, and whenever: each side ends once, and all tables are empty."""
    for moment in moments(op, fault):
        world = World(op, fault)
        for _ in range(moment):
            world.rig.step()
        for node, name in zip(world.sides, ("producer", "consumer"), strict=True):
            if who in (name, "both"):
                node.agent.abort("t")
        run_to_the_end(world)
        check(world, op, f"{who} aborts a {op} with {fault} engine at step {moment}")
        world.close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_peer_that_closes_at_every_step(op: str) -> None:
    """One side closes in good order at any step: the other ends once, and keeps nothing."""
    for closing in (0, 1):
        for moment in moments(op, "healthy"):
            world = World(op, "healthy")
            for _ in range(moment):
                world.rig.step()
            gone, left = world.sides[closing], world.sides[1 - closing]
            world.rig.nodes.remove(gone)
            gone.agent.close(0.0)
            gone.events += gone.agent.poll()
            when = f"{gone.name} closes at step {moment} of a {op}"
            run_to_the_end(world)
            check_side(world, left, when)
            terminal = [e for e in gone.events if isinstance(e, TERMINAL)]
            assert len(terminal) == 1, (when, gone.events)
            if left is world.p and gone.of(Received):
                assert left.of(Sent), when
            if left is world.c and op == "write" and gone.of(Sent):
                assert left.of(Received), when
            left.agent.close(0.0)


@pytest.mark.parametrize("op", ["read", "write"])
def test_peer_that_dies_at_every_step(op: str) -> None:
    """One side is gone without a word at any step: the other ends once, in time."""
    for dying in (0, 1):
        for moment in moments(op, "healthy"):
            world = World(op, "healthy")
            for _ in range(moment):
                world.rig.step()
            gone, left = world.sides[dying], world.sides[1 - dying]
            world.rig.nodes.remove(gone)
            gone.agent._channel.close()
            gone.transport.close(0.0)
            when = f"{gone.name} dies at step {moment} of a {op}"
            run_to_the_end(world)
            check_side(world, left, when)
            left.agent.close(0.0)


def test_every_phase_is_hit() -> None:
    """The steps above really pass through what they claim to: the script has all its phases."""
    phases: set[str] = set()
    for op in ("read", "write"):
        world = World(op, "late")
        probes: dict[str, Callable[[], bool]] = {
            f"{op} begun": lambda w=world: any(
                n.tables["pulls"] + n.tables["pushes"] for n in w.sides
            ),
            f"{op} moving": lambda w=world: any(n.tables["in_flight_pieces"] for n in w.sides),
            f"{op} answering": lambda w=world: any(n.tables["unconfirmed"] for n in w.sides),
            f"{op} granted": lambda w=world: bool(
                w.p.counters.get("grants.given") or w.p.counters.get("received.accept")
            ),
            f"{op} over": world.ended,
        }
        while not world.ended():
            phases.update(name for name, probe in probes.items() if probe())
            world.rig.step()
        phases.update(name for name, probe in probes.items() if probe())
        world.close()
    wanted = {"begun", "moving", "answering", "granted", "over"}
    assert phases == {f"{op} {name}" for op in ("read", "write") for name in wanted}
    _ = Event
