"""Mailboxes: one way to reach one address, with what was sent on it and not yet confirmed.

A mailbox outlives the link that uses it, so that a release still arrives after the link failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core import wire
from kvxfer.core.address import Address
from kvxfer.core.reliable import Outbox
from kvxfer.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.agent.context import Context
    from kvxfer.core.channel import Route

__all__ = ["Mailbox", "Mailboxes", "canonical"]


def canonical(address: str) -> str:
    """One spelling per address, so that two names of one place are one connection.

    Raises:
        InvalidInputError: not an address.
    """
    return Address.parse(address.removeprefix("tcp://")).tcp()


class Mailbox:
    """Messages to one peer. Used on the progress thread only."""

    def __init__(self, owner: Mailboxes, ctx: Context, route: Route, address: str) -> None:
        self._owner = owner
        self._ctx = ctx
        self.route = route
        self.address = address
        """Empty for a route that the peer dialled."""
        self.outbox = Outbox()
        self.users = 0
        """Links that use it; with none and nothing unconfirmed it is dropped."""
        self._on_confirm: dict[int, Callable[[float], None]] = {}

    def send(self, body: wire.Message) -> None:
        """Once; may be lost."""
        self._ctx.send(self.route, body)

    def mail(
        self,
        body: wire.Message,
        *,
        now: float,
        until: float,
        on_confirm: Callable[[float], None] | None = None,
    ) -> None:
        """Until confirmed or ``until``; ``on_confirm`` is called with the time of the former."""
        mid = self._ctx.mail(self.outbox, self.route, body, now=now, until=until)
        if on_confirm is not None:
            self._on_confirm[mid] = on_confirm
        self.step(now)

    def confirmed(self, mid: int, now: float) -> None:
        """The peer has it."""
        if self.outbox.confirm(mid):
            callback = self._on_confirm.pop(mid, None)
            if callback is not None:
                callback(now)
        if not len(self.outbox) and not self.users:
            self._owner.drop(self)

    def link_ended(self) -> None:
        """One link less uses it.

        A route that the peer dialled ends with its link: nobody can be reached on it again, so
        what is unconfirmed is given up.  On a dialled one it goes on being sent until it is too
        old: a release must arrive even if the link failed.
        """
        self.users -= 1
        if not self.address and not self.users:
            self._ctx.counters.count("messages.undeliverable", len(self.outbox))
            self._owner.drop(self)
        else:
            self._ctx.soon(self)

    def moved(self, route: Route, now: float) -> None:
        """The peer's connection came back on another route."""
        if route != self.route:
            self._owner.rename(self, route)
            self._ctx.transmit(self.route, self.outbox.resend_all(now))

    def step(self, now: float) -> None:
        """Re-send what is due."""
        if not self._owner.has(self):
            return
        self._ctx.transmit(self.route, self.outbox.due(now))
        if len(self._on_confirm) > 2 * len(self.outbox) + 16:
            self._on_confirm = {m: c for m, c in self._on_confirm.items() if m in self.outbox}
        at = self.outbox.next_at()
        if at is not None:
            self._ctx.at(self, at)
        elif not self.users:
            self._owner.drop(self)


class Mailboxes:
    """All mailboxes of an agent: dialled ones by address, inbound ones by route."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._by_address: dict[str, Mailbox] = {}
        self._by_route: dict[Route, Mailbox] = {}

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
