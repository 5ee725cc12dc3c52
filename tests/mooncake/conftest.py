"""Fixtures for tests of the real Mooncake engine."""

from __future__ import annotations

import pytest
from mooncake_rig import two_sides


@pytest.fixture
def rig():
    """Makes ``TwoSides`` objects; all are closed after the test."""
    rigs = []

    def make(**config):
        rigs.append(two_sides(**config))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()
