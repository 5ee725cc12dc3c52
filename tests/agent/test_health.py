"""Health: each problem has a name of the list, numbers, and a next step; the worst come first."""

from __future__ import annotations

import ast
import itertools
import json
import threading
from pathlib import Path

import pytest
from agent_rig import Rig, at

import kvxfer.agent.health as module
from kvxfer.agent import Agent, AgentConfig, Health, Problem
from kvxfer.agent.config import Limits
from kvxfer.agent.failures import RECENT, Failures
from kvxfer.agent.health import PROBLEMS, health_of
from kvxfer.agent.pump import Pump
from kvxfer.core.events import Sent
from kvxfer.policies.admission import FixedAdmission
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan


def named(health: Health) -> dict[str, Problem]:
    return {problem.name: problem for problem in health.problems}


def test_the_list_of_names_is_the_codes() -> None:
    """Metrics and the runbook rely on it."""
    tree = ast.parse(Path(module.__file__).read_text())
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem":
            (name,) = (k.value for k in node.keywords if k.arg == "name")
            used |= {n.value for n in ast.walk(name) if isinstance(n, ast.Constant)}
    assert used == set(PROBLEMS)


def test_nothing_is_wrong(rig: Rig) -> None:
    """Ready, no problems, and JSON that says so, with the agent's name."""
    p = rig.node("p")
    assert p.agent.health() == Health(agent="p", incarnation=p.agent.incarnation)
    told = json.loads(json.dumps(p.agent.health().to_dict()))
    assert told == {
        "ready": True,
        "agent": "p",
        "incarnation": p.agent.incarnation,
        "problems": [],
    }


def test_closed(rig: Rig) -> None:
    """One problem that stands for all others."""
    p = rig.node("p")
    p.agent.add_observer(lambda _: 1 // 0)
    p.agent.hold("t", at(0, 1))
    p.agent.close(0.0)
    assert list(named(p.agent.health())) == ["closed"]


def test_a_failure_speaks_against_new_requests_for_a_minute(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails in every round keeps a worker out; what failed once does not do so for ever."""
    p = rig.node("p")
    with monkeypatch.context() as broken:
        broken.setattr(p.transport, "progress", lambda budget: 1 // 0)
        rig.pass_time(1.0)
        failed = named(p.agent.health())["transport_failed"]
        assert not p.agent.health().ready
        assert failed.blocking
        assert failed.numbers["failures"] >= 2
    rig.pass_time(RECENT - 2.0)
    assert not p.agent.health().ready
    rig.pass_time(3.0)
    healed = named(p.agent.health())["transport_failed"]
    assert p.agent.health().ready
    assert not healed.blocking
    assert healed.numbers["failures"] == failed.numbers["failures"]
    assert healed.numbers["last_seconds"] >= RECENT


def test_failed_rounds_speak_against_new_requests_for_a_minute(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for the rounds of the progress thread, which notes them and goes on."""
    p = rig.node("p")
    pump = Pump(p.agent._engine, rig.clock, "p")
    rounds, failing = itertools.count(), threading.Event()

    def broken(now: float) -> float:
        if next(rounds):  # the first one is noted by now
            failing.set()
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(p.agent._engine, "round", broken)
        pump.start()
        assert failing.wait(60.0)
        assert pump.stop(60.0)

    def told() -> Problem:
        health = health_of(p.agent._engine, pump, rig.clock.now(), closed=False)
        return named(health)["rounds_failed"]

    assert told().blocking
    rig.clock.advance(RECENT)
    assert not told().blocking


def test_full_quarantine_blocks_and_comes_first(rig: Rig) -> None:
    """With its numbers: how many, of how many, how many blocks, for how long."""
    plan = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    p, c = rig.node("p", lease=60.0), rig.node("c", plan=plan, limits=Limits(quarantined=1))
    c.agent.add_observer(lambda _: 1 // 0)
    c.agent.pull(p.agent.hold("t", at(0, 5, 6)), at(0, 1, 2))
    rig.run(lambda: not c.agent.health().ready)
    rig.pass_time(3.0)
    health = c.agent.health()
    assert [x.name for x in health.problems] == ["quarantine_full", "observer_failed"]
    first = health.problems[0]
    assert first.numbers["transfers"] == first.numbers["limit"] == 1
    assert first.numbers["blocks"] == 2
    assert first.numbers["oldest_seconds"] == pytest.approx(3.0, abs=0.2)
    assert health.reasons == (first.message,)
    assert all(problem.next_step for problem in health.problems)


def test_backpressure_says_how_long(rig: Rig) -> None:
    """A call that has waited for more than a second for credits is a warning, with the queue."""
    late = Fault(kind=FaultKind.LATE, after=4.0)
    p = rig.node("p", lease=60.0)
    c = rig.node("c", posts=[late, late], admission=FixedAdmission(credits=4))
    for i in range(2):
        c.agent.pull(p.agent.hold(f"t{i}", at(0, i)), at(0, i))
    rig.run(lambda: c.agent.snapshot().waiting_for_credits > 0)
    assert "backpressure" not in named(c.agent.health())
    rig.pass_time(1.5)
    problem = named(c.agent.health())["backpressure"]
    assert not problem.blocking
    assert problem.numbers["calls"] >= 1
    assert problem.numbers["seconds"] == pytest.approx(1.5, abs=0.2)
    assert "Timeouts.queue is 3.0 s" in problem.message
    assert "4 of 4" in problem.message


def test_events_that_nobody_collects(rig: Rig) -> None:
    """Blocks are freed by what ``poll`` returns: nobody who does not call it is ready."""
    p = rig.node("p", limits=Limits(events=2))
    for i in range(3):
        p.agent._ctx.emit(Sent(transfer_id=f"t{i}"))
    problem = named(p.agent.health())["events_not_collected"]
    assert problem.numbers == {"events": 3, "limit": 2}
    p.agent.poll()
    assert p.agent.health().ready


def test_a_stalled_and_an_ended_thread() -> None:
    """Both are named, with what to look for."""
    with Agent("loopback", config=AgentConfig(name="w", keeper=None)) as agent:
        assert agent._pump is not None
        agent._pump.stop(30.0)
        agent._pump.last_round -= 100.0
        problems = named(agent.health())
        assert list(problems) == ["thread_ended"]
        assert "restart" in problems["thread_ended"].next_step
        agent._pump = _Silent(agent.clock.now() - 7.0)  # type: ignore[assignment]
        problem = named(agent.health())["thread_stalled"]
        assert problem.numbers["seconds"] == pytest.approx(7.0, abs=5.0)
        assert "py-spy" in problem.next_step


class _Silent:
    """A thread that is alive and makes no round."""

    alive, failures = True, Failures()

    def __init__(self, last_round: float) -> None:
        self.last_round = last_round

    def stop(self, timeout: float) -> bool:
        return True

    def is_current_thread(self) -> bool:
        return False
