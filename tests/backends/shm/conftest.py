"""Fixtures of the shm tests. Everything they start ends with the test."""

from __future__ import annotations

import pytest
from shm_rig import ChildProcess, Near


@pytest.fixture
def near():
    """A transport in this process."""
    side = Near()
    yield side
    side.transport.close()


@pytest.fixture
def make_near():
    """Transports with options of their own."""
    made = []

    def make(**options):
        made.append(Near(**options))
        return made[-1]

    yield make
    for side in made:
        side.transport.close()


@pytest.fixture
def make_child():
    """Child processes, not opened yet."""
    made = []

    def make(**options):
        made.append(ChildProcess(**options))
        return made[-1]

    yield make
    for child in made:
        child.dispose()
