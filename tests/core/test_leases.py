"""Promise 5: leases in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.leases import Hold, LeaseTable, Refusal
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError


def test_renewals_extend_and_silence_expires() -> None:
    """Report O27 with its numbers: lease 3 s, renewed each second until 4 s: expires at 7 s."""
    leases = LeaseTable(margin=0.5)
    leases.hold("t", epoch=1, lease=3.0, now=0.0)
    for second in range(1, 5):
        assert isinstance(leases.open("t", epoch=1, now=float(second)), Hold)
    assert leases.expire(7.4) == []
    assert isinstance(leases.open("t", epoch=1, now=7.2), Refusal), "too late for a promise"
    assert [h.transfer_id for h in leases.expire(7.5)] == ["t"]
    late = leases.open("t", epoch=1, now=8.0)
    assert isinstance(late, Refusal)
    assert late.kind is ErrorKind.EXPIRED


def test_older_and_newer_epochs() -> None:
    """Report O53: a reference to an earlier hold is stale, to a later one not known yet."""
    leases = LeaseTable(margin=0.5)
    leases.hold("t", epoch=4, lease=3.0, now=0.0)
    leases.end("t", Refusal(ErrorKind.STALE, "consumed"))
    assert isinstance(leases.open("t", epoch=4, now=0.1), Refusal)
    assert leases.open("t", epoch=5, now=0.1) is None
    leases.hold("t", epoch=5, lease=3.0, now=0.2)
    assert isinstance(leases.open("t", epoch=4, now=0.3), Refusal)


def test_limits_and_doubles_are_refused() -> None:
    """Promise 8: the table is bounded, and an id is held once."""
    leases = LeaseTable(margin=0.5, capacity=1)
    leases.hold("t", epoch=1, lease=3.0, now=0.0)
    with pytest.raises(InvalidInputError, match="held already"):
        leases.hold("t", epoch=2, lease=3.0, now=0.0)
    with pytest.raises(CapacityError, match="1 transfers are held"):
        leases.hold("u", epoch=3, lease=3.0, now=0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["hold", "open", "end"]), st.floats(0.01, 2.0)
        ),
        max_size=40,
    )
)
def test_no_grant_outlives_its_hold(script: list[tuple[str, str, float]]) -> None:
    """A granted remaining time, counted from its answer, never passes the moment of expiry."""
    leases = LeaseTable(margin=0.0)
    now, promised, epoch = 0.0, dict[str, float](), 0
    for name, verb, pause in script:
        now += pause
        for hold in leases.expire(now):
            assert promised.pop(hold.transfer_id, 0.0) <= now
        if verb == "hold" and name not in leases:
            epoch += 1
            leases.hold(name, epoch=epoch, lease=1.5, now=now)
        elif verb == "open" and name in leases:
            held = leases.get(name)
            assert held is not None
            answer = leases.open(name, epoch=held.epoch, now=now)
            if isinstance(answer, Hold):
                promised[name] = max(promised.get(name, 0.0), answer.ends_at)
        elif verb == "end":
            leases.end(name, Refusal(ErrorKind.STALE, "x"))
            promised.pop(name, None)
    leases.expire(now + 10)
    assert len(leases) == 0
