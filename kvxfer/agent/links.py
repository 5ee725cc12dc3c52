"""Links: what one agent knows of one incarnation of a peer, and how to reach it.

A link goes through: dial, hello, transport connected, and, once somebody wants to post, path
prepared.  Every stage is bounded by ``Timeouts.connect``; a link that fails tells its waiters and
leaves the table, so that the next submit starts a fresh handshake.  A peer that restarted is a new
link: nothing of the old one is reused.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from kvxfer.agent.mapping import LinkLayers, match_link
from kvxfer.agent.poster import Poster
from kvxfer.core import wire
from kvxfer.core.events import PeerDown, PeerUp
from kvxfer.errors import (
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
    from kvxfer.agent.caches import Caches
    from kvxfer.agent.context import Steppable
    from kvxfer.agent.hello import PeerHello
    from kvxfer.agent.linktable import LinkTable
    from kvxfer.agent.mailbox import Mailbox
    from kvxfer.core.memory import Descriptor, Region
    from kvxfer.core.pollable import Pollable
    from kvxfer.core.transport import Path, Peer, Transport
    from kvxfer.policies.retry import RetryRun

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
        self.error: KvxferError | None = None
        self.transport: Transport | None = None
        self.peer: Peer | None = None
        self.paths = PathState()
        self.poster = Poster(self._ctx, self)
        self.layers = LinkLayers()
        self._caches: Caches | None = None
        self._connecting: Pollable[Peer] | None = None
        self._connect_run: RetryRun | None = None
        self._connect_at = now
        self._waiters: dict[Steppable, None] = {}
        self._deadline = now + self._ctx.timeouts.connect
        self._hello_at = now
        self._hello_interval = 0.02
        self._suspect_until: float | None = None
        self._announced = False
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

    @property
    def usable(self) -> bool:
        return self.state not in (LinkState.FAILED, LinkState.CLOSED)

    @property
    def up(self) -> bool:
        return self.state is LinkState.UP

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
        try:
            self._table.local.check(hello)
            self.transport = self._table.local.choose(hello)
            self._match(hello)
        except (HandshakeError, GeometryError, InvalidInputError) as error:
            self.mailbox.send(wire.HelloRefused((wire.WIRE_MIN, wire.WIRE_MAX), str(error)[:4096]))
            self.fail(error, now)
            return
        self.state = LinkState.CONNECTING
        self._ctx.soon(self)

    def _hello_message(self) -> wire.Hello:
        return self._table.local.message(answer=False, session=self.session)

    def _refresh(self, hello: PeerHello, now: float) -> None:
        """The same incarnation again: it may have registered caches, or want a new connection."""
        assert self.hello is not None
        renewed = hello.session > self.hello.session
        if not renewed and hello.revision <= self.hello.revision:
            return
        self.hello = hello
        try:
            self._match(hello)
        except (GeometryError, InvalidInputError) as error:
            self.fail(error, now)
            return
        self.drop_path(now)
        if renewed and self.up:
            self._reconnect(now)
        self._ctx.soon(self)
        self._changed()

    def _reconnect(self, now: float) -> None:
        """The peer's side of the connection is new: so must be ours."""
        assert self.transport is not None
        if self.peer is not None:
            self.transport.disconnect(self.peer)
            self.peer = None
        self.state = LinkState.CONNECTING
        self._connecting = self._connect_run = None
        self._connect_at = now
        self._deadline = now + self._ctx.timeouts.connect
        self._ctx.counters.count("peers.reconnected")

    def _match(self, hello: PeerHello) -> None:
        """Pair our layers with theirs, as far as both have registered any."""
        self._caches = self._table.local.caches
        self.layers = match_link(self._caches, self._table.local.ranks, hello.layers, hello.ranks)

    def greet_again(self) -> None:
        """What we know of the peer is out of date: have it introduce itself again."""
        self.mailbox.send(self._hello_message())

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

    def suspect(self, now: float) -> None:
        """The connection dropped. The peer has ``Timeouts.connect`` to say hello again."""
        if self.state is LinkState.UP and self._suspect_until is None:
            self._suspect_until = now + self._ctx.timeouts.connect
            self._hello_at, self._hello_interval = now, 0.02
            self._ctx.counters.count("peers.suspected")
            self._ctx.soon(self)

    def _check_suspect(self, now: float) -> None:
        assert self._suspect_until is not None
        if now >= self._suspect_until:
            self.fail(
                PeerLostError(
                    f"{self!r}: the connection dropped and nobody came back within "
                    f"{self._ctx.timeouts.connect} s"
                ),
                now,
            )
            return
        if now >= self._hello_at and self.mailbox.address:
            self.mailbox.send(self._hello_message())
            self._hello_at = now + self._hello_interval
            self._hello_interval = min(self._hello_interval * 2, 0.5)
        self._ctx.at(self, min(max(self._hello_at, now + 1e-3), self._suspect_until))

    def _connect(self, now: float) -> None:
        assert self.hello is not None
        assert self.transport is not None
        if self._connecting is None:
            if now < self._connect_at:
                self._ctx.at(self, self._connect_at)
                return
            info = self.hello.infos[self.transport.name]
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
            self.peer = peer
            self.state = LinkState.UP
            if not self._announced:
                self._announced = True
                self._ctx.counters.count("peers.up")
                self._ctx.emit(PeerUp(peer=self.incarnation, address=self.address))
            self._changed()
        elif now >= self._deadline:
            self.fail(HandshakeError(f"{self!r}: the transport did not connect in time"), now)
        else:
            self._ctx.at(self, now + self._ctx.config.pump_interval)

    def _connect_failed(self, error: KvxferError, now: float) -> None:
        """Try again as the retry policy says, until the connect deadline."""
        if self._connect_run is None:
            self._connect_run = self._ctx.retry.start(
                now, self._deadline, self._ctx.rng, phase=Phase.CONNECT
            )
        at = self._again(self._connect_run, error, now)
        if at is None:
            self.fail(error, now)
        else:
            self._connect_at = at
            self._ctx.at(self, at)

    def _again(self, run: RetryRun, error: KvxferError, now: float) -> float | None:
        verdict = self._ctx.classifier.classify_exception(
            error, backend=self.transport.name if self.transport else "kvxfer", op=None
        )
        decision = run.after(verdict, now, str(error))
        if decision.again:
            self._ctx.counters.count(f"connect.retried.{verdict.kind.value}")
            return decision.at
        return None

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
            state.deadline = now + self._ctx.timeouts.connect
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
            self.fail(HandshakeError(f"{self!r}: the path was not prepared in time"), now)
        else:
            self._ctx.at(self, now + self._ctx.config.pump_interval)

    def _prepare_failed(self, error: KvxferError, now: float) -> None:
        state = self.paths
        assert state.deadline is not None
        if state.run is None:
            state.run = self._ctx.retry.start(
                now, state.deadline, self._ctx.rng, phase=Phase.CONNECT
            )
        at = self._again(state.run, error, now)
        if at is None:
            self.fail(error, now)
        else:
            state.not_before = at
            self._ctx.at(self, at)

    def _region_pairs(self) -> list[tuple[Region, Descriptor]]:
        assert self.hello is not None
        assert self.transport is not None
        assert self._caches is not None
        theirs = self.hello.descriptors[self.transport.name]
        mine = self._caches.regions[self.transport.name]
        return [(mine[local], theirs[remote]) for local, remote in self.layers.regions]

    def drop_path(self, now: float, generation: int | None = None) -> None:
        """Have the path prepared anew, if it is still the one of ``generation``."""
        state = self.paths
        if generation is not None and generation != state.generation:
            return
        if state.path is not None:
            state.path.close()
            state.path = None
            self._ctx.counters.count("paths.rebuilt")
        state.deadline = state.run = state.pending = None
        if state.wanted:
            self._ctx.soon(self)

    # ---- the end -----------------------------------------------------------------------------

    def fail(self, error: KvxferError, now: float) -> None:
        """The peer cannot be used any more; waiters see ``error``."""
        if not self.usable:
            return
        was_up = self.state is LinkState.UP
        self.error = error
        self.state = LinkState.FAILED
        self._ctx.counters.count(f"peers.failed.{self.kind_of_failure().value}")
        if was_up:
            self._ctx.emit(PeerDown(peer=self.incarnation, reason=str(error)))
        self._end()

    def close(self, reason: str) -> None:
        """In good order."""
        if not self.usable:
            return
        was_up = self.state is LinkState.UP
        self.error = StaleError(reason)
        self.state = LinkState.CLOSED
        if was_up:
            self._ctx.emit(PeerDown(peer=self.incarnation, reason=reason))
        self._end()

    def _end(self) -> None:
        self._table.drop(self)
        self.poster.link_ended()
        if self.peer is not None and self.transport is not None:
            # Fails what is pending by the transport's own ledger; drained is told separately.
            self.transport.disconnect(self.peer)
        self._ctx.forget(self)
        self._changed()
        self._waiters.clear()
        self.mailbox.link_ended()

    def kind_of_failure(self) -> ErrorKind:
        """For transfers that depended on this link."""
        if isinstance(self.error, TransportError):
            return self.error.kind
        return ErrorKind.HANDSHAKE
