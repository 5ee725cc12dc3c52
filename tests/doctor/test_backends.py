"""Backends that crash, hang, raise and bring checks of their own: nothing reaches the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_rig import run_doctor

BACKEND = """
import os, sys, time
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.hostcheck import Finding, HostCheck, Level

class Mine(LoopbackTransport):
    name = "mine"
    config_type = None

    @classmethod
    def host_checks(cls):
        def judge(facts):
            return [Finding(backend="mine", level=Level.WARNING, what=f"has {facts} fans",
                            next_step="buy another")]
        return [HostCheck("fans", lambda query: query.options.get("fans", 1), judge)]

    def __init__(self, **options):
        options.pop("fans", 1)
        how = options.pop("how", "")
        super().__init__()
        if how == "abort":
            sys.stderr.write("engine: no device, giving up\\n")
            sys.stderr.flush()
            os.abort()
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(3600)
        if how == "raise":
            raise RuntimeError("odd")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A distribution that brings the backend ``mine``."""
    (tmp_path / "mine_backend.py").write_text(BACKEND)
    info = tmp_path / "mine-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[kvxfer.backends]\nmine = mine_backend:Mine\n")
    return tmp_path


def test_checks_of_a_plug_in(mine: Path) -> None:
    """A stranger's backend is found, its own checks run, then it is started and moves bytes."""
    told = run_doctor("--backend", "mine", "--config", '{"fans": 0}', path=[mine])
    assert told.backend("mine")["distribution"] == "mine 2.5"
    assert told.one("fans", "mine")["what"] == "has 0 fans"
    assert told.one("fans", "mine")["next_step"] == "buy another"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("abort", "was ended by SIGABRT: engine: no device, giving up"),
        ("exit", "exited with 7"),
        ("hang", "did not end within 20 s"),
        ("raise", "RuntimeError: odd"),
    ],
)
def test_an_engine_that_ends_its_process(mine: Path, how: str, words: str) -> None:
    """What it found before is kept, what it was at is named, and the other backends are looked at
    all the same."""
    config = f'{{"how": "{how}"}}'
    arguments = (
        "--backend",
        "mine",
        "--config",
        config,
        "--timeout",
        "20" if how == "hang" else "90",
    )
    told = run_doctor(*arguments, path=[mine])
    assert told.status == 1
    found = told.one("start", "mine")
    assert found["level"] == "error"
    assert words in found["what"]
    assert told.one("fans", "mine")["level"] == "warning"


def test_one_crash_spoils_no_other(mine: Path) -> None:
    """In a run over all backends, each has its own process."""
    broken = BACKEND.replace('how = options.pop("how", "")', 'how = "abort"')
    (mine / "mine_backend.py").write_text(broken)
    told = run_doctor(path=[mine])
    assert told.status == 1
    assert told.backend("mine")["state"] == "not usable"
    assert told.backend("loopback")["state"] == "usable"


def test_a_wrong_configuration() -> None:
    """What the backend's configuration refuses is said as it says it."""
    told = run_doctor("--backend", "shm", "--config", '{"wokers": 2}')
    assert told.status == 1
    texts = [f["what"] + f["next_step"] for f in told.backend("shm")["findings"]]
    assert any("did you mean 'workers'" in text for text in texts)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config", "{}"),
        ("--backend", "shm", "--config", "{"),
        ("--backend", "shm", "--config", "[]"),
        ("--cache-bytes", "lots"),
        ("--ports", "x"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...]) -> None:
    """Exit status 2, and a sentence; no traceback."""
    done = run_doctor(*arguments, json_only=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvxfer: ")
    assert "Traceback" not in done.stderr
