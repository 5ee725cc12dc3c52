"""Circuit breakers: windows, pauses, probes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError, ErrorKind
from kvxfer.policies.breaker import Breaker, BreakerPolicy, BreakerTable, Circuit


def after(*faults: float, policy: BreakerPolicy | None = None) -> Breaker:
    breaker = (policy or BreakerPolicy()).begin()
    for at in faults:
        breaker.fault(at)
    return breaker


def test_o07_five_faults_in_five_seconds_open_it() -> None:
    """Report O07: faults at 0, 1, 2, 3, 4: open at 4; 5 and 9 are rejected, 14.1 is allowed."""
    breaker = BreakerPolicy(faults=5, window=5.0, pause=10.0).begin()
    assert [breaker.fault(t) for t in (0.0, 1.0, 2.0, 3.0, 4.0)] == [False] * 4 + [True]
    assert breaker.state(4.0) is Circuit.OPEN
    assert not breaker.allows(5.0)
    assert not breaker.allows(9.0)
    assert breaker.allows(14.1)


def test_o07_faults_that_age_out_never_open_it() -> None:
    """Report O07: faults at 0, 1, 2, 8, 9: at most three in any window of 5 s."""
    breaker = BreakerPolicy().begin()
    for t in (0.0, 1.0, 2.0, 8.0, 9.0):
        assert not breaker.fault(t)
        assert breaker.allows(t)
    assert breaker.state(9.0) is Circuit.CLOSED


def test_one_probe_at_a_time() -> None:
    """Half open lets one through; its success closes the breaker, its fault opens it again."""
    breaker = after(0, 1, 2, 3, 4)
    assert breaker.state(14.0) is Circuit.HALF_OPEN
    assert breaker.allows(14.0)
    assert not breaker.allows(14.1)
    assert breaker.fault(15.0, "again")
    assert breaker.wait(15.0) == 10.0
    assert breaker.allows(25.0)
    assert breaker.success(25.5)
    assert breaker.state(25.5) is Circuit.CLOSED
    assert breaker.wait(25.5) == 0.0
    assert not breaker.fault(26.0)  # the old faults are forgotten


def test_a_probe_that_says_nothing_does_not_close_the_door_for_ever() -> None:
    """After another pause, or when it ended without a result, somebody else may try."""
    breaker = after(0, 1, 2, 3, 4)
    assert breaker.allows(14.0)
    assert breaker.wait(15.0) == 9.0
    assert breaker.allows(24.0)
    breaker.unproven()
    assert breaker.allows(24.1)


def test_what_was_begun_before_closes_nothing() -> None:
    """Something under way when the breaker opened may still work: that proves little."""
    breaker = after(0, 1, 2, 3, 4)
    assert not breaker.success(5.0)
    assert breaker.state(5.0) is Circuit.OPEN


def test_faults_while_open_do_not_prolong_the_pause() -> None:
    """Stragglers of the same failure would otherwise keep the peer out for ever."""
    breaker = after(0, 1, 2, 3, 4, 5, 9, 13.9)
    assert breaker.allows(14.0)


@given(
    gaps=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=60),
    faults=st.integers(1, 6),
    window=st.floats(0.5, 8.0),
)
def test_it_opens_exactly_when_the_window_is_full(
    gaps: list[float], faults: int, window: float
) -> None:
    """It opens at the first fault that is the n-th within the window, and not before."""
    breaker = BreakerPolicy(faults=faults, window=window, pause=1.0).begin()
    times: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        times.append(now)
        opened = breaker.fault(now)
        assert opened == (sum(1 for t in times if now - t < window) >= faults)
        if opened:
            return


@pytest.mark.parametrize(
    ("field", "value"),
    [("faults", 0), ("faults", True), ("window", 0), ("pause", float("inf")), ("window", "5")],
)
def test_bad_settings_name_the_field(field: str, value: object) -> None:
    """The error names field and value."""
    with pytest.raises(ConfigError, match=rf"BreakerPolicy\.{field} must be"):
        BreakerPolicy(**{field: value})  # type: ignore[arg-type]


def test_peers_are_apart_and_the_table_is_bounded() -> None:
    """One peer's faults never count for another; old entries make room, counted."""
    table: BreakerTable[str] = BreakerTable(BreakerPolicy(faults=2), most=3)
    assert not table.fault("a", 0.0)
    assert table.fault("a", 1.0, "broken", ErrorKind.PEER_LOST)
    assert not table.allows("a", 2.0)
    assert table.allows("b", 2.0)
    (state,) = table.states(2.0)
    assert (state.name, state.state, state.wait, state.reason) == ("a", Circuit.OPEN, 9.0, "broken")
    for name in "bcd":
        table.fault(name, 3.0)
    assert len(table) == 3
    assert table.evicted == 1
    table.fault("e", 30.0)  # those whose faults have aged out go first, uncounted
    assert len(table) == 1
    assert table.evicted == 1


def test_success_forgets_the_entry() -> None:
    """What closed needs no place in the table."""
    table: BreakerTable[str] = BreakerTable(BreakerPolicy(faults=1))
    table.fault("a", 0.0)
    assert table.allows("a", 10.0)
    assert table.success("a", 10.5)
    assert len(table) == 0


def test_none_means_no_breakers() -> None:
    """Without a policy nothing is counted and everything allowed."""
    table: BreakerTable[str] = BreakerTable(None)
    assert not any(table.fault("a", 0.1 * i) for i in range(100))
    assert table.allows("a", 10.0)
    assert len(table) == 0
