"""``kvxfer doctor`` with the real Mooncake engine: what it finds, and a library that is gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mooncake


def doctor(**env: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "doctor", "--backend", "mooncake", "--json"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)["backends"][0]


def test_usable() -> None:
    """It starts, tells its queue and its open ports, and moves bytes."""
    status, told = doctor()
    assert status == 0
    texts = [f["what"] for f in told["findings"]]
    assert any("tcp, 1024 pieces per peer" in text for text in texts)
    assert any("TCP ports" in text for text in texts)
    assert any("every byte is right" in text for text in texts)


def test_library_damaged(tmp_path: Path) -> None:
    """The engine's shared object cannot be loaded: installed, broken, and what it needs."""
    (here,) = mooncake.__path__
    package = tmp_path / "mooncake"
    package.mkdir()
    for entry in Path(here).iterdir():
        if entry.name.startswith("engine."):
            (package / entry.name).write_bytes(b"\x7fELF and nothing behind it")
        elif entry.suffix == ".py":
            shutil.copy(entry, package)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    status, told = doctor(PYTHONPATH=path)
    assert status == 1
    (found,) = [f for f in told["findings"] if f["level"] == "error"]
    assert found["check"] == "library"
    assert "is installed, but mooncake.engine does not load" in found["what"]
    assert "libibverbs1" in found["next_step"]


def test_environment() -> None:
    """A variable that takes away what the capabilities promise is named."""
    status, told = doctor(MC_TCP_PROTO="1")
    assert status == 1
    (found,) = [f for f in told["findings"] if f["level"] == "error"]
    assert "MC_TCP_PROTO=1" in found["what"]
    assert found["next_step"] == "unset it"
