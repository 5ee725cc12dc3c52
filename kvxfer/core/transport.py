"""The contract between kvxfer and an engine.

A backend subclasses ``Transport`` and implements the methods that begin with an underscore; the
public ones check their arguments here, once for all backends.  Everything convenient (retries,
leases, rank mapping, ACKs) lives above.

Thread rules: ``register`` and ``deregister`` may be called from any thread and may block, and so
may ``close``.
``post`` is called from one thread at a time per path, which is the agent's posting thread where
``Capabilities.may_block_in_post``, while another thread may be inside ``progress``.  Everything
else is called from one thread, the agent's progress thread, and must not wait.
"""

from __future__ import annotations

import collections
import itertools
import secrets
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

import attrs
import numpy as np

from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.capabilities import Capabilities
from kvxfer.core.memory import Descriptor, Region, Span
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import ClosedError, InvalidInputError, KvxferError, RegionBusyError, StaleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.core.batch import Batch
    from kvxfer.core.hostcheck import HostCheck

__all__ = ["Fence", "Path", "Peer", "PeerInfo", "Transport"]

T = TypeVar("T")

PROGRESS_GRACE_S = 0.5
"""How long ``close`` waits for a thread that is inside ``progress``, though it was given less. An
engine must not be ended under a thread, and a round of progress is short."""


@attrs.frozen(kw_only=True)
class PeerInfo:
    """How a peer's transport can be reached. Safe to send over the control channel only.

    ``incarnation`` names one life of the transport, unique for ever; ``data`` is the backend's own
    encoding and may hold secrets that admit whoever knows them.
    """

    transport: str
    incarnation: str
    data: bytes = attrs.field(default=b"", repr=False)


@attrs.frozen(kw_only=True)
class Fence:
    """The answer to ``fence`` and ``disconnect``.

    ``done``: nothing between us and that peer's incarnation lands any more, in either memory; our
    attempts on it are marked drained.  Otherwise ``reason`` says what the engine cannot prove.
    ``ours_done`` is the weaker half: nothing that *we* posted lands any more, which is all that a
    failed READ needs.  An engine that can prove only that says so.
    ``source_done``: no WRITE of ours reads our memory any more, though bytes that it has sent may
    still land at the peer.  That is all that the source of a failed WRITE needs.
    """

    done: bool
    reason: str = ""
    ours_done: bool = attrs.field()
    source_done: bool = attrs.field()

    @ours_done.default
    def _whole_proves_half(self) -> bool:
        return self.done

    @source_done.default
    def _whole_proves_source(self) -> bool:
        return self.done


class Peer:
    """A connected remote transport. Backends subclass it for their own state."""

    def __init__(self, transport: Transport, info: PeerInfo) -> None:
        self.transport = transport
        self.info = info
        self.closed = False
        self.paths: dict[Path, None] = {}  # sets in the order of time: replays are exact
        self.queue = f"{info.transport}:{info.incarnation}/{next(transport._connections)}"
        """The name of the queue that posts to this peer go through, unless its paths say better."""

    def __repr__(self) -> str:
        return f"<Peer {self.info.transport}:{self.info.incarnation}{' closed' * self.closed}>"


class Path:
    """What a transport prepared between local regions and a peer's descriptors.

    ``batch.pair`` indexes ``pairs``.  ``close`` frees what the engine holds for it; posting on a
    closed path raises ``StaleError``.

    ``queues`` names, for each pair, the queue whose room its pieces take (``Capabilities.credits``
    is the room of one).  Equal names are one queue, also between paths, peers and connections; so a
    queue that was made anew needs a new name.  By default each connection has one.
    """

    def __init__(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> None:
        self.peer = peer
        self.pairs = tuple(pairs)
        self.closed = False
        self.undrained: dict[Attempt, None] = {}
        self.queues: tuple[str, ...] = (peer.queue,) * len(self.pairs)
        self.kinds = [(r.span.kind, d.kind) for r, d in self.pairs]
        self._nbytes = [(r.nbytes, d.nbytes) for r, d in self.pairs]
        self.works_for: list[Op] = []
        """The ops that work between the memory kinds of every pair, as far as that was asked."""
        self.max_pieces = self.max_nbytes = 0
        """What one post takes, as far as that was asked."""
        self.local_nbytes = np.array([r.nbytes for r, _ in self.pairs], dtype=np.int64)
        self.remote_nbytes = np.array([d.nbytes for _, d in self.pairs], dtype=np.int64)
        peer.paths[self] = None

    def settled(self, attempt: Attempt) -> None:
        """Called by an attempt once it is drained."""
        self.undrained.pop(attempt, None)
        if self.closed:
            self._forget_if_over()

    def close(self) -> None:
        """Idempotent. Attempts in flight go on."""
        if not self.closed:
            self.closed = True
            self.peer.paths.pop(self, None)
            self.peer.transport._close_path(self)
            self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self.closed and not self.undrained:
            self.peer.transport._paths.pop(self, None)

    def check(self, batch: Batch) -> None:
        """Refuse pieces that leave their regions.

        Raises:
            InvalidInputError: names the first such piece, its range and the region's size.
        """
        reach = batch.reach
        if reach is not None and reach[0] < len(self._nbytes):
            here, there = self._nbytes[reach[0]]
            if reach[1] <= here and reach[2] <= there:
                return
        if not len(batch) or self._holds_members(batch):
            return
        top, i = batch.top_pair()
        if top >= len(self.pairs):
            raise InvalidInputError(f"pair[{i}] is {top}, but the path has {len(self.pairs)} pairs")
        for side, nbytes in (("local", self.local_nbytes), ("remote", self.remote_nbytes)):
            beyond = batch.first_beyond(side, nbytes)
            if beyond is not None:
                pair, local, remote, size = batch.piece(beyond)
                offset = local if side == "local" else remote
                raise InvalidInputError(
                    f"piece {beyond} ends at {side} byte {offset + size}, but the "
                    f"{side} region of pair {pair} has {int(nbytes[pair])} bytes",
                    next_step="check the block ids and the layout of that side",
                )

    def _holds_members(self, batch: Batch) -> bool:
        """Whether it is quick to say that the pieces of all members lie in their regions."""
        members, shared = batch.members, batch.shared
        if members is None or shared is None:
            return False
        sizes = self._nbytes
        ends = shared.end("local"), shared.end("remote")
        for pair, local, remote in members.rows:
            if pair >= len(sizes):
                return False
            here, there = sizes[pair]
            if local + ends[0] > here or remote + ends[1] > there:
                return False
        return True


class _UntilClosed(Pollable[T]):
    """A backend's answer, or ours once the transport is closed: nobody waits for ever."""

    def __init__(
        self,
        pollable: Pollable[T],
        transport: Transport,
        otherwise: Callable[[], tuple[T | None, KvxferError | None]],
    ) -> None:
        self._pollable = pollable
        self._transport = transport
        self._otherwise = otherwise
        self._answer: tuple[T | None, KvxferError | None] = (None, None)
        self._lock = threading.Lock()

    def poll(self) -> tuple[T | None, KvxferError | None]:
        with self._lock:
            if self._answer == (None, None):
                closed = self._transport.closed  # first: what is answered until then counts
                self._answer = self._pollable.poll()
                if closed and self._answer == (None, None):
                    self._answer = self._otherwise()
            return self._answer


class Transport(ABC):
    """One engine of one process, from construction (bound and reachable) to ``close``."""

    name: ClassVar[str]
    must_be_polled: ClassVar[bool] = True
    """False where every change calls the ``on_change`` waker, so that nobody has to look."""
    config_type: ClassVar[Any] = None
    """The class of the constructor's ``config``, if its classmethod ``from_options`` makes one of a
    mapping of JSON values: ``create_transport`` then takes such a mapping."""

    def __init__(self, *, incarnation: str | None = None) -> None:
        self.incarnation = incarnation or secrets.token_hex(8)
        self.closed = False
        self.revision = 0
        """Rises when ``local_info`` or descriptors change: peers have to be told then."""
        self._changed: collections.deque[Attempt] = collections.deque()
        self._ended_peers: collections.deque[Peer] = collections.deque()
        self._waker: Callable[[], None] | None = None
        self._paths: dict[Path, None] = {}
        self._registered: set[Region] = set()
        self._connections = itertools.count(1)
        self._engine_ended = False
        """``_close`` has ended the engine: it reads and writes nothing of ours any more."""
        self._progressing = False
        """A thread is inside ``_advance``. ``progress`` sets it before it looks at ``closed``, and
        ``close`` goes the other way round: one of the two notices the other, without a lock."""

    # ---- what a backend author writes -----------------------------------------------------

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this engine can do and promises. Constant for the life of the transport."""

    @abstractmethod
    def local_info(self) -> PeerInfo:
        """How peers reach this transport."""

    @abstractmethod
    def _register(self, span: Span) -> Region: ...

    @abstractmethod
    def _deregister(self, region: Region) -> None: ...

    @abstractmethod
    def _connect(self, info: PeerInfo) -> Pollable[Peer]: ...

    @abstractmethod
    def _prepare(
        self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]
    ) -> Pollable[Path]: ...

    @abstractmethod
    def _post(self, attempt: Attempt) -> None:
        """Start ``attempt``. Raise a ``TransportError`` if and only if nothing was posted.

        When it ends, now or later, from any thread: settle it (``complete``, ``fail``,
        ``mark_drained``) and call ``_report``.
        """

    @abstractmethod
    def _disconnect(self, peer: Peer) -> Pollable[Fence]: ...

    @abstractmethod
    def _close(self, deadline: float) -> None:
        """Free everything. ``deadline`` is seconds from now; never join a stuck thread longer.

        No ``_advance`` runs, nor will one, unless ``_progressing`` is true: then a thread is stuck
        inside it, and what it uses must be left alone.
        """

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        """Prove that nothing of ``peer`` lands any more. Default: this engine cannot."""
        return Ready(Fence(done=False, reason=f"{self.name} has no fence"))

    def proves_end(self, error: KvxferError) -> bool:
        """Whether this failure of ``connect`` proves that nothing of the peer lands any more.

        Default: it does not.
        """
        return False

    def _advance(self, budget: int) -> None:
        """Ask a polled engine for news and ``_report`` it. Default: nothing to ask."""

    def _close_path(self, path: Path) -> None:
        """Free what the engine holds for ``path``. Default: nothing."""

    def cancel(self, attempt: Attempt) -> None:
        """Behind ``Attempt.request_cancel``. Default: the engine cannot cancel; ignored."""

    @classmethod
    def host_checks(cls) -> Sequence[HostCheck]:
        """What ``kvxfer doctor`` should look at, in order, before it starts the engine.

        Called, like the checks themselves, in a process of its own.  Default: nothing.
        """
        return ()

    def descriptor(self, region: Region) -> Descriptor:
        """How peers address ``region`` now. Default: the same for the life of the region."""
        return region.descriptor

    # ---- what a backend calls --------------------------------------------------------------

    def _report(self, attempt: Attempt) -> None:
        """Tell ``progress`` that ``attempt`` changed. Callable from any thread."""
        self._changed.append(attempt)
        if self._waker is not None:
            self._waker()

    def _report_lost(self, peer: Peer) -> None:
        """Tell that ``peer`` has ended, its process or its transport. Callable from any thread.

        Only on proof: what ended touches no memory any more, and never comes back.  A connection
        that merely broke is no proof.
        """
        self._ended_peers.append(peer)
        if self._waker is not None:
            self._waker()

    # ---- what the agent calls --------------------------------------------------------------

    def lost_peers(self) -> list[Peer]:
        """Peers that ended since the last call, as far as this engine can prove it.

        An engine that cannot tell returns nothing: then the control channel and the deadlines have
        to notice.
        """
        return [self._ended_peers.popleft() for _ in range(len(self._ended_peers))]

    def on_change(self, waker: Callable[[], None] | None) -> None:
        """Have ``waker`` called, from any thread, whenever ``progress`` has news.

        Where ``must_be_polled`` is false, nobody has to look before; elsewhere it is a mere hint.
        """
        self._waker = waker

    @final
    def register(self, span: Span) -> Region:
        """Make ``span`` usable for transfers. May block; any thread.

        Raises:
            InvalidInputError: the engine cannot use this memory.
            TransportError: the engine refused.
        """
        self._check_open()
        region = self._register(span)
        self._registered.add(region)
        return region

    @final
    def deregister(self, region: Region) -> None:
        """Undo ``register``. Idempotent once it has succeeded. May block; any thread.

        ``close`` undoes every registration: afterwards there is nothing left to do.

        Raises:
            RegionBusyError: an attempt that is not drained still uses the region.
        """
        if region not in self._registered:
            return
        # A post marks its region as used, then looks whether it is registered; here it is the other
        # way round.  So one of the two notices the other, whatever the order.
        self._registered.discard(region)
        try:
            self._check_idle(region)
            if not self.closed:
                self._deregister(region)
        except BaseException:
            self._registered.add(region)
            raise

    def _check_idle(self, region: Region) -> None:
        # An attempt drains a moment before its path hears of it: ask the attempt.
        busy = sum(
            not attempt.drained and self._uses(attempt, region)
            for path in tuple(self._paths)
            for attempt in tuple(path.undrained)
        )
        if busy:
            raise RegionBusyError(
                f"{busy} attempts that are not drained use the region at "
                f"{region.span.address:#x} ({region.nbytes} bytes)",
                next_step="wait until they are drained, or fence the peer",
            )

    @staticmethod
    def _uses(attempt: Attempt, region: Region) -> bool:
        return any(attempt.path.pairs[p][0] is region for p in attempt.batch.used_pairs)

    @final
    def connect(self, info: PeerInfo) -> Pollable[Peer]:
        """Reach a peer: the answer is a ``Peer`` only if that incarnation was found alive.

        Otherwise it is a ``HandshakeError``, ``PeerLostError`` or another error of ours, also for
        ``info`` that was damaged on its way.

        Raises:
            InvalidInputError: ``info`` is of another transport.
        """
        self._check_open()
        if info.transport != self.name:
            raise InvalidInputError(
                f"a {self.name} transport cannot connect to a {info.transport} peer"
            )
        return _UntilClosed(self._connect(info), self, self._closed_answer)

    @final
    def prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        """Prepare posts between local regions and the peer's descriptors, many at once.

        Raises:
            StaleError: the peer is closed, a descriptor is of another incarnation of it, or a
                region is not registered here (any more).
            InvalidInputError: no pairs, or a descriptor of another transport.
        """
        self._check_open()
        if peer.closed:
            raise StaleError(f"{peer!r} is closed", next_step="connect again")
        if not pairs:
            raise InvalidInputError("no pairs to prepare")
        for region, descriptor in pairs:
            if descriptor.transport != self.name or region.descriptor.transport != self.name:
                raise InvalidInputError(
                    f"a {self.name} transport cannot pair {region.descriptor.transport} regions "
                    f"with {descriptor.transport} descriptors"
                )
            if descriptor.incarnation != peer.info.incarnation:
                raise StaleError(
                    f"the descriptor is of incarnation {descriptor.incarnation}, the peer is now "
                    f"{peer.info.incarnation}",
                    next_step="fetch the peer's current descriptors",
                )
            self._require_registered(region)
        return _UntilClosed(self._prepare(peer, pairs), self, self._closed_answer)

    def post(self, op: Op, path: Path, batch: Batch, *, tag: object = None) -> Attempt:
        """Hand ``batch`` to the engine, once. No sleep, no retry.

        Either raises, and nothing was posted, or returns an ``Attempt``.  An empty batch is DONE
        at once.

        Raises:
            StaleError: the path or its peer is closed, or a region was deregistered.
            InvalidInputError: pieces outside their regions, too many or too large for one post, or
                an op and memory kinds the engine cannot do.
            BackpressureError, TransportError: the engine refused and posted nothing.
        """
        peer = path.peer
        if self.closed or path.closed or peer.closed:
            self._check_open()
            raise StaleError(f"the path to {peer!r} is closed", next_step="prepare a new one")
        path.check(batch)
        count = len(batch)
        if op not in path.works_for or count > path.max_pieces or batch.nbytes > path.max_nbytes:
            self._check_supported(op, path, batch)
        attempt = Attempt(op, path, batch, tag)
        if not count:
            attempt.complete(by="nothing to do")
            self._report(attempt)
            return attempt
        self._paths[path] = None
        path.undrained[attempt] = None
        try:
            pairs, registered = path.pairs, self._registered
            for p in batch.used_pairs:
                if pairs[p][0] not in registered:
                    self._require_registered(pairs[p][0])
            self._post(attempt)
        except BaseException:
            path.undrained.pop(attempt, None)
            raise
        if self.closed or peer.closed:
            # ``disconnect`` or ``close`` ran while the engine took it, and may have missed it.
            self._fail_pending(path, "the connection was closed")
        return attempt

    def progress(self, budget: int = 1024) -> list[Attempt]:
        """Attempts whose state or ``drained`` changed since the last call, at most ``budget``.

        An attempt can appear again when it drains after it failed. Cost does not depend on peers,
        paths or regions that are idle.  After ``close`` it returns what was not collected yet.
        """
        self._progressing = True
        try:
            if not self.closed:
                self._advance(budget)
        finally:
            self._progressing = False
        changed = self._changed
        if not changed:
            return []
        return [changed.popleft() for _ in range(min(budget, len(changed)))]

    @final
    def fence(self, peer: Peer) -> Pollable[Fence]:
        """Ask for the proof that nothing of this peer's incarnation lands any more."""
        return self._until_fenced(peer, self._fence)

    @final
    def disconnect(self, peer: Peer) -> Pollable[Fence]:
        """Close ``peer`` and its paths; every pending attempt on it is failed by our own ledger.

        Those attempts are reported through ``progress`` like any other. Idempotent.
        """
        if not peer.closed:
            peer.closed = True
            # A path that was closed earlier may still have attempts in flight.
            for path in dict.fromkeys([*peer.paths, *self._paths_of(peer)]):
                self._fail_pending(path, "the connection was closed")
                path.close()
        return self._until_fenced(peer, self._disconnect)

    def close(self, deadline: float = 5.0) -> list[Attempt]:
        """Close everything within ``deadline`` seconds; returns what was not drained by then.

        The one call that may come from any thread: where another one is inside ``progress``, it
        waits for that first, at least for ``PROGRESS_GRACE_S``.
        """
        if self.closed:
            return []
        end = time.monotonic() + deadline
        self.closed = True
        left: list[Attempt] = []
        for path in tuple(self._paths):
            self._fail_pending(path, "the transport was closed")
        self._let_progress_end(max(deadline, PROGRESS_GRACE_S))
        self._close(max(0.0, end - time.monotonic()))
        self._registered.clear()
        for path in tuple(self._paths):
            left.extend(a for a in tuple(path.undrained) if not a.drained)
        return left

    # ---- inside ----------------------------------------------------------------------------

    def _let_progress_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._progressing and time.monotonic() < end:
            time.sleep(0.0005)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the {self.name} transport is closed")

    def _require_registered(self, region: Region) -> None:
        if region not in self._registered:
            raise StaleError(
                f"the local region at {region.span.address:#x} ({region.nbytes} bytes) is not "
                "registered with this transport, or not any more",
                next_step="register it and prepare a new path",
            )

    def _paths_of(self, peer: Peer) -> list[Path]:
        return [path for path in tuple(self._paths) if path.peer is peer]

    def _closed_answer(self) -> tuple[None, KvxferError]:
        return None, ClosedError(f"the {self.name} transport was closed")

    def _until_fenced(self, peer: Peer, ask: Callable[[Peer], Pollable[Fence]]) -> Pollable[Fence]:
        def after_close() -> tuple[Fence, None]:
            return self._fence_after_close(peer), None

        if self.closed:
            return Ready(self._fence_after_close(peer))
        return _UntilClosed(ask(peer), self, after_close)

    def _fence_after_close(self, peer: Peer) -> Fence:
        left = sum(
            not attempt.drained
            for path in self._paths_of(peer)
            for attempt in tuple(path.undrained)
        )
        reason = f"{left} attempts were not drained when the transport was closed" if left else ""
        return Fence(done=not left, reason=reason, source_done=self._engine_ended or not left)

    def _fail_pending(self, path: Path, why: str) -> None:
        for attempt in tuple(path.undrained):
            if attempt.state is AttemptState.PENDING and attempt.fail(
                EngineError(backend=self.name, message=why), accepted=Accepted.UNKNOWN
            ):
                self._report(attempt)

    def _check_supported(self, op: Op, path: Path, batch: Batch) -> None:
        caps = self.capabilities
        if len(batch) > caps.max_pieces or batch.nbytes > caps.max_nbytes:
            raise InvalidInputError(
                f"{len(batch)} pieces of {batch.nbytes} bytes exceed what one post of {self.name} "
                f"takes ({caps.max_pieces} pieces, {caps.max_nbytes} bytes)",
                next_step="cut the batch",
            )
        if all(caps.supports(op, a, b) for a, b in set(path.kinds)):
            path.works_for.append(op)
            path.max_pieces, path.max_nbytes = caps.max_pieces, caps.max_nbytes
            return
        for local, remote in {path.kinds[p] for p in batch.used_pairs}:
            if not caps.supports(op, local, remote):
                raise InvalidInputError(
                    f"{self.name} cannot {op.value} between local {local.value} and remote "
                    f"{remote.value} memory"
                )
