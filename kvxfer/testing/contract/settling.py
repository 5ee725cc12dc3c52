"""How attempts end, and what may be done with the memory before and after."""

from __future__ import annotations

import time

from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.capabilities import Capabilities, FenceScope
from kvxfer.core.transport import Fence
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import RegionBusyError, TransportError
from kvxfer.testing.contract.base import LARGE, ContractBase, Rig, requires, two_process
from kvxfer.testing.pair import Pair
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.pieces import whole

__all__ = ["Settles"]


def _can_write(caps: Capabilities, suite: type[ContractBase]) -> bool:
    return Op.WRITE in suite.usable(caps)


class Settles(ContractBase):
    """progress, terminal states, drained, deregister, disconnect, fence, close."""

    def test_progress_reports_every_attempt_and_nothing_else(self, pair: Pair, op: Op) -> None:
        """Every attempt is reported once it is terminal, by calls that respect ``budget``; a
        transport with nothing to say reports nothing."""
        transport = pair.near.transport
        rig = self.rig(pair, [65536])
        assert transport.progress() == []
        parts = whole(65536, pieces=24).cut(max_pieces=1, max_nbytes=65536)
        for part in parts:
            pair.post(op, rig.path, part)
        posted, reported = pair.posted, list(pair.reports)
        deadline = time.monotonic() + self.timeout
        while len({id(a) for a in reported}) < len(posted):
            assert time.monotonic() < deadline, f"{len(reported)} of {len(posted)} reported"
            news = transport.progress(2)
            assert len(news) <= 2, f"progress(2) returned {len(news)} attempts"
            for attempt in news:
                assert any(attempt is p for p in posted), f"{attempt!r} was never posted"
                assert attempt.terminal, f"{attempt!r} was reported before it ended"
            reported += news
            pair.far.pump()
        for _ in range(20):
            assert all(any(a is p for p in posted) for a in transport.progress())

    def test_terminal_state_is_final(self, pair: Pair, op: Op) -> None:
        """The first terminal state wins: over a late failure, a cancel, a disconnect, a close."""
        rig = self.rig(pair, [4096])
        (attempt,) = pair.move(op, rig.path, whole(4096))
        before = (
            attempt.state,
            attempt.accepted,
            attempt.nbytes,
            attempt.error,
            attempt.drained_by,
        )
        late = EngineError(backend="test", message="too late")
        assert not attempt.fail(late, accepted=Accepted.UNKNOWN)
        assert not attempt.mark_drained("too late")
        attempt.request_cancel()
        pair.outcome(pair.near.transport.disconnect(rig.path.peer), "disconnect")
        pair.near.transport.close()
        after = (attempt.state, attempt.accepted, attempt.nbytes, attempt.error, attempt.drained_by)
        assert after == before
        assert attempt.state is AttemptState.DONE

    def test_a_time_out_is_not_overwritten(self, pair: Pair, op: Op) -> None:
        """An attempt that its owner failed stays FAILED when the engine succeeds later; the late
        completion is its proof of being drained, and ``progress`` tells of it."""
        rig = self.rig(pair, [LARGE])
        with self.hold(pair):
            attempts = pair.post_all(op, rig.path, whole(LARGE, pieces=64))
            ours = EngineError(backend="test", message="time-out")
            failed = [a for a in attempts if a.fail(ours, accepted=Accepted.UNKNOWN)]
        pair.drained(attempts, "attempts that their owner gave up")
        for attempt in failed:
            assert attempt.state is AttemptState.FAILED
            assert attempt.error == ours
            assert attempt.drained_by
        pair.until(
            lambda: all(any(a is r for r in pair.reports) for a in failed),
            "the proof of every attempt that was given up reported",
        )

    def test_cancel_lies_about_nothing(self, pair: Pair, op: Op) -> None:
        """A cancelled attempt still ends: DONE with all bytes, or FAILED, and untouched where it
        says that nothing was accepted."""
        rig = self.rig(pair, [LARGE])
        with self.hold(pair):
            attempts = pair.post_all(op, rig.path, whole(LARGE, pieces=64))
            for attempt in attempts:
                attempt.request_cancel()
        pair.ended(attempts, "cancelled attempts")
        pair.drained(attempts, "cancelled attempts")
        if all(a.state is AttemptState.DONE for a in attempts):
            rig.expect(op, whole(LARGE, pieces=64))
        elif all(a.accepted is Accepted.NONE for a in attempts):
            rig.expect_untouched("by attempts that say so")

    def test_deregister_waits_until_drained(self, pair: Pair, op: Op) -> None:
        """While an attempt that uses a region is not drained, ``deregister`` raises
        RegionBusyError; afterwards it succeeds, also twice."""
        rig = self.rig(pair, [LARGE, 4096])
        (here, there), (idle, _) = rig.buffers
        transport = pair.near.transport
        with self.hold(pair) as held:
            attempts = pair.post_all(op, rig.path, whole(LARGE, pieces=64))
            try:
                pair.near.deregister(here)
            except RegionBusyError:
                pass
            else:
                assert not held, "deregister succeeded though a held attempt uses the region"
                early = [a for a in attempts if not a.drained]
                assert not early, f"deregister succeeded before {early[0]!r} was drained"
            pair.near.deregister(idle)  # in the path, but in no piece
        pair.ended(attempts, "attempts on the region")
        pair.drained(attempts, "attempts on the region")
        pair.near.deregister(here)
        pair.near.deregister(here)
        assert transport.progress(0) == []
        rig.path.close()
        again = [(pair.near.register_again(here), there)]
        path = pair.prepare(rig.path.peer, again)
        pair.move(op, path, whole(LARGE))

    def test_disconnect_fails_what_is_pending(self, pair: Pair, op: Op) -> None:
        """``disconnect`` leaves no attempt pending, on closed paths either, and reports each; its
        fence, when done, means drained, and then nothing lands any more; ``ours_done`` means at
        least that no READ does."""
        rig = self.rig(pair, [LARGE])
        peer = rig.path.peer
        closed_early = pair.prepare(peer, rig.buffers)
        with self.hold(pair):
            attempts = pair.post_all(op, rig.path, whole(LARGE, pieces=64))
            attempts += pair.post_all(op, closed_early, whole(LARGE, pieces=64))
            closed_early.close()
            pollable = pair.near.transport.disconnect(peer)
            pending = [a for a in attempts if not a.terminal]
            assert not pending, f"{len(pending)} of {len(attempts)} still pending after disconnect"
            fence = pair.answer(pollable, "disconnect")
        self._check_fence(rig, attempts, fence)
        again = pair.answer(pair.near.transport.disconnect(peer), "the second disconnect")
        assert again.done or again.reason
        if fence.done or (fence.ours_done and op is Op.READ):
            self._nothing_lands(rig, op)

    def test_fence_keeps_its_word(self, pair: Pair, op: Op) -> None:
        """``fence`` answers within its bound, as the capability says: PEER means done, NONE means
        not; done means that every attempt is terminal and drained, and then nothing lands."""
        scope = pair.near.transport.capabilities.fence
        rig = self.rig(pair, [LARGE])
        with self.hold(pair):
            attempts = pair.post_all(op, rig.path, whole(LARGE, pieces=64))
            fence = pair.answer(pair.near.transport.fence(rig.path.peer), "fence")
        if scope is FenceScope.PEER:
            assert fence.done, fence.reason
        if scope is FenceScope.NONE:
            assert not fence.done
        self._check_fence(rig, attempts, fence, reported=fence.done)
        if fence.done:
            self._nothing_lands(rig, op)

    @requires("fence: no fence per peer", lambda caps, _: caps.fence is FenceScope.PEER)
    @requires("ops: no write", _can_write)
    def test_receivers_fence_stops_writes(self, pair: Pair) -> None:
        """Once the receiver's fence is done, no WRITE of that peer lands, posted before or after,
        and none of those posted after is DONE."""
        rig = self.rig(pair, [1 << 20])
        batch = whole(1 << 20, pieces=64)
        stream: list[Attempt] = []

        def fenced() -> bool:
            if len(stream) < 64:
                stream.extend(self._try_post(rig, batch))
            return pair.far.exchange_state(number) != "pending"

        stream.extend(pair.post_all(Op.WRITE, rig.path, batch))
        number = pair.far.fence(pair.near.info)
        pair.until(fenced, "the receiver's fence")
        assert pair.far.exchange_state(number) == "done"
        rig.overwrite_destinations(Op.WRITE, seed=77)
        after = self._try_post(rig, batch)
        pair.ended([*stream, *after], "writes to a receiver that fenced us")
        assert not [a for a in after if a.state is AttemptState.DONE]
        rig.expect_untouched("after the receiver's fence")

    @requires("fence: nothing proves it by region", lambda caps, _: caps.fence is FenceScope.REGION)
    @requires("ops: no write", _can_write)
    def test_deregister_stops_writes(self, pair: Pair) -> None:
        """Once the receiver has deregistered a region, no WRITE lands in it."""
        rig = self.rig(pair, [1 << 20])
        batch = whole(1 << 20, pieces=64)
        stream = pair.post_all(Op.WRITE, rig.path, batch)
        pair.far.deregister(rig.buffers[0][1])
        rig.overwrite_destinations(Op.WRITE, seed=78)
        after = self._try_post(rig, batch)
        pair.ended([*stream, *after], "writes into a region that is gone")
        assert not [a for a in after if a.state is AttemptState.DONE]
        rig.expect_untouched("after deregister")

    @two_process
    def test_close_answers_what_was_asked(self, pair: Pair) -> None:
        """``connect``, ``prepare`` and ``disconnect`` that a stopped peer left without an answer
        get one when the transport is closed: nobody waits for ever."""
        ((here, there),) = self.buffers(pair, pair.far, [4096])
        assert here.region is not None
        assert isinstance(pair.far, PeerProcess)
        transport, info = pair.near.transport, pair.far.info
        peer, other = pair.connect(), pair.connect()
        pair.far.stop()
        try:
            connecting = transport.connect(info)
            preparing = transport.prepare(peer, [(here.region, there.descriptor)])
            fencing = transport.disconnect(other)
            transport.close(1.0)
            pair.outcome(connecting, "the answer of connect after close")
            pair.outcome(preparing, "the answer of prepare after close")
            pair.outcome(fencing, "the answer of disconnect after close")
        finally:
            pair.far.resume()

    def test_close_fails_what_is_pending(self, pair: Pair, op: Op) -> None:
        """``close`` returns within its deadline, leaves no attempt pending and returns those not
        drained; closing again returns nothing."""
        transport = pair.near.transport
        rig = self.rig(pair, [LARGE])
        with self.hold(pair):
            attempts = pair.post_all(op, rig.path, whole(LARGE, pieces=64))
            start = time.monotonic()
            left = transport.close(2.0)
            took = time.monotonic() - start
        assert took < 2.0 + 10 * self.quick, f"close(2.0) took {took:.1f} s"
        assert all(a.terminal for a in attempts)
        assert {id(a) for a in left} >= {id(a) for a in attempts if not a.drained}
        assert all(any(a is p for p in pair.posted) for a in left)
        assert transport.close() == []
        pair.until(
            lambda: all(any(a is r for r in pair.reports) for a in attempts),
            "attempts that close failed reported",
        )
        if not left:
            rig.overwrite_destinations(op, seed=79)
            # Another transport moving as many bytes gives a late copy its chance.
            with self.make_pair(self.modes[0]) as other:
                fresh = self.rig(other, [LARGE])
                other.move(op, fresh.path, whole(LARGE, pieces=64))
            rig.expect_untouched("after close said that all is drained")

    # ---- helpers ---------------------------------------------------------------------------

    def _check_fence(
        self, rig: Rig, attempts: list[Attempt], fence: Fence, *, reported: bool = True
    ) -> None:
        assert fence.ours_done or not fence.done, "done, but not what we posted ourselves"
        if fence.done:
            undrained = [a for a in attempts if not a.drained]
            assert not undrained, f"the fence is done, but not drained: {undrained[0]!r}"
        else:
            assert fence.reason, "a fence that cannot be done must say why"
        if reported:
            rig.pair.until(
                lambda: all(any(a is r for r in rig.pair.reports) for a in attempts),
                "every attempt reported",
            )

    def _nothing_lands(self, rig: Rig, op: Op) -> None:
        """Reuse the destination, move as many bytes elsewhere on a new connection, look again."""
        rig.overwrite_destinations(op, seed=76)
        other = self.rig(rig.pair, [LARGE], side=rig.far, seed=3)
        batch = whole(LARGE, pieces=64)
        rig.pair.move(op, other.path, batch)
        other.expect(op, batch)
        rig.expect_untouched("after the fence said that nothing lands")

    @staticmethod
    def _try_post(rig: Rig, batch: Batch) -> list[Attempt]:
        """WRITE ``batch``, unless the engine knows already that nobody takes it."""
        try:
            return rig.pair.post_all(Op.WRITE, rig.path, batch)
        except TransportError:
            return []
