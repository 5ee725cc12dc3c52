"""The shm transport: peers on the same machine, copies by our own threads."""

from __future__ import annotations

import errno
import functools
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.backends._local import check_dram
from kvxfer.backends.shm import allocation, messages
from kvxfer.backends.shm.client import Client, cut_error
from kvxfer.backends.shm.config import ShmConfig
from kvxfer.backends.shm.copiers import Copier, copier
from kvxfer.backends.shm.exports import ExportTable
from kvxfer.backends.shm.fencing import Fencing
from kvxfer.backends.shm.inline import InlineCopies
from kvxfer.backends.shm.jobs import CopyJob, ProbeTask
from kvxfer.backends.shm.loop import HandoverLoop
from kvxfer.backends.shm.memfd import PeerAccess
from kvxfer.backends.shm.peer import RemoteRegion, ShmPath, ShmPeer
from kvxfer.backends.shm.pool import CopyPool
from kvxfer.backends.shm.preparing import check_pair, why_not
from kvxfer.backends.shm.procs import ProcessId, admit_readers
from kvxfer.backends.shm.protocol import (
    PROTOCOL,
    Address,
    decode_address,
    encode_address,
)
from kvxfer.backends.shm.server import Server
from kvxfer.core.capabilities import (
    Cancel,
    Capabilities,
    DataPathAuth,
    FenceScope,
    Visibility,
)
from kvxfer.core.memory import Descriptor, MemoryKind, Region, Span
from kvxfer.core.pollable import Deferred, Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    BackpressureError,
    ConfigError,
    HandshakeError,
    InvalidInputError,
    KvxferError,
    TransportError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.backends.shm.messages import Message
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.hostcheck import HostCheck

__all__ = ["ShmTransport"]

MAX_PIECES = 65536
"""Per post: bounds the time that ``post`` spends cutting a batch (about a millisecond)."""
_EXPECTING_AN_ANSWER = (messages.FENCED, messages.PEER_CLOSED)
_REVOKE_ON_CLOSE = 1.0
"""Seconds that ``close`` waits at most for peers to unmap our memory. A healthy one needs 1 ms."""


class ShmTransport(Transport):
    """Moves bytes between processes of one machine, through shared memory.

    Memory made by ``allocate``, ``allocate_bytes`` or ``share_storage`` lies in sealed memory
    files: peers map it once, then READ and WRITE are plain copies.  Memory that lies elsewhere is
    READ where it lies, with process_vm_readv; a WRITE to it is refused by ``post``.

    DONE means that the copy is made.  A peer whose process ended fails what was not copied yet; a
    READ of its memory file that was complete counts, since those bytes are intact.

    ``fence(peer)`` ends every attempt towards the peer and takes our memory back from it: done
    once the peer confirmed that it unmapped what it could write, or its process has ended.  The
    peer is let in again once we ``connect`` to it again.

    Raises:
        ConfigError: the handover socket cannot be bound, /proc is not mounted, or the compiled
            copier is asked for and not there.
    """

    name: ClassVar[str] = messages.BACKEND
    config_type: ClassVar[type[ShmConfig]] = ShmConfig

    @classmethod
    def host_checks(cls) -> Sequence[HostCheck]:
        from kvxfer.backends.shm.hostchecks import CHECKS

        return CHECKS

    def __init__(self, config: ShmConfig | None = None, *, incarnation: str | None = None) -> None:
        super().__init__(incarnation=incarnation)
        self.config = config or ShmConfig()
        self._copier = copier(self.config.copier)
        try:
            self._process = ProcessId.current()
        except OSError as error:
            raise ConfigError(f"shm needs /proc mounted: {error}") from error
        if self.config.admit_readers:
            try:
                admit_readers()
            except OSError as error:
                raise ConfigError(f"admit_readers=True cannot be had: {error}") from error
        self._exports = ExportTable()
        self._clients: dict[ShmPeer, Client] = {}  # loop thread only
        self._loop = HandoverLoop("kvxfer-shm-handover")
        self._pool = CopyPool(
            workers=self.config.workers,
            workers_max=self.config.workers_max,
            stuck_after=self.config.stuck_after,
            name="kvxfer-shm-copy",
        )
        self._inline = InlineCopies(self._pool, self.config.inline_nbytes)
        try:
            self._server = Server(
                self._loop, self.config, incarnation=self.incarnation, find=self._exports.find
            )
        except BaseException:
            self._loop.discard()
            raise
        self._capabilities = Capabilities(
            ops=frozenset((op, MemoryKind.DRAM, MemoryKind.DRAM) for op in Op),
            visibility=Visibility.VISIBLE,
            cancel=Cancel.BEST_EFFORT,
            fence=FenceScope.PEER,
            max_pieces=min(MAX_PIECES, self.config.queue_pieces),
            credits=self.config.queue_pieces,
            data_path_auth=DataPathAuth.SECRET,
            ip_versions=frozenset(),
        )
        self._info = PeerInfo(
            transport=self.name,
            incarnation=self.incarnation,
            data=encode_address(
                Address(
                    lowest=PROTOCOL,
                    highest=PROTOCOL,
                    boot_id=self._process.boot_id,
                    namespaces=self._process.namespaces,
                    pid=self._process.pid,
                    start_time=self._process.start_time,
                    socket=self._server.socket,
                    token=self._server.token,
                )
            ),
        )
        self._loop.start()
        self._loop.call(self._server.start)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def copier(self) -> Copier:
        """The code that copies: compiled, or Python and numpy, and why."""
        return self._copier

    @property
    def counters(self) -> dict[str, int]:
        """Refused and dropped connections by reason, replaced threads, unexpected errors."""
        counters = dict(self._server.counters)
        counters["threads_replaced"] = self._pool.replaced
        counters["handover_errors"] = self._loop.failures
        return counters

    def local_info(self) -> PeerInfo:
        return self._info

    # ---- memory ----------------------------------------------------------------------------

    def allocate(
        self,
        shape: int | Sequence[int],
        dtype: Any,
        *,
        peers: PeerAccess = PeerAccess.READ_WRITE,
    ) -> Any:
        """A zeroed array or tensor that peers can map: see ``kvxfer.backends.shm.allocate``."""
        return allocation.allocate(shape, dtype, peers=peers)

    def allocate_bytes(self, nbytes: int, *, peers: PeerAccess = PeerAccess.READ_WRITE) -> Span:
        """A span that peers can map: see ``kvxfer.backends.shm.allocate_bytes``."""
        return allocation.allocate_bytes(nbytes, peers=peers)

    def share_storage(self, tensor: Any, *, peers: PeerAccess = PeerAccess.READ_WRITE) -> Span:
        """Move a tensor's storage: see ``kvxfer.backends.shm.share_storage``."""
        return allocation.share_storage(tensor, peers=peers)

    def _register(self, span: Span) -> Region:
        check_dram(span, self.name)
        export = self._exports.add(span)
        return Region(
            span=span,
            descriptor=Descriptor(
                transport=self.name,
                incarnation=self.incarnation,
                region_id=export.region_id,
                nbytes=span.nbytes,
            ),
        )

    def _deregister(self, region: Region) -> None:
        region_id = region.descriptor.region_id
        if self._exports.remove(region_id):
            self._loop.call(lambda: self._server.announce_gone(region_id))

    # ---- peers and paths -------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        try:
            address = decode_address(info.data)
        except WireError as error:
            return Ready(error=messages.BROKEN_PROTOCOL.error(HandshakeError, str(error)))
        answer: Deferred[Peer] = Deferred()
        peer = ShmPeer(self, info, address)
        client = Client(
            self._loop,
            self.config,
            peer,
            process=self._process,
            cut=lambda why: self._retire(peer, why),
            unmap=lambda mapping: self._pool.when_idle(peer, mapping.close),
        )

        def connected(error: KvxferError | None) -> None:
            if error is not None:
                self._clients.pop(peer, None)
                answer.fail(error)
            else:
                answer.resolve(peer)
            self._wake()

        def begin() -> None:
            self._clients[peer] = client
            self._server.admit(info.incarnation)
            client.connect(self.incarnation, connected)

        self._loop.call(begin)
        return answer

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        shm = _shm_peer(peer)
        answer: Deferred[Path] = Deferred()

        def granted(error: KvxferError | None) -> None:
            if error is None:
                error = why_not(shm, pairs)
            if error is not None:
                resolve(error)
                return
            regions = {d.region_id: shm.regions[d.region_id] for _, d in pairs}
            remote = [regions[d.region_id] for _, d in pairs]
            in_place = [r for r in regions.values() if r.mapping is None]
            if not in_place:
                resolve(None, remote)
                return

            def probed(problem: EngineError | None) -> None:
                # On a copy thread: a page fault there must not hold up the handover thread.
                refusal = None
                if problem is not None:
                    refusal = HandshakeError(problem.message, engine=problem)
                self._loop.call(lambda: resolve(refusal, remote))

            self._pool.submit(shm, [ProbeTask(shm, in_place, probed)])

        def resolve(error: KvxferError | None, remote: Sequence[RemoteRegion] = ()) -> None:
            if error is None and (peer.closed or shm.cut is not None):
                error = cut_error(shm.cut or messages.STOPPED, shm)
            if error is not None:
                answer.fail(error)
            else:
                answer.resolve(ShmPath(shm, pairs, remote))
            self._wake()

        def begin() -> None:
            client = self._clients.get(shm)
            if client is None:
                resolve(cut_error(shm.cut or messages.STOPPED, shm))
            else:
                client.want({d.region_id for _, d in pairs}, granted)

        self._loop.call(begin)
        return answer

    # ---- copies ----------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        path, peer = _shm_path(attempt.path), _shm_peer(attempt.path.peer)
        if peer.cut is not None:
            raise cut_error(peer.cut, peer)
        pairs = attempt.batch.used_pairs
        for p in pairs:
            check_pair(attempt.op, path.pairs[p][0], path.remote[p])
        job = CopyJob(
            attempt,
            path,
            peer,
            [path.remote[p] for p in pairs],
            workers=self.config.workers,
            copy_pieces=self._copier.copy_pieces,
            settled=self._settled,
            lost=self._lost,
        )
        if not peer.begin(job, self.config.queue_pieces):
            raise messages.QUEUE_FULL.error(
                BackpressureError,
                f"{peer.pieces_in_flight} pieces are in flight, {job.pieces} more exceed "
                f"{self.config.queue_pieces}",
            )
        attempt.handle = job
        self._inline.run(peer, job.tasks)

    def _settled(self, job: CopyJob) -> None:
        job.attempt.handle = None
        self._report(job.attempt)

    def _lost(self, peer: ShmPeer) -> None:
        self._loop.call(lambda: self._retire(peer, messages.PEER_GONE))

    def _advance(self, budget: int) -> None:
        self._pool.relieve()
        self._inline.renew()

    def cancel(self, attempt: Attempt) -> None:
        job = attempt.handle
        if isinstance(job, CopyJob):
            job.stop(messages.STOPPED.engine())

    # ---- the end of peers ------------------------------------------------------------------

    def _retire(
        self, peer: ShmPeer, why: Message, then: Callable[[Client | None], None] | None = None
    ) -> None:
        """Let go of a peer. ``then`` follows on the loop once nothing touches its memory."""
        first = peer.cut is None
        client = self._clients.get(peer)
        if first:
            peer.cut = why
            peer.alive = why is messages.FENCED or why is messages.STOPPED
            if client is not None:
                client.fail_asking(why)
            if not peer.alive:
                self._report_lost(peer)
            self._wake()
        self._pool.drop(peer)
        if not first and then is None:
            return

        def let_go() -> None:
            peer.unmap()
            left = self._clients.pop(peer, None)
            if then is not None:
                then(left)
            elif left is not None:
                left.revoked() if why in _EXPECTING_AN_ANSWER else left.close()

        self._pool.when_idle(peer, lambda: self._loop.call(let_go))

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        shm = _shm_peer(peer)
        answer = Fencing(self._wake)

        def let_go(client: Client | None) -> None:
            if client is not None:
                client.bye()
            answer.own_copies_ended()

        def begin() -> None:
            self._retire(shm, messages.STOPPED, let_go)
            self._begin_fence(shm, answer)

        self._loop.call(begin)
        return answer.pollable

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        shm = _shm_peer(peer)
        answer = Fencing(self._wake)

        def begin() -> None:
            for job in tuple(shm.jobs):
                job.stop(messages.STOPPED.engine())
            self._pool.drop(shm)
            self._pool.when_idle(shm, lambda: self._loop.call(answer.own_copies_ended))
            self._begin_fence(shm, answer)

        self._loop.call(begin)
        return answer.pollable

    def proves_end(self, error: KvxferError) -> bool:
        """A process that has ended copies nothing: no other one writes for it."""
        engine = error.engine if isinstance(error, TransportError) else None
        return engine is not None and (
            engine.message.startswith(messages.PID_REUSED.text)
            or (engine.message.startswith(messages.PEER_GONE.text) and engine.code == errno.ESRCH)
        )

    def _begin_fence(self, peer: ShmPeer, answer: Fencing) -> None:
        self._server.revoke(peer.info.incarnation, answer.peer_answered)
        self._loop.later(self.config.fence_timeout, lambda: answer.too_late(len(peer.jobs)))

    def _close(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        revoked = threading.Event()
        self._loop.call(lambda: self._server.dismiss(lambda _: revoked.set()))
        stuck = self._pool.stop(max(0.0, end - time.monotonic()))
        revoked.wait(max(0.0, min(end - time.monotonic(), _REVOKE_ON_CLOSE)))

        def farewell() -> None:
            for peer, client in tuple(self._clients.items()):
                peer.cut = peer.cut or messages.STOPPED
                if stuck and peer.jobs:
                    client.hang_up()
                    self._pool.when_idle(peer, functools.partial(_let_go_late, peer, client))
                else:
                    peer.unmap()
                    client.bye()
            self._server.close()

        self._loop.call(farewell)
        # The thread only ever runs short callbacks; it is late when something holds the GIL.
        self._loop.stop(max(0.1, end - time.monotonic()))
        self._exports.clear()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker()


def _let_go_late(peer: ShmPeer, client: Client) -> None:
    """A copy that was stuck when we closed has returned after all."""
    peer.unmap()
    client.close()


def _shm_peer(peer: Peer) -> ShmPeer:
    if not isinstance(peer, ShmPeer):
        raise InvalidInputError(f"{peer!r} is no shm peer")
    return peer


def _shm_path(path: Path) -> ShmPath:
    if not isinstance(path, ShmPath):
        raise InvalidInputError(f"{path!r} is no shm path")
    return path
