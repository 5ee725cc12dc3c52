"""One line broken in a copy of the package: the simulator says so within seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sabotages import SABOTAGES, Sabotage

import kvxfer

_PACKAGE = Path(kvxfer.__file__).parent
_LIMIT = 15.0
"""CPU seconds within which each must be found."""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sabotage], Path]:
    root = tmp_path_factory.mktemp("sabotaged")
    copy = root / "kvxfer"
    shutil.copytree(_PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "softrdma"))
    shown: dict[Path, str] = {}

    def patch(sabotage: Sabotage) -> Path:
        for path, text in shown.items():
            path.write_text(text, encoding="utf-8")
        path = copy / sabotage.file
        text = shown.setdefault(path, path.read_text(encoding="utf-8"))
        assert text.count(sabotage.old) == 1, f"{sabotage.name}: {sabotage.file} has changed"
        path.write_text(text.replace(sabotage.old, sabotage.new), encoding="utf-8")
        return root

    return patch


def simulate(root: Path, *options: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "sim", "--stop", *options],
        env=env,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=[s.name for s in SABOTAGES])
def test_it_is_found(sabotage: Sabotage, patched: Callable[[Sabotage], Path]) -> None:
    """A checker that cannot fail shows nothing: with fixed seeds, within 15 seconds."""
    root = patched(sabotage)
    before = os.times()
    status, said = simulate(
        root, "--seeds", "8", "--transfers", "100", "--harsh", "4", *sabotage.options
    )
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    assert status == 1, f"{sabotage.name} was not noticed:\n{said}"
    assert "violation" in said
    assert spent <= _LIMIT, f"found only after {spent:.1f} s of CPU"


def test_there_are_enough() -> None:
    """At least fifteen, and all of them different."""
    assert len({(s.file, s.old, s.new) for s in SABOTAGES}) == len(SABOTAGES) >= 15
