"""Fixtures for tests of the real mori engine. They run in an environment that
``python -m kvxfer.testing.softrdma setup`` made, without torch."""

from __future__ import annotations

import pytest
from mori_rig import Rig

from kvxfer.testing.softrdma.pytest_plugin import (  # noqa: F401  fixtures, found by name
    mori_engine,
    mori_pair,
    mori_peer,
    softrdma,
    softrdma_run,
)


@pytest.fixture
def rig(softrdma):  # noqa: F811
    """Makes ``mori_rig.Rig`` objects; all are closed after the test."""
    rigs = []

    def make(**config):
        rigs.append(Rig(softrdma, **config))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()
