"""``kvxfer demo --failover``: an engine dies half-way, and the demo shows what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer", "demo", "--json", "--failover", *words],
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_demo_shows_the_downgrade() -> None:
    """Prefill's NIXL dies half-way: every request is received, no byte is wrong, and the change of
    backend is among the events and the counters."""
    done = demo("--backend", "nixl", "--faults", "none", "--requests", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    assert shown["outcomes"]["decode"] == {"received": 40}
    assert shown["bytes_wrong"] == shown["blocks_leaked"] == 0
    assert shown["failover"]["downgrades"] == shown["failover"]["to.shm"] == 1
    assert any(c.startswith("decode: over shm instead of nixl") for c in shown["backend_changes"])


def test_there_must_be_another_backend() -> None:
    done = demo("--backend", "shm")
    assert done.returncode != 0
    assert "cannot fail over from shm to itself" in done.stdout + done.stderr
