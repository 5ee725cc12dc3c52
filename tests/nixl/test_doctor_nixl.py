"""``kvxfer doctor`` with the real NIXL: what it finds, and what it names when parts are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def doctor(**env: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "doctor", "--backend", "nixl", "--json"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)["backends"][0]


def test_usable() -> None:
    """It starts, names its open ports, and moves bytes."""
    status, told = doctor()
    assert status == 0
    assert told["state"] == "usable"
    ports = [f for f in told["findings"] if "TCP ports" in f["what"]]
    assert len(ports) == 1
    assert "data_network_trusted" in ports[0]["next_step"]
    assert any("every byte is right" in f["what"] for f in told["findings"])


def test_plug_ins_hidden(tmp_path: Path) -> None:
    """NIXL's UCX plug-in cannot be found where the environment says: the folder is named."""
    status, told = doctor(NIXL_PLUGIN_DIR=str(tmp_path))
    assert status == 1
    (found,) = [f for f in told["findings"] if f["level"] == "error"]
    assert str(tmp_path) in found["what"]
    assert "unset it" in found["next_step"]


def test_library_broken(tmp_path: Path) -> None:
    """A package of that name that does not load hides the real one: installed, and broken."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import no_such_library_of_nixl\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    status, told = doctor(PYTHONPATH=path)
    assert status == 1
    (found,) = [f for f in told["findings"] if f["level"] == "error"]
    assert found["check"] == "library"
    assert "no_such_library_of_nixl" in found["what"]
    assert "pip install nixl" in found["next_step"]
