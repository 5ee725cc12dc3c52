"""Timers, re-sent messages and what was seen before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.reliable import Inbox, Outbox
from kvxfer.core.timers import Timers


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["set", "cancel"]), st.integers(0, 50))),
    st.integers(0, 50),
)
def test_timers_match_a_dictionary(script: list[tuple[int, str, int]], now: int) -> None:
    """Each key comes due once, at its last setting, in order."""
    timers: Timers[int] = Timers()
    model: dict[int, int] = {}
    for key, verb, at in script:
        if verb == "set":
            timers.set(key, at)
            model[key] = at
        else:
            timers.cancel(key)
            model.pop(key, None)
    assert timers.next_at() == min(model.values(), default=None)
    due = timers.pop_due(now)
    assert sorted(due) == sorted(k for k, at in model.items() if at <= now)
    assert [model[k] for k in due] == sorted(model[k] for k in due)
    assert len(timers) == len(model) - len(due)


def test_moving_a_timer_for_ever_does_not_grow_it() -> None:
    """Promise 8: renewing one lease a million times keeps a bounded heap."""
    timers: Timers[str] = Timers()
    for n in range(100_000):
        timers.set("t", float(n))
    assert len(timers._heap) < 200


def test_outbox_resends_until_confirmed() -> None:
    """Promise 6: again after 0.1, 0.2, 0.4 s, at most each second, until confirmed."""
    box = Outbox()
    box.put(1, b"release", now=0.0, until=60.0)
    times, now = [], 0.0
    while len(times) < 7:
        at = box.next_at()
        assert at is not None
        now = at
        times += [round(now, 3)] * len(box.due(now))
    assert times == [0.1, 0.3, 0.7, 1.5, 2.5, 3.5, 4.5]
    assert box.confirm(1)
    assert not box.confirm(1)
    assert box.next_at() is None
    assert len(box) == 0


def test_outbox_gives_up_at_its_bound() -> None:
    """Promise 7: every loop has a bound and a counter."""
    box = Outbox()
    box.put(1, b"x", now=0.0, until=1.0)
    while (at := box.next_at()) is not None:
        box.due(at)
    assert box.expired == 1
    assert len(box) == 0


def test_twice_equals_once() -> None:
    """Promise 6, with a bounded memory of what was seen."""
    inbox = Inbox(capacity=3)
    assert inbox.first_time("a", 1)
    assert not inbox.first_time("a", 1)
    assert inbox.first_time("b", 1)
    for mid in range(2, 6):
        inbox.first_time("a", mid)
    assert len(inbox) == 3
    assert inbox.duplicates == 1
