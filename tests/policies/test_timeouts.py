"""Durations per phase."""

from __future__ import annotations

import pickle
from fractions import Fraction

import attrs
import numpy as np
import pytest

from kvxfer.errors import ConfigError
from kvxfer.policies.timeouts import Phase, Timeouts, transport_retry_budget

FIELDS = [field.name for field in attrs.fields(Timeouts)]


NO_DURATIONS = (
    *(0, 0.0, -1, float("inf"), float("-inf"), float("nan"), True, False, None, b"1", [1]),
    *("", "abc", "1.5 s", "inf", "nan", "-1", "0", "1e999"),
)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [*NO_DURATIONS, pytest.param(10**400, id="huge")], ids=repr)
def test_refuses_what_is_no_duration(field: str, value: object) -> None:
    """Behaviour 21 and report O24: 0, negative, infinite, nan, bool and other text are refused."""
    with pytest.raises(ConfigError, match=rf"Timeouts\.{field} must be a positive, finite number"):
        Timeouts(**{field: value})


def test_the_error_names_the_value() -> None:
    """Whoever reads the error sees what was given."""
    with pytest.raises(ConfigError, match="not 'soon'"):
        Timeouts(ack="soon")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1.5", 1.5),
        (" 2 ", 2.0),
        ("1e-3", 0.001),
        (3, 3.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
    ],
)
def test_takes_numbers_and_numeric_text(value: object, seconds: float) -> None:
    """Behaviour 21: the text "1.5" is 1.5. Whatever came in, a float comes out."""
    held = Timeouts(connect=value).connect
    assert held == seconds
    assert type(held) is float


def test_defaults_are_valid_and_frozen() -> None:
    """The defaults pass their own checks, survive pickling, and cannot be changed."""
    timeouts = Timeouts()
    assert pickle.loads(pickle.dumps(timeouts)) == timeouts
    assert attrs.evolve(timeouts) == timeouts
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        timeouts.post = 1.0


def test_each_phase_has_its_bound() -> None:
    """``of`` and the fields say the same, and there is one field per phase."""
    timeouts = Timeouts(connect=1, queue=2, post=3, transfer=4, ack=5, drain=6)
    assert [timeouts.of(phase) for phase in Phase] == [1, 2, 3, 4, 5, 6]
    assert [phase.value for phase in Phase] == FIELDS


def test_defaults_leave_room_for_the_engines() -> None:
    """The reasons given beside the defaults hold: mori's 5.1 s handshake twice, its 5 s wait in a
    post, and the retry budget of a queue pair with the time-out exponent 17."""
    timeouts = Timeouts()
    assert timeouts.connect > 2 * 5.1
    assert timeouts.post > 5
    assert timeouts.drain > transport_retry_budget(exponent=17)


def test_transport_retry_budget() -> None:
    """Report O04: 4.096 us x 2^14 x 7 = 0.470 s; with exponent 17 it is 3.758 s."""
    assert transport_retry_budget() == pytest.approx(0.470, abs=5e-4)
    assert transport_retry_budget(exponent=17) == pytest.approx(3.758, abs=5e-4)
    for bad in ({"exponent": 0}, {"exponent": 32}, {"retries": 8}, {"retries": True}):
        with pytest.raises(ConfigError, match=rf"{next(iter(bad))} must be an integer from 1 to"):
            transport_retry_budget(**bad)
