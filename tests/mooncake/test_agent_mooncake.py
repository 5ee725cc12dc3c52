"""Agents over the real Mooncake engine, and the demo over it."""

from __future__ import annotations

import json
import subprocess
import sys

from kvxfer.testing.agents import AgentTests


class TestMooncake(AgentTests):
    backend = "mooncake"


def test_demo_with_faults():
    """The demo over mooncake, with faults: no wrong byte, no leaked block."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvxfer", "demo", "--json"),
            *("--backend", "mooncake", "--requests", "80"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["held"] is True, told["broken"]
    assert (told["bytes_wrong"], told["blocks_leaked"]) == (0, 0)
    assert sum(told["faults"].values()) > 0
