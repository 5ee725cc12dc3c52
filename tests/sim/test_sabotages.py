"""One line broken in a copy of the package: the simulator says so within seconds."""

from __future__ import annotations

import pytest
from broken import LIMIT, Broken
from sabotages import SABOTAGES, Sabotage

pytestmark = pytest.mark.timeout(600)
"""Of the wall: what counts is seconds of CPU, and the machine may be busy."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Broken:
    return Broken(tmp_path_factory.mktemp("sabotaged"))


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=[s.name for s in SABOTAGES])
def test_it_is_found(sabotage: Sabotage, broken: Broken) -> None:
    """A checker that cannot fail shows nothing: with fixed seeds, within 15 seconds."""
    root = broken.with_one(sabotage)
    status, said, spent = broken.simulate(root, sabotage, first_seed=0)
    assert status == 1, f"{sabotage.name} was not noticed:\n{said}"
    assert "violation" in said
    assert spent <= LIMIT, f"found only after {spent:.1f} s of CPU"


def test_there_are_enough() -> None:
    """At least fifteen, and all of them different."""
    assert len({(s.file, s.old, s.new) for s in SABOTAGES}) == len(SABOTAGES) >= 15
