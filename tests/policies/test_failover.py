"""Failover: when a backend is left, when it is probed, and when it is used again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.policies.failover import Failover, Standing

NAMES = ("nixl", "shm", "tcp")
POLICY = Failover(faults=2, window=5.0, pause=4.0, longest_pause=16.0, probes=3, spacing=0.5)


def test_so_many_faults_in_the_window_move_it() -> None:
    """One fault is none; the second within the window moves on; the reason is that of the last."""
    standing = Standing(POLICY, NAMES)
    assert standing.fault("nixl", 0.0, "first") is None
    assert standing.fault("nixl", 5.0, "too late to count with the first") is None
    change = standing.fault("nixl", 6.0, "queue pair error")
    assert change is not None
    assert (change.before, change.after, change.down) == ("nixl", "shm", True)
    assert standing.current == "shm"
    assert standing.reason == "queue pair error"


def test_what_arrives_ends_the_row() -> None:
    """Faults with successes between them are the retry policy's business."""
    standing = Standing(POLICY, NAMES)
    for t in range(20):
        assert standing.fault("nixl", t / 10) is None
        standing.arrived("nixl")
    assert standing.current == "nixl"


def test_a_final_fault_moves_at_once() -> None:
    """A backend that cannot connect at all is not asked twice."""
    standing = Standing(POLICY, NAMES)
    assert standing.fault("nixl", 0.0, final=True) is not None
    assert standing.fault("shm", 0.0, final=True) is not None
    assert standing.current == "tcp"


def test_late_faults_of_the_one_before_change_nothing() -> None:
    """What was in flight fails after the switch: that is no fault of the new one."""
    standing = Standing(POLICY, NAMES)
    standing.fault("nixl", 0.0, final=True)
    for _ in range(10):
        assert standing.fault("nixl", 0.1, final=True) is None
    assert standing.current == "shm"


def test_where_every_other_one_was_left_there_is_no_change() -> None:
    """The agent decides then: the peer itself may be dead."""
    standing = Standing(POLICY, NAMES[:2])
    standing.fault("nixl", 0.0, final=True)
    assert standing.alternative() is None
    assert standing.fault("shm", 0.0, final=True) is None
    assert standing.current == "shm"


def test_back_after_three_good_probes() -> None:
    """A pause, then probes half a second apart; a bad one begins the row, and a longer pause."""
    standing = Standing(POLICY, NAMES)
    standing.fault("nixl", 0.0, final=True)
    assert standing.due(3.9) is None
    assert standing.wait(3.0) == 1.0
    assert standing.due(4.0) == "nixl"
    assert standing.due(4.0) is None  # it is being probed
    assert standing.probed("nixl", 4.0, ok=True) is None
    assert standing.next_at() == 4.5
    assert standing.due(4.5) == "nixl"
    assert standing.probed("nixl", 4.5, ok=False, reason="refused") is None
    assert standing.reason == "refused"
    assert standing.next_at() == 4.5 + 8.0
    for t in (12.5, 13.0):
        assert standing.due(t) == "nixl"
        assert standing.probed("nixl", t, ok=True) is None
    assert standing.due(13.5) == "nixl"
    change = standing.probed("nixl", 13.5, ok=True)
    assert change is not None
    assert (change.before, change.after, change.down) == ("shm", "nixl", False)
    assert standing.next_at() is None
    assert standing.reason == ""


def back_up(standing: Standing, now: float) -> float:
    """Probe until it is used again; when that was."""
    while standing.current != standing.preferred:
        at = standing.next_at()
        assert at is not None
        now = max(now, at)
        name = standing.due(now)
        assert name is not None
        standing.probed(name, now, ok=True)
    return now


def test_one_that_only_seems_to_work_is_probed_less_and_less() -> None:
    """Probes arrive and requests do not: each return is followed by twice the pause, up to the
    longest; a backend that served for that long starts afresh."""
    standing = Standing(POLICY, NAMES[:2])
    now, pauses = 0.0, []
    for _ in range(5):
        standing.fault("nixl", now, final=True)
        pauses.append(standing.wait(now))
        now = back_up(standing, now)
    assert pauses == [4.0, 8.0, 16.0, 16.0, 16.0]
    standing.fault("nixl", now + 16.0, final=True)
    assert standing.wait(now + 16.0) == 4.0


def test_a_probe_that_says_nothing_does_not_close_the_door() -> None:
    """One that was given up is not counted, and another may go."""
    standing = Standing(POLICY, NAMES)
    standing.fault("nixl", 0.0, final=True)
    assert standing.due(4.0) == "nixl"
    standing.unproven("nixl", 4.2)
    assert standing.probed("nixl", 4.3, ok=True) is None  # nobody asked
    assert standing.due(4.8) == "nixl"


@pytest.mark.parametrize(
    "wrong",
    [
        {"faults": 0},
        {"probes": True},
        {"window": -1.0},
        {"pause": float("inf")},
        {"pause": 90.0},
        {"spacing": "1"},
        {"order": ("nixl",)},
        {"order": ("nixl", "nixl")},
        {"order": "nixl"},
        {"order": ("nixl", 3)},
    ],
    ids=str,
)
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    """The error names the field."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"Failover.*{name}"):
        Failover(**wrong)  # type: ignore[arg-type]
    assert Failover(order=["a", "b"]).order == ("a", "b")  # type: ignore[arg-type]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fault", "final", "arrived", "good", "bad", "unproven"]),
        st.integers(0, 2),
        st.floats(0.0, 10.0),
    ),
    max_size=120,
)


@given(_STEPS)
def test_whatever_happens(steps: list[tuple[str, int, float]]) -> None:
    """Down only for faults of the one in use, up only after so many good probes in a row, never a
    probe before its time, and whoever is better than the one in use is on its way back."""
    standing = Standing(POLICY, NAMES)
    now = 0.0
    good = dict.fromkeys(NAMES, 0)
    probing: str | None = None
    for what, index, wait in steps:
        now += wait
        name, before = NAMES[index], standing.current
        change = None
        if what in ("fault", "final"):
            change = standing.fault(name, now, final=what == "final")
            if change is not None:
                assert name == before == change.before
                assert change.after == standing.current != before
                good[before] = 0
        elif what == "arrived":
            standing.arrived(name)
        else:
            if probing is None:
                at = standing.next_at()
                probing = standing.due(now)
                assert (probing is not None) == (at is not None and now >= at)
            if probing is None:
                continue
            if what == "unproven":
                standing.unproven(probing, now)
            else:
                good[probing] = good[probing] + 1 if what == "good" else 0
                change = standing.probed(probing, now, ok=what == "good")
                if change is not None:
                    assert not change.down
                    assert good[probing] == POLICY.probes
                    assert change.after == probing == standing.current
                    good[probing] = 0
            probing = None
        assert standing.current == (change.after if change is not None else before)
        place = NAMES.index(standing.current)
        if place and probing is None:
            at = standing.next_at()
            assert at is not None
            assert at <= now + POLICY.longest_pause
        assert (standing.reason == "") or place > 0
