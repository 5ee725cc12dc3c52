"""Options of the soak."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak-rounds", type=int, default=20, help="rounds of kill -9")
    group.addoption("--soak-seed", type=int, default=1, help="of the random moments")
