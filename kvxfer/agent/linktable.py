"""All links of an agent: by incarnation, and by address while the incarnation is not known."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvxfer.agent.hello import PeerHello
from kvxfer.agent.links import Link, LinkState
from kvxfer.agent.mailbox import Mailboxes, canonical
from kvxfer.core import wire
from kvxfer.core.keys import split_peer
from kvxfer.errors import (
    CapacityError,
    CircuitOpenError,
    HandshakeError,
    InvalidInputError,
    PeerLostError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvxfer.agent.context import Context
    from kvxfer.agent.hello import LocalHello
    from kvxfer.core.channel import Route
    from kvxfer.core.transport import Peer

__all__ = ["LinkTable"]

_LAST_WORDS = 0.25
"""Seconds in which a good-bye must arrive that was sent before its sender closed its engine."""


class LinkTable:
    """Progress thread only. Bounded by ``Limits.peers`` through the mailboxes."""

    def __init__(self, ctx: Context, local: LocalHello) -> None:
        self.ctx = ctx
        self.local = local
        self.mailboxes = Mailboxes(ctx)
        self._by_incarnation: dict[str, Link] = {}
        self._sessions = itertools.count(1)
        self._greeting: dict[Link, None] = {}
        """Links whose peer has not said hello."""
        self.on_ended: Callable[[str, float], None] = lambda incarnation, now: None
        """Called with a peer that has ended for certain, and the time."""

    def __len__(self) -> int:
        return len(self._by_incarnation) + len(self._greeting)

    def __iter__(self) -> Iterator[Link]:
        yield from tuple(self._by_incarnation.values())
        yield from tuple(self._greeting)

    def next_session(self) -> int:
        """For a new link."""
        return next(self._sessions)

    def of(self, incarnation: str) -> Link | None:
        """The link to a peer that said hello."""
        return self._by_incarnation.get(incarnation)

    def reach(self, address: str, incarnation: str | None, now: float) -> Link:
        """A usable link to that peer, begun now if there is none.

        Raises:
            InvalidInputError: not an address.
            CapacityError: too many peers.
            HandshakeError: the incarnation belongs to another peer than the address names.
            CircuitOpenError: it failed too often and is left alone for a while.
        """
        link = self._known(address, incarnation)
        name = incarnation or canonical(address)
        if link is not None and (link.allowed or not self.ctx.breakers.wait(name, now)):
            return link
        if link is None and self.ctx.breakers.allows(name, now):
            box = self.mailboxes.dial(canonical(address))
            link = Link(self, mailbox=box, expected=incarnation, now=now)
            link.allowed = True
            self._greeting[link] = None
            self.ctx.soon(link)
            return link
        self.ctx.counters.count("breakers.rejected")
        raise self.circuit_open(name, now)

    def circuit_open(self, name: str, now: float) -> CircuitOpenError:
        """Why nothing is tried with the peer whose breaker is ``name``."""
        breaker = self.ctx.breakers.of(name)
        error = CircuitOpenError(
            f"the peer {name} failed too often and is left alone for another "
            f"{self.ctx.breakers.wait(name, now):.3f} s; the last fault was: "
            f"{breaker.reason if breaker is not None else 'unknown'}",
            next_step="use another peer, or try again after the pause",
        )
        if breaker is not None:
            error.kind = breaker.kind
        return error

    def _known(self, address: str, incarnation: str | None) -> Link | None:
        if incarnation is not None:
            known = self._by_incarnation.get(incarnation)
            if known is not None:
                if not self.ctx.trust.same_peer(known, address):
                    raise HandshakeError(
                        f"{address} is to be incarnation {incarnation}, which is another peer's"
                    )
                return known
        address = canonical(address)
        for link in (*self._greeting, *self._by_incarnation.values()):
            if address in (link.mailbox.address, link.address) and (
                incarnation is None or link.expected == incarnation
            ):
                return link
        return None

    def on_hello(self, route: Route, sender: str, message: wire.Hello, now: float) -> None:
        """A hello came in, first or in answer; a first one is answered.

        Raises:
            WireError: the hello makes no sense.
        """
        try:
            hello = PeerHello.from_wire(sender, message)
        except (WireError, InvalidInputError) as error:
            # Both sides learn why at once, instead of waiting for each other until a deadline.
            self._refuse(HandshakeError(str(error)), route, now)
            raise
        known = self._by_incarnation.get(sender)
        if known is not None and known.hello is not None and known.hello.address != hello.address:
            self._refuse_twin(known.hello, hello, route, now)
            return
        link = known or self._greeting_link(route, hello)
        if link is None:
            link = self._inbound(route, sender, now)
        elif not link.mailbox.address and not message.answer:
            link.mailbox.moved(route, now)  # it reconnected
        link.on_hello(hello, now)
        self._tell_who_answers(route, link, hello, now)
        if link.usable:
            link.learn_keeper(hello.keeper)
            if link in self._greeting:
                del self._greeting[link]
                self._by_incarnation[sender] = link
            if not message.answer:
                self.ctx.send(route, self.local.message(answer=True, session=link.session))

    def _tell_who_answers(self, route: Route, link: Link, hello: PeerHello, now: float) -> None:
        """Links that wait for an earlier life at that place learn who answers there now."""
        for other in tuple(self._greeting):
            waits_here = other.mailbox.route == route and bool(other.mailbox.address)
            if waits_here and other.expected not in (None, hello.incarnation):
                other.on_hello(hello, now)  # refuses it as stale

    def _refuse_twin(self, first: PeerHello, second: PeerHello, route: Route, now: float) -> None:
        """An incarnation is one life of one process: nobody else may speak in its name."""
        error = HandshakeError(
            f"incarnation {second.incarnation} is {first.name!r} at {first.address}, and "
            f"{second.name!r} at {second.address} as well",
            next_step="leave Agent(incarnation=...) out, or make it unique for ever",
        )
        self._refuse(error, route, now)

    def _refuse(self, error: HandshakeError, route: Route, now: float) -> None:
        """Turn a hello down: the peer is told why, and so is who waits for it here."""
        self.ctx.counters.count("hellos.refused")
        self.ctx.send(route, wire.HelloRefused(self.local.versions, str(error)[:4096]))
        for link in tuple(self._greeting):
            if link.mailbox.route == route:
                link.fail(error, now)

    def _inbound(self, route: Route, sender: str, now: float) -> Link:
        """A link for a peer that dialled us: one per connection, and not without bound."""
        box = self.mailboxes.inbound(route)
        for other in tuple(self):
            if other.mailbox is box:
                other.close(f"its connection now speaks for {sender}")
        limit = self.ctx.config.limits.peers
        if len(self) >= limit:
            raise CapacityError(f"{limit} peers are known: the table is full")
        link = Link(self, mailbox=self.mailboxes.inbound(route), expected=sender, now=now)
        self._greeting[link] = None
        return link

    def _greeting_link(self, route: Route, hello: PeerHello) -> Link | None:
        for link in self._greeting:
            same_route = link.mailbox.route == route
            same_place = _same_place(link.mailbox.address, hello.address)
            if same_route or (same_place and link.expected in (None, hello.incarnation)):
                return link
        return None

    def on_hello_refused(self, route: Route, message: wire.HelloRefused, now: float) -> None:
        """The peer turned our hello down."""
        for link in tuple(self):
            if link.mailbox.route == route and link.state in (
                LinkState.HELLO,
                LinkState.CONNECTING,
            ):
                link.fail(HandshakeError(f"the peer refused our hello: {message.message}"), now)

    def on_who(self, route: Route, sender: str, now: float) -> None:
        """The peer does not know us: it restarted, or lost us. Say hello again."""
        links = [link for link in self if link.mailbox.route == route]
        box = self.mailboxes.get(route)
        if not links and box is not None:
            # Both sides gave the link up, and something still has to be said.
            box.answered_by(sender)
            if len(box.outbox):
                box.send(self.local.message(answer=False, session=self.next_session()))
        for link in links:
            if link.hello is not None and link.incarnation != sender:
                # Another life answers there now; what the old one held is gone.
                self.mailboxes.depart(link.incarnation, now)
                link.close(f"the peer at {link.address} restarted as {sender}")
            else:
                link.mailbox.send(self.local.message(answer=False, session=link.session))

    def on_route_lost(self, route: Route, now: float) -> None:
        """A connection dropped: the peer died, restarted, or the network did."""
        for link in tuple(self._by_incarnation.values()):
            if link.mailbox.route == route:
                link.suspect(now)

    def on_peer_lost(self, peer: Peer, now: float) -> None:
        """An engine saw the peer end. Its last words may still be on their way to us."""
        for link in tuple(self._by_incarnation.values()):
            if not link.has(peer) or not link.usable:
                continue
            if link.engine_ended(peer, now):
                self.ctx.counters.count("peers.ended")
                self.ctx.at(_Ended(self, link), now + _LAST_WORDS)
            else:
                self.ctx.counters.count("peers.engines_ended")

    def on_bye(self, sender: str) -> None:
        link = self._by_incarnation.get(sender)
        if link is not None:
            link.close("the peer closed")

    def caches_changed(self, now: float) -> None:
        for link in tuple(self._by_incarnation.values()):
            link.caches_changed(now)

    def readdressed(self, now: float) -> None:
        """Our transports are addressed otherwise from now on: tell every peer."""
        for link in tuple(self._by_incarnation.values()):
            link.readdressed(now)

    def drop(self, link: Link) -> None:
        """Called by the link itself at its end."""
        self._greeting.pop(link, None)
        if self._by_incarnation.get(link.incarnation) is link:
            del self._by_incarnation[link.incarnation]


def _same_place(dialled: str, said: str) -> bool:
    """Whether a peer is where we dial. Whose the place is may have been left out when dialling."""
    if not dialled or not said:
        return False
    place, peer = split_peer(dialled)
    return dialled == said or (not peer and split_peer(said)[0] == place)


class _Ended:
    """Fails a link whose peer has ended, once there was time to hear its good-bye."""

    def __init__(self, table: LinkTable, link: Link) -> None:
        self._table = table
        self._link = link

    def step(self, now: float) -> None:
        link = self._link
        if link.usable:
            self._table.mailboxes.depart(link.incarnation, now)
            link.fail(PeerLostError(f"{link!r}: the peer's process or engine has ended"), now)
            self._table.on_ended(link.incarnation, now)
