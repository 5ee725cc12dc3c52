"""READ and WRITE move exactly what the batch names."""

from __future__ import annotations

import threading

import pytest

from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, StaleError
from kvxfer.testing.contract.base import LARGE, ContractBase, requires
from kvxfer.testing.pair import Pair
from kvxfer.testing.pieces import scattered, whole

__all__ = ["MovesBytes"]


class MovesBytes(ContractBase):
    """Which bytes move, and when they are there."""

    def test_moves_exactly_the_pieces(self, pair: Pair, op: Op) -> None:
        """Scattered pieces of odd sizes arrive whole, first and last byte of a region included;
        no other byte of either side changes, inside the regions or just outside."""
        near = [8192, 5000, 16384, 4096, 12289]
        far = [16384, 4097, 8192, 6000, 12288]
        rig = self.rig(pair, near, far)
        batch = scattered(1, near, far, pieces=60)
        pair.move(op, rig.path, batch)
        rig.expect(op, batch)

    def test_done_means_drained_and_there(self, pair: Pair, op: Op) -> None:
        """At the moment an attempt is DONE it is drained, wholly accepted, and its bytes are what
        the capability ``visibility`` promises."""
        rig = self.rig(pair, [LARGE])
        batch = whole(LARGE, pieces=128)
        attempts = pair.move(op, rig.path, batch)
        rig.expect(op, batch)
        for attempt in attempts:
            assert attempt.state is AttemptState.DONE
            assert attempt.drained
            assert attempt.drained_by, "drained_by must name the proof"
            assert attempt.accepted is Accepted.ALL
            assert attempt.nbytes == attempt.batch.nbytes
            assert attempt.error is None
        assert not rig.path.undrained

    def test_post_takes_what_it_is_given(self, pair: Pair, op: Op) -> None:
        """The attempt carries the op, path, batch and tag of its post."""
        rig = self.rig(pair, [4096])
        tag = object()
        batch = whole(512)
        attempt = pair.post(op, rig.path, batch, tag=tag)
        assert (attempt.op, attempt.path, attempt.batch, attempt.tag) == (op, rig.path, batch, tag)
        pair.done([attempt])

    def test_many_regions_in_one_path(self, pair: Pair, op: Op) -> None:
        """One post spans all pairs of a path, as the layers of a model do."""
        sizes = [2048 + 7 * i for i in range(64)]
        rig = self.rig(pair, sizes)
        batch = scattered(2, sizes, sizes, pieces=256)
        pair.move(op, rig.path, batch)
        rig.expect(op, batch)

    def test_layers_share_their_pieces(self, pair: Pair, op: Op) -> None:
        """A factored batch moves every member's pieces from the member's own bases: layers of one
        storage, of several, and more of them than one post takes."""
        rig = self.rig(pair, [98304, 40000, 65536])
        batch = Batch.repeated(
            [0, 0, 0, 1, 2, 2],
            [0, 32768, 65536, 3, 0, 32768],
            [65536, 0, 32768, 5, 32768, 0],
            [0, 4096, 8192, 20480, 30000],
            [28672, 0, 12288, 20000, 17000],
            [4096, 4096, 4000, 1, 999],
        )
        pair.move(op, rig.path, batch)
        rig.expect(op, batch)
        parts = batch.cut(max_pieces=3, max_nbytes=1 << 20)
        again = [*batch.cut(max_pieces=10, max_nbytes=1 << 20), *parts, batch.slice(4, 21)]
        pair.done([a for part in again for a in pair.post_all(op, rig.path, part)])
        rig.expect(op, batch)

    def test_one_region_in_several_pairs(self, pair: Pair, op: Op) -> None:
        """A region may stand in several pairs of a path, and in several paths."""
        peer = pair.connect()
        (here, there), (here2, there2) = self.buffers(pair, pair.far, [4096, 4096])
        crossed = pair.prepare(peer, [(here, there2), (here2, there)])
        straight = pair.prepare(peer, [(here, there), (here2, there2)])
        for seed, path, buffers in (
            (1, crossed, [(here, there2), (here2, there)]),
            (2, straight, [(here, there), (here2, there2)]),
        ):
            rig = self.fill(pair, pair.far, buffers, path, seed)
            batch = scattered(seed, [4096] * 2, [4096] * 2, pieces=12)
            pair.move(op, path, batch)
            rig.expect(op, batch)

    def test_parallel_attempts(self, pair: Pair, op: Op) -> None:
        """Attempts posted without waiting for one another all end DONE, each with its own bytes."""
        rig = self.rig(pair, [32768] * 4)
        batch = scattered(3, [32768] * 4, [32768] * 4, pieces=200)
        parts = batch.cut(max_pieces=7, max_nbytes=1 << 20)
        assert len(parts) > 20
        attempts = [a for part in parts for a in pair.post_all(op, rig.path, part)]
        pair.done(attempts, f"{len(attempts)} parallel attempts")
        rig.expect(op, batch)

    def test_both_directions_at_once(self, pair: Pair) -> None:
        """READs and WRITEs on one path do not disturb one another."""
        caps = pair.near.transport.capabilities
        ops = self.usable(caps)
        rig = self.rig(pair, [65536])
        halves = {
            Op.READ: whole(32768, pieces=64),
            Op.WRITE: whole(65536, pieces=128).slice(64, 128),
        }
        attempts = [
            attempt
            for i in range(8)
            for op in ops
            for attempt in pair.post_all(op, rig.path, halves[op].slice(8 * i, 8 * i + 8))
        ]
        pair.done(attempts)
        here, there = rig.buffers[0]
        for op in ops:
            at = slice(0, 32768) if op is Op.READ else slice(32768, 65536)
            expected = (rig.far_bytes if op is Op.READ else rig.near_bytes)[0][at]
            pair.until(
                lambda at=at, expected=expected: (  # type: ignore[misc]
                    rig.pair.near.read(here)[at] == expected == rig.far.read(there)[at]
                ),
                f"the bytes of {op.value} beside the other op",
            )

    def test_cut_batches_add_up(self, pair: Pair, op: Op) -> None:
        """A batch cut by pieces and by bytes, single pieces included, moves the same bytes."""
        rig = self.rig(pair, [65536])
        batch = scattered(4, [65536], [65536], pieces=16, slot=4096)
        parts = batch.cut(max_pieces=3, max_nbytes=1000)
        assert sum(part.nbytes for part in parts) == batch.nbytes
        attempts = [a for part in parts for a in pair.post_all(op, rig.path, part)]
        pair.done(attempts, f"{len(attempts)} attempts of one cut batch")
        rig.expect(op, batch)

    def test_a_batch_may_be_posted_again(self, pair: Pair, op: Op) -> None:
        """Posting the same batch twice, as a retry does, gives the same bytes: both ops are
        idempotent."""
        rig = self.rig(pair, [8192])
        batch = scattered(5, [8192], [8192], pieces=8)
        attempts = [*pair.post_all(op, rig.path, batch), *pair.post_all(op, rig.path, batch)]
        pair.done(attempts)
        rig.expect(op, batch)

    def test_empty_batch_is_done_at_once(self, pair: Pair, op: Op) -> None:
        """An empty batch is DONE when ``post`` returns, and reported."""
        rig = self.rig(pair, [4096])
        attempt = pair.post_once(op, rig.path, whole(4096).slice(0, 0))
        assert attempt.state is AttemptState.DONE
        assert attempt.drained
        assert attempt.nbytes == 0
        pair.until(lambda: attempt in pair.reports, "the empty batch reported")
        rig.expect_untouched("by an empty batch")

    def test_regions_registered_after_connect(self, pair: Pair, op: Op) -> None:
        """``register`` and ``connect`` may come in any order, on both sides."""
        early = self.buffers(pair, pair.far, [4096])
        peer = pair.connect()
        late = self.buffers(pair, pair.far, [4096])
        for seed, buffers in ((1, late), (2, early), (3, early + late)):
            rig = self.fill(pair, pair.far, buffers, pair.prepare(peer, buffers), seed)
            sizes = [4096] * len(buffers)
            batch = scattered(seed, sizes, sizes, pieces=6)
            pair.move(op, rig.path, batch)
            rig.expect(op, batch)

    def test_register_and_deregister_on_another_thread(self, pair: Pair, op: Op) -> None:
        """``register`` and ``deregister`` may run on any thread while transfers go on."""
        rig = self.rig(pair, [32768])
        batch = scattered(6, [32768], [32768], pieces=32)
        spare = pair.near.register(4096, kind=self.near_kind)
        pair.near.deregister(spare)
        stop, errors = threading.Event(), []

        def churn() -> None:
            try:
                while not stop.is_set():
                    pair.near.deregister(pair.near.register_again(spare))
            except Exception as error:  # noqa: BLE001 - shown on the test's thread
                errors.append(error)

        thread = threading.Thread(target=churn, daemon=True)
        thread.start()
        try:
            for _ in range(10):
                pair.move(op, rig.path, batch)
        finally:
            stop.set()
            thread.join(self.timeout)
        assert not thread.is_alive(), "register or deregister hangs"
        assert not errors, errors
        rig.expect(op, batch)

    @requires("credits: the engine does not count pieces", lambda caps, _: caps.credits is not None)
    def test_no_refusal_within_credits(self, pair: Pair, op: Op) -> None:
        """Up to ``credits`` pieces in flight to a peer are not refused."""
        most = pair.near.transport.capabilities.credits
        assert most is not None
        rig = self.rig(pair, [65536])
        batch = scattered(7, [65536], [65536], pieces=min(most, 100))
        parts = batch.slice(0, min(len(batch), most)).cut(max_pieces=1, max_nbytes=1 << 20)
        pair.done([pair.post_once(op, rig.path, part) for part in parts])

    def test_a_refused_post_has_posted_nothing(self, pair: Pair, op: Op) -> None:
        """Posts are made without waiting until the engine refuses or has taken enough.  What it
        refused, by an exception or with ``accepted`` NONE, has not touched the destination."""
        caps = pair.near.transport.capabilities
        rig = self.rig(pair, [1 << 20])
        batch = scattered(8, [1 << 20], [1 << 20], pieces=1000)
        taken, refused, words = [], [], []
        for part in batch.cut(max_pieces=min(8, caps.max_pieces), max_nbytes=caps.max_nbytes):
            try:
                attempt = pair.post_once(op, rig.path, part)
            except BackpressureError as error:
                refused.append(part)
                words.append(error.engine)
                continue
            taken.append(attempt)
        assert None not in words, "a refusal carries the engine's own words"
        pair.ended(taken, "everything taken")
        refused += [a.batch for a in taken if a.accepted is Accepted.NONE]
        unknown = [a for a in taken if a.accepted is Accepted.UNKNOWN]
        assert not (unknown and caps.atomic_refusal), f"atomic_refusal, yet {unknown[0]!r}"
        pair.drained(taken, "everything taken")
        done = [a.batch for a in taken if a.state is AttemptState.DONE]
        if not unknown:
            rig.expect(op, Batch.concat(done) if done else batch.slice(0, 0))
        # And the path still works: what was refused goes through once there is room.
        pair.done([a for part in refused for a in pair.post_all(op, rig.path, part)])

    def test_registered_again(self, pair: Pair, op: Op) -> None:
        """Memory can be registered again after ``deregister``, and works on a new path."""
        rig = self.rig(pair, [8192])
        pair.move(op, rig.path, whole(8192))
        here, there = rig.buffers[0]
        rig.path.close()
        pair.near.deregister(here)
        again = pair.near.register_again(here)
        buffers = [(again, there)]
        rig = self.fill(pair, pair.far, buffers, pair.prepare(rig.path.peer, buffers), seed=9)
        batch = scattered(9, [8192], [8192], pieces=10)
        pair.move(op, rig.path, batch)
        rig.expect(op, batch)

    def test_closed_path_lets_its_attempts_finish(self, pair: Pair, op: Op) -> None:
        """``Path.close`` is idempotent and leaves attempts in flight alone."""
        rig = self.rig(pair, [LARGE])
        batch = whole(LARGE, pieces=64)
        attempts = pair.post_all(op, rig.path, batch)
        rig.path.close()
        rig.path.close()
        pair.done(attempts, "attempts of a closed path")
        rig.expect(op, batch)
        with pytest.raises(StaleError):
            pair.near.transport.post(op, rig.path, batch.slice(0, 1))
