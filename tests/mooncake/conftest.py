"""Fixtures for tests of the real Mooncake engine."""

from __future__ import annotations

import pytest
from mooncake_rig import Rig


@pytest.fixture
def rig():
    """Makes ``Rig`` objects; all are closed after the test."""
    rigs = []

    def make(**config):
        rigs.append(Rig(**config))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()
