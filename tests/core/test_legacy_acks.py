"""Foreign connectors' ACKs, counted: the numbers that engines pin in their own tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvxfer.core.acks import AckOutcome
from kvxfer.core.legacy_acks import LegacyCountingAcks
from kvxfer.errors import InvalidInputError


def legacy(tp_size: int, **options: object) -> LegacyCountingAcks:
    return LegacyCountingAcks(tp_size=tp_size, unknown_peer_size="equal", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"), [(4, 4, 1), (8, 4, 1), (4, 8, 2), (2, 6, 3), (6, 2, 1)]
)
def test_expected_acks_per_producer_rank(producer: int, consumer: int, expected: int) -> None:
    """Behaviour 6 and report O10: the fan-in, where the sizes divide."""
    assert legacy(producer).expected_acks(consumer) == expected


@pytest.mark.parametrize(("producer", "consumer"), [(4, 6), (6, 4), (2, 5)])
def test_sizes_that_do_not_divide_are_refused(producer: int, consumer: int) -> None:
    """Behaviour 6, report O10: an error names both sizes; as an ACK it is counted, not raised."""
    acks = legacy(producer)
    with pytest.raises(InvalidInputError, match=f"{producer} and {consumer} do not divide"):
        acks.expected_acks(consumer)
    acks.map("t", "r", now=0.0)
    assert acks.record("t", size=consumer, now=0.0).outcome is AckOutcome.REJECTED
    assert len(acks) == 1


def test_bare_string_is_one_complete_ack() -> None:
    """Behaviour 7: no size, so equal: complete, nothing counted, the id is remembered."""
    acks = legacy(4)
    acks.map("t", "r", now=0.0)
    result = acks.receive("t", now=1.0)
    assert (result.outcome, result.owners) == (AckOutcome.COMPLETE, ("r",))
    assert acks.counts == {}
    assert acks.ended("t")


def test_counting_until_the_fan_in() -> None:
    """Behaviours 8, 9 and 11: D 8 on P 4: the second completes, once; the third is nothing."""
    acks = legacy(4)
    acks.map("t", "r", now=0.0)
    message = {"type": "release", "transfer_id": "t", "size": 8}
    assert acks.receive(message, now=1.0).outcome is AckOutcome.PROGRESS
    assert acks.counts == {"t": 1}
    assert acks.poll(1.0) == []
    acks.receive(message, now=2.0)
    assert [r.owners for r in acks.poll(2.0)] == [("r",)]
    assert acks.counts == {}
    assert acks.ended("t")
    assert acks.receive(message, now=3.0).outcome is AckOutcome.DUPLICATE
    assert acks.poll(3.0) == []
    assert (acks.counts, acks.early, len(acks)) == ({}, (), 0)


def test_fourth_of_three_is_a_duplicate() -> None:
    """Report O10, first half: P 2, D 6: three complete it, the fourth is counted and nothing."""
    acks = legacy(2)
    acks.map("t", "r", now=0.0)
    outcomes = [acks.record("t", size=6, now=0.0).outcome.value for _ in range(4)]
    assert outcomes == ["progress", "progress", "complete", "duplicate"]
    assert acks.counters["duplicate"] == 1


def test_ack_of_an_ended_id_leaves_nothing() -> None:
    """Behaviour 10: "not live" means ended; ten thousand of them make no entry."""
    acks = legacy(4)
    acks.map("t", "r", now=0.0)
    acks.record("t", now=0.0)
    for _ in range(10_000):
        acks.record("t", size=8, now=1.0)
    assert (acks.counts, acks.early, len(acks)) == ({}, (), 0)


def test_ack_before_the_map_is_buffered() -> None:
    """Report O09, and O16 with its numbers: bounded by time and count, counted once mapped."""
    acks = legacy(4, early_ttl=5.0, early_capacity=3)
    for n in range(5):
        acks.record(f"u{n + 1}", now=float(n))
    assert acks.early == ("u3", "u4", "u5")
    assert acks.counters["evicted_capacity"] == 2
    acks.poll(7.5)
    assert acks.early == ("u4", "u5")
    assert acks.counters["evicted_ttl"] == 1
    acks.map("u4", "r", now=7.6)
    assert [r.owners for r in acks.poll(7.6)] == [("r",)]
    for _ in range(10_000):
        acks.record("unknown", size=8, now=8.0)
    acks.map("unknown", "q", now=8.0)
    assert [r.owners for r in acks.poll(8.0)] == [("q",)]


def test_size_that_is_missing_must_be_allowed() -> None:
    """Promise 10: no guessed default; the caller says "equal", or the message is refused."""
    strict = LegacyCountingAcks(tp_size=4)
    strict.map("t", "r", now=0.0)
    assert strict.receive("t", now=0.0).outcome is AckOutcome.REJECTED
    assert strict.record("t", size=0, now=0.0).outcome is AckOutcome.REJECTED
    assert strict.record("t", size=4, now=0.0).outcome is AckOutcome.COMPLETE
    with pytest.raises(InvalidInputError, match='None or "equal"'):
        LegacyCountingAcks(tp_size=4, unknown_peer_size="one")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [None, 0, -1])
def test_unknown_size_is_ours_and_never_one(size: object) -> None:
    """Reports O12 and behaviour 63: TP 8, rank 5 faces rank 5; all eight are released."""
    acks = legacy(8)
    assert acks.faced(5, size) == (5,)
    assert acks.all_ranks(size) == tuple(range(8))


def test_faced_ranks() -> None:
    """Report O12: a size of 16 faces two ranks; text is an error. Behaviours 2 and 3."""
    assert legacy(8).faced(5, 16) == (10, 11)
    with pytest.raises(InvalidInputError, match="'8'"):
        legacy(8).faced(5, "8")
    assert [legacy(8).faced(r, 4) for r in range(8)] == [(r // 2,) for r in range(8)]
    assert [legacy(4).faced(r, 8)[0] for r in range(4)] == [0, 2, 4, 6]


def test_early_finish_releases_every_rank_once() -> None:
    """Behaviour 58: peer TP 2 gives 0 and 1; 8 gives 0 to 7; absent gives our own 4."""
    acks = legacy(4)
    assert acks.all_ranks(2) == (0, 1)
    assert acks.all_ranks(8) == tuple(range(8))
    assert acks.all_ranks(None) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "FOO", "transfer_id": "t"},
        {"type": "release"},
        {"type": "release", "transfer_id": ""},
        {"type": "release", "transfer_id": 7},
        {},
        "",
        b"t",
        None,
    ],
)
def test_unknown_messages_are_counted(message: object) -> None:
    """Behaviour 41: unknown type, empty payload: rejected, counted, nothing changes."""
    acks = legacy(4)
    acks.map("t", "r", now=0.0)
    assert acks.receive(message, now=0.0).outcome is AckOutcome.REJECTED
    assert (len(acks), acks.counts) == (1, {})


def test_release_with_and_without_a_size() -> None:
    """Behaviour 41: with D size 8 it counts for 8, without one for the default. O49: a decline."""
    acks = legacy(4)
    for transfer_id in ("t", "u", "v"):
        acks.map(transfer_id, f"r-{transfer_id}", now=0.0)
    release = {"type": "release", "transfer_id": "t"}
    assert acks.receive(release, now=0.0).outcome is AckOutcome.COMPLETE
    release = {"type": "release", "transfer_id": "u", "size": 8}
    assert acks.receive(release, now=0.0).outcome is AckOutcome.PROGRESS
    release = {"type": "release", "transfer_id": "v", "size": 8, "blocks": []}
    assert acks.receive(release, now=0.0).outcome is AckOutcome.DECLINED


def test_writers_are_counted() -> None:
    """Behaviour 52: two writers: the second finishes it; no field: one; a failure clears all."""
    acks = legacy(4)
    for transfer_id in ("t", "u", "v"):
        acks.map(transfer_id, f"r-{transfer_id}", now=0.0)
    done = {"type": "write_done", "transfer_id": "t", "writers": 2}
    assert acks.receive(done, now=0.0).outcome is AckOutcome.PROGRESS
    assert acks.receive(done, now=0.0).outcome is AckOutcome.COMPLETE
    done = {"type": "write_done", "transfer_id": "u"}
    assert acks.receive(done, now=0.0).outcome is AckOutcome.COMPLETE
    acks.write_done("v", writers=2, now=0.0)
    failed = acks.receive({"type": "write_failed", "transfer_id": "v"}, now=0.0)
    assert (failed.outcome, failed.owners) == (AckOutcome.FAILED, ("r-v",))
    assert acks.counts == {}
    assert acks.write_done("v", writers=2, now=0.0).outcome is AckOutcome.DUPLICATE


def test_last_release_of_a_read() -> None:
    """Behaviour 12: one release that carries D size 8; all tables are empty then."""
    acks = legacy(8)
    acks.map("t", "r", now=0.0)
    acks.receive({"type": "release", "transfer_id": "t", "size": 8}, now=0.0)
    assert len(acks.poll(0.0)) == 1
    assert (len(acks), acks.counts, acks.early) == (0, {}, ())


def test_unmap_exactly() -> None:
    """Behaviour 27: by exact request id."""
    acks = legacy(4)
    acks.map("t", "a-1", now=0.0)
    assert acks.unmap("a-1")
    assert len(acks) == 0


def test_unmap_by_suffix() -> None:
    """Report O14 and behaviour 28: eight hexadecimal digits, and nothing else, are a suffix."""
    acks = legacy(4)
    acks.map("t", "a-1", now=0.0)
    for other in ("a-1-zz", "a-12", "a-1-0f3c9d2", "a-1-0f3c9d2e1", "a-1_0f3c9d2e", "a-1-0f3c9d2g"):
        assert not acks.unmap(other, "t"), other
    assert not acks.unmap("a-1-0f3c9d2e")
    assert not acks.unmap("a-1-0f3c9d2e", "u")
    assert len(acks) == 1
    assert acks.unmap("a-1-0f3c9d2e", "t")
    assert len(acks) == 0


def test_unmap_of_the_unknown() -> None:
    """Behaviour 29: no error, nothing removed; an exact match wins over the suffix."""
    acks = legacy(4)
    acks.map("t", "a", now=0.0)
    acks.map("u", "a-0f3c9d2e", now=0.0)
    assert not acks.unmap("x")
    assert not acks.unmap("x", "nothing")
    assert not acks.unmap("x", None)
    assert acks.unmap("a-0f3c9d2e", "t")
    assert acks.record("t", now=0.0).owners == ("a",)
    assert acks.ended("u")


def test_several_owners_complete_together() -> None:
    """Report O15: three samples of one prompt, one completion; one request has one transfer."""
    acks = legacy(4)
    for owner in ("0_c", "1_c", "2_c"):
        acks.map("t", owner, now=0.0)
    with pytest.raises(InvalidInputError, match="'1_c' waits for transfer 't'"):
        acks.map("u", "1_c", now=0.0)
    assert acks.unmap("1_c")
    acks.map("t", "1_c", now=0.0)
    assert set(acks.record("t", now=0.0).owners) == {"0_c", "1_c", "2_c"}


def test_late_unmap_removes_only_its_own() -> None:
    """Report O09: t was mapped to r2 after r1 ended; unmapping r1 late leaves r2."""
    acks = legacy(4)
    acks.map("t", "r1", now=0.0)
    acks.record("t", now=0.0)
    acks.map("t", "r2", now=1.0)
    assert not acks.unmap("r1", "t")
    assert acks.record("t", now=1.0).owners == ("r2",)


def test_deadline_and_forgetting() -> None:
    """Promises 4 and 8: what nobody acknowledges expires, and nothing is remembered for ever."""
    acks = legacy(4, terminal_ttl=100.0)
    acks.map("t", "r", now=0.0, deadline=5.0)
    acks.record("t", size=8, now=1.0)
    assert acks.next_at() == 5.0
    assert [r.outcome for r in acks.poll(5.0)] == [AckOutcome.EXPIRED]
    assert acks.poll(6.0) == []
    assert acks.next_at() == 105.0
    acks.poll(105.0)
    assert not acks.ended("t")
    assert acks.next_at() is None


def test_smaller_size_does_not_complete_early() -> None:
    """What one message said of the fan-in holds: a later one cannot free earlier."""
    acks = legacy(4)
    acks.map("t", "r", now=0.0)
    acks.record("t", size=16, now=0.0)
    assert acks.record("t", now=0.0).outcome is AckOutcome.PROGRESS
    assert acks.counts == {"t": 2}


def test_usable_alone() -> None:
    """Loads no socket, no retry policy, no agent and no backend."""
    code = (
        "import sys, kvxfer.core.legacy_acks\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('zmq', 'tenacity', 'torch', 'mori', "
        "'nixl', 'msgspec') or m.startswith(('kvxfer.agent', 'kvxfer.backends'))]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
