"""The MoRI-IO engine as a transport."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kvxfer.backends.moriio import address, rehearsal
from kvxfer.backends.moriio.binding import BACKEND, Engine
from kvxfer.backends.moriio.calls import Call
from kvxfer.backends.moriio.config import MoriioConfig
from kvxfer.backends.moriio.environment import effective
from kvxfer.backends.moriio.generation import Generation, GenerationEnded
from kvxfer.backends.moriio.generations import Generations
from kvxfer.backends.moriio.lanes import Lane, PairLane
from kvxfer.backends.moriio.peers import (
    MoriioPath,
    MoriioPeer,
    RegisteredMemory,
    RemoteMemory,
    checked_memory,
    checked_remote,
    engine_key,
    pack_memory,
)
from kvxfer.backends.moriio.plan import Counting, plan_of
from kvxfer.backends.moriio.posting import Poster, check_alive
from kvxfer.core.capabilities import Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region
from kvxfer.core.pollable import Deferred, Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    ClosedError,
    HandshakeError,
    InvalidInputError,
    KvxferError,
    StaleError,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.backends.moriio.binding import Memory, Remote
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.hostcheck import HostCheck
    from kvxfer.core.memory import Span

__all__ = ["MoriioTransport"]

ENGINE_CLOSED = "engine closed"
NO_FENCE_BY_DISCONNECT = (
    "MoRI-IO cannot end one peer's queue pairs: fence the peer, which replaces the engine, or close"
)

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
        self._root_causes: dict[str, str] = {}
        self._fences: collections.deque[tuple[int, MoriioPeer, Deferred[Fence]]] = (
            collections.deque()
        )
        self._generations = Generations(
            self._make_generation,
            linger=self.config.generation_linger_s,
            drain=self.config.generation_drain_s,
            switched=self._move_to,
        )
        atomic = self.config.one_queue_pair_per_call
        most = max(self.config.max_send_wr - self._counting.extra, 1)
        self._poster = Poster(
            queue_pairs=self.config.qp_per_transfer,
            atomic=atomic,
            own_admission=self.config.own_admission,
            extra=self._counting.extra,
            report=self._report,
            root_cause=self._root_cause,
        )
        self._capabilities = Capabilities(
            ops=frozenset((op, a, b) for op in Op for a in MemoryKind for b in MemoryKind),
            # A READ is visible; a WRITE is acknowledged by the peer's NIC, and this is one value.
            visibility=Visibility.ACKED,
            read_visibility=Visibility.VISIBLE,
            fence=FenceScope.ENGINE,
            max_pieces=most,
            max_nbytes=self.config.max_post_nbytes,
            credits=most * (self.config.qp_per_transfer if atomic else 1),
            # Not of one piece in a single-pair path, but of several pairs the later may be refused.
            atomic_refusal=False,
            may_block_in_post=True,
            data_path_auth=DataPathAuth.NONE,
            ip_versions=frozenset({4}),
        )

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
                _memory_of(region).on(generation)
        return generation

    def _move_to(self, fresh: Generation) -> None:
        """Give the open paths of every peer queue pairs of the new engine."""
        self.revision += 1
        for peer in tuple(self._peers):
            if not peer.fencing:
                for path in tuple(peer.paths):
                    peer.thread.submit(partial(self._move, peer, path, fresh))

    def _move(self, peer: MoriioPeer, path: Path, fresh: Generation) -> None:
        assert isinstance(path, MoriioPath)
        lanes = path.lanes
        if not lanes or lanes[0].whole.connection.generation.number >= fresh.number:
            return
        # What fails here fails again, and is told, when the path is prepared anew.
        theirs = _theirs(peer, path.pairs)
        self._reach_all(theirs)
        moved = self._lanes(peer, fresh, path.pairs, theirs)
        if not path.closed:
            path.use(moved)

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
        return self._describe(region.span, _memory_of(region), region.descriptor.region_id)

    def _deregister(self, region: Region) -> None:
        _memory_of(region).remove()

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
                peer.address = self._reach(remote)
                self._generations.current.add_remote(remote)
            except BaseException:
                self._peers.discard(peer)
                peer.thread.stop()
                raise
            return peer

        return peer.thread.submit(connect)

    def _reach(self, remote: Remote) -> str:
        """The address of a peer's engine, after it has taken a TCP connection."""
        try:
            where = address.resolve_ipv4(remote.host)
        except InvalidInputError as error:
            raise HandshakeError(
                f"the peer advertises a host this engine cannot dial: {error.message}",
                next_step=error.next_step,
            ) from error
        address.probe(where, remote.port, self.config.connect_timeout_s)
        return where

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        assert isinstance(peer, MoriioPeer)

        def prepare() -> Path:
            path = MoriioPath(peer, pairs, self._prepared_lanes(peer, pairs))
            if peer.closed:  # in the meantime, and without seeing this path
                path.close()
                raise ClosedError(f"{peer!r} was closed")
            return path

        return peer.thread.submit(prepare)

    def _prepared_lanes(
        self, peer: MoriioPeer, pairs: Sequence[tuple[Region, Descriptor]]
    ) -> tuple[PairLane, ...]:
        generation = self._generations.current
        theirs = _theirs(peer, pairs)
        while True:
            self._reach_all(theirs)
            # Only now: for a peer that is not there no engine is made.
            if generation.degraded(memory.remote.key for memory in theirs) is not None:
                config = self.config
                patience = config.generation_linger_s + config.generation_drain_s
                generation = self._generations.after(generation, patience)
            try:
                return self._lanes(peer, generation, pairs, theirs)
            except GenerationEnded:
                if self.closed or generation is self._generations.current:
                    raise
                generation = self._generations.current

    def _reach_all(self, theirs: Sequence[RemoteMemory]) -> None:
        for remote in {memory.remote.key: memory.remote for memory in theirs}.values():
            self._reach(remote)

    def _lanes(
        self,
        peer: MoriioPeer,
        generation: Generation,
        pairs: Sequence[tuple[Region, Descriptor]],
        theirs: Sequence[RemoteMemory],
    ) -> tuple[PairLane, ...]:
        """Sessions for all pairs. Waits for the peers' engines, which have just been reached."""
        lanes = []
        for (region, _), there in zip(pairs, theirs, strict=True):
            self._require_registered(region)
            key = there.remote.key
            generation.add_remote(there.remote)
            whole, views = _memory_of(region).on(generation)

            def open_lane(here: Memory, far: Memory, key: str = key) -> Lane:
                session = generation.open_session(here, far)
                return Lane(session, generation.connection(key, here.place, far.place))

            lane = open_lane(whole, there.whole)
            check_alive(lane.connection)
            lanes.append(
                PairLane(
                    lane,
                    here={0: whole, **views},
                    there={0: there.whole, **there.views},
                    open_lane=open_lane,
                    later=peer.thread.submit,
                )
            )
        return tuple(lanes)

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
        for key in [k for k in tuple(self._root_causes) if k.startswith(peer.key_prefix)]:
            self._root_causes.pop(key, None)

    # ---- fences ----------------------------------------------------------------------------

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        """Replace the engine. Done once every engine that could reach that peer is gone."""
        assert isinstance(peer, MoriioPeer)
        peer.fencing = True
        for generation in self._generations.live:
            generation.forsake(peer.key_prefix)
        answer: Deferred[Fence] = Deferred()
        self._fences.append((self._generations.fence(), peer, answer))
        return answer

    def _settle_ended(self) -> None:
        """Draw the conclusions from engines that are gone."""
        generations = self._generations
        while generations.ended:
            generation = generations.ended.popleft()
            for attempt in self._poster.ended(generation):
                # It keeps no region of ours busy any more.
                assert isinstance(attempt.path.peer, MoriioPeer)
                attempt.path.peer.unproven += 1
                attempt.path.settled(attempt)
            self._answer_fences(generation.number, None)
        while generations.failed_fences:
            self._answer_fences(*generations.failed_fences.popleft())

    def _answer_fences(self, number: int, failure: KvxferError | None) -> None:
        for fence in tuple(self._fences):
            wanted, peer, answer = fence
            if wanted > number:
                continue
            self._fences.remove(fence)
            peer.fencing = False
            if failure is not None:
                reason = f"no engine could be made to replace this one: {failure}"
                answer.resolve(Fence(done=False, reason=reason))
                continue
            left = peer.unproven + sum(
                not a.drained for path in self._paths_of(peer) for a in tuple(path.undrained)
            )
            reason = f"what {left} attempts have sent may still land at the peer" if left else ""
            # Its keys to our memory died with the engine: nothing of the peer lands here. So did
            # the queue pairs: nothing of ours reads there or here.
            answer.resolve(Fence(done=not left, reason=reason, source_done=True))

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

    def _root_cause(self, call: Call) -> str:
        """Why the peer of ``call`` cannot be reached, as far as the engine has told."""
        known = tuple({peer.key_prefix for peer in tuple(self._peers)})
        for failure in call.connection.generation.engine.pop_failures():
            if known and failure.engine_key.startswith(known):
                self._root_causes[failure.engine_key] = failure.detail
        cause = self._root_causes.get(call.connection.peer_key, "")
        return cause.removeprefix("completion status ")

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
        empty = [generation.leave(left()) for generation in live]
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
        for path in tuple(self._paths):
            for attempt in tuple(path.undrained):
                # Without queue pairs nothing lands here. What a WRITE has sent may land there.
                if attempt.op is Op.READ and all(empty) and attempt.mark_drained(ENGINE_CLOSED):
                    self._report(attempt)
        unfinished.clear()


def _theirs(peer: MoriioPeer, pairs: Sequence[tuple[Region, Descriptor]]) -> list[RemoteMemory]:
    return [checked_memory(peer.info.incarnation, descriptor) for _, descriptor in pairs]


def _memory_of(region: Region) -> RegisteredMemory:
    memory: RegisteredMemory = region.handle
    return memory
