"""The MoRI-IO engine as a transport."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, ClassVar

from kvxfer.backends._background import Gate
from kvxfer.backends.moriio import address
from kvxfer.backends.moriio.binding import BACKEND, Engine, Memory
from kvxfer.backends.moriio.calls import SendQueue, by_pair
from kvxfer.backends.moriio.config import MoriioConfig, effective
from kvxfer.backends.moriio.peers import (
    MoriioPath,
    MoriioPeer,
    checked_memory,
    checked_remote,
    engine_key,
)
from kvxfer.backends.moriio.posting import Lane, Poster, check_alive
from kvxfer.core.capabilities import Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import Op
from kvxfer.errors import (
    ClosedError,
    HandshakeError,
    InvalidInputError,
    StaleError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.backends.moriio.binding import Remote
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.memory import Span

__all__ = ["MoriioTransport"]

ENGINE_CLOSED = "engine closed"
NO_PEER_FENCE = (
    "MoRI-IO has no fence per peer: it cannot end one peer's queue pairs. Closing the transport "
    "ends them all"
)

_QueueKey = tuple[str, tuple[int, int, int], tuple[int, int, int]]

_abandoned: list[object] = []
"""What threads that never came back may still touch: kept for the life of the process."""


class MoriioTransport(Transport):
    """One MoRI-IO engine with its RDMA backend.

    The engine listens on an OS-chosen port of ``config.host`` from construction on, and its own
    threads keep about one core busy until ``close``.  ``connect`` and ``prepare`` work on a thread
    per peer; ``post`` may wait inside the engine; ``progress`` never waits.  The remote side need
    not connect to us for us to READ from it or WRITE to it.

    An attempt that spans several pairs makes one engine call per pair.  If a later call fails after
    an earlier one was posted, the attempt is FAILED with ``accepted=UNKNOWN``, and drained once the
    posted calls are over.

    A queue pair that has failed is dead for its two engines: posts and paths to that peer are
    refused until either side comes back under a new incarnation.

    Raises:
        ConfigError: a setting, or an environment variable that overrides one.
        MissingDependencyError: the wheel is not installed or does not load.
        TransportError: no RDMA device with an active port, or the engine refuses its settings.
    """

    name: ClassVar[str] = BACKEND

    def __init__(
        self, config: MoriioConfig | None = None, *, incarnation: str | None = None
    ) -> None:
        super().__init__(incarnation=incarnation)
        self.config = effective(config or MoriioConfig(), os.environ)
        host = address.local_ipv4(self.config.host)
        self._engine = Engine(engine_key(self.incarnation, generation=1), host, self.config)
        self._gate = Gate(self.name)
        self._poster = Poster(
            self._gate,
            own_admission=self.config.own_admission,
            report=self._report,
            root_cause=self._root_cause,
        )
        self._region_ids = itertools.count()
        self._peers: set[MoriioPeer] = set()
        self._roster = threading.Lock()  # keeps add_remote and remove_remote of one key in order
        self._queues: dict[_QueueKey, SendQueue] = {}
        self._root_causes: dict[str, str] = {}
        self._capabilities = Capabilities(
            ops=frozenset((op, a, b) for op in Op for a in MemoryKind for b in MemoryKind),
            # A READ is visible; a WRITE is acknowledged by the peer's NIC, and this is one value.
            visibility=Visibility.ACKED,
            read_visibility=Visibility.VISIBLE,
            fence=FenceScope.ENGINE,
            max_pieces=self.config.max_send_wr,
            max_nbytes=self.config.max_post_nbytes,
            credits=self.config.max_send_wr,
            # Not of one piece in a single-pair path, but of several pairs the later may be refused.
            atomic_refusal=False,
            may_block_in_post=True,
            data_path_auth=DataPathAuth.NONE,
            ip_versions=frozenset({4}),
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def local_info(self) -> PeerInfo:
        return PeerInfo(
            transport=self.name, incarnation=self.incarnation, data=self._engine.descriptor
        )

    # ---- memory ----------------------------------------------------------------------------

    def _register(self, span: Span) -> Region:
        with self._gate:
            memory = self._engine.register(span)
        return Region(
            span=span,
            descriptor=Descriptor(
                transport=self.name,
                incarnation=self.incarnation,
                region_id=next(self._region_ids),
                nbytes=span.nbytes,
                kind=span.kind,
                device=span.device,
                data=memory.pack(),
            ),
            handle=memory,
        )

    def _deregister(self, region: Region) -> None:
        with self._gate:
            self._engine.deregister(_memory_of(region))

    # ---- peers and paths -------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        try:
            remote = checked_remote(info)
        except HandshakeError as error:
            return Ready(error=error)
        peer = MoriioPeer(self, info, remote)
        self._peers.add(peer)

        def connect() -> Peer:
            try:
                self._reach(peer)
            except BaseException:
                self._peers.discard(peer)
                peer.thread.stop()
                raise
            return peer

        return peer.thread.submit(connect)

    def _reach(self, peer: MoriioPeer) -> None:
        try:
            peer.address = address.resolve_ipv4(peer.remote.host)
        except InvalidInputError as error:
            raise HandshakeError(
                f"the peer advertises a host this engine cannot dial: {error.message}",
                next_step=error.next_step,
            ) from error
        address.probe(peer.address, peer.remote.port, self.config.connect_timeout_s)
        with self._gate, self._roster:
            self._engine.add_remote(peer.remote)

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        assert isinstance(peer, MoriioPeer)

        def prepare() -> Path:
            address.probe(peer.address, peer.remote.port, self.config.connect_timeout_s)
            path = MoriioPath(peer, pairs, [self._lane(peer, r, d) for r, d in pairs])
            if peer.closed:  # in the meantime, and without seeing this path
                path.close()
                raise ClosedError(f"{peer!r} was closed")
            return path

        return peer.thread.submit(prepare)

    def _lane(self, peer: MoriioPeer, region: Region, descriptor: Descriptor) -> Lane:
        self._require_registered(region)
        local, remote = _memory_of(region), checked_memory(peer.remote, descriptor)
        with self._gate:
            session = self._engine.open_session(local, remote)
        queue = self._queues.setdefault(
            (peer.remote.key, local.place, remote.place),
            SendQueue(self.config.max_send_wr, ordered=self.config.qp_per_transfer == 1),
        )
        check_alive(queue)
        return Lane(session, queue)

    def _close_path(self, path: Path) -> None:
        assert isinstance(path, MoriioPath)
        path.lanes = ()

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        assert isinstance(peer, MoriioPeer)
        self._peers.discard(peer)
        peer.thread.stop(lambda: self._forget(peer.remote))
        return Ready(Fence(done=False, reason=NO_PEER_FENCE))

    def _forget(self, remote: Remote) -> None:
        with self._gate, self._roster:
            if any(p.remote.key == remote.key for p in tuple(self._peers)):
                return
            self._engine.remove_remote(remote)
        self._root_causes.pop(remote.key, None)
        for key in tuple(self._queues):
            if key[0] == remote.key:
                self._queues.pop(key, None)

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        return Ready(Fence(done=False, reason=NO_PEER_FENCE))

    # ---- attempts --------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        path = attempt.path
        assert isinstance(path, MoriioPath)
        lanes = path.lanes
        if not lanes:
            raise StaleError(f"the path to {path.peer!r} is closed", next_step="prepare a new one")
        self._poster.post(attempt, lanes, by_pair(attempt.batch, len(path.pairs)))

    def _advance(self, budget: int) -> None:
        self._poster.advance(budget)

    def _root_cause(self, attempt: Attempt) -> str:
        """Why the peer of ``attempt`` cannot be reached, as far as the engine has told."""
        known = {peer.remote.key for peer in tuple(self._peers)}
        for failure in self._engine.pop_failures():
            if failure.engine_key in known:
                self._root_causes[failure.engine_key] = failure.detail
        peer = attempt.path.peer
        assert isinstance(peer, MoriioPeer)
        return self._root_causes.get(peer.remote.key, "").removeprefix("completion status ")

    # ---- the end ---------------------------------------------------------------------------

    def _close(self, deadline: float) -> None:
        peers = tuple(self._peers)
        for peer in peers:
            peer.thread.stop()
        empty = self._gate.close(deadline)
        unfinished = self._poster.finish()
        for peer in peers:
            for path in tuple(peer.paths):
                path.close()
        if not empty:
            # Ending the engine under a thread that is inside it would end the process.
            _abandoned.append((self._engine, unfinished))
            return
        self._engine.shut()
        for path in tuple(self._paths):
            for attempt in tuple(path.undrained):
                # Without queue pairs nothing lands here. What a WRITE has sent may land there.
                if attempt.op is Op.READ and attempt.mark_drained(ENGINE_CLOSED):
                    self._report(attempt)
        unfinished.clear()


def _memory_of(region: Region) -> Memory:
    memory = region.handle
    assert isinstance(memory, Memory)
    return memory
