"""A copy of the package with one sabotage in it, and the simulator run on that copy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sabotages import Sabotage

import kvxfer

__all__ = ["LIMIT", "Broken"]

LIMIT = 15.0
"""CPU seconds within which each sabotage must be found."""

_PACKAGE = Path(kvxfer.__file__).parent


class Broken:
    """One copy below ``root``; each sabotage replaces the one before."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._copy = root / "kvxfer"
        shutil.copytree(
            _PACKAGE, self._copy, ignore=shutil.ignore_patterns("__pycache__", "softrdma")
        )
        self._shown: dict[Path, str] = {}

    def with_one(self, sabotage: Sabotage) -> Path:
        """The folder to import from, with that one sabotage."""
        for path, text in self._shown.items():
            self._write(path, text)
        path = self._copy / sabotage.file
        text = self._shown.setdefault(path, path.read_text(encoding="utf-8"))
        assert text.count(sabotage.old) == 1, f"{sabotage.name}: {sabotage.file} has changed"
        self._write(path, text.replace(sabotage.old, sabotage.new))
        return self._root

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Another line of equal length within the same second looks unchanged to Python.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def simulate(
        self, root: Path, sabotage: Sabotage, *, first_seed: int
    ) -> tuple[int, str, float]:
        """Exit status, what it said, and the CPU seconds it took."""
        env = {**os.environ, "PYTHONPATH": str(root)}
        words = [sys.executable, "-m", "kvxfer", "sim", "--stop", "--seed", str(first_seed)]
        before = os.times()
        done = subprocess.run(
            [*words, *sabotage.options],
            env=env,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        after = os.times()
        spent = after.children_user + after.children_system
        spent -= before.children_user + before.children_system
        return done.returncode, done.stdout + done.stderr, spent
