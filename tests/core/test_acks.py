"""Promise 8 and the reports about ACKs: sets of ranks, early ACKs, duplicates, owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.acks import Ack, AckOutcome, AckReconciler
from kvxfer.errors import InvalidInputError


def ack(transfer_id: str, source: int = 0, **more: object) -> Ack:
    return Ack(transfer_id=transfer_id, source=source, **more)  # type: ignore[arg-type]


def expect(acks: AckReconciler, transfer_id: str, owner: str = "r", **more: object):  # type: ignore[no-untyped-def]
    options: dict[str, object] = {"sources": {0}, "deadline": 100.0, "now": 0.0, **more}
    return acks.expect(transfer_id, owners=[owner], **options)  # type: ignore[arg-type]


def test_early_ack_is_resolved_when_it_is_expected() -> None:
    """Report O09: ack at 0 s, expected at 0.4 s: complete once, never again."""
    acks = AckReconciler()
    assert acks.record(ack("t1"), 0.0).outcome is AckOutcome.EARLY
    result = expect(acks, "t1", "r1", now=0.4)
    assert result.outcome is AckOutcome.COMPLETE
    assert result.owners == ("r1",)
    assert acks.record(ack("t1"), 0.5).outcome is AckOutcome.STALE
    assert acks.poll(0.5) == []


def test_late_unmap_removes_only_its_own() -> None:
    """Report O09: t1 belongs to r2 now; unmapping r1 late leaves it."""
    acks = AckReconciler()
    expect(acks, "t1", "r1")
    assert acks.unmap("t1", owner="r1")
    expect(acks, "t1", "r2")
    assert not acks.unmap("t1", owner="r1")
    assert acks.record(ack("t1"), 1.0).owners == ("r2",)


def test_ranks_are_a_set() -> None:
    """Report O10: ranks 0, 0, 1, 2 complete at the last; the repeated 0 is a duplicate."""
    acks = AckReconciler()
    expect(acks, "t", sources={0, 1, 2})
    outcomes = [acks.record(ack("t", source), 0.0).outcome for source in (0, 0, 1, 2)]
    assert [o.value for o in outcomes] == ["progress", "duplicate", "progress", "complete"]
    assert acks.record(ack("t", 2), 0.0).outcome is AckOutcome.STALE
    assert acks.counters["duplicate"] == 1


def test_rank_outside_the_expected_set_is_rejected() -> None:
    """A rank that does not read cannot free."""
    acks = AckReconciler()
    expect(acks, "t", sources={0, 1})
    assert acks.record(ack("t", 7), 0.0).outcome is AckOutcome.REJECTED


def test_first_ack_names_the_ranks_where_the_producer_cannot_know() -> None:
    """The consumer knows its own size: its ranks settle an open expectation."""
    acks = AckReconciler()
    expect(acks, "t", sources=None)
    first = acks.record(ack("t", 1, sources=frozenset({0, 1})), 0.0)
    assert first.missing == {0}
    assert acks.record(ack("t", 0, sources=frozenset({0})), 0.0).outcome is AckOutcome.COMPLETE


def test_all_owners_complete_once() -> None:
    """Report O15: three samples of one prompt share a transfer and complete together."""
    acks = AckReconciler()
    for owner in ("0_c", "1_c", "2_c"):
        expect(acks, "t", owner)
    assert acks.record(ack("t"), 1.0).owners == ("0_c", "1_c", "2_c")
    expect(acks, "u", "a", epoch=1)
    with pytest.raises(InvalidInputError, match="epoch"):
        expect(acks, "u", "b", epoch=2)


def test_early_buffer_is_bounded_by_time_and_count() -> None:
    """Report O16 with its numbers: TTL 5 s, capacity 3, ACKs u1 to u5 at 0 to 4 s."""
    acks = AckReconciler(early_ttl=5.0, early_capacity=3)
    for n in range(5):
        acks.record(ack(f"u{n + 1}"), float(n))
    assert acks.early == ("u3", "u4", "u5")
    assert acks.counters["evicted_capacity"] == 2
    acks.poll(7.5)
    assert acks.early == ("u4", "u5")
    assert acks.counters["evicted_ttl"] == 1
    assert expect(acks, "u4", now=7.6).outcome is AckOutcome.COMPLETE
    for _ in range(10_000):
        acks.record(ack("unknown"), 8.0)
        acks.record(ack("u4"), 8.0)
    assert acks.early == ("u5", "unknown")


def test_decline_stands_for_all_ranks() -> None:
    """Report O23: one decline completes, later ACKs are stale."""
    acks = AckReconciler()
    expect(acks, "t", sources={0, 1})
    assert acks.record(ack("t", 0, declined=True), 0.0).outcome is AckOutcome.DECLINED
    assert acks.record(ack("t", 1), 0.0).outcome is AckOutcome.STALE


def test_ack_of_an_older_epoch_is_stale() -> None:
    """Report O54: the old job's ACK does not complete the new one."""
    acks = AckReconciler()
    expect(acks, "t", epoch=2)
    assert acks.record(ack("t", epoch=1), 0.0).outcome is AckOutcome.STALE
    assert acks.record(ack("t", epoch=2), 0.0).outcome is AckOutcome.COMPLETE
    assert acks.record(ack("t", epoch=3), 0.0).outcome is AckOutcome.EARLY


def test_deadline_expires_once_and_names_the_missing() -> None:
    """Promise 4: expiry needs no further ACK."""
    acks = AckReconciler()
    expect(acks, "t", sources={0, 1}, deadline=5.0)
    acks.record(ack("t", 0), 1.0)
    assert acks.next_at() == 5.0
    (result,) = acks.poll(5.0)
    assert result.outcome is AckOutcome.EXPIRED
    assert result.missing == {1}
    assert acks.poll(6.0) == []
    assert len(acks) == 0


@given(
    sources=st.sets(st.integers(0, 9), min_size=1),
    order=st.permutations(range(10)),
    expected_after=st.integers(0, 30),
    repeats=st.lists(st.integers(0, 9), max_size=20),
)
def test_any_order_completes_exactly_once(
    sources: set[int], order: list[int], expected_after: int, repeats: list[int]
) -> None:
    """Whatever the order of ACKs, repeats and the expectation, it completes exactly once."""
    acks = AckReconciler()
    stream = [s for s in [*repeats, *order, *repeats] if s in sources]
    completed = 0
    for n, source in enumerate([*stream, None]):
        if n == expected_after or (source is None and expected_after > n):
            result = acks.expect("t", sources=sources, deadline=9.0, now=0.0)
            completed += result is not None
        if source is not None:
            result = acks.record(ack("t", source), 0.0)
            completed += result.outcome is AckOutcome.COMPLETE
    assert completed == 1
    assert len(acks) == 0
