"""``kvxfer demo``: real processes, every byte checked, and each sabotage noticed."""

from __future__ import annotations

import json
import subprocess
import sys

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
