"""``kvxfer demo``: real processes, every byte checked, and each sabotage noticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def demo(*arguments: str, timeout: float = 110) -> tuple[int, dict[str, object]]:
    """Run the demo; its exit status and JSON result."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "demo", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_default_faults() -> None:
    """All promises hold under every default fault, each of which strikes."""
    status, result = demo("--requests", "120", "--model", "llama-3.1-70b-tp8")
    assert result["broken"] == []
    assert status == 0
    assert result["bytes_wrong"] == result["blocks_leaked"] == 0
    assert sum(result["retries"].values()) > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-30b-a3b"])
def test_other_geometries(model: str) -> None:
    """Latent and grouped caches move as well."""
    status, result = demo("--requests", "15", "--faults", "none", "--model", model)
    assert result["broken"] == []
    assert status == 0
    assert result["bytes"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("sabotage", ["early-free", "flip-byte", "drop-release"])
def test_sabotage_is_noticed(sabotage: str) -> None:
    """The demo can fail: each broken promise gives a non-zero exit status and its reason."""
    status, result = demo(
        "--requests",
        "15",
        "--faults",
        "none",
        "--model",
        "llama-3.1-70b-tp8",
        "--sabotage",
        sabotage,
    )
    assert status == 1
    assert not result["held"]
    if sabotage == "drop-release":
        assert result["outcomes"]["prefill"]["expired"] > 0  # type: ignore[index]
    else:
        assert result["bytes_wrong"] > 0  # type: ignore[operator]


def test_process_local_backend_is_refused() -> None:
    """A backend that cannot reach another process is refused with the next step."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "demo", "--backend", "loopback"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--backend shm" in done.stderr


def test_plugins_are_listed() -> None:
    """``kvxfer plugins`` names what is installed and from where."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "plugins"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kvxfer.backends.shm:ShmTransport" in done.stdout


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C, which reaches all of its processes: what is under way ends, and the result is shown
    as always."""
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvxfer", "demo", "--json", "--requests", "20000"),
                *("--model", "llama-3.1-70b-tp8", "--metrics-port", "0"),
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 100
        while errors.read_text().count("/metrics") < 2:  # told once both run, before requests begin
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.communicate()
    result = json.loads(output)
    assert result["held"] is True, result["broken"]
    assert process.returncode == 0
    assert result["requests"].get("total", 0) < 20000
    assert not result["bytes_wrong"] + result["blocks_leaked"]
