"""The keeper without a process: books, peers and a channel. One turn is all it does.

Nothing here waits or reads a clock.  ``process`` runs it beside a real agent; tests and the
simulator run it in virtual time.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, TypeVar

from kvxfer.core import wire
from kvxfer.errors import CapacityError, InvalidInputError, WireError
from kvxfer.keeper import messages as m
from kvxfer.keeper.holds import HoldBook
from kvxfer.keeper.peers import PeerTable
from kvxfer.keeper.watches import Asking, WatchTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.core.channel import Channel, Inbound, Route
    from kvxfer.keeper.peers import Peer

__all__ = ["Keeper"]

_T = TypeVar("_T")

_HELD_BACK = 1024
"""Grants that may wait for the agent to take the news of their readers: then no new ones."""


class Keeper:
    """Answers for one agent.

    Args:
        setup: what the agent said first.
        channel: its own; peers' keepers dial it.
    """

    def __init__(self, setup: m.Setup, channel: Channel, *, now: float) -> None:
        self._setup = setup
        self._channel = channel
        self.holds = HoldBook()
        self.watches = WatchTable(retry=setup.retry)
        self.peers = PeerTable(interval=setup.beat_interval, quiet_after=setup.quiet_after)
        self.counters: collections.Counter[str] = collections.Counter()
        self._routes: dict[str, Route] = {}
        """Dialled, by address."""
        self._last_turn = now
        self._speaks_until = now + setup.patience
        self._renewed: dict[wire.Ref, tuple[float, float]] = {}
        self._opened: collections.deque[m.Opened] = collections.deque()
        self._closed: collections.deque[m.Closed] = collections.deque()
        self._held_back: collections.deque[tuple[Route, bytes]] = collections.deque()
        """Grants to new readers, until the agent was told."""
        self._news = m.News(ready=channel.address)
        self._pending: dict[str, bool] = {}
        """Peers of which the agent must hear, and whether they are quiet."""

    # ---- one turn ----------------------------------------------------------------------------

    def turn(self, inbound: Iterable[Inbound], orders: Iterable[list[m.Order]], now: float) -> None:
        """Carry out ``orders``, then answer ``inbound``, then do what is due.

        ``now`` must be read after ``inbound`` was received and before ``orders`` were: see
        ``holds``.
        """
        if now - self._last_turn > max(self._setup.quiet_after / 4, 2 * self._setup.beat_interval):
            self.counters["stalls"] += 1
            self.peers.stalled(now)
        self._last_turn = now
        for batch in orders:
            self._speaks_until = now + self._setup.patience
            for order in batch:
                self._carry_out(order, now)
        speaks = now < self._speaks_until
        for message in inbound:
            self._receive(message, now, speaks=speaks)
        for asking in self.watches.due(now):
            if speaks:
                self._ask(asking)
        ask, quiet = self.peers.due(now)
        for peer in ask:
            if speaks:
                self._send(peer.keeper, wire.Beat(False), peer.version)
        for peer in quiet:
            self.counters["peers.quiet"] += 1
            self._pending[peer.incarnation] = True

    def next_at(self) -> float | None:
        """When to have a turn again at the latest."""
        times = [t for t in (self.watches.next_at(), self.peers.next_at()) if t is not None]
        return min(times) if times else None

    # ---- orders ------------------------------------------------------------------------------

    def _carry_out(self, order: m.Order, now: float) -> None:
        match order:
            case m.Held():
                self.holds.hold(
                    order.transfer, order.epoch, order.ticket, order.lease, order.ends_at
                )
            case m.Finished():
                self.holds.finished(order.transfer, order.epoch, order.reader)
            case m.Again():
                self.holds.again(order.transfer, order.epoch, order.reader)
            case m.Close():
                answer = self.holds.close(order.transfer, order.epoch, order.unless_after)
                self._closed.append(
                    m.Closed(
                        order.transfer,
                        order.epoch,
                        order.number,
                        answer.closed,
                        answer.granted_until,
                        answer.readers,
                    )
                )
            case m.PeerIs():
                self._know(order, now)
            case m.PeerGone():
                self._forget(order.incarnation)
            case m.Watch():
                self.watches.number_from(order.seq)
                self.watches.watch(
                    order.ref, bound=order.bound, granted_until=order.granted_until, now=now
                )
            case m.Unwatch():
                self.watches.unwatch(order.ref)
                self._renewed.pop(order.ref, None)
            case m.Sync():
                self.watches.number_from(order.seq)
                self._news = m.News(
                    ready=self._news.ready, synced=order.number, counters=dict(self.counters)
                )

    def _know(self, order: m.PeerIs, now: float) -> None:
        known = self.peers.get(order.incarnation)
        if known is not None and (known.keeper, known.agent) != (order.keeper, order.agent):
            self._hang_up(known)
        self.peers.know(
            order.incarnation,
            version=order.version,
            agent=order.agent,
            keeper=order.keeper,
            key=order.key,
            now=now,
        )
        if order.keeper:
            self._send(order.keeper, wire.Beat(False), order.version)

    def _forget(self, incarnation: str) -> None:
        known = self.peers.get(incarnation)
        if known is not None:
            self._hang_up(known)
            self.peers.forget(incarnation)
            self.watches.forget_peer(incarnation)
            self._pending.pop(incarnation, None)

    def _hang_up(self, peer: Peer) -> None:
        for address in (peer.keeper, peer.agent):
            route = self._routes.pop(address, None)
            if route is not None:
                self._channel.hang_up(route)

    # ---- the network -------------------------------------------------------------------------

    def _receive(self, message: Inbound, now: float, *, speaks: bool) -> None:
        """One message from outside. Whatever it is, the loop lives."""
        try:
            envelope = wire.decode(message.data)
        except WireError:
            self.counters["messages.rejected"] += 1
            return
        peer = self.peers.get(envelope.sender)
        if peer is None or message.peer != peer.key:
            self.counters["messages.from_strangers"] += 1
            return
        match envelope.body:
            case wire.Beat(answer=answer):
                if speaks and not answer:
                    self._answer(message.route, wire.Beat(True), peer)
            case wire.Open():
                if speaks:
                    self._grant(message.route, envelope.body, peer, now)
            case wire.Grant():
                self._on_grant(envelope.body, peer, now)
            case _:
                self.counters["messages.unexpected"] += 1
                return
        if self.peers.heard(peer.incarnation, now):
            self._pending[peer.incarnation] = False

    def _grant(self, route: Route, request: wire.Open, peer: Peer, now: float) -> None:
        granted, new = [], False
        for ref in request.refs:
            granting = None
            if ref.keeper == self._setup.incarnation and len(self._held_back) < _HELD_BACK:
                granting = self.holds.grant(ref, reader=peer.incarnation, seq=request.seq, now=now)
            if granting is None:
                self.counters["grants.left_to_the_agent"] += 1
                continue
            granted.append(wire.Granted(ref, granting.remaining))
            if granting.new:
                new = True
                self._opened.append(
                    m.Opened(ref.transfer, ref.epoch, peer.incarnation, request.seq)
                )
        self.counters["grants.given"] += len(granted)
        if not granted:
            return
        answer = wire.Grant(request.seq, granted, [])
        if new:
            frame = wire.encode(self._setup.incarnation, answer, version=peer.version)
            self._held_back.append((route, frame))
        else:
            self._answer(route, answer, peer)

    def agent_was_told(self) -> None:
        """All news were handed over: what waited for that goes out."""
        while self._held_back:
            self._put(*self._held_back.popleft())

    def _on_grant(self, answer: wire.Grant, peer: Peer, now: float) -> None:
        for granted in answer.granted:
            news = self.watches.granted(
                peer.incarnation, answer.seq, granted.ref, granted.remaining, now
            )
            if news is not None:
                self.counters["grants.obtained"] += 1
                self._renewed[granted.ref] = news
        for refused in answer.refused:
            if self.watches.refused(peer.incarnation, answer.seq, refused.ref):
                self.counters["grants.refused"] += 1

    def _ask(self, asking: Asking) -> None:
        peer = self.peers.get(asking.incarnation)
        if peer is None:
            return  # the agent has not met it yet, or has lost it
        request = wire.Open(asking.seq, list(asking.refs))
        if peer.keeper:
            self._send(peer.keeper, request, peer.version)
        if peer.agent and (asking.urgent or not peer.keeper):
            self._send(peer.agent, request, peer.version)

    def _send(self, address: str, body: wire.Message, version: int) -> None:
        route = self._routes.get(address)
        if route is None:
            try:
                route = self._routes[address] = self._channel.dial(address)
            except (InvalidInputError, CapacityError):
                self.counters["dials.failed"] += 1
                return
        self._transmit(route, body, version)

    def _answer(self, route: Route, body: wire.Message, peer: Peer) -> None:
        self._transmit(route, body, peer.version)

    def _transmit(self, route: Route, body: wire.Message, version: int) -> None:
        self._put(route, wire.encode(self._setup.incarnation, body, version=version))

    def _put(self, route: Route, frame: bytes) -> None:
        if not self._channel.send(route, frame):
            self.counters["messages.not_sent"] += 1

    # ---- news --------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether ``take_news`` has something."""
        return self._has_entries or bool(self._news.ready or self._news.synced)

    @property
    def _has_entries(self) -> bool:
        return bool(self._opened or self._closed or self._renewed or self._pending)

    def take_news(self) -> bytes:
        """The next frame for the agent. Of renewals only the latest of each hold is told.

        The answer to a ``Sync`` goes out with the last of what was known when it came.
        """
        room = m.CHUNK
        opened = _take(self._opened, room)
        # An answer must not overtake a reader that it concerns.
        closed = [] if self._opened else _take(self._closed, room - len(opened))
        renewed: list[m.Renewed] = []
        while self._renewed and len(renewed) + len(closed) + len(opened) < room:
            ref, (until, sent) = self._renewed.popitem()
            renewed.append(m.Renewed(ref, until, sent))
        quiet: list[str] = []
        heard: list[str] = []
        while self._pending and len(quiet) + len(heard) < room:
            incarnation, is_quiet = self._pending.popitem()
            (quiet if is_quiet else heard).append(incarnation)
        rest, last = self._news, not self._has_entries
        self._news = m.News() if last else m.News(synced=rest.synced, counters=rest.counters)
        return m.encode(
            m.News(
                ready=rest.ready,
                renewed=renewed,
                opened=opened,
                closed=closed,
                quiet=quiet,
                heard=heard,
                synced=rest.synced if last else 0,
                counters=rest.counters if last else {},
            )
        )


def _take(queue: collections.deque[_T], most: int) -> list[_T]:
    return [queue.popleft() for _ in range(min(len(queue), most))]
