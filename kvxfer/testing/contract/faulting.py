"""The faults of ``FaultyTransport`` over a real engine: what lands, and when it is over."""

from __future__ import annotations

import pytest

from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    BackpressureError,
    ClosedError,
    HandshakeError,
    PeerLostError,
    RegionBusyError,
    TransportError,
)
from kvxfer.testing.contract.base import ContractBase, Rig
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport
from kvxfer.testing.pair import Pair
from kvxfer.testing.pieces import whole

__all__ = ["SurvivesFaults"]

_SIZE = 1 << 16
_PIECES = 16
_SAID = EngineError(backend="test", message="injected by the test", code=7)
_FACTS = tuple[AttemptState, Accepted, bool]


def _fault(kind: FaultKind, *, lands_late: bool = False) -> Fault:
    return Fault(kind=kind, error=_SAID, lands_late=lands_late)


def _facts(attempt: Attempt) -> _FACTS:
    return attempt.state, attempt.accepted, attempt.drained


class SurvivesFaults(ContractBase):
    """refuse, partial post, late, never, duplicate, peer gone; connect, prepare, fence."""

    def test_refused_posts_move_nothing(self, pair: Pair, op: Op) -> None:
        """REFUSE raises and REFUSE_VALUE returns a failed attempt; neither touches a byte, and the
        third post goes through."""
        self._faulty(pair, posts=[_fault(FaultKind.REFUSE), _fault(FaultKind.REFUSE_VALUE)])
        rig = self.rig(pair, [_SIZE])
        batch = whole(_SIZE, pieces=_PIECES)
        with pytest.raises(BackpressureError) as refused:
            pair.post_once(op, rig.path, batch)
        assert refused.value.engine == _SAID
        attempt = pair.post_once(op, rig.path, batch)
        assert _facts(attempt) == (AttemptState.FAILED, Accepted.NONE, True)
        assert attempt.error == _SAID
        rig.expect_untouched("by two refusals")
        pair.move(op, rig.path, batch)
        rig.expect(op, batch)

    @pytest.mark.parametrize("lands_late", [False, True])
    def test_partial_post_is_not_drained(self, pair: Pair, op: Op, lands_late: bool) -> None:
        """PARTIAL fails at once while its first pieces land, at once or later: the memory stays
        taken until they have, and the whole batch posted again gives all bytes."""
        faulty = self._faulty(pair, posts=[_fault(FaultKind.PARTIAL, lands_late=lands_late)])
        rig = self.rig(pair, [_SIZE])
        batch = whole(_SIZE, pieces=_PIECES)
        attempt = pair.post_once(op, rig.path, batch)
        assert _facts(attempt) == (AttemptState.FAILED, Accepted.UNKNOWN, False)
        with pytest.raises(RegionBusyError):
            pair.near.deregister(rig.buffers[0][0])
        if lands_late:
            rig.expect_untouched("before it lands")
        self._landed(pair, faulty, attempt)
        rig.expect(op, batch.slice(0, _PIECES // 2), what="the part that was posted")
        pair.move(op, rig.path, batch)
        rig.expect(op, batch)

    def test_late_bytes_land_after_the_time_out(self, pair: Pair, op: Op) -> None:
        """LATE: its owner gives up, then the bytes land.  Until they have, nothing says that the
        memory is free; afterwards the attempt is drained, and still failed."""
        faulty = self._faulty(pair, posts=[_fault(FaultKind.LATE)])
        rig = self.rig(pair, [_SIZE])
        batch = whole(_SIZE, pieces=_PIECES)
        attempt = pair.post_once(op, rig.path, batch)
        pair.pump()
        rig.expect_untouched("by what is late")
        assert attempt.fail(_SAID, accepted=Accepted.UNKNOWN)
        assert not attempt.drained
        self._landed(pair, faulty, attempt)
        assert attempt.state is AttemptState.FAILED
        rig.expect(op, batch, what="what came late")

    def test_late_report_has_its_bytes(self, pair: Pair, op: Op) -> None:
        """LATE_REPORT: the bytes are there while the attempt is PENDING; DONE comes later."""
        faulty = self._faulty(pair, posts=[_fault(FaultKind.LATE_REPORT)])
        rig = self.rig(pair, [_SIZE])
        batch = whole(_SIZE, pieces=_PIECES)
        attempt = pair.post_once(op, rig.path, batch)
        pair.until(lambda: _arrived(rig, op), "the bytes of what is not reported")
        assert attempt.state is AttemptState.PENDING
        faulty.release()
        pair.done([attempt])
        rig.expect(op, batch)

    def test_never_is_ended_by_disconnect(self, pair: Pair, op: Op) -> None:
        """NEVER: no report comes, whatever is released; ``disconnect`` ends the attempt, and a new
        connection works."""
        faulty = self._faulty(pair, posts=[_fault(FaultKind.NEVER)])
        rig = self.rig(pair, [_SIZE])
        batch = whole(_SIZE, pieces=_PIECES)
        attempt = pair.post_once(op, rig.path, batch)
        faulty.release()
        pair.until(lambda: _arrived(rig, op), "the bytes of what is never reported")
        assert not attempt.terminal
        fence = pair.near.transport.disconnect(rig.path.peer)
        pair.ended([attempt], "what is never reported, after disconnect")
        assert attempt.state is AttemptState.FAILED
        pair.outcome(fence, "disconnect")
        fresh = self.rig(pair, [_SIZE], seed=3)
        pair.move(op, fresh.path, batch)
        fresh.expect(op, batch)

    def test_duplicate_reports_change_nothing(self, pair: Pair, op: Op) -> None:
        """DUPLICATE: one end is reported twice; state and bytes are those of one."""
        self._faulty(pair, posts=[_fault(FaultKind.DUPLICATE)])
        rig = self.rig(pair, [_SIZE])
        batch = whole(_SIZE, pieces=_PIECES)
        attempt = pair.post_once(op, rig.path, batch)
        pair.until(lambda: _times(pair, attempt) == 2, "the second report")
        assert _facts(attempt) == (AttemptState.DONE, Accepted.ALL, True)
        rig.expect(op, batch)
        other = pair.move(op, rig.path, batch)
        assert _times(pair, attempt) == 2
        assert all(_times(pair, a) <= 1 for a in other)

    @pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.FAIL_DRAINED])
    def test_failures_with_and_without_proof(self, pair: Pair, op: Op, kind: FaultKind) -> None:
        """FAIL and FAIL_DRAINED: a part lands, the attempt fails later with the engine's words; the
        proof comes with it, or not before the release."""
        faulty = self._faulty(pair, posts=[_fault(kind)])
        rig = self.rig(pair, [_SIZE])
        batch = whole(_SIZE, pieces=_PIECES)
        attempt = pair.post_once(op, rig.path, batch)
        pair.ended([attempt], "an attempt that fails")
        assert attempt.error == _SAID
        proven = kind is FaultKind.FAIL_DRAINED
        assert _facts(attempt) == (AttemptState.FAILED, Accepted.UNKNOWN, proven)
        self._landed(pair, faulty, attempt)
        rig.expect(op, batch.slice(0, _PIECES // 2), what="the part that was posted")

    def test_peer_gone_takes_nobody_along(self, pair: Pair, mode: str, op: Op) -> None:
        """PEER_GONE: what is under way to that peer fails, later posts and connects are refused as
        lost; the other peer's transfers end with the right bytes."""
        pair.fars.append(self.make_far(mode, pair))
        posts = [_fault(FaultKind.LATE), None, _fault(FaultKind.PEER_GONE)]
        faulty = self._faulty(pair, posts=posts)
        lost, kept = (self.rig(pair, [_SIZE], side=far, seed=i) for i, far in enumerate(pair.fars))
        batch = whole(_SIZE, pieces=_PIECES)
        under_way = pair.post_once(op, lost.path, batch)
        healthy = pair.post_once(op, kept.path, batch)
        doomed = pair.post_once(op, lost.path, batch)
        assert [a.state for a in (under_way, doomed)] == [AttemptState.FAILED] * 2
        assert not under_way.drained
        with pytest.raises(PeerLostError):
            pair.post_once(op, lost.path, batch)
        peer, error = pair.outcome(faulty.connect(lost.path.peer.info), "connect to who is gone")
        assert peer is None
        assert isinstance(error, PeerLostError)
        pair.done([healthy], "the other peer's transfer")
        kept.expect(op, batch)
        pair.move(op, kept.path, batch)
        self._landed(pair, faulty, under_way)

    def test_connect_and_prepare_fail_as_values(self, pair: Pair, op: Op) -> None:
        """FAIL at ``connect`` and ``prepare`` is an error value, LATE an answer that comes with the
        release; the next tries work."""
        late, fail = _fault(FaultKind.LATE), _fault(FaultKind.FAIL)
        faulty = self._faulty(pair, connects=[fail, late], prepares=[fail, late])
        ((here, there),) = self.buffers(pair, pair.far, [_SIZE])
        pairs = pair.regions([(here, there)])
        _, error = pair.outcome(faulty.connect(pair.far.info), "connect")
        assert isinstance(error, HandshakeError)
        connecting = faulty.connect(pair.far.info)
        pair.pump()
        assert connecting.poll() == (None, None)
        faulty.release()
        peer = pair.answer(connecting, "connect, released")
        _, error = pair.outcome(faulty.prepare(peer, pairs), "prepare")
        assert isinstance(error, TransportError)
        preparing = faulty.prepare(peer, pairs)
        pair.pump()
        assert preparing.poll() == (None, None)
        faulty.release()
        rig = self.fill(pair, pair.far, [(here, there)], pair.answer(preparing, "prepare"))
        pair.move(op, rig.path, whole(_SIZE))
        rig.expect(op, whole(_SIZE))

    def test_answers_that_never_come_end_with_close(self, pair: Pair) -> None:
        """NEVER at ``connect`` and ``fence``: the answer is pending until ``close`` gives one."""
        never = [_fault(FaultKind.NEVER)]
        faulty = self._faulty(pair, connects=[None, *never], fences=never)
        peer = pair.connect()
        connecting, fencing = faulty.connect(pair.far.info), faulty.fence(peer)
        for _ in range(20):
            pair.pump()
        assert connecting.poll() == fencing.poll() == (None, None)
        faulty.close()
        _, error = pair.outcome(connecting, "connect after close")
        assert isinstance(error, ClosedError)
        assert pair.answer(fencing, "fence after close").done

    # ---- helpers ---------------------------------------------------------------------------

    @staticmethod
    def _faulty(pair: Pair, **scripts: list[Fault] | list[Fault | None]) -> FaultyTransport:
        """Put a ``FaultyTransport`` around the near side's, before anything uses it."""
        faulty = FaultyTransport(pair.near.transport, FaultPlan(**scripts))  # type: ignore[arg-type]
        pair.near.transport = faulty
        return faulty

    @staticmethod
    def _landed(pair: Pair, faulty: FaultyTransport, attempt: Attempt) -> None:
        faulty.release()
        pair.drained([attempt], "what was held back")


def _arrived(rig: Rig, op: Op) -> bool:
    here, there = rig.buffers[0]
    # Ask the side whose memory is written to; the other one still holds what it did.
    source = rig.far_bytes[0] if op is Op.READ else rig.near_bytes[0]
    return (rig.pair.near.read(here) if op is Op.READ else rig.far.read(there)) == source


def _times(pair: Pair, attempt: Attempt) -> int:
    return sum(attempt is reported for reported in pair.reports)
