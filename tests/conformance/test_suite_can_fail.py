"""The suite notices a transport that breaks the contract: each sabotage fails its own test."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from sabotaged import NOTICED_BY, NOTICED_BY_TWO

ALL = {**NOTICED_BY, **NOTICED_BY_TWO}
SABOTAGED = Path(__file__).parent / "sabotaged.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of one subprocess: ``{test class: {test name without parameters: [what failed, ...]}}``,
    with an empty text for a test that passed."""
    report = tmp_path_factory.mktemp("sabotage") / "report.xml"
    wanted = [f"{SABOTAGED}::Test{e.__name__}::{test}" for e, test in ALL.items()]
    for control, noticed in (("TestHonest", NOTICED_BY), ("TestHonestShm", NOTICED_BY_TWO)):
        wanted += [f"{SABOTAGED}::{control}::{test}" for test in sorted(set(noticed.values()))]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"),
            # One direction will do: noticing takes time-outs.
            *("-k", "not process-write"),
            *("--timeout=60", f"--junitxml={report}", *wanted),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    found: dict[str, dict[str, list[str]]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is None:
            bad = [e.get("message", "") for e in (*case.iter("failure"), *case.iter("error"))]
            engine = case.get("classname", "").rpartition(".Test")[2]
            test = case.get("name", "").partition("[")[0]
            found.setdefault(engine, {}).setdefault(test, []).append("; ".join(bad))
    return found


@pytest.mark.timeout(300)  # the first one runs them all; several wait for a time-out of theirs
@pytest.mark.parametrize("engine", ALL, ids=lambda engine: engine.__name__)
def test_sabotage_is_noticed(outcomes, engine):
    """The named contract test fails with this fault, and passes without it."""
    test = ALL[engine]
    control = outcomes["HonestShm" if engine in NOTICED_BY_TWO else "Honest"][test]
    assert control, "the control did not run"
    assert not any(control)
    assert any(outcomes[engine.__name__][test])
