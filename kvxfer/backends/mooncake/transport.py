"""A Mooncake engine as a transport."""

from __future__ import annotations

import itertools
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kvxfer.backends._background import Gate
from kvxfer.backends._machine import has_rdma_device
from kvxfer.backends.mooncake import messages
from kvxfer.backends.mooncake.binding import DONE, TIMED_OUT, UNDER_WAY, Engine
from kvxfer.backends.mooncake.config import MooncakeConfig, Protocol
from kvxfer.backends.mooncake.environment import queue_limit, this_process
from kvxfer.backends.mooncake.handshake import ACKNOWLEDGED, Description, describe
from kvxfer.backends.mooncake.identity import NBYTES, Tokens
from kvxfer.backends.mooncake.registry import Registry, span_words
from kvxfer.backends.mooncake.remotes import (
    Diagnosis,
    Flight,
    MooncakePath,
    MooncakePeer,
    Remote,
    diagnose,
)
from kvxfer.backends.mooncake.wire import VERSION, EngineAddress, pack_region, unpack_region
from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.capabilities import Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import Op
from kvxfer.errors import (
    BackpressureError,
    HandshakeError,
    InvalidInputError,
    PeerLostError,
    StaleError,
    TransportError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.memory import Span

__all__ = ["MooncakeTransport"]

ALL_ENDED = "every piece has ended"
ENGINE_CLOSED = "engine closed"
NO_PEER_FENCE = (
    "Mooncake has no fence per peer: what a peer has begun to write goes on. Closing the transport "
    "ends what lands here"
)

SLOTS = 4096
"""Posts that can be under way at once: each reads the peer's identity into a place of its own."""
MAX_NAMES = 4096
"""Addresses of peers whose data port is remembered, as the engine remembers them for ever."""
_LOOK_S = 0.002
"""Seconds between two looks at the identity that ``connect`` reads, on its own thread."""
_AGAIN_S = 0.25
"""Seconds before ``connect`` reads again: after a lost connection the engine fails the first try,
and for a second it does not dial."""

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
        self._lock = threading.Lock()  # around what follows; never held inside a submit
        self._flights: list[Flight] = []
        self._remotes: dict[str, Remote] = {}
        self._data_ports: dict[str, int] = {}
        self._region_ids = itertools.count()
        tcp = self.config.protocol is Protocol.TCP
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
        with self._lock:
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
            self._look(remote)
            self._identify(remote)
            remote.lost = None
            peer = MooncakePeer(self, info, remote)
        finally:
            with self._lock:
                remote.connecting -= 1
                if peer is not None:
                    # The first one to be found alive stays, whoever claimed the name before.
                    self._remotes[info.incarnation] = remote
                    remote.users.add(peer)
                self._forget_if_unused(remote)
        return peer

    def _look(self, remote: Remote) -> None:
        """See that the peer's engine answers, before ours goes near it."""
        timeout = self.config.connect_timeout
        try:
            found = describe(remote.address, timeout)
        except ConnectionRefusedError as error:
            raise PeerLostError(
                f"nobody listens at {remote.name}",
                next_step="check that the peer process lives",
                engine=messages.PEER_GONE.engine(remote.name, None),
            ) from error
        except TimeoutError as error:
            raise HandshakeError(
                f"the engine at {remote.name} does not answer within {timeout:g} s",
                next_step="check whether the peer process is stopped, and the network",
                engine=messages.PEER_SILENT.engine(remote.name, None),
            ) from error
        except (OSError, WireError) as error:
            raise HandshakeError(
                f"{remote.name} cannot be asked for its engine: {error}",
                next_step="check routes, firewalls and the version of the peer's Mooncake",
                engine=messages.UNREACHABLE.engine(f"{remote.name}: {error}", None),
            ) from error
        self._check(remote, found)
        remote.data_port = found.data_port

    def _check(self, remote: Remote, found: Description) -> None:
        if found.protocol != self.config.protocol.value:
            raise HandshakeError(
                f"the engine at {remote.name} uses {found.protocol}, ours "
                f"{self.config.protocol.value}",
                next_step="configure one protocol on both sides",
            )
        if self.config.protocol is Protocol.TCP and found.tcp_version < ACKNOWLEDGED:
            raise HandshakeError(
                f"the engine at {remote.name} does not confirm what it receives (tcp version "
                f"{found.tcp_version})",
                next_step="bring Mooncake there to the version here",
            )
        if not found.covers(remote.token_address, NBYTES):
            raise _other_life(remote)
        with self._lock:
            known = self._data_ports.get(remote.name, found.data_port)
        if known != found.data_port:
            raise HandshakeError(
                f"the engine at {remote.name} was another one before, with data port {known} "
                f"instead of {found.data_port}: ours keeps that for as long as it lives",
                next_step="reopen this transport, or restart the peer for another port",
            )

    def _identify(self, remote: Remote) -> None:
        """Read the peer's identity through the engine, again after failures, until the time-out."""
        end = time.monotonic() + self.config.connect_timeout
        while True:
            try:
                flight = self._begin_identity(remote)
            except BackpressureError:  # other connections to it keep the engine busy
                if time.monotonic() > end:
                    raise
                time.sleep(_LOOK_S)
                continue
            failed = True
            while flight.pending:
                if time.monotonic() > end or self.closed:
                    with self._lock:  # progress sees it to its end
                        self._flights.append(flight)
                    raise HandshakeError(
                        f"the engine at {remote.name} describes itself, but moves no bytes within "
                        f"{self.config.connect_timeout:g} s",
                        next_step=f"check that its data port {remote.data_port} can be reached",
                        engine=messages.PEER_SILENT.engine(remote.name, None),
                    )
                with self._gate:
                    state = self._engine.state(flight.pending[0])
                if state in (UNDER_WAY, TIMED_OUT):
                    time.sleep(_LOOK_S)
                    continue
                flight.pending.popleft()
                failed = state != DONE
            with self._lock:
                same = flight.slot is not None and self._tokens.holds(flight.slot, remote.token)
                self._release(flight)
            if not failed:
                if not same:
                    raise _other_life(remote)
                return
            if time.monotonic() + _AGAIN_S > end or self.closed:
                raise HandshakeError(
                    f"the engine at {remote.name} describes itself, but its memory cannot be read",
                    next_step=f"check that its data port {remote.data_port} can be reached",
                    engine=messages.BROKEN.engine(remote.name),
                )
            time.sleep(_AGAIN_S)

    def _begin_identity(self, remote: Remote) -> Flight:
        with self._lock:
            flight = self._reserve(remote, None, 0, identity=True)
        with self._gate:
            assert flight.slot is not None
            number = self._engine.submit(
                Op.READ,
                remote.name,
                self._tokens.address_of(flight.slot),
                remote.token_address,
                NBYTES,
            )
        with self._lock:
            if len(self._data_ports) >= MAX_NAMES:
                self._data_ports.pop(next(iter(self._data_ports)))
            self._data_ports[remote.name] = remote.data_port
        if number:
            flight.pending.append(number)
        return flight

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
        with self._lock:
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

    def _reserve(
        self, remote: Remote, attempt: Attempt | None, pieces: int, *, identity: bool
    ) -> Flight:
        """Room in the engine's queue, and a place for the identity. Called with the lock held.

        Raises:
            BackpressureError: there is none.
        """
        wanted = pieces + identity
        slot = None
        # A single post goes through an empty queue, however short that was made.
        if not remote.pieces or remote.pieces + wanted <= self._queue:
            slot = self._tokens.take() if identity else -1
        if slot is None:
            raise BackpressureError(
                f"{remote.pieces} pieces are under way with {remote.name}, {wanted} more do not "
                f"fit into the engine's queue of {self._queue}",
                next_step="post again when some have ended",
                engine=messages.QUEUE_FULL.engine(f"{remote.pieces} of {self._queue}", None),
            )
        remote.pieces += wanted
        remote.flights += 1
        return Flight(
            remote=remote, attempt=attempt, pieces=wanted, slot=slot if identity else None
        )

    def _release(self, flight: Flight) -> None:
        """Nothing of ``flight`` is under way any more. Called with the lock held."""
        flight.remote.pieces -= flight.pieces
        flight.pieces = 0
        if flight.slot is not None:
            self._tokens.give_back(flight.slot)
            flight.slot = None
        flight.remote.flights -= 1

    def _post(self, attempt: Attempt) -> None:
        path = attempt.path
        assert isinstance(path, MooncakePath)
        remote = path.remote
        with self._gate:
            remote.check_reachable()
            with self._lock:
                if path.closed:
                    raise StaleError(
                        f"the path to {path.peer!r} is closed", next_step="prepare a new one"
                    )
                flight = self._reserve(
                    remote, attempt, len(attempt.batch), identity=self.config.verify_peer
                )
            try:
                self._submit(flight, path, attempt)
            finally:
                # What was submitted is seen to its end, also if something broke.
                with self._lock:
                    if flight.pending:
                        self._flights.append(flight)
                    else:
                        self._release(flight)
            if not flight.pending:
                raise TransportError(
                    f"Mooncake did not begin {attempt.batch} with {remote.name}",
                    next_step="connect again",
                    engine=messages.NOT_SUBMITTED.engine(remote.name),
                )

    def _submit(self, flight: Flight, path: MooncakePath, attempt: Attempt) -> None:
        submit, name, pending = self._engine.submit, path.remote.name, flight.pending
        local_base, remote_base = path.local_base, path.remote_base
        for p, local, remote, nbytes in zip(*attempt.batch.lists(), strict=True):
            number = submit(
                attempt.op, name, local_base[p] + local, remote_base[p] + remote, nbytes
            )
            if not number:
                flight.cut = True
                return
            pending.append(number)
        if flight.slot is not None:
            number = submit(
                Op.READ,
                name,
                self._tokens.address_of(flight.slot),
                path.remote.token_address,
                NBYTES,
            )
            if not number:
                flight.cut = True
                return
            pending.append(number)

    # ---- progress --------------------------------------------------------------------------

    def _advance(self, budget: int) -> None:
        if not self._flights or not self._lock.acquire(blocking=False):
            return
        try:
            still: list[Flight] = []
            ended = 0
            for i, flight in enumerate(self._flights):
                if ended >= budget:
                    still.extend(self._flights[i:])
                    break
                if self._moved_on(flight):
                    ended += 1
                else:
                    still.append(flight)
            self._flights = still
        finally:
            self._lock.release()

    def _moved_on(self, flight: Flight) -> bool:
        """Ask for the pieces of ``flight``; whether it is over. Called with the lock held."""
        state, pending = self._engine.state, flight.pending
        while pending:
            found = state(pending[0])
            if found in (UNDER_WAY, TIMED_OUT):
                return False
            pending.popleft()
            flight.failed += found != DONE
        if flight.diagnosis is None:
            same = flight.slot is None or self._tokens.holds(flight.slot, flight.remote.token)
            self._begin_verdict(flight, same=same)
        return self._finish(flight)

    def _begin_verdict(self, flight: Flight, *, same: bool) -> None:
        """All pieces have ended."""
        attempt, remote = flight.attempt, flight.remote
        whole = not flight.failed and not flight.cut
        remote.flights += 1  # until the verdict
        self._release(flight)
        if attempt is None or (whole and same):
            flight.diagnosis = Ready(Diagnosis(message=messages.BROKEN))
            if attempt is not None and attempt.complete():
                self._report(attempt)
        elif whole:
            flight.diagnosis = Ready(
                Diagnosis(message=messages.OTHER_LIFE, detail=remote.name, lost=True)
            )
        elif attempt.terminal:  # nobody waits for a reason
            flight.diagnosis = Ready(Diagnosis(message=messages.BROKEN))
        else:
            assert isinstance(attempt.path, MooncakePath)
            ranges = attempt.path.remote_ranges(attempt)
            flight.diagnosis = remote.thread.submit(
                partial(diagnose, remote, ranges, self.config.connect_timeout)
            )

    def _finish(self, flight: Flight) -> bool:
        assert flight.diagnosis is not None
        found, error = flight.diagnosis.poll()
        if found is None and error is None:
            return False
        attempt, remote = flight.attempt, flight.remote
        if attempt is not None and not attempt.drained:
            # The thread may have been stopped, or have too much to do: the reason stays unknown.
            diagnosis = found or Diagnosis(message=messages.BROKEN, detail=str(error))
            said = diagnosis.message.engine(diagnosis.detail)
            if diagnosis.lost:
                remote.lost = said
            # tcp: each piece was asked for, and its connection closed where it failed. What a
            # WRITE has sent may land all the same, and of RDMA we have not seen it.
            proven = attempt.op is Op.READ and self.config.protocol is Protocol.TCP
            accepted = Accepted.UNKNOWN if flight.cut else Accepted.ALL
            if attempt.fail(said, accepted=accepted, drained_by=ALL_ENDED if proven else ""):
                self._report(attempt)
        remote.flights -= 1
        self._forget_if_unused(remote)
        return True

    # ---- the end ---------------------------------------------------------------------------

    def _close(self, deadline: float) -> None:
        with self._lock:
            remotes = {
                *self._remotes.values(),
                *(flight.remote for flight in self._flights),
            }
        for remote in remotes:
            remote.thread.stop()
        if not self._gate.close(deadline):
            # Ending the engine under a thread that is inside it would end the process.
            self.abandoned += 1
            _abandoned.append((self._engine, self._tokens, self._flights))
            return
        self._advance(len(self._flights))
        with self._lock:
            self._flights.clear()
        self._engine.shut()
        for path in tuple(self._paths):
            for attempt in tuple(path.undrained):
                # Without an engine nothing lands here. What a WRITE has sent may land there.
                if attempt.op is Op.READ and attempt.mark_drained(ENGINE_CLOSED):
                    self._report(attempt)


def _other_life(remote: Remote) -> HandshakeError:
    return HandshakeError(
        f"another incarnation than {remote.incarnation} answers at {remote.name}",
        next_step="fetch the peer's current PeerInfo over the control channel",
        engine=messages.OTHER_LIFE.engine(remote.name, None),
    )
