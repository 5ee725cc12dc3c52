"""Limited logs: a few lines per kind and window, then a count."""

from __future__ import annotations

import logging

import pytest

from kvxfer.core.limitedlog import LimitedLog
from kvxfer.testing.clock import FakeClock


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> LimitedLog:
    caplog.set_level(logging.DEBUG, "limited")
    return LimitedLog(logging.getLogger("limited"), FakeClock(0.0), lines=3, window=60.0, agent="a")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_storm_is_three_lines_and_a_count(
    log: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    """The first lines of a window pass; the others are counted, and told with the next window."""
    clock = log._clock
    assert isinstance(clock, FakeClock)
    for i in range(1000):
        log.problem("peer_down", "peer %d failed", i, peer=i)
        clock.advance(0.05)
    assert lines(caplog)[:3] == [
        f"peer {i} failed [event=peer_down agent=a peer={i}]" for i in range(3)
    ]
    assert len(lines(caplog)) == 3
    clock.advance(30.0)
    log.problem("peer_down", "again")
    assert lines(caplog)[3:] == [
        "997 more suppressed [event=peer_down agent=a suppressed=997]",
        "again [event=peer_down agent=a]",
    ]


def test_kinds_are_limited_apart(log: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    """A storm of one kind does not silence another; a line of any kind tells of what is over."""
    for _ in range(10):
        log.problem("one", "x")
    log.news("two", "y")
    assert len(lines(caplog)) == 4
    log._clock.advance(61.0)  # type: ignore[attr-defined]
    log.news("two", "y")
    assert lines(caplog)[4] == "7 more suppressed [event=one agent=a suppressed=7]"


def test_flush_tells_what_was_left_out(log: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    """At its end an agent says what it suppressed, once."""
    for _ in range(5):
        log.problem("one", "x")
    log.flush()
    log.flush()
    assert lines(caplog)[3:] == ["2 more suppressed [event=one agent=a suppressed=2]"]


def test_levels_and_fields(log: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    """DEBUG is not limited; each record has its fields as a dictionary, and tracebacks are kept."""
    for _ in range(9):
        log.detail("d", "x")
    log.failed("e", "it broke: %s", "%", error=ValueError("why"))
    assert [r.levelno for r in caplog.records] == [logging.DEBUG] * 9 + [logging.ERROR]
    record = caplog.records[-1]
    assert record.kvxfer == {"event": "e", "agent": "a"}  # type: ignore[attr-defined]
    assert record.getMessage() == "it broke: % [event=e agent=a]"
    assert record.exc_info is not None
    assert record.exc_info[0] is ValueError
    assert record.filename == "test_limitedlog.py"


def test_nothing_is_counted_at_a_level_that_is_off(
    log: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a level is off, nothing is kept either."""
    caplog.set_level(logging.ERROR, "limited")
    for _ in range(9):
        log.problem("one", "x")
        log.detail("two", "x")
    log.flush()
    assert not caplog.records
    assert not log._windows
