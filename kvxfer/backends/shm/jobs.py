"""One attempt as work for copy threads or ``post``: in chunks, checked, copied, settled once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.backends.shm import messages
from kvxfer.backends.shm.copying import join
from kvxfer.backends.shm.vmread import ReadFailed, read_pieces
from kvxfer.core.attempt import Accepted
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import EngineError, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.backends.shm.copiers import CopyPieces
    from kvxfer.backends.shm.messages import Message
    from kvxfer.backends.shm.peer import RemoteRegion, ShmPath, ShmPeer
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.batch import Int64Array

__all__ = ["CHUNK_BYTES", "CHUNK_PIECES", "ChunkTask", "CopyJob", "ProbeTask", "probe"]

CHUNK_BYTES = 16 << 20
"""Bytes copied at most before another peer gets its turn, and before a stop is noticed: a few
milliseconds."""
CHUNK_BYTES_MIN = 4 << 20
"""Until a thread has woken up, this one has copied so much by itself. With chunks of 1 MiB, 4 MiB
took twice as long (0.9 and 0.5 ms, benchmarks/shm_engines.py)."""
CHUNK_PIECES = 4096


class CopyJob:
    """The copies of one attempt. Settles it when the last chunk has ended, on that thread.

    Cheap to make, since ``post`` does.

    ``settled`` is called once, afterwards; ``lost`` whenever the peer's process is found ended.
    """

    def __init__(
        self,
        attempt: Attempt,
        path: ShmPath,
        peer: ShmPeer,
        used: Sequence[RemoteRegion],
        *,
        workers: int,
        copy_pieces: CopyPieces,
        settled: Callable[[CopyJob], None],
        lost: Callable[[ShmPeer], None],
    ) -> None:
        self.attempt = attempt
        self.path = path
        self.peer = peer
        self.pieces = len(attempt.batch)
        self._used = used
        self._copy_pieces = copy_pieces
        self._settled = settled
        self._lost = lost
        self._lock = threading.Lock()
        self._error: EngineError | None = None
        self._moved = False
        self.tasks = self._cut(attempt.batch, workers)
        self._left = len(self.tasks)

    def stop(self, error: EngineError) -> None:
        """Have what was not copied yet left out. The first reason wins."""
        with self._lock:
            if self._error is None:
                self._error = error

    def verdict(self) -> Message | None:
        """Why copying for this attempt has no meaning any more; None if it has."""
        if self.peer.cut is not None:
            return self.peer.cut
        for region in self._used:
            if region.gone:
                return messages.REGION_GONE
        if self.peer.watch is not None and not self.peer.watch.alive():
            self._lost(self.peer)
            return messages.PEER_GONE
        return None

    def verdict_in_place(self) -> Message | None:
        """As ``verdict``, and whether the pid still names the process that was meant."""
        watch = self.peer.watch
        if watch is None:
            return messages.OTHER_NAMESPACE
        if watch.alive() and not watch.same_process():
            return messages.PID_REUSED
        return self.verdict()

    # ---- called by its tasks ---------------------------------------------------------------

    def wanted(self) -> bool:
        """Whether a chunk should be copied at all."""
        if self.attempt.terminal:  # its owner gave up: it only has to drain
            self.stop(messages.STOPPED.engine())
        elif self._error is None and (wrong := self.verdict()) is not None:
            self.stop(self._describe(wrong))
        return self._error is None

    def copy(self, batch: Batch, in_place: bool, scratch: Any) -> None:
        """Copy one chunk and check that it meant anything."""
        near, far, size = _addresses(batch, self.path)
        reading = self.attempt.op is Op.READ
        target, source = (near, far) if reading else (far, near)
        self._moved = True
        if in_place:
            self._read_in_place(target, source, size)
            return
        self._copy_mapped(target, source, size, scratch)
        wrong = self.verdict()
        # What a dead process left in its memory file stays as it was: a READ of it counts.  A
        # WRITE does not: nobody will ever look at it.
        if wrong is not None and not (reading and wrong is messages.PEER_GONE and self._died()):
            self.stop(self._describe(wrong))

    def _copy_mapped(
        self, target: Int64Array, source: Int64Array, size: Int64Array, scratch: Any
    ) -> None:
        self._copy_pieces(target, source, size, scratch)

    def _died(self) -> bool:
        watch = self.peer.watch
        return watch is not None and not watch.alive()

    def _describe(self, wrong: Message) -> EngineError:
        return wrong.engine(f"process {self.peer.address.pid}")

    def _read_in_place(self, target: Int64Array, source: Int64Array, size: Int64Array) -> None:
        try:
            read_pieces(
                self.peer.address.pid,
                *join(target, source, size),
                check=self.verdict_in_place,
            )
        except ReadFailed as failed:
            self.stop(failed.error)

    def dropped(self) -> None:
        """One chunk will not be copied: the peer was cut, or our side stops."""
        cut = self.peer.cut
        self.stop(messages.STOPPED.engine() if cut is None else self._describe(cut))
        self.chunk_ended()

    def chunk_ended(self) -> None:
        """One chunk less; the last one settles the attempt."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
            error = self._error
        if error is None:
            self.attempt.complete(by="copied")
        else:
            self.attempt.fail(
                error,
                accepted=Accepted.UNKNOWN if self._moved else Accepted.NONE,
                drained_by="its copies have ended",
            )
        self.peer.end(self)
        self._settled(self)

    # ---- inside ----------------------------------------------------------------------------

    def _cut(self, batch: Batch, workers: int) -> list[ChunkTask]:
        whole = self.path.one_place
        if whole is not None and self.pieces <= CHUNK_PIECES and batch.nbytes <= CHUNK_BYTES_MIN:
            return [ChunkTask(self, batch, whole)]
        # Two chunks per thread let all of them end at about the same time.
        share = batch.nbytes // (2 * workers)
        max_nbytes = min(max(share, CHUNK_BYTES_MIN), CHUNK_BYTES)
        return [
            ChunkTask(self, part, in_place)
            for placed, in_place in self._by_place(batch)
            for part in placed.cut(max_pieces=CHUNK_PIECES, max_nbytes=max_nbytes)
        ]

    def _by_place(self, batch: Batch) -> list[tuple[Batch, bool]]:
        if self.path.one_place is not None:
            return [(batch, self.path.one_place)]
        used = batch.used_pairs
        parts = [
            (batch.of_pairs([p for p in used if bool(self.path.in_place[p]) is place]), place)
            for place in (True, False)
        ]
        return [(part, place) for part, place in parts if len(part)]


def _addresses(batch: Batch, path: ShmPath) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Where the pieces begin, here and there, and their sizes."""
    members, shared = batch.members, batch.shared
    if members is None or shared is None:
        reach = batch.reach
        if reach is not None:  # one pair, so one base
            here, there = path.bases[reach[0]]
            return batch.local + here, batch.remote + there, batch.size
        pair = batch.pair
        return path.near[pair] + batch.local, path.far[pair] + batch.remote, batch.size
    near = path.near[members.pair] + members.local_base
    far = path.far[members.pair] + members.remote_base
    size = shared.size
    if len(members) == 1:
        return near + shared.local, far + shared.remote, size
    return (
        np.add.outer(near, shared.local).reshape(-1),
        np.add.outer(far, shared.remote).reshape(-1),
        np.tile(size, len(members)),
    )


class ChunkTask:
    """A chunk of a job."""

    __slots__ = ("_batch", "_job", "in_place", "nbytes", "pieces")

    def __init__(self, job: CopyJob, batch: Batch, in_place: bool) -> None:
        self._job = job
        self._batch = batch
        self.in_place = in_place
        self.nbytes = batch.nbytes
        self.pieces = len(batch)

    def run(self, scratch: Any) -> None:
        job = self._job
        try:
            if job.wanted():
                job.copy(self._batch, self.in_place, scratch)
        except BaseException as error:  # a bug of ours ends the attempt, never hides it
            job.stop(EngineError.of(messages.BACKEND, error))
            if not isinstance(error, Exception):  # Ctrl-C, on a thread that posts
                raise
        finally:
            job.chunk_ended()

    def drop(self) -> None:
        self._job.dropped()


class ProbeTask:
    """Tries, on a copy thread, whether memory of the peer can be read in place."""

    def __init__(
        self,
        peer: ShmPeer,
        regions: Sequence[RemoteRegion],
        answer: Callable[[EngineError | None], None],
    ) -> None:
        self._peer = peer
        self._regions = regions
        self._answer = answer

    def run(self, scratch: Any) -> None:
        self._answer(probe(self._peer, self._regions, scratch))

    def drop(self) -> None:
        cut = self._peer.cut or messages.STOPPED
        self._answer(cut.engine())


def probe(peer: ShmPeer, regions: Sequence[RemoteRegion], scratch: Any) -> EngineError | None:
    """Read the first and last byte of each region."""
    source = np.array(
        [a for r in regions for a in (r.address, r.address + r.nbytes - 1)], dtype=np.int64
    )
    target = np.full(len(source), scratch.ctypes.data, dtype=np.int64)
    watch = peer.watch

    def check() -> Message | None:
        if peer.cut is not None:
            return peer.cut
        if watch is None:
            return messages.OTHER_NAMESPACE
        if not watch.alive():
            return messages.PEER_GONE
        return None if watch.same_process() else messages.PID_REUSED

    try:
        read_pieces(
            peer.address.pid, target, source, np.ones(len(source), dtype=np.int64), check=check
        )
    except ReadFailed as failed:
        return failed.error
    return None
