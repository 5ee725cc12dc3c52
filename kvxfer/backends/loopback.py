"""The in-process engine: peers are transports of the same process, a post is a memory copy.

It is what the agent, the simulator and the conformance suite run on first, so it is
deterministic: no threads, no time, no randomness.  Copies happen inside ``post`` or, in the order
of the posts, inside ``progress``.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs import validators as v

from kvxfer.backends._local import check_dram, is_writable
from kvxfer.backends._options import config_from
from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.capabilities import (
    Cancel,
    Capabilities,
    DataPathAuth,
    FenceScope,
    Visibility,
)
from kvxfer.core.memory import Descriptor, MemoryKind, Region, Span
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    BackpressureError,
    InvalidInputError,
    KvxferError,
    PeerLostError,
    StaleError,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CopyIn", "LoopbackConfig", "LoopbackTransport"]

PEER_GONE = "the peer transport is closed"
REGION_GONE = "the peer deregistered the region"
LINK_CUT = "the peer fenced or dropped this connection"
QUEUE_FULL = "the queue to this peer is full"
FENCED = "fenced before it started"
CANCELLED = "cancelled before it started"


class CopyIn(enum.Enum):
    """Where the copy happens."""

    POST = "post"
    """Inside ``post``; ``progress`` reports it."""
    PROGRESS = "progress"
    """Inside ``progress``, in the order of the posts, at most ``budget`` attempts per call."""


@attrs.frozen(kw_only=True)
class LoopbackConfig:
    """Settings of one transport; what it bounds, tests want to see refused."""

    copy_in: CopyIn = attrs.field(default=CopyIn.POST, validator=v.instance_of(CopyIn))
    """Copy inside ``post``, or inside ``progress``."""
    max_pieces: int = attrs.field(default=2**31 - 1, validator=v.ge(1))
    """Of one post."""
    max_nbytes: int = attrs.field(default=2**62, validator=v.ge(1))
    """Of one post."""
    credits: int | None = attrs.field(default=None, validator=v.optional(v.ge(1)))
    """Pieces queued per peer with ``CopyIn.PROGRESS``, beyond which ``post`` refuses. None: no
    bound."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> LoopbackConfig:
        """From JSON values, as a configuration file has them.

        Raises:
            ConfigError: an unknown key, with the nearest one as a hint, or a value that does not
                fit.
        """
        return config_from(cls, options)


# Who can be reached, by incarnation. Weak: a transport that nobody holds cannot be reached either.
_reachable: weakref.WeakValueDictionary[str, LoopbackTransport] = weakref.WeakValueDictionary()


class _Link:
    """One connection. ``open`` is guarded by the memory lock of the side it leads to."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = True


class LoopbackPeer(Peer):
    def __init__(
        self, transport: Transport, info: PeerInfo, remote: LoopbackTransport, link: _Link
    ) -> None:
        super().__init__(transport, info)
        self.remote = remote
        self.link = link
        self.alive = True
        self.pieces_queued = 0


class LoopbackTransport(Transport):
    """Moves bytes between transports of one process. Works from any thread.

    ``fence(peer)`` drops our own posts to the peer that have not started and cuts the peer's
    connection to us; the peer is let in again once we ``connect`` to it again.

    Raises:
        InvalidInputError: the incarnation given is in use in this process.
    """

    name: ClassVar[str] = "loopback"
    config_type: ClassVar[type[LoopbackConfig]] = LoopbackConfig

    def __init__(
        self, config: LoopbackConfig | None = None, *, incarnation: str | None = None
    ) -> None:
        super().__init__(incarnation=incarnation)
        self.config = config or LoopbackConfig()
        self._regions: dict[int, Region] = {}
        self._next_region = 0
        self._inbound: dict[str, list[_Link]] = {}
        self._barred: set[str] = set()
        self._seen_by: weakref.WeakSet[LoopbackPeer] = weakref.WeakSet()
        """What others know us by: they are told when we close."""
        self._memory = threading.Lock()  # held while anybody touches our memory on behalf of a peer
        self._queue: collections.deque[Attempt] = collections.deque()
        self._copying: set[Attempt] = set()
        if _reachable.setdefault(self.incarnation, self) is not self:
            raise InvalidInputError(
                f"incarnation {self.incarnation} is in use by another loopback transport",
                next_step="leave incarnation out, or choose one that is unique for ever",
            )
        self._capabilities = Capabilities(
            ops=frozenset((op, MemoryKind.DRAM, MemoryKind.DRAM) for op in Op),
            visibility=Visibility.VISIBLE,
            cancel=Cancel.BEST_EFFORT,
            fence=FenceScope.PEER,
            max_pieces=self.config.max_pieces,
            max_nbytes=self.config.max_nbytes,
            credits=self.config.credits,
            # No port, socket or name exists that a stranger could use.
            data_path_auth=DataPathAuth.SECRET,
            ip_versions=frozenset(),
            process_local=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def local_info(self) -> PeerInfo:
        return PeerInfo(transport=self.name, incarnation=self.incarnation)

    # ---- memory ----------------------------------------------------------------------------

    def _register(self, span: Span) -> Region:
        check_dram(span, self.name)
        with self._memory:
            region_id = self._next_region
            self._next_region += 1
            region = Region(
                span=span,
                descriptor=Descriptor(
                    transport=self.name,
                    incarnation=self.incarnation,
                    region_id=region_id,
                    nbytes=span.nbytes,
                ),
            )
            self._regions[region_id] = region
        return region

    def _deregister(self, region: Region) -> None:
        with self._memory:
            self._regions.pop(region.descriptor.region_id, None)

    # ---- peers and paths -------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        remote = _reachable.get(info.incarnation)
        if remote is None or remote.closed:
            return Ready(
                error=PeerLostError(
                    f"no loopback transport of incarnation {info.incarnation} in this process",
                    next_step="loopback reaches peers in the same process only",
                )
            )
        self._barred.discard(info.incarnation)
        if self.incarnation in remote._barred:
            return Ready(
                error=StaleError(
                    f"incarnation {info.incarnation} has fenced us",
                    next_step="it must connect to us again first",
                )
            )
        link = _Link()
        with remote._memory:
            remote._inbound.setdefault(self.incarnation, []).append(link)
        peer = LoopbackPeer(self, info, remote, link)
        remote._seen_by.add(peer)
        return Ready(peer)

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        remote = _loopback_peer(peer).remote
        for _, descriptor in pairs:
            found = remote._regions.get(descriptor.region_id)
            if found is None:
                error: KvxferError = StaleError(
                    f"region {descriptor.region_id} of incarnation {remote.incarnation} is not "
                    "registered any more",
                    next_step="fetch the peer's current descriptors",
                )
                return Ready(error=error)
            if found.descriptor != descriptor:
                error = InvalidInputError(
                    f"the descriptor of region {descriptor.region_id} says {descriptor.nbytes} "
                    f"bytes, the peer registered {found.nbytes}"
                )
                return Ready(error=error)
        return Ready(Path(peer, pairs))

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        loop = _loopback_peer(peer)
        self._drop_queued(loop, CANCELLED)
        return _FencePollable(self, loop, cut_own_link=True)

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        return _FencePollable(self, _loopback_peer(peer), cut_own_link=False)

    # ---- copies ----------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        peer = _loopback_peer(attempt.path.peer)
        for p in attempt.batch.used_pairs:
            local, descriptor = attempt.path.pairs[p]
            remote = peer.remote._regions.get(descriptor.region_id)
            if remote is None:
                raise _lost(peer, descriptor)
            target = local if attempt.op is Op.READ else remote
            if not is_writable(target.span):
                raise InvalidInputError(
                    f"a {attempt.op.value} would change the region at {target.span.address:#x} "
                    f"({target.nbytes} bytes), whose owner is read-only",
                    next_step="register writable memory",
                )
        if self.config.copy_in is CopyIn.PROGRESS:
            limit = self.config.credits
            if limit is not None and peer.pieces_queued + len(attempt.batch) > limit:
                raise BackpressureError(
                    f"{peer.pieces_queued} pieces are queued, {len(attempt.batch)} more exceed "
                    f"the {limit} credits of the peer",
                    engine=EngineError(backend=self.name, message=QUEUE_FULL),
                )
            peer.pieces_queued += len(attempt.batch)
            self._queue.append(attempt)
            return
        if not peer.link.open:
            raise _refused(peer)
        self._copy(attempt, peer)

    def _advance(self, budget: int) -> None:
        for _ in range(budget):
            try:
                attempt = self._queue.popleft()
            except IndexError:
                return
            peer = _loopback_peer(attempt.path.peer)
            peer.pieces_queued -= len(attempt.batch)
            if attempt.terminal:  # failed by its owner while it waited: nothing to copy for
                attempt.mark_drained(CANCELLED)
                self._report(attempt)
            else:
                self._copy(attempt, peer)

    def _copy(self, attempt: Attempt, peer: LoopbackPeer) -> None:
        """Copy all pieces, or none, and settle ``attempt``."""
        self._copying.add(attempt)
        try:
            # One lock, the far side's: whoever fences or deregisters there excludes us.
            with peer.remote._memory:
                why = self._why_not(attempt, peer)
                if not why:
                    _move(attempt, peer.remote._regions)
        finally:
            self._copying.discard(attempt)
        if why:
            attempt.fail(EngineError(backend=self.name, message=why), accepted=Accepted.NONE)
        else:
            attempt.complete()
        self._report(attempt)

    @staticmethod
    def _why_not(attempt: Attempt, peer: LoopbackPeer) -> str:
        """Why the copy must not happen. Called with the far side's memory lock held."""
        if peer.remote.closed:
            peer.alive = False
            return PEER_GONE
        if not peer.link.open:
            return LINK_CUT
        for p in attempt.batch.used_pairs:
            if attempt.path.pairs[p][1].region_id not in peer.remote._regions:
                return REGION_GONE
        return ""

    def cancel(self, attempt: Attempt) -> None:
        try:
            self._queue.remove(attempt)
        except ValueError:  # copied already, or being copied
            return
        self._drop(attempt, CANCELLED)

    def _drop_queued(self, peer: LoopbackPeer, why: str) -> None:
        for attempt in tuple(self._queue):
            if attempt.path.peer is peer:
                self._queue.remove(attempt)
                self._drop(attempt, why)

    def _drop(self, attempt: Attempt, why: str) -> None:
        _loopback_peer(attempt.path.peer).pieces_queued -= len(attempt.batch)
        attempt.fail(EngineError(backend=self.name, message=why), accepted=Accepted.NONE)
        self._report(attempt)

    # ---- the end ---------------------------------------------------------------------------

    def _close(self, deadline: float) -> None:
        with self._memory:  # bounded by one copy
            self._regions.clear()
            self._inbound.clear()
        for attempt in tuple(self._queue):
            self._drop(attempt, CANCELLED)
        self._queue.clear()
        _reachable.pop(self.incarnation, None)
        for peer in tuple(self._seen_by):
            peer.alive = False
            if not peer.closed:
                peer.transport._report_lost(peer)
        for other in tuple(_reachable.values()):
            other._barred.discard(self.incarnation)
            with other._memory:
                other._inbound.pop(self.incarnation, None)


class _FencePollable(Pollable[Fence]):
    """Done as soon as no copy between the two sides is running; tries, never waits."""

    def __init__(
        self, transport: LoopbackTransport, peer: LoopbackPeer, *, cut_own_link: bool
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._cut_own_link = cut_own_link
        self._peer_cut = False
        self._fence: Fence | None = None

    def poll(self) -> tuple[Fence | None, KvxferError | None]:
        if self._fence is None and self._try():
            self._fence = Fence(done=True)
        return self._fence, None

    def _try(self) -> bool:
        own, peer = self._transport, self._peer
        if not self._peer_cut:
            if not own._memory.acquire(blocking=False):
                return False  # a peer's copy is running in our memory
            try:
                for link in own._inbound.pop(peer.info.incarnation, ()):
                    link.open = False
                if not own.closed and peer.info.incarnation in _reachable:
                    own._barred.add(peer.info.incarnation)
            finally:
                own._memory.release()
            own._drop_queued(peer, FENCED)
            self._peer_cut = True
        if any(attempt.path.peer is peer for attempt in tuple(own._copying)):
            return False
        if self._cut_own_link:
            remote = peer.remote
            if not remote._memory.acquire(blocking=False):
                return False
            try:
                peer.link.open = False
                links = remote._inbound.get(own.incarnation, [])
                if peer.link in links:
                    links.remove(peer.link)
                if not links:
                    remote._inbound.pop(own.incarnation, None)
            finally:
                remote._memory.release()
        return True


def _loopback_peer(peer: Peer) -> LoopbackPeer:
    if not isinstance(peer, LoopbackPeer):
        raise InvalidInputError(f"{peer!r} is no loopback peer")
    return peer


def _refused(peer: LoopbackPeer) -> StaleError:
    return StaleError(
        f"incarnation {peer.info.incarnation} has fenced or dropped this connection",
        next_step="connect again",
        engine=EngineError(backend=LoopbackTransport.name, message=LINK_CUT),
    )


def _lost(peer: LoopbackPeer, descriptor: Descriptor) -> TransportError:
    if peer.remote.closed:
        peer.alive = False
        return PeerLostError(
            f"the loopback transport of incarnation {peer.info.incarnation} is closed",
            engine=EngineError(backend=LoopbackTransport.name, message=PEER_GONE),
        )
    return StaleError(
        f"the peer deregistered region {descriptor.region_id}",
        next_step="fetch the peer's current descriptors",
        engine=EngineError(backend=LoopbackTransport.name, message=REGION_GONE),
    )


def _move(attempt: Attempt, remote_regions: dict[int, Region]) -> None:
    pairs = attempt.path.pairs
    near = [local.span.address for local, _ in pairs]
    # A pair the batch does not use may have lost its region; its base is never read.
    far = [
        found.span.address if (found := remote_regions.get(d.region_id)) else 0 for _, d in pairs
    ]
    memmove = ctypes.memmove
    read = attempt.op is Op.READ
    batch = attempt.batch
    if batch.members is None:
        for pair, local, remote, size in zip(*batch.lists(), strict=True):
            here, there = near[pair] + local, far[pair] + remote
            memmove(here, there, size) if read else memmove(there, here, size)
        return
    for pair, local_base, remote_base in batch.members:
        first, second = near[pair] + local_base, far[pair] + remote_base
        for local, remote, size in zip(*batch.shared_lists(), strict=True):
            here, there = first + local, second + remote
            memmove(here, there, size) if read else memmove(there, here, size)
