"""``kvxfer plugins`` shows origin, version, and why something cannot be used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvxfer
from kvxfer.cli import main

Distribution = Callable[..., Path]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """All three groups; our own load everywhere, engine or not."""
    assert main(["plugins", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"kvxfer.backends", "kvxfer.classifiers", "kvxfer.retry_policies"}
    ours = {row["name"]: row for row in told["kvxfer.backends"] if row["ours"]}
    assert set(ours) == {"loopback", "shm", "moriio", "mooncake", "nixl"}
    assert {row["state"] for row in ours.values()} == {"loads"}
    assert ours["shm"]["target"] == "kvxfer.backends.shm:ShmTransport"


def test_broken_ones_are_named(distribution: Distribution, run_python: Callable[..., str]) -> None:
    """One that fails to import and one of the wrong type: named with distribution, version and
    cause; exit status 1. The metadata alone does not show it."""
    folder = distribution(
        "odd-engine",
        "[kvxfer.backends]\nodd = no_such_module:Odd\nwrong = json:loads\n",
        version="3.2",
    )
    program = "import sys; from kvxfer.cli import main; print(main({words}))"
    words = ["plugins", "--json"]
    out = run_python(program.format(words=words), folder).splitlines()
    assert out[-1] == "1"
    rows = {row["name"]: row for row in json.loads(out[0])["kvxfer.backends"]}
    assert (rows["odd"]["distribution"], rows["odd"]["version"]) == ("odd-engine", "3.2")
    assert rows["odd"]["state"] == rows["wrong"]["state"] == "broken"
    assert "no_such_module" in rows["odd"]["error"]
    assert "no subclass" in rows["wrong"]["error"]
    assert rows["shm"]["state"] == "loads"
    assert (
        run_python(program.format(words=["plugins", "--no-load"]), folder).splitlines()[-1] == "0"
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_for_people(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name, origin and state: a line each into a pipe, a table on a terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "ShmTransport" in line]
    for word in ("shm", "loads", kvxfer.__version__):
        assert word in row
    assert ("│" in out) is terminal
