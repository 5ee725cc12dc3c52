"""The agent's core: one round of everything, without a thread or socket of its own.

``round`` is the whole agent in reading order: orders in, messages in, engine news in, what is due,
and the time at which it wants to run again.  The thread pump and ``poll`` call it; so does the
simulator, with another clock, channel and transport.
"""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING

from kvxfer.agent.consumer import Consumer
from kvxfer.agent.linktable import LinkTable
from kvxfer.agent.part import Call
from kvxfer.agent.producer import Producer
from kvxfer.core import wire
from kvxfer.core.reliable import Inbox
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.agent.context import Context
    from kvxfer.agent.hello import LocalHello
    from kvxfer.agent.links import Link
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.channel import Inbound
    from kvxfer.core.transport import Transport

__all__ = ["Engine"]

_log = logging.getLogger("kvxfer.agent")

_LOGGED = 20
"""How many failures of a transport's progress are logged with their traceback."""

_BUDGET = 1024
"""Messages and attempts taken per round and source, so that none starves the others."""


class Engine:
    """Progress thread only, but for ``order``."""

    def __init__(self, ctx: Context, local: LocalHello, transports: Sequence[Transport]) -> None:
        self.ctx = ctx
        self.local = local
        self.transports = tuple(transports)
        self.links = LinkTable(ctx, local)
        self.consumer = Consumer(ctx, self.links)
        self.producer = Producer(ctx, self.links, self.consumer.quarantine)
        self._inbox = Inbox()
        # Taken and not looked at yet: what follows a bug in one of them is not lost.
        self._attempts: collections.deque[Attempt] = collections.deque()
        self._inbound: collections.deque[Inbound] = collections.deque()
        self._orders: collections.deque[Callable[[float], None]] = collections.deque()

    def order(self, order: Callable[[float], None]) -> None:
        """Have ``order(now)`` called in the next round. Any thread; never waits."""
        self._orders.append(order)

    def round(self, now: float) -> float | None:
        """Do all that can be done now. Returns when to come again at the latest, None: no need."""
        more = False
        self.run_orders(now)
        for transport in self.transports:
            try:
                changed = transport.progress(_BUDGET)
            except Exception:  # noqa: BLE001 - a plug-in's bug must not stop the others
                self.ctx.counters.count("transports.failed")
                if self.ctx.counters["transports.failed"] <= _LOGGED:
                    _log.exception("progress of transport %s failed", transport.name)
                continue
            more = more or len(changed) == _BUDGET
            self._attempts.extend(changed)
        while self._attempts:
            attempt = self._attempts.popleft()
            if isinstance(attempt.tag, Call):
                attempt.tag.part.on_attempt(attempt, now)
        for route in self.ctx.channel.lost_routes():
            self.links.on_route_lost(route, now)
        inbound = self.ctx.channel.receive(_BUDGET)
        more = more or len(inbound) == _BUDGET
        self._inbound.extend(inbound)
        while self._inbound:
            self._receive(self._inbound.popleft(), now)
        self.ctx.run_due(now)
        if more or self._orders:
            return now
        return self.ctx.next_at()

    def run_orders(self, now: float) -> None:
        """Carry out what users' threads asked for."""
        while self._orders:
            self._orders.popleft()(now)

    @property
    def must_poll(self) -> bool:
        """Whether an engine that does not wake us may have news."""
        return self.ctx.in_flight > 0 and any(t.must_be_polled for t in self.transports)

    def farewell(self) -> None:
        """Tell the peers that we close; once, they notice anyway."""
        for link in self.links:
            if link.hello is not None:
                link.mailbox.send(wire.Bye())

    # ---- messages ----------------------------------------------------------------------------

    def _receive(self, inbound: Inbound, now: float) -> None:
        """One message from outside. Whatever it is, the loop lives."""
        try:
            envelope = wire.decode(inbound.data)
            self._dispatch(inbound, envelope, now)
        except (WireError, InvalidInputError):
            self.ctx.counters.count("messages.rejected")
        except CapacityError:
            self.ctx.counters.count("messages.over_capacity")

    def _dispatch(self, inbound: Inbound, envelope: wire.Envelope, now: float) -> None:
        body, sender, route = envelope.body, envelope.sender, inbound.route
        self.ctx.counters.count(f"received.{type(body).__name__.lower()}")
        match body:
            case wire.Confirm():
                self._on_confirm(inbound, sender, body, now)
                return
            case wire.Hello():
                self.links.on_hello(route, sender, body, now)
                if envelope.mid:
                    self.ctx.send(route, wire.Confirm([envelope.mid]))
                return
            case wire.HelloRefused():
                self.links.on_hello_refused(route, body, now)
                return
            case wire.Who():
                self.links.on_who(route, sender, now)
                return
            case wire.Bye():
                self.links.on_bye(sender)
                return
        link = self.links.of(sender)
        if link is None and not isinstance(body, (wire.Release, wire.Decline)):
            # Not confirmed: it is sent again once we know each other.
            self.ctx.counters.count("messages.from_strangers")
            self.ctx.send(route, wire.Who())
            return
        if not envelope.mid:
            self._handle(link, sender, body, now)
            return
        if self._inbox.seen(sender, envelope.mid):
            self.ctx.counters.count("messages.duplicate")
        else:
            # Confirmed only once it was handled: what raises is sent again.
            self._handle(link, sender, body, now)
            self._inbox.first_time(sender, envelope.mid)
        self.ctx.send(route, wire.Confirm([envelope.mid]))

    def _handle(self, link: Link | None, sender: str, body: wire.Message, now: float) -> None:
        match body:
            case wire.Release():
                # This and a decline get through even from a peer whose hello we lost.
                self.producer.on_release(body, now)
                return
            case wire.Decline():
                self.producer.on_decline(body, now)
                return
        if link is None:
            return
        match body:
            case wire.Open():
                self.producer.on_open(link, body, now)
            case wire.Grant():
                self.consumer.on_grant(sender, body, now)
            case wire.Gone():
                self.consumer.on_gone(sender, body, now)
            case wire.Ask():
                self.consumer.on_ask(link, body, now)
            case wire.Accept():
                if not self.producer.on_accept(sender, body, now):
                    self._push_nothing(link, body.ref, now)
            case wire.Seal():
                self.consumer.on_seal(link, body, now)
            case wire.PushFailed():
                self.consumer.on_push_failed(sender, body, now)
            case wire.Cancel():
                if not self.producer.on_cancel(sender, body, _kind(body.kind), now):
                    self._push_nothing(link, body.ref, now)

    def _push_nothing(self, link: Link, ref: wire.Ref, now: float) -> None:
        """Nothing of that grant is in flight, nor ever will be."""
        link.mailbox.mail(
            wire.PushFailed(ref, ErrorKind.STALE.value, "nothing is being pushed", True, False),
            now=now,
            until=now + self.ctx.timeouts.ack,
        )

    def _on_confirm(self, inbound: Inbound, sender: str, body: wire.Confirm, now: float) -> None:
        link = self.links.of(sender)
        box = self.links.mailboxes.get(inbound.route)
        if box is None and link is not None:
            box = link.mailbox
        if box is not None:
            for mid in body.mids:
                box.confirmed(mid, now)


def _kind(text: str) -> ErrorKind:
    try:
        return ErrorKind(text)
    except ValueError:
        return ErrorKind.UNKNOWN
