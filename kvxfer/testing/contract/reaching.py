"""Peers: reachable, dead, stopped, several at once; and calls that do not wait for any of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import attrs
import pytest

from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.transport import Path, PeerInfo
from kvxfer.core.verdict import Op
from kvxfer.errors import KvxferError, TransportError
from kvxfer.testing.contract.base import LARGE, TWO_PROCESS, ContractBase, two_process
from kvxfer.testing.pair import Pair, noise
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.pieces import scattered, whole

__all__ = ["ReachesPeers"]

T = TypeVar("T")


class ReachesPeers(ContractBase):
    """connect, prepare, several peers, lost peers, and the time that calls take."""

    def test_two_peers_at_once(self, pair: Pair, mode: str, op: Op) -> None:
        """Transfers with two peers run side by side and do not mix."""
        pair.fars.append(self.make_far(mode, pair))
        rigs = [
            self.rig(pair, [32768, 8192], side=far, seed=seed)
            for seed, far in enumerate(pair.fars, start=1)
        ]
        batches = [scattered(s, [32768, 8192], [32768, 8192], pieces=40) for s in (11, 12)]
        attempts: list[Attempt] = []
        for i in range(0, 40, 10):
            for rig, batch in zip(rigs, batches, strict=True):
                attempts += pair.post_all(op, rig.path, batch.slice(i, i + 10))
        for rig, batch in zip(rigs, batches, strict=True):
            attempts += pair.post_all(op, rig.path, batch.slice(40, len(batch)))
        pair.done(attempts)
        for rig, batch in zip(rigs, batches, strict=True):
            rig.expect(op, batch)

    def test_the_peer_transfers_as_well(self, pair: Pair, op: Op) -> None:
        """Both sides may connect to each other and post at the same time."""
        rig = self.rig(pair, [65536, 65536])
        here, there = rig.buffers[1]
        batch = whole(65536, pieces=32)
        number = pair.far.exchange(op, pair.near.info, [(there, here.descriptor)], batch)
        pair.done(pair.post_all(op, rig.path, batch))
        pair.until(
            lambda: pair.far.exchange_state(number) != "pending", "the peer's transfer ended"
        )
        assert pair.far.exchange_state(number) == "done"
        ours, theirs = pair.near.read(here), pair.far.read(there)
        assert ours == theirs == (rig.near_bytes if op is Op.READ else rig.far_bytes)[1]

    def test_connected_twice(self, pair: Pair, op: Op) -> None:
        """A second connection to the same peer works beside the first and outlives it."""
        first = self.rig(pair, [4096], seed=1)
        second = self.rig(pair, [4096], seed=2)
        pair.move(op, first.path, whole(4096))
        pair.outcome(pair.near.transport.disconnect(first.path.peer), "disconnect")
        third = self.rig(pair, [4096], seed=3)
        for rig in (second, third):
            pair.move(op, rig.path, whole(4096))
            rig.expect(op, whole(4096))

    def test_nobody_there_is_an_error_value(self, pair: Pair) -> None:
        """Connecting to a peer that has gone never raises, waits or hangs: the answer of
        ``connect`` is an error, and others can still be reached."""
        info = pair.far.info
        if isinstance(pair.far, PeerProcess):
            pair.far.kill()
        else:
            pair.far.shut()
        self._refused_by_value(pair, info)
        self._still_serves(pair)

    def test_peer_that_left_after_connect(self, pair: Pair, op: Op) -> None:
        """A peer that goes away between ``connect`` and ``prepare`` is an error of ``prepare`` or
        of the first post: nothing raises but ``post``, nothing hangs, nothing is DONE."""
        ((here, there),) = self.buffers(pair, pair.far, [4096])
        peer = pair.connect()
        if isinstance(pair.far, PeerProcess):
            pair.far.kill()
        else:
            pair.far.shut()
        assert here.region is not None
        preparing = pair.near.transport.prepare(peer, [(here.region, there.descriptor)])
        path, error = pair.outcome(preparing, "prepare with nobody")
        if path is not None:
            error = self._post_outcome(pair, op, path, whole(4096))
        assert isinstance(error, KvxferError), "no error, though nobody is there"
        self._still_serves(pair)

    def test_another_life_is_not_taken_for_this_one(self, pair: Pair) -> None:
        """An address where another incarnation lives by now is an error value of ``connect``."""
        other = attrs.evolve(pair.far.info, incarnation="0123456789abcdef")
        self._refused_by_value(pair, other)
        self._still_serves(pair)

    @pytest.mark.parametrize("kind", ["empty", "truncated", "noise"])
    def test_damaged_peer_info_is_an_error_value(self, pair: Pair, kind: str) -> None:
        """``PeerInfo.data`` that was damaged on its way is an error value, and does not spoil the
        good one that comes afterwards."""
        info = pair.far.info
        if not info.data:
            self._still_serves(pair)  # nothing that could be damaged
            return
        damaged = {
            "empty": b"",
            "truncated": info.data[: len(info.data) // 2],
            "noise": bytes(b ^ 0x5A for b in info.data),
        }[kind]
        self._refused_by_value(pair, attrs.evolve(info, data=damaged))
        self._still_serves(pair)

    def test_calls_do_not_wait(self, pair: Pair, op: Op) -> None:
        """``connect``, ``prepare``, ``progress``, ``fence`` and, unless ``may_block_in_post``,
        ``post`` return at once, whatever the engine is doing meanwhile."""
        transport = pair.near.transport
        peer = pair.answer(
            self._quickly("connect", lambda: transport.connect(pair.far.info)), "connect"
        )
        buffers = self.buffers(pair, pair.far, [LARGE, 4096])
        path = pair.answer(
            self._quickly("prepare", lambda: transport.prepare(peer, pair.regions(buffers))),
            "prepare",
        )
        busy = pair.post_all(op, path, whole(LARGE, pieces=64))
        small = Batch([1], [0], [0], [64])
        if not transport.capabilities.may_block_in_post:
            self._mostly_quickly("post", lambda: pair.post(op, path, small))
        self._mostly_quickly("progress", pair.near.pump)
        pair.done(busy)
        self._mostly_quickly("an idle progress", pair.near.pump)
        self._mostly_quickly("lost_peers", transport.lost_peers)
        self._mostly_quickly("local_info", transport.local_info)
        fencing = self._quickly("fence", lambda: transport.fence(peer))
        self._mostly_quickly("poll", fencing.poll)
        self._quickly("disconnect", lambda: transport.disconnect(peer))

    @two_process
    def test_killed_peer_ends_every_attempt(self, pair: Pair, mode: str, op: Op) -> None:
        """A peer killed in the middle: every attempt ends, DONE with the right bytes or FAILED, a
        healthy peer is not disturbed, and a restarted one is served."""
        pair.fars.append(self.make_far(mode, pair))
        doomed, healthy = pair.fars
        assert isinstance(doomed, PeerProcess)
        lost = self.rig(pair, [LARGE], side=doomed, seed=1)
        kept = self.rig(pair, [LARGE], side=healthy, seed=2)
        batch = whole(LARGE, pieces=64)
        attempts = pair.post_all(op, lost.path, batch)
        attempts_kept = pair.post_all(op, kept.path, batch)
        doomed.kill()
        for _ in range(4):
            error = self._post_outcome(pair, op, lost.path, batch)
            if isinstance(error, TransportError):
                break
        pair.done(attempts_kept, "transfers with the healthy peer")
        pair.ended(attempts, "transfers with the killed peer")
        kept.expect(op, batch)
        if op is Op.READ and all(a.state is AttemptState.DONE for a in attempts):
            found = pair.near.read(lost.buffers[0][0])
            assert found == lost.far_bytes[0], "DONE with wrong bytes after the peer was killed"
        answer = pair.answer(pair.near.transport.disconnect(lost.path.peer), "disconnect")
        if answer.done:
            assert all(a.drained for a in attempts)
        pair.fars[0] = self.make_far(mode, pair)
        doomed.dispose()
        assert pair.far.info.incarnation != lost.path.peer.info.incarnation
        self._still_serves(pair)

    @two_process
    def test_stopped_peer_holds_nobody(self, pair: Pair, mode: str, op: Op) -> None:
        """A peer that stands still delays neither our calls nor another peer; once it runs again,
        what was asked of it is answered."""
        pair.fars.append(self.make_far(mode, pair))
        stopped, healthy = pair.fars
        assert isinstance(stopped, PeerProcess)
        rig = self.rig(pair, [65536], side=stopped, seed=1)
        other = self.rig(pair, [65536], side=healthy, seed=2)
        transport = pair.near.transport
        batch = whole(65536, pieces=16)
        stopped.stop()
        try:
            connecting = self._quickly("connect", lambda: transport.connect(stopped.info))
            preparing = self._quickly(
                "prepare", lambda: transport.prepare(rig.path.peer, pair.regions(rig.buffers))
            )
            self._mostly_quickly("progress", pair.near.pump)
            attempts = pair.post_all(op, rig.path, batch)
            pair.move(op, other.path, batch)
            other.expect(op, batch)
            assert not transport.lost_peers(), "who stands still has not ended"
        finally:
            stopped.resume()
        pair.ended(attempts, "attempts with the stopped peer")
        pair.outcome(connecting, "connect to the stopped peer")
        pair.outcome(preparing, "prepare with the stopped peer")
        if all(a.state is AttemptState.DONE for a in attempts):
            rig.expect(op, batch)

    # ---- helpers ---------------------------------------------------------------------------

    def _still_serves(self, pair: Pair) -> None:
        """The near side works with a live peer, whatever happened with another one."""
        caps = pair.near.transport.capabilities
        mode = TWO_PROCESS if isinstance(pair.far, PeerProcess) else self.modes[0]
        pair.fars.append(self.make_far(mode, pair))
        for op in self.usable(caps):
            rig = self.rig(pair, [4096], side=pair.fars[-1], seed=5)
            pair.move(op, rig.path, whole(4096))
            rig.expect(op, whole(4096))

    def _refused_by_value(self, pair: Pair, info: PeerInfo) -> None:
        pollable = self._quickly("connect", lambda: pair.near.transport.connect(info))
        peer, error = pair.outcome(pollable, "connect with wrong information")
        assert peer is None, f"connected to {peer!r}"
        assert isinstance(error, KvxferError)

    def _post_outcome(self, pair: Pair, op: Op, path: Path, batch: Batch) -> KvxferError | None:
        """The error of a post, raised or carried by its attempts; None if all are DONE."""
        try:
            attempts = pair.post_all(op, path, batch)
        except TransportError as error:
            return error
        pair.ended(attempts, "a post to a peer that is gone")
        failed = [a for a in attempts if a.state is AttemptState.FAILED]
        return TransportError("failed", engine=failed[0].error) if failed else None

    def _quickly(self, what: str, call: Callable[[], T]) -> T:
        """Call, again if that took long: a call that waits does so each time, a machine that is
        busy with something else does not."""
        took, bound = [], self.quick + 10 * noise()
        for _ in range(3):
            start = time.monotonic()
            result = call()
            took.append(time.monotonic() - start)
            if took[-1] < bound:
                return result
        raise AssertionError(f"{what} took {took} s, each time above {bound:.3f} s: it waits")

    def _mostly_quickly(self, what: str, call: Callable[[], object], times: int = 31) -> None:
        """Call several times; the median must be well below what a wait would take."""
        took = []
        for _ in range(times):
            start = time.monotonic()
            call()
            took.append(time.monotonic() - start)
        median, bound = statistics.median(took), self.quick / 10 + min(noise(), self.quick / 10)
        assert median < bound, f"{what} takes {median:.4f} s, more than {bound:.4f} s: it waits"
