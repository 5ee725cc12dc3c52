"""The agent's core: one round of everything, without a thread or socket of its own.

``round`` is the whole agent in reading order: orders in, messages in, engine news in, what is due,
and the time at which it wants to run again.  The thread pump and ``poll`` call it; so does the
simulator, with another clock, channel and transport.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from kvxfer.agent.consumer import Consumer
from kvxfer.agent.failures import Failures
from kvxfer.agent.keeping import Keeping, KeepingHooks
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
    from kvxfer.core.channel import Inbound, Route
    from kvxfer.core.transport import Transport
    from kvxfer.keeper.port import KeeperPort

__all__ = ["Engine"]

_BUDGET = 1024
"""Messages and attempts taken per round and source, so that none starves the others."""


_RECEIVED = {kind: f"received.{kind.__name__.lower()}" for kind in wire.MESSAGES}


class Engine:
    """Progress thread only, but for ``order``."""

    def __init__(self, ctx: Context, local: LocalHello, transports: Sequence[Transport]) -> None:
        self.ctx = ctx
        self.local = local
        self.transports = tuple(transports)
        self.transport_failures = Failures()
        """Times the progress of a transport raised: a bug of a plug-in."""
        self._revisions = [transport.revision for transport in self.transports]
        self.links = LinkTable(ctx, local)
        self.consumer = Consumer(ctx, self.links)
        self.producer = Producer(ctx, self.links, self.consumer.quarantine)
        self.links.on_ended = self.producer.reader_left
        self._inbox = Inbox(ttl=ctx.config.limits.remembered_ttl)
        ctx.sweeper.watch(self._inbox)
        # Taken and not looked at yet: what follows a bug in one of them is not lost.
        self._attempts: collections.deque[Attempt] = collections.deque()
        self._inbound: collections.deque[Inbound] = collections.deque()
        self._confirms: dict[tuple[Route, int | None], list[int]] = {}
        """Message ids to confirm when this round's messages are handled."""
        self._orders: collections.deque[Callable[[float], None]] = collections.deque()

    def open_keeper(self, port: KeeperPort, now: float) -> None:
        """Have a keeper started, in the background."""
        hooks = KeepingHooks(
            leases=self.producer.leases,
            opened=self.producer.keeper_opened,
            closed=self.producer.keeper_answered,
            renewed=self.consumer.keeper_renewed,
            quiet=self._peer_quiet,
            address_changed=self._keeper_moved,
            links=lambda: iter(self.links),
            next_seq=self.consumer.closing_seq,
        )
        self.ctx.keeping = Keeping(self.ctx, port, self.ctx.config.keeper)
        self.ctx.keeping.open(hooks, now)

    def _peer_quiet(self, incarnation: str, now: float) -> None:
        link = self.links.of(incarnation)
        config = self.ctx.config.keeper
        if link is not None and config is not None:
            link.quiet(config.peer_timeout / 2, now)

    def _keeper_moved(self, address: str, now: float) -> None:
        """Peers have to know where our keeper is reached now, or that it is not."""
        generation = self.local.keeper.generation + 1
        self.local.keeper = wire.KeeperWire(address, generation)
        self.links.readdressed(now)

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
            except Exception as error:  # noqa: BLE001 - a plug-in's bug must not stop the others
                self.transport_failures.note(now)
                self.ctx.counters.count("transports.failed")
                self.ctx.log.failed(
                    "transport", "progress of transport %s failed", transport.name, error=error
                )
                continue
            more = more or len(changed) == _BUDGET
            self._attempts.extend(changed)
            for peer in transport.lost_peers():
                self.links.on_peer_lost(peer, now)
        self._tell_new_addresses(now)
        while self._attempts:
            attempt = self._attempts.popleft()
            if isinstance(attempt.tag, Call):
                attempt.tag.part.on_attempt(attempt, now)
        for route in self.ctx.channel.lost_routes():
            self.links.on_route_lost(route, now)
        inbound = self.ctx.channel.receive(_BUDGET)
        more = more or len(inbound) == _BUDGET
        # Read after what came, so that no grant is counted from before its request was sent,
        # however long this process was held up in between.
        came = max(now, self.ctx.clock.now())
        # Whatever the messages are about, the keeper knew of it before: see ``keeping``.
        self.ctx.keeping.collect(came)
        self._inbound.extend(inbound)
        if self._inbound:
            # Once for all of them: what ages was added to, and acks may have moved deadlines.
            self.ctx.sweeper.arm()
            self.ctx.soon(self.producer)
        while self._inbound:
            self._receive(self._inbound.popleft(), came)
        self._confirm()
        self.ctx.run_due(now)
        self.ctx.keeping.flush(now)
        if more or self._orders:
            return now
        return self.ctx.next_at()

    def _confirm(self) -> None:
        """Confirm what this round has handled: one message per peer, however many came."""
        while self._confirms:
            (route, version), mids = self._confirms.popitem()
            for first in range(0, len(mids), _BUDGET):
                self.ctx.send(route, wire.Confirm(mids[first : first + _BUDGET]), version)

    def _tell_new_addresses(self, now: float) -> None:
        """Engines that were rebuilt are addressed otherwise: the peers have to know."""
        revisions = [transport.revision for transport in self.transports]
        if revisions != self._revisions:
            self._revisions = revisions
            self.local.revision += 1
            self.ctx.counters.count("transports.readdressed")
            self.links.readdressed(now)

    def run_orders(self, now: float) -> None:
        """Carry out what users' threads asked for."""
        while self._orders:
            self._orders.popleft()(now)

    @property
    def remembered(self) -> int:
        """What has ended, or was seen, and is remembered for a while."""
        return (
            len(self._inbox)
            + len(self.links.mailboxes.departed)
            + self.producer.remembered
            + self.consumer.remembered
        )

    @property
    def must_poll(self) -> bool:
        """Whether an engine that does not wake us may have news."""
        return self.ctx.in_flight > 0 and any(t.must_be_polled for t in self.transports)

    def farewell(self) -> None:
        """Tell the peers that we close; once, they notice anyway.

        The good-bye carries what it might overtake: what we have confirmed, and our last words that
        the peer has not.
        """
        confirmed = self._inbox.recent(wire.MAX_LAST_WORDS)
        for link in self.links:
            if link.hello is None:
                continue
            bye = wire.Bye()
            if link.version >= 2:
                bye = wire.Bye(confirmed.get(link.incarnation, []), _last_words(link))
            link.mailbox.send(bye)

    # ---- messages ----------------------------------------------------------------------------

    def _receive(self, inbound: Inbound, now: float) -> None:
        """One message from outside. Whatever it is, the loop lives."""
        try:
            envelope = wire.decode(inbound.data, self.local.versions)
            self._dispatch(inbound, envelope, now)
        except (WireError, InvalidInputError):
            self.ctx.counters.count("messages.rejected")
            if wire.unknown_type(inbound.data) is not None:
                self.ctx.counters.count("messages.unknown_type")
        except CapacityError:
            self.ctx.counters.count("messages.over_capacity")

    def _dispatch(self, inbound: Inbound, envelope: wire.Envelope, now: float) -> None:
        body, sender, route = envelope.body, envelope.sender, inbound.route
        trust = self.ctx.trust
        if trust.tickets is not None and not trust.admits(sender, inbound.peer, body):
            return
        kind = type(body)
        self.ctx.counters[_RECEIVED[kind]] += 1
        if kind in _BETWEEN_AGENTS:
            self._on_agent(inbound, envelope, now)
            return
        link = self.links.of(sender)
        if link is None and not _says_who(body):
            # Not confirmed: it is sent again once we know each other.
            self.ctx.counters.count("messages.from_strangers")
            self.ctx.send(route, wire.Who())
            return
        if self._handle_once(link, route, envelope, now) and envelope.mid:
            to = (route, None if link is None else link.version)
            mids = self._confirms.get(to)
            if mids is None:
                mids = self._confirms[to] = []
            mids.append(envelope.mid)

    def _on_agent(self, inbound: Inbound, envelope: wire.Envelope, now: float) -> None:
        """What two agents have to say to each other before, or besides, any transfer."""
        body, sender, route = envelope.body, envelope.sender, inbound.route
        match body:
            case wire.Confirm():
                self._on_confirm(inbound, sender, body.mids, now)
            case wire.Hello():
                self.links.on_hello(route, sender, body, now)
                if envelope.mid:
                    self.ctx.send(route, wire.Confirm([envelope.mid]))
            case wire.HelloRefused():
                self.links.on_hello_refused(route, body, now)
            case wire.Who():
                self.links.on_who(route, sender, now)
            case wire.Bye():
                self._on_bye(inbound, sender, body, now)

    def _handle_once(
        self, link: Link | None, route: Route, envelope: wire.Envelope, now: float
    ) -> bool:
        """Handle it unless it was before. False: it must not be confirmed."""
        sender, mid = envelope.sender, envelope.mid
        if not mid:
            return self._handle(link, route, sender, envelope.body, now)
        if self._inbox.seen(sender, mid):
            self.ctx.counters.count("messages.duplicate")
            return True
        # Remembered and confirmed only once it was handled: what raises is sent again.
        if not self._handle(link, route, sender, envelope.body, now):
            return False
        self._inbox.remember(sender, mid, now)
        return True

    def _on_bye(self, inbound: Inbound, sender: str, body: wire.Bye, now: float) -> None:
        """The peer closes: first what it still had to say, then the end of the link."""
        link = self.links.of(sender)
        self._on_confirm(inbound, sender, body.confirmed, now)
        for frame in body.last:
            try:
                envelope = wire.decode(frame, self.local.versions)
                words = envelope.body
                if envelope.sender != sender or not isinstance(words, _LAST_WORDS):
                    raise WireError("not the sender's last words")
                if link is None and not _says_who(words):
                    continue  # about what we do not know any more either
                self._handle_once(link, inbound.route, envelope, now)
            except (WireError, InvalidInputError):
                self.ctx.counters.count("messages.rejected")
        if link is not None:
            self.links.mailboxes.depart(sender, now)
        self.links.on_bye(sender)
        self.producer.reader_left(sender, now)

    def _handle(
        self, link: Link | None, route: Route, sender: str, body: wire.Message, now: float
    ) -> bool:
        """False: not settled, so it must not be confirmed."""
        trust = self.ctx.trust
        if trust.tickets is not None and not trust.allows(link, sender, body):
            return False
        match body:
            case wire.Release():
                # This and a decline get through even from a peer whose hello we lost.
                self.producer.on_release(link, sender, body, now)
                return True
            case wire.Decline():
                self.producer.on_decline(sender, body, now)
                return True
        if link is None:
            return True
        match body:
            case wire.Open():
                self.producer.on_open(link, route, body, now)
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
                return self.consumer.on_seal(link, body, now)
            case wire.Sealed():
                self.producer.on_sealed(sender, body, _kind(body.kind), now)
            case wire.PushFailed():
                self.consumer.on_push_failed(sender, body, now)
            case wire.Cancel():
                if not self.producer.on_cancel(sender, body, _kind(body.kind), now):
                    self._push_nothing(link, body.ref, now)
        return True

    def _push_nothing(self, link: Link, ref: wire.Ref, now: float) -> None:
        """Nothing of that grant is in flight, nor ever will be."""
        link.mailbox.mail(
            wire.PushFailed(ref, ErrorKind.STALE.value, "nothing is being pushed", True, False),
            now=now,
            until=now + self.ctx.timeouts.ack,
            to=link.incarnation,
        )

    def _on_confirm(self, inbound: Inbound, sender: str, mids: Sequence[int], now: float) -> None:
        link = self.links.of(sender)
        box = self.links.mailboxes.get(inbound.route)
        if box is None and link is not None:
            box = link.mailbox
        if box is not None:
            for mid in mids:
                box.confirmed(mid, now)


_BETWEEN_AGENTS = frozenset({wire.Confirm, wire.Hello, wire.HelloRefused, wire.Who, wire.Bye})
_LAST_WORDS = (wire.Release, wire.Decline, wire.Gone, wire.Sealed, wire.PushFailed)
"""What still matters once its sender has closed. A seal does not: what is under way fails then."""


def _says_who(body: wire.Message) -> bool:
    """Whether a message stands without its sender's hello."""
    return isinstance(body, (wire.Release, wire.Decline)) and bool(body.ranks)


def _last_words(link: Link) -> list[bytes]:
    """Frames for a peer that it has not confirmed, as many as fit into a good-bye."""
    words: list[bytes] = []
    left = wire.MAX_FRAME_NBYTES // 2
    for _, frame in link.mailbox.outbox:
        fits = len(words) < wire.MAX_LAST_WORDS and len(frame) < min(left, wire.MAX_OPAQUE_NBYTES)
        if fits and isinstance(wire.decode(frame).body, _LAST_WORDS):
            words.append(frame)
            left -= len(frame)
    return words


def _kind(text: str) -> ErrorKind:
    try:
        return ErrorKind(text)
    except ValueError:
        return ErrorKind.UNKNOWN
