"""All links of an agent: by incarnation, and by address while the incarnation is not known."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvxfer.agent.hello import PeerHello
from kvxfer.agent.links import Link, LinkState
from kvxfer.agent.mailbox import Mailboxes, canonical
from kvxfer.core import wire
from kvxfer.errors import CapacityError, HandshakeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.agent.context import Context
    from kvxfer.agent.hello import LocalHello
    from kvxfer.core.channel import Route

__all__ = ["LinkTable"]


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
        """
        if incarnation is not None:
            known = self._by_incarnation.get(incarnation)
            if known is not None:
                return known
        address = canonical(address)
        for link in (*self._greeting, *self._by_incarnation.values()):
            if address in (link.mailbox.address, link.address) and (
                incarnation is None or link.expected == incarnation
            ):
                return link
        link = Link(self, mailbox=self.mailboxes.dial(address), expected=incarnation, now=now)
        self._greeting[link] = None
        self.ctx.soon(link)
        return link

    def on_hello(self, route: Route, sender: str, message: wire.Hello, now: float) -> None:
        """A hello came in, first or in answer; a first one is answered.

        Raises:
            WireError: the hello makes no sense.
        """
        hello = PeerHello.from_wire(sender, message)
        link = self._by_incarnation.get(sender) or self._greeting_link(route, hello)
        if link is None:
            link = self._inbound(route, sender, now)
        elif not link.mailbox.address and not message.answer:
            link.mailbox.moved(route, now)  # it reconnected
        link.on_hello(hello, now)
        if link.usable:
            if link in self._greeting:
                del self._greeting[link]
                self._by_incarnation[sender] = link
            if not message.answer:
                self.ctx.send(route, self.local.message(answer=True, session=link.session))

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
            same_place = bool(hello.address) and link.mailbox.address == hello.address
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
        for link in tuple(self):
            if link.mailbox.route != route:
                continue
            if link.hello is not None and link.incarnation != sender:
                # Another life answers there now; what the old one held is gone.
                link.close(f"the peer at {link.address} restarted as {sender}")
            else:
                link.mailbox.send(self.local.message(answer=False, session=link.session))

    def on_route_lost(self, route: Route, now: float) -> None:
        """A connection dropped: the peer died, restarted, or the network did."""
        for link in tuple(self._by_incarnation.values()):
            if link.mailbox.route == route:
                link.suspect(now)

    def on_bye(self, sender: str) -> None:
        link = self._by_incarnation.get(sender)
        if link is not None:
            link.close("the peer closed")

    def caches_changed(self, now: float) -> None:
        for link in tuple(self._by_incarnation.values()):
            link.caches_changed(now)

    def drop(self, link: Link) -> None:
        """Called by the link itself at its end."""
        self._greeting.pop(link, None)
        if self._by_incarnation.get(link.incarnation) is link:
            del self._by_incarnation[link.incarnation]
