from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))

from reports.report_rig import ReportRig


@pytest.fixture
def rig() -> Iterator[ReportRig]:
    rig = ReportRig()
    yield rig
    rig.close()
