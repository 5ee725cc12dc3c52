from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvxfer


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that a run starts find kvxfer and the backends of these tests."""
    paths = [str(Path(kvxfer.__file__).parents[1]), str(Path(__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
