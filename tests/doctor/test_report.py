"""How the doctor's findings are shown, and what makes the exit status."""

from __future__ import annotations

import json
import sys

import pytest

from kvxfer.cli.doctor.report import Report, show
from kvxfer.core.hostcheck import Finding, Level


def finding(level: Level, check: str = "start") -> Finding:
    return Finding(
        backend="any", check=check, level=level, what=f"what of {check}", next_step="do this"
    )


def report(level: Level, *, asked: bool, host: Level = Level.OK) -> Report:
    made = Report(host=[finding(host, "memlock")])
    made.add("any", None, [finding(level)], asked=asked)
    return made


@pytest.mark.parametrize(
    ("level", "asked", "usable", "state"),
    [
        (Level.OK, False, True, "usable"),
        (Level.NOTE, True, True, "usable"),
        (Level.WARNING, True, True, "usable"),
        (Level.MISSING, False, True, "not installed"),
        (Level.MISSING, True, False, "not installed"),
        (Level.ERROR, False, False, "not usable"),
        (Level.ERROR, True, False, "not usable"),
    ],
)
def test_what_counts(level: Level, asked: bool, usable: bool, state: str) -> None:
    """An error counts always; what is not installed only where it was asked for."""
    made = report(level, asked=asked)
    assert made.usable is usable
    assert made.backends[0].state == state
    assert not report(level, asked=asked, host=Level.ERROR).usable


@pytest.mark.parametrize("terminal", [False, True])
def test_for_people(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finding with its next step; the verdict names what is wrong."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "100")
    show(report(Level.ERROR, asked=True), as_json=False)
    out = capsys.readouterr().out
    for words in ("what of start", "what of memlock", "do this", "Not usable: any."):
        assert words in out
    assert ("│" in out) is terminal


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object, with the same facts."""
    show(report(Level.MISSING, asked=True), as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["usable"] is False
    (backend,) = told["backends"]
    assert (backend["name"], backend["state"], backend["asked"]) == ("any", "not installed", True)
    assert backend["findings"] == [
        {"check": "start", "level": "missing", "what": "what of start", "next_step": "do this"}
    ]
