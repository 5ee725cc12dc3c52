"""A NIXL agent as a transport."""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvxfer.backends._background import Gate, JobThread, Turnstile
from kvxfer.backends.nixl.binding import BACKEND, DISCONNECTED, Agent, describe
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.envelope import Content, unwrap, wrap
from kvxfer.backends.nixl.paths import NixlPath, NixlPeer
from kvxfer.backends.nixl.pieces import Scratch
from kvxfer.backends.nixl.remotes import Remote, Remotes, agent_name, pack_region
from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.capabilities import Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    ClosedError,
    HandshakeError,
    KvxferError,
    StaleError,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.hostcheck import HostCheck
    from kvxfer.core.memory import Span

__all__ = ["NixlTransport"]

AGENT_CLOSED = "agent closed"
ENDPOINT_FAILED = "endpoint failed"
NO_PEER_FENCE = (
    "NIXL has no fence per peer: what is in flight lands even after its handle is released and its "
    "agent forgotten. Closing the transport ends what lands here"
)

_LAST_CHANCE = 1.0
"""Seconds at most that ``close`` gives to what is in flight."""

_abandoned: list[object] = []
"""What threads that never came back may still touch: kept for the life of the process."""


@attrs.frozen(eq=False)
class _Flight:
    attempt: Attempt
    handle: Any
    remote: Remote


class NixlTransport(Transport):
    """One NIXL agent over UCX.

    The agent's name is derived from the incarnation.  ``local_info`` holds how to reach the agent
    and no memory; each descriptor carries the keys of its own region, so a region registered later
    needs nothing but its descriptor.  ``connect`` and ``prepare`` work on a thread per peer;
    ``post`` may copy inside NIXL (over shared memory it does); ``progress`` never waits: while
    another thread is inside NIXL it returns what is known already.

    Raises:
        ConfigError: ``UCX_TLS`` names nothing that can connect.
        MissingDependencyError: NIXL or its UCX plug-in does not load.
        TransportError: UCX does not start.
    """

    name: ClassVar[str] = BACKEND
    config_type: ClassVar[type[NixlConfig]] = NixlConfig

    @classmethod
    def host_checks(cls) -> Sequence[HostCheck]:
        from kvxfer.backends.nixl.hostchecks import CHECKS

        return CHECKS

    def __init__(self, config: NixlConfig | None = None, *, incarnation: str | None = None) -> None:
        super().__init__(incarnation=incarnation)
        self.config = config or NixlConfig()
        self._agent = Agent(agent_name(self.incarnation), self.config)
        self._info = PeerInfo(
            transport=self.name,
            incarnation=self.incarnation,
            data=wrap(Content.CONNECTION, self._agent.connection_metadata()),
        )
        self._gate = Gate(self.name)
        # Around every call of the agent, and what is below. Its holder may be inside NIXL.
        self._lock = Turnstile()
        self._flights: list[_Flight] = []
        self._forgotten: collections.deque[NixlPath] = collections.deque()
        self._remotes = Remotes(self._agent)
        self._scratch = (Scratch(), Scratch())  # used with the lock held
        self._region_ids = itertools.count()
        self._threads: set[JobThread] = set()
        self._capabilities = Capabilities(
            ops=frozenset((op, a, b) for op in Op for a in MemoryKind for b in MemoryKind),
            # NIXL ends a transfer with a flush of the UCX endpoint: complete at the target.
            visibility=Visibility.VISIBLE,
            fence=FenceScope.ENGINE,
            max_pieces=self.config.max_pieces,
            may_block_in_post=True,
            data_path_auth=DataPathAuth.NONE,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def local_info(self) -> PeerInfo:
        return self._info

    # ---- memory ----------------------------------------------------------------------------

    def _register(self, span: Span) -> Region:
        with self._gate, self._lock:
            try:
                registration = self._agent.register(span)
                metadata = self._agent.region_metadata(registration)
            except Exception as error:  # its exceptions share no base class but this one
                raise TransportError(
                    f"NIXL does not register {span.nbytes} bytes of {span.kind.value} at "
                    f"{span.address:#x}: {error}",
                    engine=describe(error),
                ) from error
        return Region(
            span=span,
            descriptor=Descriptor(
                transport=self.name,
                incarnation=self.incarnation,
                region_id=next(self._region_ids),
                nbytes=span.nbytes,
                kind=span.kind,
                device=span.device,
                data=pack_region(span, metadata),
            ),
            handle=registration,
        )

    def _deregister(self, region: Region) -> None:
        with self._gate, self._lock:
            try:
                self._agent.deregister(region.handle)
            except Exception as error:  # as above
                raise TransportError(
                    f"NIXL does not deregister {region.span.address:#x}: {error}",
                    engine=describe(error),
                ) from error

    # ---- peers and paths -------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        try:
            metadata = unwrap(Content.CONNECTION, info.data)
        except KvxferError as error:
            return Ready(error=HandshakeError(f"the peer's connection data: {error.message}"))
        thread = JobThread(f"kvxfer-nixl-{info.incarnation[:8]}", backend=self.name)
        self._threads.add(thread)

        def connect() -> Peer:
            try:
                with self._gate, self._lock:
                    remote = self._remotes.reach(agent_name(info.incarnation), metadata)
                    peer = NixlPeer(self, info, remote, thread)
                    remote.users.add(peer)
            except BaseException:
                self._threads.discard(thread)
                thread.stop()
                raise
            return peer

        return thread.submit(connect)

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        assert isinstance(peer, NixlPeer)

        def prepare() -> Path:
            addresses = []
            for region, descriptor in pairs:
                self._require_registered(region)
                with self._gate, self._lock:
                    addresses.append(self._remotes.load(peer.remote, descriptor))
            path = NixlPath(peer, pairs, addresses, self._scratch)
            if peer.closed:  # in the meantime, and without seeing this path
                path.close()
                raise ClosedError(f"{peer!r} was closed")
            return path

        return peer.thread.submit(prepare)

    def _close_path(self, path: Path) -> None:
        assert isinstance(path, NixlPath)
        self._forgotten.append(path)
        if self._lock.try_enter():
            try:
                self._release_lists()
            finally:
                self._lock.leave()

    def _release_lists(self) -> None:
        """Free what closed paths had prepared. Called with the lock held."""
        while self._forgotten:
            self._forgotten.popleft().forget()

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        assert isinstance(peer, NixlPeer)
        self._threads.discard(peer.thread)
        peer.remote.users.discard(peer)
        peer.thread.stop(self._sweep)
        return Ready(Fence(done=False, reason=NO_PEER_FENCE))

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        return Ready(Fence(done=False, reason=NO_PEER_FENCE))

    def _sweep(self) -> None:
        with self._gate, self._lock:
            self._remotes.forget_unused()

    # ---- posting ---------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        path = attempt.path
        assert isinstance(path, NixlPath)
        remote = path.remote
        with self._gate, self._lock:
            remote.check_reachable()
            if path.closed:
                raise StaleError(
                    f"the path to {path.peer!r} is closed", next_step="prepare a new one"
                )
            try:
                handle = path.describe(self._agent, attempt.op, attempt.batch)
            except KvxferError:
                raise
            except Exception as error:  # its exceptions share no base class but this one
                failure = describe(error)
                if failure.exception[0] == DISCONNECTED:
                    remote.lost = failure
                raise TransportError(
                    f"NIXL refused {attempt.batch}: {error}", engine=failure
                ) from error
            flight = _Flight(attempt, handle, remote)
            try:
                state = self._agent.start(handle)
            except Exception as error:  # noqa: BLE001 - as above; some of it may be posted
                self._failed(flight, describe(error), Accepted.UNKNOWN)
                return
            if state == "PROC":
                remote.flights += 1
                self._flights.append(flight)
            else:
                self._ended(flight, state)

    def _ended(self, flight: _Flight, state: str) -> None:
        if state == "DONE":
            _release(flight.handle)
            flight.attempt.complete()
            self._report(flight.attempt)
        else:
            self._failed(flight, EngineError(backend=self.name, message=state), Accepted.ALL)

    def _failed(self, flight: _Flight, error: EngineError, accepted: Accepted) -> None:
        proof = ""
        if error.exception and error.exception[0] == DISCONNECTED:
            flight.remote.lost = error
            # UCX has failed the endpoint and every request on it; replies are dropped from now on.
            # What a WRITE has sent may still land.
            proof = ENDPOINT_FAILED if flight.attempt.op is Op.READ else ""
        _release(flight.handle)
        flight.attempt.fail(error, accepted=accepted, drained_by=proof)
        self._report(flight.attempt)

    # ---- progress --------------------------------------------------------------------------

    def _advance(self, budget: int) -> None:
        if not (self._flights or self._forgotten) or not self._lock.try_enter():
            return
        try:
            self._collect(budget)
        finally:
            self._lock.leave()

    def _collect(self, budget: int) -> None:
        """See what has ended, at most ``budget``. Called with the lock held."""
        leaving = False
        self._release_lists()
        still: list[_Flight] = []
        ended = 0
        for i, flight in enumerate(self._flights):
            if ended >= budget:
                still.extend(self._flights[i:])
                break
            try:
                state = self._agent.state(flight.handle)
            except Exception as error:  # noqa: BLE001 - its exceptions share no other base
                self._failed(flight, describe(error), Accepted.ALL)
            else:
                if state == "PROC":
                    still.append(flight)
                    continue
                self._ended(flight, state)
            ended += 1
            flight.remote.flights -= 1
            leaving |= not flight.remote.users and not flight.remote.flights
        self._flights = still
        if leaving:
            self._remotes.forget_unused()

    # ---- the end ---------------------------------------------------------------------------

    def _close(self, deadline: float) -> None:
        for thread in tuple(self._threads):
            thread.stop()
        if not self._gate.close(deadline) or self._progressing:
            # Ending the agent under a thread that is inside it would end the process.
            _abandoned.append((self._agent, self._flights))
            return
        with self._lock:  # another thread may still close paths
            self._end_agent(min(deadline / 2, _LAST_CHANCE))
        for path in tuple(self._paths):
            for attempt in tuple(path.undrained):
                # Without an agent nothing lands here. What a WRITE has sent may land there.
                if attempt.op is Op.READ and attempt.mark_drained(AGENT_CLOSED):
                    self._report(attempt)

    def _end_agent(self, patience: float) -> None:
        """End the agent, and what is in flight with it. Called with the lock held."""
        # Better that they end than that we end the agent under them: UCX was seen to abort then.
        until = time.monotonic() + patience
        self._collect(len(self._flights))
        while self._flights and time.monotonic() < until:
            time.sleep(0.001)
            self._collect(len(self._flights))
        while self._flights:  # popped: whoever names a handle keeps NIXL's agent alive
            _release(self._flights.pop().handle)
        for peer in self._remotes.users():
            for path in tuple(peer.paths):
                path.close()
        self._release_lists()
        self._agent.shut()
        self._engine_ended = True


def _release(handle: Any) -> None:
    # NIXL refuses where it cannot cancel; the handle then frees itself with the agent.
    with contextlib.suppress(Exception):
        handle.release()
