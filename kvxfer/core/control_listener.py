"""The inbound half of the control channel: one ROUTER that peers dial."""

from __future__ import annotations

import errno
import logging
import socket as sockets
import time
from typing import TYPE_CHECKING, Any

import attrs
import zmq

from kvxfer.core.address import Address
from kvxfer.core.control_bind import bind_first_free
from kvxfer.core.control_config import refuse_exposure
from kvxfer.core.control_curve import CurveAuth
from kvxfer.core.control_guard import Connections, hang_up_on
from kvxfer.core.control_hub import Hub, Inlet
from kvxfer.core.control_sockets import HANDSHAKE_FAILED, Monitor, configure, seed_identities
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from kvxfer.core.channel import Inbound
    from kvxfer.core.control_config import ChannelAuth, ControlConfig

__all__ = ["InboundRoute", "Listener"]

logger = logging.getLogger("kvxfer.control")

# Not EVENT_ACCEPT_FAILED: without descriptors libzmq tries, fails and reports in a tight loop.
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
# A connection is worth three reports at most; 20,000 connections may come and go while we are
# kept from reading. About 100 bytes each.
_MONITOR_DEPTH = 60_000
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_SWEEP = 0.25
"""Seconds between two looks at what the connections have sent."""
_REBIND = 0.005
"""Seconds until the port is tried again that libzmq's thread has not given back yet."""


@attrs.frozen(cache_hash=True)
class InboundRoute:
    """One connection that a peer opened. Ends with it: a peer that comes back is a new route."""

    channel: int
    identity: bytes


@attrs.frozen
class _Known:
    """A route, the descriptor of its connection, the key behind it and whose that is."""

    route: InboundRoute
    fd: int
    key: bytes
    peer: str


class Listener(Inlet):
    """Bound from construction on.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        hub: Hub,
        context: zmq.Context[Any],
        config: ControlConfig,
        auth: ChannelAuth | None,
        *,
        serial: int,
    ) -> None:
        self.bound, self._monitor = Address(config.bind_host), None
        self._serial = serial
        self._max_routes = config.max_routes
        # From the first message of a connection until it is lost.
        self._known: dict[bytes, _Known] = {}
        self._identities: dict[int, bytes] = {}
        self._open: set[int] = set()
        self._guard = Connections(config)
        self._auth = auth
        self._curve = auth if isinstance(auth, CurveAuth) else None
        self._rebind_at: float | None = None
        self._sweep_at = 0.0
        seed_identities()
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        try:
            host = _literal(config.bind_host)
            refuse_exposure(host, config, auth)
            configure(socket, config, version=host.version, dials=False)
            if auth is not None:
                auth.configure_listener(socket)
            self._monitor = Monitor(context, socket, _EVENTS, _MONITOR_DEPTH)
            self.bound, self._endpoint = _bind(socket, host, config)
        except BaseException:
            if self._monitor is not None:
                self._monitor.close()
            socket.close(0)
            raise
        super().__init__(hub, socket, config.max_message_nbytes)
        hub.watch(self._monitor.socket, self._on_monitor)

    def __len__(self) -> int:
        return len(self._known)

    def peer(self, route: InboundRoute) -> str:
        """Whose key the connection showed; empty without keys or for one that has ended."""
        known = self._known.get(route.identity) if route.channel == self._serial else None
        return "" if known is None else known.peer

    def next_due(self) -> float | None:
        """When ``tick`` has something to do."""
        due = self._sweep_at if self._open else None
        if self._rebind_at is not None:
            due = self._rebind_at if due is None else min(due, self._rebind_at)
        return due

    def tick(self, now: float) -> None:
        """Look after the port and the connections."""
        if self._rebind_at is not None and now >= self._rebind_at:
            self._bind_again(now)
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP
            for fd in self._guard.overdue(now):
                self._cut(fd, "inbound_cut_pending")
            for fd in self._guard.excessive(now):
                self._cut(fd, "inbound_cut_unread")

    def keys_changed(self, *, renewed: bool, now: float) -> None:
        """The allow-list is another one: whose key went is cut off. ``renewed``: so is ours."""
        if self._curve is None:
            return
        for identity, known in tuple(self._known.items()):
            if self._curve.name(known.key) != known.peer:
                self._cut(known.fd, "inbound_cut_keys")
                self._forget(identity)
        if renewed:
            # A bound socket keeps the key it was bound with. Its connections end with it; whoever
            # knows our new key, as all should by now, is back within its first pause.
            self.socket.unbind(self._endpoint)
            for identity in tuple(self._known):
                self._forget(identity)
            self._open.clear()
            self._guard.clear()
            self._curve.configure_listener(self.socket)
            self._bind_again(now)

    def _bind_again(self, now: float) -> None:
        try:
            self.socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            if self._rebind_at is None:
                logger.info("%s is not free yet: %s", self.bound, error.strerror)
            self._rebind_at = now + _REBIND
        else:
            self._rebind_at = None

    def _cut(self, fd: int, reason: str) -> None:
        self.hub.counters[reason] += 1
        assert self.bound.port is not None
        hang_up_on(fd, self.bound.port)

    def send(self, route: InboundRoute, data: bytes) -> bool:
        counters = self.hub.counters
        if route.channel != self._serial:
            counters["dropped_out_no_route"] += 1
            return False
        if route.identity not in self._known:
            counters["dropped_out_unroutable"] += 1
            return False
        self.touch()
        try:
            try:
                self._send(route.identity, data)
            except zmq.Again:
                self.writable()  # hears what the peer has taken meanwhile
                self._send(route.identity, data)
        except zmq.Again:
            counters["dropped_out_queue_full"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            counters["dropped_out_unroutable"] += 1
            self._forget(route.identity)
            return False
        return True

    def close(self) -> None:
        if self._monitor is not None:
            self.hub.unwatch(self._monitor.socket)
            self._monitor.close()
        super().close()

    def _send(self, identity: bytes, data: bytes) -> None:
        self.socket.send(identity, _MORE)
        self.socket.send(data, zmq.NOBLOCK)

    def _read_one(self, out: list[Inbound]) -> None:
        identity = self.socket.recv(zmq.NOBLOCK)
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        data = self.accept(frame)
        known = self._known.get(identity)
        if known is not None:
            self._guard.heard(known.fd)
            if data is not None:
                self.deliver(known.route, data, known.peer, out)
            return
        if data is None:
            return
        key = _key(frame)
        reason = self._refusal(identity, key)
        if reason is not None:
            self.hub.counters[reason] += 1
            return
        peer = "" if self._curve is None else self._curve.name(key) or ""
        route = InboundRoute(self._serial, identity)
        self.deliver(route, data, peer, out)
        self._learn(route, _descriptor(frame), key, peer)

    def _refusal(self, identity: bytes, key: bytes) -> str | None:
        if self._curve is not None and self._curve.name(key) is None:
            return "dropped_in_not_allowed"  # its key went while the message was under way
        # Ours never choose an identity. One that was chosen could be somebody else's former one.
        if len(identity) != 5 or identity[0] != 0:
            return "dropped_in_chosen_identity"
        return "dropped_in_too_many_routes" if len(self._known) >= self._max_routes else None

    def _learn(self, route: InboundRoute, fd: int, key: bytes = b"", peer: str = "") -> None:
        """Tie the route to its connection, so that the end of that connection names it.

        Descriptors are reused.  The reports are read first: the one that opened this connection
        lies before its messages, so a closing report read later is of this connection or of a
        later one on the same descriptor, and either way this one has ended.
        """
        self._on_monitor()
        if fd not in self._open:
            self._lost(route)
            return
        self._end(fd)
        self._guard.heard(fd)
        self._known[route.identity] = _Known(route, fd, key, peer)
        self._identities[fd] = route.identity

    def _forget(self, identity: bytes) -> None:
        known = self._known.pop(identity, None)
        if known is not None:
            self._identities.pop(known.fd, None)
            self._lost(known.route)

    def _lost(self, route: InboundRoute) -> None:
        self.hub.counters["inbound_lost"] += 1
        self.hub.report_lost(route)

    def _on_monitor(self) -> None:
        counters = self.hub.counters
        if self._monitor is None or self._closed:
            return
        for event, value in self._monitor.read():
            if event == zmq.EVENT_ACCEPTED:
                counters["inbound_accepted"] += 1
                self._open.add(value)
                for fd in self._guard.opened(value, time.monotonic()):
                    self._cut(fd, "inbound_cut_pending")
            elif event == zmq.EVENT_DISCONNECTED:
                counters["inbound_closed"] += 1
                self._open.discard(value)
                self._guard.closed(value)
                self._end(value)
            else:
                counters["inbound_handshakes_failed"] += 1
        if self._monitor.more:
            self.hub.later(self._on_monitor)

    def _end(self, fd: int) -> None:
        identity = self._identities.get(fd)
        if identity is not None:
            self._forget(identity)


def _descriptor(frame: zmq.Frame) -> int:
    """The connection a frame came over; -1 if it had ended before libzmq looked at it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _key(frame: zmq.Frame) -> bytes:
    """The key under which a frame came, as ``CurveAuth`` told libzmq; empty without keys."""
    try:
        return bytes.fromhex(str(frame.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return b""


def _bind(socket: zmq.Socket[bytes], host: Address, config: ControlConfig) -> tuple[Address, str]:
    """Where it is bound, as an address of ours and in libzmq's own words."""

    def bind(endpoint: str) -> None:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error

    bind_first_free(bind, host.host, config.ports)
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    text = endpoint.rstrip(b"\0").decode()
    return host.with_port(Address.parse(text).port), text


def _literal(bind_host: str) -> Address:
    """The address to bind for a host that may be a name. May wait for the name server."""
    address = Address(bind_host)
    if address.version is not None:
        return address
    try:
        found = sockets.getaddrinfo(bind_host, None, type=sockets.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"bind_host {bind_host!r} cannot be resolved: {error.strerror}",
            next_step="Give an address of this machine instead of a name",
        ) from error
    return Address(str(found[0][4][0]))
