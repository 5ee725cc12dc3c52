from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The modules under ``scripts/``; what they make goes to a folder of the test."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    class Scripts:
        home = tmp_path / "venvs"
        compiles: ModuleType = importlib.import_module("compiles")
        venvs: ModuleType = importlib.import_module("venvs")
        lane_run: ModuleType = importlib.import_module("lane_run")
        lane_table: ModuleType = importlib.import_module("lane_table")
        lanes: ModuleType = importlib.import_module("lanes")

    Scripts.home.mkdir()
    monkeypatch.setattr(Scripts.venvs, "HOME", Scripts.home)
    monkeypatch.setattr(Scripts.lane_run, "HOME", Scripts.home)
    monkeypatch.setattr(Scripts.lanes, "HOME", Scripts.home)
    monkeypatch.setattr(Scripts.lanes, "RESULTS", Scripts.home / "results")
    return Scripts
