"""The fake clock."""

from __future__ import annotations

import pytest

from kvxfer.errors import InvalidInputError
from kvxfer.testing import FakeClock


def test_moves_only_when_told_to():
    """``now`` is what ``advance`` made of ``start``, in seconds."""
    clock = FakeClock(2.5)
    assert clock.now() == clock.now() == 2.5
    assert clock.advance(0.25) == clock.now() == 2.75
    assert clock.advance(0) == 2.75


@pytest.mark.parametrize("dt", [-0.001, float("nan")])
def test_never_goes_back(dt):
    """A negative step, or none that is a number, is refused and changes nothing."""
    clock = FakeClock()
    with pytest.raises(InvalidInputError, match="cannot go back"):
        clock.advance(dt)
    assert clock.now() == 0.0
