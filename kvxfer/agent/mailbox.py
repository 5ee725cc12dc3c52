"""Mailboxes: one way to reach one address, with what was sent on it and not yet confirmed.

A mailbox outlives the link that uses it, so that a release still arrives after the link failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core import wire
from kvxfer.core.address import Address
from kvxfer.core.keys import join_peer, split_peer
from kvxfer.core.reliable import Outbox
from kvxfer.core.remembered import Remembered
from kvxfer.errors import CapacityError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.agent.context import Context
    from kvxfer.core.channel import Route

__all__ = ["Mailbox", "Mailboxes", "canonical"]


_BEYOND_A_LINK = (
    wire.Release,
    wire.Decline,
    wire.Gone,
    wire.Sealed,
    wire.PushFailed,
    wire.Cancel,
)
"""What stays true when the link has ended. A hello is about the link, a grant to write is void with
it, and a push whose seal was on its way fails."""


def canonical(address: str) -> str:
    """One spelling per address, so that two names of one place are one connection.

    Raises:
        InvalidInputError: not an address.
    """
    text, peer = split_peer(address)
    return join_peer(Address.parse(text.removeprefix("tcp://")).tcp(), peer)


class Mailbox:
    """Messages to one peer. Used on the progress thread only."""

    def __init__(self, owner: Mailboxes, ctx: Context, route: Route, address: str) -> None:
        self._owner = owner
        self._ctx = ctx
        self.route = route
        self.address = address
        """Empty for a route that the peer dialled."""
        self.outbox = Outbox()
        self.version = ctx.config.wire_versions[0]
        """The wire version to speak here: the oldest until a hello told otherwise."""
        self.users = 0
        """Links that use it; with none and nothing unconfirmed it is dropped."""
        self._notes: dict[int, tuple[str, Callable[[float], None] | None]] = {}
        """By message: the incarnation it is meant for, and what to call when it is confirmed."""

    def send(self, body: wire.Message) -> None:
        """Once; may be lost."""
        self._ctx.send(self.route, body, self.version)

    def mail(
        self,
        body: wire.Message,
        *,
        now: float,
        until: float,
        on_confirm: Callable[[float], None] | None = None,
        to: str = "",
    ) -> None:
        """Until confirmed or ``until``; ``on_confirm`` is called with the time of the former.

        ``to`` names the incarnation it is meant for: if that one has ended, nothing is sent.
        """
        if to in self._owner.departed:
            self._ctx.counters.count("messages.undeliverable")
            return
        mid = self._ctx.mail(
            self.outbox, self.route, body, now=now, until=until, version=self.version
        )
        if on_confirm is not None or to:
            self._notes[mid] = (to, on_confirm)
        self.step(now)

    def confirmed(self, mid: int, now: float) -> None:
        """The peer has it."""
        if self.outbox.confirm(mid):
            _, callback = self._notes.pop(mid, ("", None))
            if callback is not None:
                callback(now)
        if not len(self.outbox) and not self.users:
            self._owner.drop(self)

    def gone(self, incarnation: str) -> None:
        """Drop what was meant for that incarnation; see ``Mailboxes.depart``."""
        mids = [mid for mid, (to, _) in self._notes.items() if to == incarnation]
        dropped = self.outbox.drop(mids)
        for mid in mids:
            del self._notes[mid]
        if dropped:
            self._ctx.counters.count("messages.undeliverable", dropped)
            self._ctx.soon(self)

    def answered_by(self, incarnation: str) -> None:
        """That one answers there now: nobody else will confirm what is meant for an earlier one."""
        for other in {to for to, _ in self._notes.values()} - {"", incarnation}:
            self.gone(other)

    def link_ended(self, address: str, now: float) -> None:
        """One link less uses it; ``address`` is where its peer said it can be dialled, or empty.

        What is unconfirmed goes on being sent until it is too old: a release must arrive even if
        the link failed.  A route that the peer dialled ends with its link, so it goes on over one
        that we dial.
        """
        self.users -= 1
        if self.address or self.users:
            self._ctx.soon(self)
            return
        self._owner.drop(self)
        self.outbox.drop([mid for mid, frame in self.outbox if not _outlives_links(frame)])
        if not len(self.outbox):
            return
        try:
            self._owner.dial(address)._take_over(self, now)
        except (InvalidInputError, CapacityError):
            self._ctx.counters.count("messages.undeliverable", len(self.outbox))

    def _take_over(self, other: Mailbox, now: float) -> None:
        """What ``other`` has unconfirmed is sent here from now on."""
        self._notes.update(other._notes)
        self._ctx.transmit(self.route, self.outbox.take_over(other.outbox, now))
        self.step(now)

    def moved(self, route: Route, now: float) -> None:
        """The peer's connection came back on another route."""
        if route != self.route:
            self._owner.rename(self, route)
            self._ctx.transmit(self.route, self.outbox.resend_all(now))

    def step(self, now: float) -> None:
        """Re-send what is due."""
        if not self._owner.has(self):
            return
        expired = self.outbox.expired
        self._ctx.transmit(self.route, self.outbox.due(now))
        if self.outbox.expired > expired:
            self._ctx.counters.count("messages.given_up", self.outbox.expired - expired)
        if len(self._notes) > 2 * len(self.outbox) + 16:
            self._notes = {mid: note for mid, note in self._notes.items() if mid in self.outbox}
        at = self.outbox.next_at()
        if at is not None:
            self._ctx.at(self, at)
        elif not self.users:
            self._owner.drop(self)


def _outlives_links(frame: bytes) -> bool:
    return isinstance(wire.decode(frame).body, _BEYOND_A_LINK)


class Mailboxes:
    """All mailboxes of an agent: dialled ones by address, inbound ones by route."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._by_address: dict[str, Mailbox] = {}
        self._by_route: dict[Route, Mailbox] = {}
        self.departed: Remembered[str, None] = Remembered(
            capacity=ctx.config.limits.peers, ttl=ctx.config.limits.remembered_ttl
        )
        """Incarnations that have ended for certain."""
        ctx.sweeper.watch(self.departed)

    def depart(self, incarnation: str, now: float) -> None:
        """That incarnation has ended: what is meant for it can reach nobody any more."""
        self.departed.add(incarnation, None, now)
        self._ctx.sweeper.arm()
        for box in tuple(self._by_route.values()):
            box.gone(incarnation)

    def __len__(self) -> int:
        return len(self._by_route)

    @property
    def unconfirmed(self) -> int:
        """Messages that are being re-sent."""
        return sum(len(box.outbox) for box in tuple(self._by_route.values()))

    def dial(self, address: str) -> Mailbox:
        """The mailbox for ``address``, dialled now if need be.

        Raises:
            InvalidInputError: not an address.
            CapacityError: too many.
        """
        address = canonical(address)
        box = self._by_address.get(address)
        if box is None:
            self._check_room()
            box = Mailbox(self, self._ctx, self._ctx.channel.dial(address), address)
            self._by_address[address] = box
            self._by_route[box.route] = box
        return box

    def inbound(self, route: Route) -> Mailbox:
        """The mailbox to answer on a route that a peer dialled."""
        box = self._by_route.get(route)
        if box is None:
            self._check_room()
            box = self._by_route[route] = Mailbox(self, self._ctx, route, "")
        return box

    def has(self, box: Mailbox) -> bool:
        """False once it was dropped."""
        return self._by_route.get(box.route) is box

    def get(self, route: Route) -> Mailbox | None:
        return self._by_route.get(route)

    def _check_room(self) -> None:
        limit = self._ctx.config.limits.peers
        if len(self._by_route) >= limit:
            raise CapacityError(
                f"{limit} peers are connected: the table is full",
                next_step="raise Limits.peers, or forget peers that are gone",
            )

    def rename(self, box: Mailbox, route: Route) -> None:
        self._by_route.pop(box.route, None)
        box.route = route
        self._by_route[route] = box

    def drop(self, box: Mailbox) -> None:
        if self._by_route.get(box.route) is box:
            del self._by_route[box.route]
        if box.address and self._by_address.get(box.address) is box:
            del self._by_address[box.address]
            self._ctx.channel.hang_up(box.route)
        self._ctx.forget(box)
