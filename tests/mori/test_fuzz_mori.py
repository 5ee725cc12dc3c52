"""Nothing that a user of the API does, or a peer suffers, ends the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = int(os.environ.get("KVXFER_MORI_FUZZ", "10000"))
SEED = 20


@pytest.mark.timeout(600)
def test_random_calls_leave_the_process_alive(softrdma):
    """10,000 random calls with a fixed seed (bad vectors, closed paths, dropped objects,
    deregistered memory, restarted, stopped and killed peers, damaged descriptors, injected faults):
    each returns or raises an error of ours, the process lives, moves good bytes afterwards, and
    ends with status 0."""
    search = os.pathsep.join(p or os.getcwd() for p in sys.path)
    program = str(Path(__file__).with_name("fuzz_run.py"))
    done = subprocess.run(
        [sys.executable, program, str(CALLS), str(SEED)],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    print(result["seconds"], result["outcomes"])
    assert result["defects"] == []
    assert result["calls"] == CALLS
    assert result["works"]
    outcomes = result["outcomes"]
    for call in ("post", "prepare", "connect", "register", "fence", "restart", "renew"):
        assert outcomes.get(f"{call} ok", 0) > 0, f"no {call} ever succeeded: {outcomes}"
    refused = sum(n for what, n in outcomes.items() if not what.endswith(" ok"))
    assert refused > CALLS / 10, "hardly anything was wrong with the calls"
