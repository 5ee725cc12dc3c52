"""The runbook's worker as a process of its own: SIGTERM, and what its peers see of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doc_blocks import ROOT, blocks_of

import kvxfer
from kvxfer import Agent, AgentConfig, Blocks, KVLayout, Offer
from kvxfer.backends.shm import allocate

PAGE = ROOT / "docs" / "operations" / "runbook.md"
MAIN = """
import sys
from kvxfer.backends.shm import allocate

GRACE = float(sys.argv[1])
worker = Agent("shm", config=AgentConfig(name="worker"))
cache = allocate((64, 4096), np.uint8)
cache[7] = 42
worker.register_kv_caches({"layers.0": cache}, LAYOUT)
print(worker.hold("request-1", Blocks.at(0, [7]), lease=60.0).to_json(), flush=True)
sys.exit(0 if serve(worker, lambda: ()) else 1)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The page's worker, up to where the page begins to try it, and a main of ours."""
    block = next(
        b for b in blocks_of("runbook", PAGE.read_text()) if "signal.SIGTERM, lambda" in b.code
    )
    taught = block.code.partition("\nworker = Agent(")[0]
    assert "def serve(" in taught
    path = tmp_path / "worker.py"
    path.write_text(taught + MAIN)
    return path


def start(program: Path, grace: float) -> tuple[subprocess.Popen[str], Offer]:
    process = subprocess.Popen(
        [sys.executable, program, str(grace)],
        env=os.environ | {"PYTHONPATH": str(Path(kvxfer.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Offer.from_json(process.stdout.readline())


@pytest.fixture
def reader() -> Iterator[Agent]:
    layout = KVLayout(
        num_blocks=64,
        block_stride=4096,
        planes=1,
        plane_stride=64 * 4096,
        kernel_tokens=16,
        token_stride=256,
        heads=2,
        head_stride=128,
        head_nbytes=128,
        dtype="uint8",
    )
    with Agent("shm", config=AgentConfig(name="reader")) as agent:
        agent.cache = allocate((64, 4096), np.uint8)  # type: ignore[attr-defined]
        agent.register_kv_caches({"layers.0": agent.cache}, layout)  # type: ignore[attr-defined]
        yield agent


def test_what_was_offered_is_served_after_sigterm(program: Path, reader: Agent) -> None:
    """A peer that comes after the signal gets every byte; then the worker ends, drained."""
    process, offer = start(program, grace=60.0)
    with process:
        process.send_signal(signal.SIGTERM)
        pull = reader.pull(offer, Blocks.at(0, [9]))
        assert reader.wait(pull, 60)
        assert pull.error is None
        assert (reader.cache[9] == 42).all()  # type: ignore[attr-defined]
        assert process.wait(60) == 0


def test_nobody_reads(program: Path) -> None:
    """The grace period ends it, not drained; it does not wait for the lease of a minute."""
    process, _ = start(program, grace=0.5)
    with process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == 1
