"""The MoRI-IO engine as a transport."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kvxfer.backends.moriio import address, rehearsal
from kvxfer.backends.moriio.binding import BACKEND, Engine
from kvxfer.backends.moriio.capable import capabilities_of
from kvxfer.backends.moriio.causes import RootCauses
from kvxfer.backends.moriio.config import MoriioConfig
from kvxfer.backends.moriio.environment import effective
from kvxfer.backends.moriio.fences import NO_FENCE_BY_DISCONNECT, Fences
from kvxfer.backends.moriio.generation import Generation, GenerationEnded
from kvxfer.backends.moriio.generations import Generations
from kvxfer.backends.moriio.peers import (
    MoriioPath,
    MoriioPeer,
    RegisteredMemory,
    checked_remote,
    engine_key,
    pack_memory,
)
from kvxfer.backends.moriio.plan import Counting, plan_of
from kvxfer.backends.moriio.posting import Poster
from kvxfer.backends.moriio.preparing import Preparer
from kvxfer.core.capabilities import Capabilities
from kvxfer.core.memory import Descriptor, Region
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    HandshakeError,
    StaleError,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.attempt import Attempt
    from kvxfer.core.hostcheck import HostCheck
    from kvxfer.core.memory import Span

__all__ = ["MoriioTransport"]

ENGINE_CLOSED = "engine closed"

_abandoned: list[object] = []
"""What threads that never came back may still touch: kept for the life of the process."""


class MoriioTransport(Transport):
    """One MoRI-IO engine, and for a while two.

    The engine listens on an OS-chosen port of ``config.host`` from construction on, and its own
    threads keep about one core busy until ``close``.  ``connect`` and ``prepare`` work on a thread
    per peer; ``post`` may wait inside the engine; ``progress`` never waits.  The remote side need
    not connect to us for us to READ from it or WRITE to it.

    An attempt that spans several pairs makes one engine call per pair.  If a later call fails after
    an earlier one was posted, the attempt is FAILED with ``accepted=UNKNOWN``, and drained once the
    posted calls are over.

    A queue pair that has failed is dead for its two engines.  The next ``prepare`` to that peer
    makes a new engine generation beside the old one.  Open paths of healthy peers move over by
    themselves; the old engine is ended ``generation_linger_s`` later.  ``local_info`` and
    ``descriptor`` then name the new one, and ``revision`` rises: peers must be told in that time.
    ``fence`` rests on the same: it is done when the old engine is gone.

    Raises:
        ConfigError: a setting, or an environment variable that overrides one.
        MissingDependencyError: the wheel is not installed or does not load.
        TransportError: no RDMA device with an active port, or the engine refuses its settings.
    """

    name: ClassVar[str] = BACKEND
    config_type: ClassVar[type[MoriioConfig]] = MoriioConfig

    @classmethod
    def host_checks(cls) -> Sequence[HostCheck]:
        from kvxfer.backends.moriio.hostchecks import CHECKS

        return CHECKS

    def __init__(
        self, config: MoriioConfig | None = None, *, incarnation: str | None = None
    ) -> None:
        super().__init__(incarnation=incarnation)
        self.config = effective(config or MoriioConfig(), os.environ)
        self._host = address.local_ipv4(self.config.host)
        self._counting = Counting.of(self.config)
        self._peers: set[MoriioPeer] = set()
        self._region_ids = itertools.count()
        self._generations = Generations(
            self._make_generation,
            linger=self.config.generation_linger_s,
            drain=self.config.generation_drain_s,
            switched=self._move_to,
        )
        self._preparer = Preparer(
            self.config,
            self._generations,
            memory_of=self._memory_of,
            closed=lambda: self.closed,
        )
        self._fences = Fences(self._generations, self._may_land)
        self._causes = RootCauses(lambda: {peer.key_prefix for peer in tuple(self._peers)})
        self._poster = Poster(
            queue_pairs=self.config.qp_per_transfer,
            atomic=self.config.one_queue_pair_per_call,
            own_admission=self.config.own_admission,
            extra=self._counting.extra,
            report=self._report,
            root_cause=self._causes.find,
        )
        self._capabilities = capabilities_of(self.config, self._counting)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def generation(self) -> int:
        """The number of the engine that new paths use, from 1."""
        return self._generations.current.number

    def local_info(self) -> PeerInfo:
        return PeerInfo(
            transport=self.name,
            incarnation=self.incarnation,
            data=self._generations.current.engine.descriptor,
        )

    # ---- generations -----------------------------------------------------------------------

    def _make_generation(self, number: int) -> Generation:
        port = self.config.port
        if port:
            port += (number - 1) % 2  # the predecessor still has the other one
            rehearsal.rehearse_port(self._host, port)
        key = engine_key(self.incarnation, generation=number)
        engine = Engine(key, self._host, self.config, port=port)
        generation = Generation(number, engine, self.config)
        for region in tuple(self._registered):
            with contextlib.suppress(StaleError):  # deregistered meanwhile
                self._memory_of(region).on(generation)
        return generation

    def _move_to(self, fresh: Generation) -> None:
        """Give the open paths of every peer queue pairs of the new engine."""
        self.revision += 1
        for peer in tuple(self._peers):
            if not peer.fencing:
                for path in tuple(peer.paths):
                    peer.thread.submit(partial(self._preparer.move, peer, path, fresh))

    # ---- memory ----------------------------------------------------------------------------

    def _register(self, span: Span) -> Region:
        if self.config.rehearse:
            rehearsal.rehearse_registration(self._host, span, self.config)
        memory = RegisteredMemory(span)
        region_id = next(self._region_ids)
        return Region(span=span, descriptor=self._describe(span, memory, region_id), handle=memory)

    def _describe(self, span: Span, memory: RegisteredMemory, region_id: int) -> Descriptor:
        while True:
            generation = self._generations.current
            try:
                whole, views = memory.on(generation)
                data = pack_memory(
                    generation.engine.descriptor,
                    whole.pack(),
                    {offset: view.pack() for offset, view in views.items()},
                )
                break
            except GenerationEnded:
                if self.closed or generation is self._generations.current:
                    raise
        return Descriptor(
            transport=self.name,
            incarnation=self.incarnation,
            region_id=region_id,
            nbytes=span.nbytes,
            kind=span.kind,
            device=span.device,
            data=data,
        )

    def descriptor(self, region: Region) -> Descriptor:
        memory: RegisteredMemory = region.handle
        return self._describe(region.span, memory, region.descriptor.region_id)

    def _deregister(self, region: Region) -> None:
        memory: RegisteredMemory = region.handle
        memory.remove()

    def _memory_of(self, region: Region) -> RegisteredMemory:
        self._require_registered(region)
        memory: RegisteredMemory = region.handle
        return memory

    # ---- peers and paths -------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        try:
            remote = checked_remote(info.incarnation, info.data)
        except HandshakeError as error:
            return Ready(error=error)
        peer = MoriioPeer(self, info, remote)
        self._peers.add(peer)

        def connect() -> Peer:
            try:
                return self._preparer.connect(peer)
            except BaseException:
                self._peers.discard(peer)
                peer.thread.stop()
                raise

        return peer.thread.submit(connect)

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        assert isinstance(peer, MoriioPeer)
        return peer.thread.submit(lambda: self._preparer.prepare(peer, pairs))

    def _close_path(self, path: Path) -> None:
        assert isinstance(path, MoriioPath)
        path.lanes = ()

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        assert isinstance(peer, MoriioPeer)
        self._peers.discard(peer)
        peer.thread.stop(lambda: self._forget(peer))
        return Ready(Fence(done=False, reason=NO_FENCE_BY_DISCONNECT))

    def _forget(self, peer: MoriioPeer) -> None:
        if any(p.key_prefix == peer.key_prefix for p in tuple(self._peers)):
            return
        for generation in self._generations.live:
            generation.remove_remotes(peer.key_prefix)
        self._causes.forget(peer.key_prefix)

    # ---- fences ----------------------------------------------------------------------------

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        assert isinstance(peer, MoriioPeer)
        return self._fences.ask(peer)

    def _may_land(self, peer: MoriioPeer) -> int:
        """Attempts whose bytes may still land, here or there."""
        return peer.unproven + sum(
            not a.drained for path in self._paths_of(peer) for a in tuple(path.undrained)
        )

    def _settle_ended(self) -> None:
        """Draw the conclusions from engines that are gone."""
        while self._generations.ended:
            generation = self._generations.ended.popleft()
            for attempt in self._poster.ended(generation):
                # It keeps no region of ours busy any more.
                assert isinstance(attempt.path.peer, MoriioPeer)
                attempt.path.peer.unproven += 1
                attempt.path.settled(attempt)
            self._fences.answer(generation.number)
        self._fences.failed()

    # ---- attempts --------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        path = attempt.path
        assert isinstance(path, MoriioPath)
        while True:
            lanes = path.lanes
            if not lanes:
                raise StaleError(
                    f"the path to {path.peer!r} is closed", next_step="prepare a new one"
                )
            assert isinstance(path.peer, MoriioPeer)
            if path.peer.fencing:
                message = "the peer is being fenced"
                raise TransportError(message, engine=EngineError(backend=BACKEND, message=message))
            try:
                self._poster.post(attempt, plan_of(attempt.batch, lanes, self._counting))
                return
            except GenerationEnded:
                if lanes is path.lanes:
                    raise

    def _advance(self, budget: int) -> None:
        self._poster.advance(budget)
        if self._generations.ended or self._generations.failed_fences:
            self._settle_ended()

    # ---- the end ---------------------------------------------------------------------------

    def _close(self, deadline: float) -> None:
        end = time.monotonic() + deadline

        def left() -> float:
            return max(end - time.monotonic(), 0.0)

        peers, registered = tuple(self._peers), tuple(self._registered)
        for peer in peers:
            peer.thread.stop()
        self._generations.close(left())
        live = self._generations.live
        empty = [generation.leave(left()) and not self._progressing for generation in live]
        self._settle_ended()
        unfinished = self._poster.finish()
        for peer in peers:
            for path in tuple(peer.paths):
                path.close()
        for generation, nobody_inside in zip(live, empty, strict=True):
            if nobody_inside:
                generation.end()
            else:
                # Ending the engine under a thread that is inside it would end the process.
                _abandoned.append((generation, list(unfinished), registered))
        self._engine_ended = all(empty)
        for path in tuple(self._paths):
            for attempt in tuple(path.undrained):
                # Without queue pairs nothing lands here. What a WRITE has sent may land there.
                if attempt.op is Op.READ and all(empty) and attempt.mark_drained(ENGINE_CLOSED):
                    self._report(attempt)
        unfinished.clear()
