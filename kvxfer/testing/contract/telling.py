"""What a transport tells of itself, on which threads it may be used, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from typing import TypeVar

from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Peer, Transport
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, RegionBusyError
from kvxfer.testing.contract.base import ContractBase, Rig
from kvxfer.testing.pair import Pair
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.pieces import scattered, whole
from kvxfer.testing.station import Station

__all__ = ["TellsTheTruth"]

T = TypeVar("T")

_IDLE = 60
"""Paths and regions that lie idle."""


class TellsTheTruth(ContractBase):
    """queues, descriptors, wake-ups, lost peers, threads, cost, leftovers."""

    def test_every_pair_names_its_queue(self, pair: Pair, op: Op) -> None:
        """``Path.queues`` has a name for each pair, and keeps it while posts go on."""
        rig = self.rig(pair, [4096] * 3)
        before = rig.path.queues
        assert len(before) == len(rig.path.pairs) == 3
        assert all(isinstance(name, str) and name for name in before)
        pair.move(op, rig.path, whole(4096, pair=1))
        assert rig.path.queues == before

    def test_descriptor_addresses_the_region(self, pair: Pair, op: Op) -> None:
        """``descriptor`` of a region, asked for at any time, is what the peer needs: it moves bytes
        with it, and no region but that one changes."""
        transport = pair.near.transport
        rig = self.rig(pair, [8192, 8192])
        here, there = rig.buffers[1]
        assert here.region is not None
        told = transport.descriptor(here.region)
        assert told.transport == transport.name
        assert told.incarnation == transport.incarnation
        assert (told.nbytes, told.kind) == (8192, here.region.span.kind)
        number = pair.far.exchange(op, pair.near.info, [(there, told)], whole(8192, pieces=4))
        pair.until(lambda: pair.far.exchange_state(number) != "pending", "the peer's transfer")
        assert pair.far.exchange_state(number) == "done"
        # The peer moves from its own side: a READ of its is a WRITE as seen from here.
        mirrored = Op.WRITE if op is Op.READ else Op.READ
        rig.expect(mirrored, whole(8192, pieces=4, pair=1))

    def test_whoever_sleeps_is_woken(self, pair: Pair, op: Op) -> None:
        """Where nobody has to poll (``must_be_polled`` false), each change calls the waker, so that
        ``progress`` is never needed before; where polling is a must, ``progress`` alone does."""
        transport = pair.near.transport
        rig = self.rig(pair, [65536])
        woken = threading.Event()
        transport.on_change(woken.set)
        for part in whole(65536, pieces=12).cut(max_pieces=1, max_nbytes=65536):
            woken.clear()
            attempt = pair.post(op, rig.path, part)
            while not any(attempt is known for known in pair.reports):
                if transport.must_be_polled:
                    pair.until(lambda a=attempt: a in pair.reports, "the attempt reported")  # type: ignore[misc]
                    break
                assert woken.wait(self.timeout), "nobody was woken, and there are news"
                woken.clear()
                pair.near.pump()
            assert attempt.state is AttemptState.DONE
        transport.on_change(None)
        pair.move(op, rig.path, whole(65536, pieces=12))

    def test_lost_peers_have_ended(self, pair: Pair, mode: str) -> None:
        """``lost_peers`` names peers that ended, each at most once; never one that lives, be it
        idle, busy, or one whose connection we closed ourselves."""
        pair.fars.append(self.make_far(mode, pair))
        doomed, living = pair.fars
        transport = pair.near.transport
        op = self.usable(transport.capabilities)[0]
        kept = self.rig(pair, [65536], side=living, seed=1)
        closed = pair.connect(living)
        gone = pair.connect(doomed)
        pair.outcome(transport.disconnect(closed), "disconnect")
        lost: list[Peer] = []
        for ended in (False, True):
            if ended:
                _end(pair, doomed)
            for _ in range(10):
                pair.move(op, kept.path, whole(65536, pieces=8))
                lost += transport.lost_peers()
            assert all(peer is gone for peer in lost), f"{lost} are said to have ended"
            assert len(lost) <= ended

    def test_posts_beside_progress(self, pair: Pair, op: Op) -> None:
        """Two threads post, each on a path of its own, while a third is inside ``progress`` and a
        fourth reads the attempts: each ends DONE with its bytes, and whoever sees DONE sees it
        drained and accepted."""
        rigs = [self.rig(pair, [32768], seed=seed) for seed in (1, 2)]
        batches = [scattered(s, [32768], [32768], pieces=48) for s in (21, 22)]
        posters = [
            _Poster(pair.near.transport, op, rig, batch)
            for rig, batch in zip(rigs, batches, strict=True)
        ]
        watcher = _Watcher(posters)
        for thread in (*posters, watcher):
            thread.start()
        try:
            pair.until(
                lambda: (
                    not any(p.is_alive() for p in posters)
                    and all(a.terminal for p in posters for a in p.attempts)
                ),
                "two threads posting beside progress",
            )
        finally:
            watcher.stop.set()
            watcher.join(self.timeout)
            for poster in posters:
                poster.stop.set()
                pair.posted += poster.posted
        assert not watcher.problems, watcher.problems[0]
        assert not [p.error for p in posters if p.error is not None]
        for poster, rig, batch in zip(posters, rigs, batches, strict=True):
            assert [a for a in poster.attempts if a.state is not AttemptState.DONE] == []
            rig.expect(op, batch)

    def test_answers_are_for_any_thread(self, pair: Pair) -> None:
        """What ``connect`` and ``prepare`` return may be polled on any thread, on several at once;
        all of them see the same answer."""
        transport = pair.near.transport
        buffers = self.buffers(pair, pair.far, [4096])
        connecting = transport.connect(pair.far.info)
        peer = self._polled_by_three(pair, connecting)
        path = self._polled_by_three(pair, transport.prepare(peer, pair.regions(buffers)))
        for op in self.usable(transport.capabilities):
            pair.move(op, path, whole(4096))

    def test_idle_things_cost_nothing(self, pair: Pair) -> None:
        """``progress`` takes no longer for paths and regions that lie idle."""
        rig = self.rig(pair, [4096])
        before = _cost(pair.near.transport)
        idle = self.buffers(pair, pair.far, [4096] * _IDLE)
        paths = [pair.prepare(rig.path.peer, [buffers]) for buffers in idle]
        after = _cost(pair.near.transport)
        bound = 3 * before + 1e-6 * _IDLE
        assert after < bound, f"{after:.2e} s beside {_IDLE} idle paths, {before:.2e} s before"
        for path in paths:
            path.close()

    def test_paths_come_and_go(self, pair: Pair, op: Op) -> None:
        """Paths may be prepared and closed as often as one likes: what the engine held for one is
        free again, so that its regions can be deregistered and the peer used on."""
        rig = self.rig(pair, [4096, 4096])
        for _ in range(20):
            path = pair.prepare(rig.path.peer, rig.buffers)
            pair.move(op, path, whole(4096, pair=1))
            path.close()
            assert not path.undrained
        rig.expect(op, whole(4096, pair=1))
        rig.path.close()
        for here, _ in rig.buffers:
            pair.near.deregister(here)

    def test_close_frees_everything(self, pair: Pair, mode: str, op: Op) -> None:
        """A transport that was used and closed leaves no thread and no file descriptor behind, and
        its memory can be registered with the next one: the fifth costs what the second did."""
        second = (0, 0)
        for number in range(5):
            self._use_once(mode, op)
            if number == 1:  # the first paid for what an engine loads once for all
                second = _held()
        pair.until(
            lambda: all(now <= then for now, then in zip(_held(), second, strict=True)),
            f"threads and file descriptors as after the second of five transports, {second}",
        )

    # ---- helpers ---------------------------------------------------------------------------

    def _use_once(self, mode: str, op: Op) -> None:
        with self.make_pair(mode) as fresh:
            rig = self.rig(fresh, [65536])
            fresh.move(op, rig.path, whole(65536, pieces=8))
            here = rig.buffers[0][0]
            try:
                fresh.near.deregister(here)
            except RegionBusyError as error:
                raise AssertionError("DONE, and the region is busy") from error
            fresh.near.register_again(here)

    def _polled_by_three(self, pair: Pair, pollable: Pollable[T]) -> T:
        seen: list[object] = []

        def look() -> None:
            deadline = time.monotonic() + self.timeout
            while time.monotonic() < deadline:
                value, error = pollable.poll()
                if value is not None or error is not None:
                    seen.append(value or error)
                    return
                time.sleep(0.001)

        threads = [threading.Thread(target=look, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        pair.until(lambda: not any(t.is_alive() for t in threads), "polling on three threads")
        assert len(seen) == 3, "no answer"
        assert seen[0] is seen[1] is seen[2], f"different answers: {seen}"
        return pair.answer(pollable, "what three threads polled")


def _end(pair: Pair, side: object) -> None:
    if isinstance(side, PeerProcess):
        side.kill()
    else:
        assert isinstance(side, Station)
        side.shut()


def _held() -> tuple[int, int]:
    """Threads and file descriptors of this process, those for looking apart."""
    gc.collect()  # memory goes with its last reference, and tests make cycles
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _cost(transport: Transport) -> float:
    """Seconds of one idle ``progress``: the best of several medians, for machines that are busy."""
    medians = []
    for _ in range(8):
        took = []
        for _ in range(100):
            start = time.perf_counter()
            transport.progress()
            took.append(time.perf_counter() - start)
        medians.append(statistics.median(took))
    return min(medians)


class _Poster(threading.Thread):
    """Posts one batch in small parts, again after a refusal."""

    def __init__(self, transport: Transport, op: Op, rig: Rig, batch: Batch) -> None:
        super().__init__(name="kvxfer-test-posts", daemon=True)
        self.posted: list[Attempt] = []
        self.attempts: list[Attempt] = []
        self.error: Exception | None = None
        self.stop = threading.Event()
        self._transport, self._op, self._rig, self._batch = transport, op, rig, batch

    def run(self) -> None:
        try:
            for part in self._batch.cut(max_pieces=4, max_nbytes=1 << 20):
                self._post(part)
        except Exception as error:  # noqa: BLE001 - shown on the test's thread
            self.error = error

    def _post(self, part: Batch) -> None:
        while not self.stop.is_set():
            try:
                attempt = self._transport.post(self._op, self._rig.path, part)
            except BackpressureError:
                time.sleep(0.001)
                continue
            self.posted.append(attempt)
            if attempt.state is AttemptState.FAILED and attempt.accepted is Accepted.NONE:
                continue  # the other way to refuse
            self.attempts.append(attempt)
            return


class _Watcher(threading.Thread):
    """Looks at attributes that other threads write."""

    def __init__(self, posters: list[_Poster]) -> None:
        super().__init__(name="kvxfer-test-watches", daemon=True)
        self.problems: list[str] = []
        self.stop = threading.Event()
        self._posters = posters

    def run(self) -> None:
        while not self.stop.is_set():
            for poster in self._posters:
                for attempt in tuple(poster.attempts):
                    if attempt.state is AttemptState.DONE and not (
                        attempt.drained and attempt.drained_by and attempt.nbytes
                    ):
                        self.problems.append(f"{attempt!r} with {attempt.nbytes} bytes")
            time.sleep(0.0005)
