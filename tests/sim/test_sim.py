"""The simulation: promises hold for many orders of events, and runs replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.agent import Agent
from kvxfer.core.channel import Channel
from kvxfer.core.transport import Transport
from kvxfer.testing.sim import (
    NodeFault,
    PostFault,
    SimConfig,
    World,
    expected_cells,
    run,
    shrink,
)

SMALL = SimConfig(transfers=60)
ROUGH = SimConfig(transfers=60, lose=0.15, duplicate=0.15, delay=0.1)
SEEDS = json.loads(Path(__file__).with_name("seeds.json").read_text(encoding="ascii"))

pytestmark = pytest.mark.timeout(600)
"""Of the wall: a busy machine simulates slowly."""


@pytest.mark.parametrize("config", [SMALL, ROUGH], ids=["small", "rough"])
@pytest.mark.parametrize("seed", range(4))
def test_promises_hold(seed: int, config: SimConfig) -> None:
    """Promises 1 to 8, 10 and 12 under every fault the simulation knows."""
    report = run(seed, config)
    assert not report.violations, str(report.violations[0])
    assert report.outcomes["Received"] > 15


@pytest.mark.parametrize("case", SEEDS, ids=[case["name"] for case in SEEDS])
def test_what_was_once_found_stays_fixed(case: dict[str, object]) -> None:
    """Each seed once broke a promise; its name says how."""
    report = run(int(str(case["seed"])), SimConfig.from_dict(case["config"]))  # type: ignore[arg-type]
    assert not report.violations, str(report.violations[0])


CROWDED = {
    "transfers": 200,
    "producers": 2,
    "consumers": 18,
    "rate": 400.0,
    "abort": 0.0,
    "lose": 0.25,
    "retry_elsewhere": 1.0,
    "writes": 0.0,
}
"""One hold has several readers, which are told that it is gone, in some order."""


@pytest.mark.parametrize(
    ("seed", "profile", "changes"),
    [(5, "mixed", {"transfers": 60, "lose": 0.1}), (2, "leases", CROWDED)],
    ids=["mixed", "crowded"],
)
def test_equal_seeds_give_equal_runs_in_any_process(
    seed: int, profile: str, changes: dict[str, float]
) -> None:
    """A failing seed replays exactly, whatever the hash seed of the process."""
    program = (
        "from kvxfer.testing.sim import PROFILES, run\n"
        "import attrs, json\n"
        f"report = run({seed}, attrs.evolve(PROFILES[{profile!r}], **{changes!r}))\n"
        "print(json.dumps(report.to_dict(), sort_keys=True))"
    )
    told = set()
    for hash_seed in ("0", "1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        told.add(done.stdout)
    assert len(told) == 1


def test_what_is_replaced() -> None:
    """Transport, channel, clock and randomness are the simulation's; everything else ships."""
    world = World(1, SMALL)
    try:
        ours: set[type] = set()
        shipped: set[str] = set()
        for node in world.nodes:
            assert type(node.agent) is Agent
            context = node.agent._ctx
            for part in (
                node.agent._engine,
                node.agent._engine.links,
                node.agent._engine.consumer,
                node.agent._engine.producer,
                context,
                context.timeouts,
                context.retry,
                context.classifier,
                node.agent.config,
            ):
                shipped.add(type(part).__module__)
            ours |= {type(node.transport), type(context.channel), type(context.clock)}
        assert all(
            m.split(".")[:2] in (["kvxfer", p] for p in ("agent", "policies")) for m in shipped
        )
        assert {c.__name__ for c in ours} == {"SimTransport", "SimChannel", "NodeClock"}
        for kind in ours:
            assert kind.__module__.startswith("kvxfer.testing.sim.")
            assert hasattr(kind, "now") or issubclass(kind, (Transport, Channel))
    finally:
        world.close()


def test_every_fault_strikes() -> None:
    """Each fault that the configuration names happens; the phases are counted."""
    struck: dict[str, int] = {}
    phases: set[tuple[str, str]] = set()

    for seed in range(6):
        report = run(seed, SimConfig(transfers=150).harsher(4.0))
        phases |= set(report.faults)
        for (fault, _), n in report.faults.items():
            struck[fault] = struck.get(fault, 0) + n
    for name in (*(f.value for f in NodeFault), *(f.value for f in PostFault)):
        assert struck.get(name, 0) > 0, name
    assert struck["lost"] > 0
    assert struck["duplicated"] > 0
    assert phases <= {
        *expected_cells(),
        *(p for p in phases if p[0] in ("lost", "duplicated", "cut")),
    }


def test_a_failing_run_gets_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinking keeps a violation while requests and faults go."""
    from kvxfer.agent.part import Part

    monkeypatch.setattr(Part, "done", property(lambda self: self.error is None))
    seed, small, report = shrink(1, SimConfig(transfers=60), most=12)
    assert report.violations
    assert small.transfers < 60
    assert run(seed, small).violations
    assert report.violations[0].trace
