"""A Mooncake engine as a transport."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kvxfer.backends._background import Gate
from kvxfer.backends._machine import has_rdma_device
from kvxfer.backends.mooncake import messages
from kvxfer.backends.mooncake.binding import Engine
from kvxfer.backends.mooncake.config import MooncakeConfig, Protocol
from kvxfer.backends.mooncake.connecting import Connector
from kvxfer.backends.mooncake.environment import queue_limit, this_process
from kvxfer.backends.mooncake.flights import Flights
from kvxfer.backends.mooncake.handshake import Description
from kvxfer.backends.mooncake.identity import Tokens
from kvxfer.backends.mooncake.registry import Registry, span_words
from kvxfer.backends.mooncake.remotes import MooncakePath, MooncakePeer, Remote
from kvxfer.backends.mooncake.wire import VERSION, EngineAddress, pack_region, unpack_region
from kvxfer.core.attempt import Attempt
from kvxfer.core.capabilities import Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import Op
from kvxfer.errors import HandshakeError, InvalidInputError, StaleError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.hostcheck import HostCheck
    from kvxfer.core.memory import Span

__all__ = ["MooncakeTransport"]

ENGINE_CLOSED = "engine closed"
NO_PEER_FENCE = (
    "Mooncake has no fence per peer: what a peer has begun to write goes on. Closing the transport "
    "ends what lands here"
)

SLOTS = 4096
"""Posts that can be under way at once: each reads the peer's identity into a place of its own."""

_abandoned: list[object] = []
"""What threads that never came back may still touch: kept for the life of the process."""


class MooncakeTransport(Transport):
    """One Mooncake engine, over tcp or RDMA.

    A post submits its pieces one by one, in its caller's thread, and ``progress`` asks for each:
    neither waits in the engine, but for the lock that it holds while it dials a new peer.
    ``connect`` works on a thread per peer: it first sees, with a time-out of ours, that the peer's
    engine answers, then reads the identity of the incarnation through the engine.  Why a piece
    failed (the engine says -1, whatever it was) is found out on that thread as well.

    ``abandoned`` counts the engines that ``close`` left to a thread that was stuck in them.

    Raises:
        ConfigError: a variable of the environment takes away what the capabilities promise, or the
            engine took another protocol.
        MissingDependencyError: Mooncake does not load.
        TransportError: it does not start.
    """

    name: ClassVar[str] = messages.BACKEND
    config_type: ClassVar[type[MooncakeConfig]] = MooncakeConfig

    @classmethod
    def host_checks(cls) -> Sequence[HostCheck]:
        from kvxfer.backends.mooncake.hostchecks import CHECKS

        return CHECKS

    def __init__(
        self, config: MooncakeConfig | None = None, *, incarnation: str | None = None
    ) -> None:
        super().__init__(incarnation=incarnation)
        self.config = config or MooncakeConfig()
        self.abandoned = 0
        this_process.prepare(self.config, os.environ, rdma=has_rdma_device())
        self._queue = queue_limit(os.environ)
        self._engine = Engine(self.config)
        self._registry = Registry(self._engine)
        self._tokens = Tokens(self.incarnation, SLOTS)
        self._registry.add(self._tokens.address, self._tokens.nbytes)
        self._gate = Gate(self.name)
        self._region_ids = itertools.count()
        tcp = self.config.protocol is Protocol.TCP
        self._flights = Flights(
            self._engine,
            self._tokens,
            queue=self._queue,
            ends_prove=tcp,  # of RDMA we have not seen it
            patience=self.config.connect_timeout,
            report=self._report,
            over=self._forget_if_unused,
        )
        self._connector = Connector(self.config, self._flights, self._gate, lambda: self.closed)
        self._remotes: dict[str, Remote] = {}
        """By incarnation; guarded by the lock of the flights."""
        # Several posts, with the identity that each reads, fit into the engine's queue.
        room = max(self._queue * 3 // 4, 1)
        kinds = tuple(MemoryKind) if self._engine.reaches_devices else (MemoryKind.DRAM,)
        self._capabilities = Capabilities(
            ops=frozenset((op, a, b) for op in Op for a in kinds for b in kinds),
            # tcp: the peer's engine confirms a piece once it is in memory. RDMA: its NIC does.
            visibility=Visibility.VISIBLE if tcp else Visibility.ACKED,
            read_visibility=Visibility.VISIBLE,
            fence=FenceScope.ENGINE,
            max_pieces=min(self.config.max_pieces, max(self._queue // 4, 1)),
            credits=room,
            may_block_in_post=True,
            data_path_auth=DataPathAuth.NONE,
            ip_versions=frozenset({self.config.address.version or 4}),
        )
        self._where = EngineAddress(
            version=VERSION,
            host=self._engine.address.host,
            port=self._engine.address.port or 0,
            protocol=self.config.protocol.value,
            token=self._tokens.address,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def description(self) -> Description:
        """What the engine said of itself when it started: protocol, data port."""
        return self._engine.description

    def local_info(self) -> PeerInfo:
        return PeerInfo(
            transport=self.name, incarnation=self.incarnation, data=self._where.encode()
        )

    # ---- memory ----------------------------------------------------------------------------

    def _register(self, span: Span) -> Region:
        if span.kind is not MemoryKind.DRAM and not self._engine.reaches_devices:
            raise InvalidInputError(
                f"this build of Mooncake cannot register {span_words(span)}",
                next_step="install the build for your device",
            )
        with self._gate:
            known = self._registry.add(span.address, span.nbytes)
        return Region(
            span=span,
            descriptor=Descriptor(
                transport=self.name,
                incarnation=self.incarnation,
                region_id=next(self._region_ids),
                nbytes=span.nbytes,
                kind=span.kind,
                device=span.device,
                data=pack_region(span.address),
            ),
            handle=known,
        )

    def _deregister(self, region: Region) -> None:
        with self._gate:
            self._registry.remove(region.handle)

    # ---- peers and paths -------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        try:
            where = EngineAddress.decode(info.data)
            if where.protocol != self.config.protocol.value:
                raise HandshakeError(
                    f"the peer's engine uses {where.protocol}, ours {self.config.protocol.value}",
                    next_step="configure one protocol on both sides",
                )
        except WireError as error:
            return Ready(error=HandshakeError(f"the peer's address: {error.message}"))
        except HandshakeError as error:
            return Ready(error=error)
        with self._flights.lock:
            remote = self._remotes.get(info.incarnation)
            if remote is None or remote.name != str(where.address):
                remote = Remote(info.incarnation, where)
                # A wrong address under the name of a good peer is tried, and not remembered.
                self._remotes.setdefault(info.incarnation, remote)
            remote.connecting += 1
        return remote.thread.submit(partial(self._reach, remote, info))

    def _reach(self, remote: Remote, info: PeerInfo) -> Peer:
        """On the remote's thread."""
        peer: MooncakePeer | None = None
        try:
            self._connector.reach(remote)
            remote.lost = None
            peer = MooncakePeer(self, info, remote)
        finally:
            with self._flights.lock:
                remote.connecting -= 1
                if peer is not None:
                    # The first one to be found alive stays, whoever claimed the name before.
                    self._remotes[info.incarnation] = remote
                    remote.users.add(peer)
                self._forget_if_unused(remote)
        return peer

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        assert isinstance(peer, MooncakePeer)
        bases = []
        for _, descriptor in pairs:
            try:
                bases.append(unpack_region(descriptor.data))
            except WireError as error:
                return Ready(
                    error=HandshakeError(
                        f"descriptor {descriptor.region_id}: {error.message}",
                        next_step="fetch the peer's current descriptors",
                    )
                )
        return Ready(MooncakePath(peer, pairs, bases))

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        assert isinstance(peer, MooncakePeer)
        with self._flights.lock:
            peer.remote.users.discard(peer)
            self._forget_if_unused(peer.remote)
        return self._fence(peer)

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        left = any(not a.drained for path in self._paths_of(peer) for a in tuple(path.undrained))
        return Ready(Fence(done=False, reason=NO_PEER_FENCE, ours_done=not left))

    def _forget_if_unused(self, remote: Remote) -> None:
        """Called with the lock held."""
        if remote.unused:
            if self._remotes.get(remote.incarnation) is remote:
                del self._remotes[remote.incarnation]
            remote.thread.stop()

    # ---- posting ---------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        path = attempt.path
        assert isinstance(path, MooncakePath)
        with self._gate:
            path.remote.check_reachable()
            with self._flights.lock:
                if path.closed:
                    raise StaleError(
                        f"the path to {path.peer!r} is closed", next_step="prepare a new one"
                    )
                flight = self._flights.reserve(
                    path.remote, attempt, len(attempt.batch), identity=self.config.verify_peer
                )
            self._flights.submit(flight, path, attempt)

    def _advance(self, budget: int) -> None:
        self._flights.advance(budget)

    # ---- the end ---------------------------------------------------------------------------

    def _close(self, deadline: float) -> None:
        with self._flights.lock:
            remotes = {
                *self._remotes.values(),
                *(flight.remote for flight in self._flights.under_way),
            }
        for remote in remotes:
            remote.thread.stop()
        if not self._gate.close(deadline) or self._progressing:
            # Ending the engine under a thread that is inside it would end the process.
            self.abandoned += 1
            _abandoned.append((self._engine, self._tokens, self._flights))
            return
        self._flights.advance(len(self._flights.under_way))
        with self._flights.lock:
            self._flights.under_way.clear()
        self._engine.shut()
        self._engine_ended = True
        for path in tuple(self._paths):
            for attempt in tuple(path.undrained):
                # Without an engine nothing lands here. What a WRITE has sent may land there.
                if attempt.op is Op.READ and attempt.mark_drained(ENGINE_CLOSED):
                    self._report(attempt)
