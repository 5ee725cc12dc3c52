"""Links: what one agent knows of one incarnation of a peer, and how to reach it.

A link goes through: dial, hello, transport connected, and, once somebody wants to post, path
prepared.  Every stage is bounded by ``Timeouts.connect``; a link that fails tells its waiters and
leaves the table, so that the next submit starts a fresh handshake.  A peer that restarted is a new
link: nothing of the old one is reused.

A path that failed is prepared anew.  If that did not help, or cannot be done, the connection is
made anew as well, on both sides.  Both are charged to the peer's circuit breaker: when it opens,
the link fails, and transfers to that peer fail at once until the pause is over.  With failover on,
the link moves to the peer's next backend instead, as long as there is one (``switching``).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from kvxfer.agent.fencing import ConnectAndFence
from kvxfer.agent.mapping import LinkLayers, match_link
from kvxfer.agent.poster import Poster
from kvxfer.agent.switching import Switching
from kvxfer.core import wire
from kvxfer.core.events import PeerDown, PeerUp
from kvxfer.core.observations import BreakerClosed, BreakerOpened, ConnectFailed, PeerSuspected
from kvxfer.core.verdict import Action
from kvxfer.errors import (
    CircuitOpenError,
    ErrorKind,
    GeometryError,
    HandshakeError,
    InvalidInputError,
    KvxferError,
    PeerLostError,
    StaleError,
    TransportError,
)
from kvxfer.policies.timeouts import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.caches import Caches
    from kvxfer.agent.context import Steppable
    from kvxfer.agent.hello import PeerHello
    from kvxfer.agent.linktable import LinkTable
    from kvxfer.agent.mailbox import Mailbox
    from kvxfer.core.memory import Descriptor, Region
    from kvxfer.core.pollable import Pollable
    from kvxfer.core.topology import Ranks
    from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
    from kvxfer.policies.retry import Decision, RetryRun

__all__ = ["Link", "LinkState"]


class LinkState(enum.Enum):
    """How far a link has come. UP: hello accepted and transport connected."""

    HELLO = "hello"
    CONNECTING = "connecting"
    UP = "up"
    FAILED = "failed"
    CLOSED = "closed"


@attrs.define
class PathState:
    """The prepared path of a link, if any. ``generation`` rises with every rebuild."""

    generation: int = 0
    path: Path | None = None
    pending: Pollable[Path] | None = None
    not_before: float = 0.0
    run: RetryRun | None = None
    deadline: float | None = None
    wanted: bool = False
    failures: int = 0
    """Paths that failed since something last arrived over one."""


_CHARGED = frozenset(
    {
        ErrorKind.CONNECTION,
        ErrorKind.HANDSHAKE,
        ErrorKind.PEER_LOST,
        ErrorKind.TIMEOUT,
        ErrorKind.UNKNOWN,
    }
)
"""Links that failed in these ways count as faults of the peer. A peer that restarted or was fenced
(STALE) has a reason of its own, and another life is another breaker."""

_MOVED_FOR = _CHARGED | {ErrorKind.RESOURCE}
"""What a call gives up for, where another backend may do better. Not for room in a queue: that an
engine is busy is no reason to storm the next one."""


class Link:
    """One incarnation of one peer. Used on the progress thread only."""

    def __init__(
        self,
        table: LinkTable,
        *,
        mailbox: Mailbox,
        expected: str | None,
        now: float,
    ) -> None:
        self._table = table
        self._ctx = table.ctx
        self.mailbox = mailbox
        mailbox.users += 1
        self.expected = expected
        """The incarnation we were told to reach; None: whoever answers there."""
        self.state = LinkState.HELLO
        self.hello: PeerHello | None = None
        self.version = self._ctx.config.wire_versions[0]
        """The wire version both sides speak, once the peer said hello."""
        self.error: KvxferError | None = None
        self.transport: Transport | None = None
        self.peer: Peer | None = None
        self.paths = PathState()
        self.poster = Poster(self._ctx, self)
        self.layers = LinkLayers()
        self.reader: tuple[Ranks, Ranks, int, frozenset[int]] | None = None
        """What the producer made of both sides' ranks, and of which."""
        self._caches: Caches | None = None
        self._connecting: Pollable[Peer] | None = None
        self._connect_run: RetryRun | None = None
        self._connect_at = now
        self._waiters: dict[Steppable, None] = {}
        self._deadline = now + self._ctx.timeouts.connect
        self._hello_at = now
        self._hello_interval = 0.02
        self._greet_until = 0.0
        self._suspect_until: float | None = None
        self._suspicion = ""
        self.keeper: wire.KeeperWire | None = None
        """Where the peer's keeper is reached; None from a peer that cannot have one."""
        self._announced = False
        self.allowed = False
        """The circuit breaker let this link through."""
        self._greeting = False
        """What we know of the peer is out of date: nothing is tried before its next hello."""
        self._old_peers: list[Peer] = []
        """Connections that were left while something was in flight on them."""
        self._used: dict[str, PeerInfo] = {}
        """The backends over which the peer may have reached into our memory, and how they are
        reached."""
        self.switching: Switching | None = None
        """Failover; None: off, or the two sides have one backend in common."""
        self._kept: dict[str, Peer] = {}
        """Connections over backends that are not in use, by name."""
        self._unwanted: list[tuple[Transport, Pollable[Peer]]] = []
        """What was being connected when the link moved on."""
        self.session = table.next_session()

    def __repr__(self) -> str:
        return f"<Link {self.address or 'inbound'} {self.incarnation} {self.state.value}>"

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation if self.hello is not None else (self.expected or "")

    @property
    def address(self) -> str:
        """Where it was dialled, or where it says it can be dialled, or empty."""
        return self.mailbox.address or (self.hello.address if self.hello is not None else "")

    def letterbox(self) -> Mailbox:
        """Where mail for the peer goes, also once the link has ended.

        Raises:
            InvalidInputError: it has ended, and the peer never said where it can be dialled.
            CapacityError: too many peers.
        """
        if self.usable:
            return self.mailbox
        box = self._table.mailboxes.dial(self.address)
        if not box.users:
            box.version = self.version  # known from its hello
        return box

    @property
    def breaker(self) -> str:
        """The name of this peer's circuit breaker: its incarnation, or where it was dialled."""
        return self.incarnation or self.mailbox.address

    @property
    def usable(self) -> bool:
        return self.state not in (LinkState.FAILED, LinkState.CLOSED)

    @property
    def up(self) -> bool:
        return self.state is LinkState.UP

    @property
    def answers(self) -> bool:
        """Up, or on its way back there: leases are renewed while a backend is changed."""
        return self.up or (self._announced and self.usable)

    @property
    def knows_layers(self) -> bool:
        """Up, and both sides have registered caches: plans can be made."""
        return (
            self.up
            and self.hello is not None
            and bool(self.hello.layers)
            and self._caches is not None
            and bool(self._caches.layers)
        )

    def when_changed(self, waiter: Steppable) -> None:
        """Step ``waiter`` whenever the state or the path of this link changes."""
        self._waiters[waiter] = None

    def unwatch(self, waiter: Steppable) -> None:
        self._waiters.pop(waiter, None)

    @property
    def watched(self) -> bool:
        return bool(self._waiters)

    def _changed(self) -> None:
        for waiter in self._waiters:
            self._ctx.soon(waiter)

    # ---- stages ------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Move on as far as possible; called when due."""
        if not self.usable:
            return
        if self.state is LinkState.HELLO:
            self._say_hello(now)
        elif self._greeting:
            self._greet(now)
            return
        if self.state is LinkState.CONNECTING:
            self._connect(now)
        if self.state is LinkState.UP and self._suspect_until is not None:
            self._check_suspect(now)
        if self.state is LinkState.UP and self.paths.wanted:
            self._prepare(now)

    def _say_hello(self, now: float) -> None:
        if now >= self._deadline:
            self.fail(
                HandshakeError(
                    f"no answer from {self.address or 'the peer'} within "
                    f"{self._ctx.timeouts.connect} s",
                    next_step="check that the peer runs, its address, and the fingerprint",
                ),
                now,
            )
            return
        if now >= self._hello_at:
            self.mailbox.send(self._hello_message())
            self._hello_at = now + self._hello_interval
            self._hello_interval = min(self._hello_interval * 2, 0.5)
        self._ctx.at(self, min(self._hello_at, self._deadline))

    def on_hello(self, hello: PeerHello, now: float) -> None:
        """The peer introduced itself, first or in answer."""
        if self.hello is not None:
            if hello.incarnation == self.hello.incarnation:
                self._suspect_until = None
                if self._greeting:
                    self._greeting = False
                    self._ctx.soon(self)
                self._refresh(hello, now)
            return
        if self.expected is not None and hello.incarnation != self.expected:
            self.fail(
                StaleError(
                    f"{self.address} is now incarnation {hello.incarnation}, not {self.expected}: "
                    "the peer restarted and what it held is gone",
                    next_step="use the new incarnation's offers",
                ),
                now,
            )
            return
        self.hello = hello
        self._remember_used(hello)
        try:
            self._table.local.check(hello)
            common = self._table.local.common(hello)
            self.transport = common[0]
            self._match(hello)
        except (HandshakeError, GeometryError, InvalidInputError) as error:
            self.mailbox.send(wire.HelloRefused(self._table.local.versions, str(error)[:4096]))
            self.fail(error, now)
            return
        if self.mailbox.address:
            self._breaker_proved(self.mailbox.address, now)
        policy = self._ctx.config.failover
        if policy is not None and len(common) > 1:
            self.switching = Switching(self._ctx, self, policy, common)
        self.version = wire.common_version(self._table.local.versions, hello.versions) or 0
        self.mailbox.version = self.version
        self.state = LinkState.CONNECTING
        self._ctx.soon(self)

    def _remember_used(self, hello: PeerHello) -> None:
        """Also what a later hello leaves out: an engine that ended may have sent bytes before."""
        for transport in hello.used(self._table.local.transports):
            self._used[transport.name] = hello.infos[transport.name]

    def _hello_message(self) -> wire.Hello:
        return self._table.local.message(answer=False, session=self.session)

    def _refresh(self, hello: PeerHello, now: float) -> None:
        """The same incarnation again: it may have registered caches, or want a new connection."""
        assert self.hello is not None
        renewed = hello.session > self.hello.session
        if not renewed and hello.revision <= self.hello.revision:
            return
        self.hello = hello
        self._remember_used(hello)
        try:
            self._match(hello)
        except (GeometryError, InvalidInputError) as error:
            self.fail(error, now)
            return
        self.drop_path(now)
        if self.switching is not None:
            self.switching.peer_changed(now)
        if renewed and self.up:
            self._reconnect(now)
        self._ctx.soon(self)
        self._changed()

    def _reconnect(self, now: float) -> None:
        """The peer's side of the connection is new: so must be ours."""
        assert self.transport is not None
        if self.peer is not None:
            self.transport.disconnect(self.peer)
            self._old_peers = [*self.left_peers(), self.peer]
            self.peer = None
        self._connect_anew(now)
        self._ctx.counters.count("peers.reconnected")

    def _connect_anew(self, now: float) -> None:
        self.state = LinkState.CONNECTING
        self._connecting = self._connect_run = None
        self._connect_at = now
        self._deadline = now + self._patience

    @property
    def _patience(self) -> float:
        """Seconds to connect or prepare anew: fewer where another backend could be used."""
        seconds = self._ctx.timeouts.connect
        return seconds if self.switching is None else min(seconds, self.switching.patience)

    # ---- other backends ----------------------------------------------------------------------

    def use(self, transport: Transport, now: float, *, broken: bool) -> None:
        """Go on over another backend. ``broken``: what is in flight over the one before is lost.

        Otherwise it may end in peace.  Parts wait until nothing of the one before can touch their
        memory (``Part.waits_elsewhere``).
        """
        assert self.transport is not None
        before = self.transport
        self.drop_path(now)
        self.poster.leave_thread()
        if self._connecting is not None:
            self._unwanted.append((before, self._connecting))
        if self.peer is not None:
            self._old_peers = [*self.left_peers(), self.peer]
            if broken:
                before.disconnect(self.peer)
            else:
                self._kept[before.name] = self.peer
        self.transport = transport
        self.peer = None
        self._greeting = False
        self.paths.failures = 0
        self._connect_anew(now)
        self._ctx.soon(self)
        self._changed()

    def close_unwanted(self) -> None:
        """Close connections that came up when nobody wanted them any more."""
        still = []
        for transport, connecting in self._unwanted:
            peer, error = connecting.poll()
            if peer is not None:
                transport.disconnect(peer)
            elif error is None:
                still.append((transport, connecting))
        self._unwanted = still

    def keep(self, peer: Peer) -> None:
        """``peer`` is connected over a backend that is not in use; it is for the next switch."""
        self._kept[peer.transport.name] = peer

    def kept(self, backend: str) -> Peer | None:
        """A connection over that backend that is not in use, if there is one and it is open."""
        peer = self._kept.get(backend)
        return None if peer is None or peer.closed else peer

    def drop_kept(self, backend: str) -> None:
        peer = self._kept.pop(backend, None)
        if peer is not None:
            peer.transport.disconnect(peer)

    def _backend_failed(self, error: KvxferError, now: float) -> None:
        """The backend in use cannot reach the peer: the next one, or none."""
        if not self._moved(error, now):
            self.fail(error, now)

    def gave_up(self, error: KvxferError, now: float) -> bool:
        """A call can do no more over the backend in use; True if the link has moved to another."""
        return error.kind in _MOVED_FOR and self.usable and self._moved(error, now)

    def too_late(self, error: KvxferError, now: float) -> None:
        """A part was not complete in time. It is lost; others may be better off elsewhere."""
        if self.switching is not None and self.usable:
            self.switching.fault(error, now)

    def _match(self, hello: PeerHello) -> None:
        """Pair our layers with theirs, as far as both have registered any."""
        self._caches = self._table.local.caches
        self.layers = match_link(self._caches, self._table.local.ranks, hello.layers, hello.ranks)

    @property
    def peers_to_fence(self) -> list[Peer]:
        """The connection, and earlier ones on which something may still be in flight."""
        return [*self.left_peers(), *([self.peer] if self.peer is not None else [])]

    def left_peers(self) -> list[Peer]:
        """Connections that were left and on which something may still be in flight."""
        if self._old_peers:
            self._old_peers = [
                p
                for p in self._old_peers
                if p is not self.peer and any(x.undrained for x in p.transport._paths_of(p))
            ]
        return self._old_peers

    def begin_fences(
        self, *, they_write: bool, over: frozenset[str] | None, also: Sequence[Peer] = ()
    ) -> tuple[list[Pollable[Fence]], list[str]]:
        """Ask for the proof that nothing of that peer lands any more, and why some cannot be asked.

        ``they_write``: nothing that the peer writes, over any backend that it may use.  ``over``:
        only over these.  ``also``: connections on which something of ours is not proven to be over,
        whether or not we still know them.
        """
        if not they_write:
            known = dict.fromkeys([*self.peers_to_fence, *also])
            peers = [p for p in known if over is None or p.transport.name in over]
            return [peer.transport.fence(peer) for peer in peers], []
        fences: list[Pollable[Fence]] = []
        if self.hello is None:
            return fences, [f"no connection to {self.incarnation} that could be fenced"]
        unknown = (over or frozenset()) - set(self._used)
        if unknown:
            return fences, [f"it wrote over {', '.join(sorted(unknown))}, which we do not share"]
        connected = [*self.peers_to_fence, *self._kept.values()]
        for transport in self._table.local.transports:
            if transport.name not in self._used or (
                over is not None and transport.name not in over
            ):
                continue
            peers = [peer for peer in connected if peer.transport is transport]
            try:
                fences += [transport.fence(peer) for peer in peers] or [
                    ConnectAndFence(transport, self._used[transport.name])
                ]
            except KvxferError as error:
                return fences, [f"{transport.name} cannot be fenced: {error}"]
        return fences, []

    def fenced(self, over: frozenset[str] | None, now: float) -> None:
        """Its connections over these backends, or all, were fenced: they carry nothing any more.

        Over the backend in use the two sides have to meet anew, unless they can go on over another.
        """
        for backend in tuple(self._kept):
            if over is None or backend in over:
                self.drop_kept(backend)
        if over is not None and (self.transport is None or self.transport.name not in over):
            return
        error = StaleError(f"{self!r} was fenced")
        if over is None or not self.usable or not self._moved(error, now):
            self.fail(error, now)

    def _moved(self, error: KvxferError, now: float) -> bool:
        """Whether the link has left the backend in use, which cannot be used at all."""
        return self.switching is not None and bool(self.switching.fault(error, now, final=True))

    def _renew(self, now: float) -> None:
        """Make the connection anew, on both sides: the peer does the same on our next hello."""
        self.session = self._table.next_session()
        self._reconnect(now)
        self._ask_for_hello(now)

    def _ask_for_hello(self, now: float) -> None:
        """What we know of the peer is out of date: nothing is tried before it said hello again."""
        if not self._greeting:
            self._greeting = True
            self._greet_until = now + self._ctx.timeouts.connect
            self._hello_at, self._hello_interval = now, 0.02
            self._ctx.counters.count("peers.greeted_again")
        self._ctx.soon(self)

    def _greet(self, now: float) -> None:
        if now >= self._greet_until:
            seconds = self._ctx.timeouts.connect
            error = PeerLostError(f"{self!r}: asked to say hello again, it did not in {seconds} s")
            self.fail(error, now)
            return
        if now >= self._hello_at:
            self.mailbox.send(self._hello_message())
            self._hello_at = now + self._hello_interval
            self._hello_interval = min(self._hello_interval * 2, 0.5)
        self._ctx.at(self, min(self._hello_at, self._greet_until))

    def caches_changed(self, now: float) -> None:
        """We registered other caches: pair again, tell the peer, prepare a new path."""
        if self.hello is None or not self.usable:
            return
        try:
            self._match(self.hello)
        except (GeometryError, InvalidInputError) as error:
            self.fail(error, now)
            return
        self.mailbox.mail(self._hello_message(), now=now, until=now + self._ctx.timeouts.ack)
        self.drop_path(now)
        self._ctx.soon(self)
        self._changed()

    def readdressed(self, now: float) -> None:
        """Our engine's addresses are new: tell the peer. Our own path goes on."""
        if self.hello is not None and self.usable:
            self.mailbox.mail(self._hello_message(), now=now, until=now + self._ctx.timeouts.ack)

    def suspect(self, now: float) -> None:
        """The connection dropped. The peer has ``Timeouts.connect`` to say hello again."""
        self._suspect("the connection dropped", self._ctx.timeouts.connect, now)

    def quiet(self, within: float, now: float) -> None:
        """Its keeper is not heard of: dead with it, or dead alone. It has ``within`` seconds."""
        self._suspect("its keeper was not heard of", within, now)

    def _suspect(self, why: str, within: float, now: float) -> None:
        if self.state is not LinkState.UP:
            return
        if self._suspect_until is None:
            self._suspect_until = now + within
            self._hello_at, self._hello_interval = now, 0.02
            self._ctx.counters.count("peers.suspected")
            if self._ctx.observers:
                self._ctx.observe(PeerSuspected(peer=self.incarnation, reason=why))
        elif now + within >= self._suspect_until:
            return
        self._suspect_until, self._suspicion = now + within, why
        self._ctx.soon(self)

    def learn_keeper(self, keeper: wire.KeeperWire | None) -> None:
        """The peer said where its keeper is reached; an older word is ignored."""
        known = self.keeper
        if known is None or (keeper is not None and keeper.generation >= known.generation):
            self.keeper = keeper
        self._ctx.keeping.met(self)

    def _check_suspect(self, now: float) -> None:
        assert self._suspect_until is not None
        if now >= self._suspect_until:
            if not self._ctx.keeping.hears(self.incarnation):
                error = PeerLostError(f"{self!r}: {self._suspicion} and nobody came back")
                self.fail(error, now)
                return
            # The process lives and cannot answer itself: its GIL is held, or it is stopped.
            self._suspect_until = now + self._ctx.timeouts.connect
            self._ctx.counters.count("peers.busy")
        if now >= self._hello_at:
            self.mailbox.send(self._hello_message())
            self._hello_at = now + self._hello_interval
            self._hello_interval = min(self._hello_interval * 2, 0.5)
        self._ctx.at(self, min(max(self._hello_at, now + 1e-3), self._suspect_until))

    def engine_ended(self, peer: Peer, now: float) -> bool:
        """One engine saw its peer end. True if that ends the link.

        Where the two sides may use several, it says nothing of the others: the peer's process has
        to answer, or the link fails.
        """
        if self.hello is None or not self.usable:
            return False
        used = set(self._used)
        used.update(() if self.switching is None else self.switching.order)
        if len(used | {peer.transport.name}) < 2:
            return peer is self.peer
        self._suspect(f"its {peer.transport.name} engine ended", self._ctx.timeouts.connect, now)
        if peer is not self.peer:
            self.drop_kept(peer.transport.name)
        elif self.switching is not None:
            error = PeerLostError(f"{self!r}: its {peer.transport.name} engine has ended")
            self.switching.fault(error, now, final=True)
        return False

    def has(self, peer: Peer) -> bool:
        """Whether that is a connection of this link."""
        return peer is self.peer or self._kept.get(peer.transport.name) is peer

    def _connect(self, now: float) -> None:
        assert self.hello is not None
        assert self.transport is not None
        if self._connecting is None:
            if now < self._connect_at:
                self._ctx.at(self, self._connect_at)
                return
            if not self._pass_breaker(now):
                return
            kept = self._kept.pop(self.transport.name, None)
            if kept is not None and not kept.closed:
                self._connected(kept)
                return
            info = self.hello.infos.get(self.transport.name)
            if info is None:
                gone = HandshakeError(f"{self!r} does not offer {self.transport.name} any more")
                self._backend_failed(gone, now)
                return
            try:
                self._connecting = self.transport.connect(info)
            except KvxferError as error:
                self._connect_failed(error, now)
                return
        peer, failure = self._connecting.poll()
        if failure is not None:
            self._connecting = None
            self._connect_failed(failure, now)
        elif peer is not None:
            self._connecting = None
            self._connected(peer)
        elif now >= self._deadline:
            late = HandshakeError(f"{self!r}: {self.transport.name} did not connect in time")
            self._backend_failed(late, now)
        else:
            self._ctx.at(self, now + self._ctx.config.pump_interval)

    def _connected(self, peer: Peer) -> None:
        self.peer = peer
        self.state = LinkState.UP
        if not self._announced:
            self._announced = True
            self._ctx.counters.count("peers.up")
            self._ctx.log.news("peer_up", "peer %s is up", self.address, peer=self.incarnation)
            self._ctx.emit(PeerUp(peer=self.incarnation, address=self.address))
        self._changed()

    def _pass_breaker(self, now: float) -> bool:
        """Whether the network may be touched.

        A peer that dialled us while it is left alone keeps its link: it can still read from us, for
        which we need no connection to it.
        """
        if self.allowed or self._ctx.breakers.allows(self.breaker, now):
            self.allowed = True
            return True
        free_at = now + self._ctx.breakers.wait(self.breaker, now)
        self._deadline = free_at + self._ctx.timeouts.connect
        self._ctx.at(self, free_at)
        return False

    def _connect_failed(self, error: KvxferError, now: float) -> None:
        """Try again as the retry policy says, until the connect deadline."""
        if self._connect_run is None:
            self._connect_run = self._ctx.retry.start(
                now, self._deadline, self._ctx.rng, phase=Phase.CONNECT
            )
        decision = self._decide(self._connect_run, error, now)
        if not decision.again:
            self._backend_failed(error, now)
            return
        if decision.action is Action.REHANDSHAKE:
            # It may have to let us in first, and does when it hears of us.
            self.mailbox.send(self._hello_message())
        self._connect_at = decision.at
        self._ctx.at(self, decision.at)

    def _decide(self, run: RetryRun, error: KvxferError, now: float) -> Decision:
        verdict = self._ctx.classifier.classify_exception(
            error, backend=self.transport.name if self.transport else "kvxfer", op=None
        )
        decision = run.after(verdict, now, str(error))
        if decision.again:
            self._ctx.counters.count(f"connect.retried.{verdict.kind.value}")
        if self._ctx.observers:
            self._ctx.observe(
                ConnectFailed(
                    peer=self.incarnation,
                    kind=verdict.kind,
                    again=decision.again,
                    delay=max(0.0, decision.at - now) if decision.again else 0.0,
                    message=str(error),
                )
            )
        return decision

    # ---- the path ----------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        return self.paths.path

    def want_path(self, now: float) -> None:
        """Somebody is going to post: prepare a path unless there is one."""
        if not self.paths.wanted:
            self.paths.wanted = True
            self._ctx.soon(self)

    def _prepare(self, now: float) -> None:
        state = self.paths
        if state.path is not None or not self.knows_layers or not self.layers.regions:
            return  # there, or nothing to pair: a later hello may change that
        if state.deadline is None:
            state.deadline = now + (
                self._patience if state.generation else self._ctx.timeouts.connect
            )
        assert self.transport is not None
        assert self.peer is not None
        if state.pending is None:
            if now < state.not_before:
                self._ctx.at(self, state.not_before)
                return
            try:
                state.pending = self.transport.prepare(self.peer, self._region_pairs())
            except KvxferError as error:
                self._prepare_failed(error, now)
                return
        path, failure = state.pending.poll()
        if failure is not None:
            state.pending = None
            self._prepare_failed(failure, now)
        elif path is not None:
            state.pending = None
            state.run = None
            state.path = path
            state.generation += 1
            self._changed()
        elif now >= state.deadline:
            state.pending = None
            late = HandshakeError(f"{self!r}: the path was not prepared in time")
            self._backend_failed(late, now)
        else:
            self._ctx.at(self, now + self._ctx.config.pump_interval)

    def _prepare_failed(self, error: KvxferError, now: float) -> None:
        state = self.paths
        assert state.deadline is not None
        if state.run is None:
            state.run = self._ctx.retry.start(
                now, state.deadline, self._ctx.rng, phase=Phase.CONNECT
            )
        decision = self._decide(state.run, error, now)
        if not decision.again:
            self._backend_failed(error, now)
            return
        state.not_before = decision.at
        self._ctx.at(self, decision.at)
        if decision.action not in (Action.REBUILD, Action.REHANDSHAKE):
            return
        # The connection itself is out of order, or what the peer told us of its memory.
        if self._charge(error, now):
            return
        state.failures += 1
        if decision.action is Action.REBUILD or state.failures > 1:
            self._renew(now)
        else:
            self._ask_for_hello(now)

    def _region_pairs(self) -> list[tuple[Region, Descriptor]]:
        assert self.transport is not None
        assert self._caches is not None
        theirs = self.descriptors_of(self.transport.name)
        if not theirs:
            raise HandshakeError(f"{self!r} does not offer {self.transport.name} any more")
        mine = self._caches.regions[self.transport.name]
        return [(mine[local], theirs[remote]) for local, remote in self.layers.regions]

    def descriptors_of(self, backend: str) -> tuple[Descriptor, ...]:
        """The peer's memory, as that backend addresses it."""
        return () if self.hello is None else self.hello.descriptors.get(backend, ())

    def path_failed(
        self, now: float, generation: int, error: KvxferError, *, greet: bool = False
    ) -> None:
        """What went over the path of ``generation`` failed for a reason that lies in the path.

        Once per path: whoever else was on it failed for the same reason.  ``greet``: the peer has
        to say hello again first.
        """
        state = self.paths
        if generation != state.generation or state.path is None or not self.usable:
            return
        self.drop_path(now)
        state.failures += 1
        # A queue that only never empties has cost a run of refusals: that storms nobody.
        stuck = error.kind is ErrorKind.BACKPRESSURE
        if not stuck and self._charge(error, now):
            return
        if stuck or state.failures > 1:
            self._renew(now)
        elif greet:
            self._ask_for_hello(now)

    def proved(self, now: float) -> None:
        """Something arrived over the path."""
        self.paths.failures = 0
        if self.switching is not None:
            self.switching.arrived()
        self._breaker_proved(self.breaker, now)

    def _breaker_proved(self, name: str, now: float) -> None:
        if not self._ctx.breakers.success(name, now):
            return
        self._ctx.counters.count("breakers.closed")
        self._ctx.log.news("breaker_closed", "peer %s is used again", name, peer=name)
        if self._ctx.observers:
            self._ctx.observe(BreakerClosed(peer=name))

    def _charge(self, error: KvxferError, now: float) -> bool:
        """Count a fault; True if it was one too many: the link has moved, or has failed."""
        if self.switching is not None and self.usable:
            moved = self.switching.fault(error, now)
            if moved is not None:
                return moved
        return self._charge_peer(error, now)

    def _charge_peer(self, error: KvxferError, now: float) -> bool:
        """Count a fault of the peer; True if that was one too many and the link has failed."""
        self._ctx.counters.count("breakers.faults")
        if not self._ctx.breakers.fault(self.breaker, now, str(error), error.kind):
            return False
        self._ctx.counters.count("breakers.opened")
        self._ctx.log.problem(
            "breaker_opened",
            "peer %s failed too often and is left alone for %.1f s: %s",
            self.breaker,
            self._ctx.breakers.wait(self.breaker, now),
            error,
            peer=self.breaker,
            kind=error.kind.value,
        )
        if self._ctx.observers:
            self._ctx.observe(BreakerOpened(peer=self.breaker, kind=error.kind, reason=str(error)))
        if self.usable:
            self.fail(self._table.circuit_open(self.breaker, now), now)
        return True

    def drop_path(self, now: float) -> None:
        """Have the path prepared anew."""
        state = self.paths
        if state.path is not None:
            state.path.close()
            state.path = None
            self.poster.path_dropped()
            self._ctx.counters.count("paths.rebuilt")
        state.deadline = state.run = state.pending = None
        if state.wanted:
            self._ctx.soon(self)

    # ---- the end -----------------------------------------------------------------------------

    def fail(self, error: KvxferError, now: float) -> None:
        """The peer cannot be used any more; waiters see ``error``."""
        if not self.usable:
            return
        # Also while its connection is made anew: whoever heard of it coming hears of it going.
        was_up = self._announced
        self.error = error
        self.state = LinkState.FAILED
        kind = self.kind_of_failure()
        self._ctx.counters.count(f"peers.failed.{kind.value}")
        if kind in _CHARGED and not isinstance(error, CircuitOpenError):
            self._charge_peer(error, now)
        else:
            self._ctx.breakers.unproven(self.breaker)
        self._ctx.log.problem(
            "peer_down" if was_up else "peer_unreachable",
            "peer %s failed: %s",
            self.address,
            error,
            peer=self.incarnation,
            kind=kind.value,
        )
        if was_up:
            self._ctx.emit(PeerDown(peer=self.incarnation, reason=str(error)))
        self._end()

    def close(self, reason: str) -> None:
        """In good order."""
        if not self.usable:
            return
        was_up = self._announced
        self._ctx.breakers.unproven(self.breaker)
        self.error = StaleError(reason)
        self.state = LinkState.CLOSED
        if was_up:
            self._ctx.log.news(
                "peer_closed", "peer %s: %s", self.address, reason, peer=self.incarnation
            )
            self._ctx.emit(PeerDown(peer=self.incarnation, reason=reason))
        self._end()

    def _end(self) -> None:
        self._table.drop(self)
        self.poster.link_ended()
        if self.peer is not None and self.transport is not None:
            # Fails what is pending by the transport's own ledger; drained is told separately.
            self.transport.disconnect(self.peer)
        for backend in tuple(self._kept):
            self.drop_kept(backend)
        self.close_unwanted()
        if self.switching is not None:
            self.switching.close()
        if self.hello is not None:
            self._ctx.keeping.parted(self.incarnation)
        self._ctx.forget(self)
        self._changed()
        self._waiters.clear()
        self.mailbox.link_ended(self.address, self._ctx.clock.now())

    def kind_of_failure(self) -> ErrorKind:
        """For transfers that depended on this link."""
        if isinstance(self.error, TransportError):
            return self.error.kind
        return ErrorKind.HANDSHAKE
