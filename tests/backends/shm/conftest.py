"""Fixtures of the shm tests. Everything they start ends with the test."""

from __future__ import annotations

import pytest
from shm_rig import ChildProcess, Near

from kvxfer.backends.shm import Copier, CopierChoice, copier
from kvxfer.errors import ConfigError


@pytest.fixture(params=["compiled", "python"])
def each_copier(request: pytest.FixtureRequest) -> Copier:
    """Both ways to copy, one after the other."""
    try:
        return copier(CopierChoice(request.param))
    except ConfigError as error:
        pytest.skip(f"shm's compiled copier is not built: {error}")


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
