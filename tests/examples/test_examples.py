"""The examples run in fresh interpreters, and those of one part load no other."""

from __future__ import annotations

import functools
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvxfer
from kvxfer.policies.timeouts import Timeouts

ROOT = Path(__file__).parents[2]
SERVERS = {"vllm_proxy"}
"""Programs that run for ever; this one is run by tests/vllm/test_http.py."""
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem not in SERVERS)
WHOLE = ROOT / "examples" / "minimal_connector.py"
"""Uses the agent, and so nearly everything."""

ALONE = {
    "layout_alone": {"layout", "topology"},
    "plan_blocks": {"layout"},
    "reconcile_acks": {"acks", "remembered", "timers"},
}
"""By example: the parts of ``kvxfer.core`` that it may load."""

STRANGERS = ("zmq", "tenacity", "torch", "entrypoints", "msgspec", "mori", "nixl", "mooncake")


def loaded_by(example: Path) -> set[str]:
    """Names of all modules that are loaded when the example has run to its end."""
    program = (
        "import json, runpy, sys\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
        "print()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={"PYTHONPATH": str(Path(kvxfer.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path != WHOLE], ids=lambda path: path.stem
)
def test_example_of_one_part_loads_no_other(example: Path) -> None:
    """It runs; no transport, agent, backend or policy is loaded, and no library that they need."""
    loaded = loaded_by(example)
    for stranger in STRANGERS:
        assert stranger not in loaded
    ours = {name for name in loaded if name.startswith("kvxfer.")}
    parts = {name.split(".")[2] for name in ours if name.startswith("kvxfer.core.")}
    assert parts == ALONE[example.stem]
    assert {name.split(".")[1] for name in ours} == {"core", "errors"}


def test_every_example_is_run() -> None:
    """A new example must be named here, with the parts it may load."""
    assert {example.stem for example in EXAMPLES} == {*ALONE, WHOLE.stem}


def test_the_connector_is_short_and_runs() -> None:
    """Both halves in fewer than 150 lines; every byte of every head is compared by itself."""
    assert len(WHOLE.read_text().splitlines()) < 150
    loaded = loaded_by(WHOLE)
    assert "kvxfer.agent.scheduler" in loaded


def test_the_connector_when_prefill_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose producer has gone is computed again, and no block is lost."""
    names = runpy.run_path(str(WHOLE))
    timeouts = functools.partial(names["Agent"], timeouts=Timeouts(connect=1.0))
    monkeypatch.setitem(names["Worker"].__init__.__globals__, "Agent", timeouts)
    prefill, decode = names["Engine"](tp=1), names["Engine"](tp=2)
    prefill.scheduler.allocate("request-1", 3)
    offer = prefill.scheduler.hand_over("request-1")
    for worker in prefill.workers:
        worker.agent.close()
    decode.scheduler.admit("request-1", offer)
    deadline = time.monotonic() + 60
    while "request-1" not in decode.scheduler.recompute:
        assert time.monotonic() < deadline
        decode.step()
    while len(decode.scheduler.free) < names["BLOCKS"]:
        assert time.monotonic() < deadline
        decode.step()
    assert decode.scheduler.ready == []
    for worker in decode.workers:
        worker.agent.close()
