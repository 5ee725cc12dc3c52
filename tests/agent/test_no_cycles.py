"""A transfer that has ended is freed at once: no reference cycle waits for the garbage collector.

Each pull used to leave 46 objects in cycles, and the collector's pauses fall into the engine's
step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
from agent_rig import Node, Rig, at

from kvxfer.core.events import Drained, Expired, Failed, Quarantined, Received, Sent
from kvxfer.core.verdict import EngineError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan

ROUNDS = 3
SQ_FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): ep=0 depth=60 requested=8 max=64"
)
INVALID = EngineError(backend="moriio", code=11, message="length out of range")
OF_TRANSFERS = frozenset(
    {
        *(
            "Accepting",
            "Attempt",
            "Batch",
            "Call",
            "Draining",
            "Grant",
            "Job",
            "Part",
            "Pull",
            "Push",
        ),
        *("Ticket", "TransferHandle"),
    }
)


@pytest.fixture
def garbage() -> Iterator[Callable[[], list[object]]]:
    """What only the collector can free, of what was made since it was last asked.

    Call ``gc.collect()`` to begin anew.
    """

    def look() -> list[object]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = list(gc.garbage)
        gc.garbage.clear()
        return found

    gc.disable()
    yield look
    gc.enable()
    gc.collect()


def pull(p: Node, c: Node, name: str) -> Callable[[], bool]:
    c.agent.pull(p.agent.hold(name, at(0, 5, 9, 2)), at(0, 1, 7, 3))
    return lambda: bool(p.of(Sent, name) and c.of(Received, name))


def pull_by_layers(p: Node, c: Node, name: str) -> Callable[[], bool]:
    offer = p.agent.hold(name, at(0, 5, 9))
    c.agent.pull(offer, at(0, 1, 7), layers=["layer0"], last=False)
    c.agent.pull(offer, at(0, 1, 7), layers=["layer1"])
    return lambda: bool(p.of(Sent, name) and c.of(Received, name))


def release_only(p: Node, c: Node, name: str) -> Callable[[], bool]:
    c.agent.pull(p.agent.hold(name, at(0, 1, 2)), at(0))
    return lambda: bool(p.of(Sent, name))


def decline(p: Node, c: Node, name: str) -> Callable[[], bool]:
    c.agent.decline(p.agent.hold(name, at(0, 1, 2)))
    return lambda: not p.tables["holds"]


def expire(p: Node, c: Node, name: str) -> Callable[[], bool]:
    p.agent.hold(name, at(0, 1, 2))
    return lambda: bool(p.of(Expired, name))


def push(p: Node, c: Node, name: str) -> Callable[[], bool]:
    c.agent.accept(name, at(0, 3, 1))
    p.agent.push(name, at(0, 7, 8), to=c.agent.endpoint)
    p.agent.seal(name, b"token")
    return lambda: bool(p.of(Sent, name) and c.of(Received, name))


def push_nobody_takes(p: Node, c: Node, name: str) -> Callable[[], bool]:
    p.agent.push(name, at(0, 7, 8), to=c.agent.endpoint)
    p.agent.seal(name)
    return lambda: bool(p.of(Failed, name))


def accept_nobody_pushes(p: Node, c: Node, name: str) -> Callable[[], bool]:
    c.agent.accept(name, at(0, 3, 1))
    return lambda: bool(c.of(Failed, name))


@pytest.mark.parametrize(
    "transfer",
    [
        pull,
        pull_by_layers,
        release_only,
        decline,
        expire,
        push,
        push_nobody_takes,
        accept_nobody_pushes,
    ],
)
def test_nothing_is_left_to_the_collector(
    rig: Rig, garbage: Callable[[], list[object]], transfer: Callable[..., Callable[[], bool]]
) -> None:
    """Nothing at all that a transfer made, whichever way it ended."""
    p, c = rig.node("p"), rig.node("c")
    for number in range(ROUNDS + 1):
        rig.run(transfer(p, c, f"t{number}"))
        rig.pass_time(0.5)
        if not number:  # it connects the two: another matter
            gc.collect()
    assert [type(thing).__name__ for thing in garbage()] == []


@pytest.mark.parametrize("write", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=FaultKind.REFUSE, error=SQ_FULL),
        Fault(kind=FaultKind.REFUSE_VALUE, error=SQ_FULL),
        Fault(kind=FaultKind.REFUSE, error=INVALID),
        Fault(kind=FaultKind.PARTIAL, error=INVALID, after=0.5),
        Fault(kind=FaultKind.FAIL_DRAINED, error=INVALID),
        Fault(kind=FaultKind.FAIL, error=INVALID, after=0.2),
        Fault(kind=FaultKind.LATE, after=6.0),
        Fault(kind=FaultKind.DUPLICATE),
    ],
    ids=lambda fault: f"{fault.kind.value}-{'full' if fault.error is SQ_FULL else 'other'}",
)
def test_nor_of_a_post_that_went_wrong(
    rig: Rig, garbage: Callable[[], list[object]], write: bool, fault: Fault
) -> None:
    """Retried, failed, drained late: what the transfer was made of is freed. What a fence makes
    anew (connections) is another matter."""
    p = rig.node("p", posts=[fault] * write, lease=60.0)
    c = rig.node("c", posts=[fault] * (not write))
    gc.collect()
    ended = (push if write else pull)(p, c, "t")
    rig.run(lambda: ended() or bool((p if write else c).of(Failed, "t")))
    rig.pass_time(30.0)
    left = [t for t in garbage() if type(t).__name__ in OF_TRANSFERS]
    assert left == []


def test_nor_of_a_quarantine_that_was_reclaimed(
    rig: Rig, garbage: Callable[[], list[object]]
) -> None:
    """Blocks that the user takes back free the transfer too; what the engine may still report of
    it finds nobody, and nothing breaks."""
    never = Fault(kind=FaultKind.NEVER)
    plan = FaultPlan(posts=[never], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    p, c = rig.node("p", lease=60.0), rig.node("c", plan=plan)
    gc.collect()
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.agent._engine.consumer.pulls))
    there = weakref.ref(next(iter(c.agent._engine.consumer.pulls.values())))
    rig.run(lambda: bool(c.of(Quarantined)))
    c.agent.reclaim("t")
    rig.run(lambda: bool(c.of(Drained)))
    rig.pass_time(10.0)
    assert handle.drained
    assert there() is None
    assert [t for t in garbage() if type(t).__name__ in OF_TRANSFERS] == []
    c.agent.pull(p.agent.hold("u", at(0, 6)), at(0, 2))
    rig.run(lambda: bool(c.of(Received, "u")))
