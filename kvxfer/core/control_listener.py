"""The inbound half of the control channel: one ROUTER that peers dial."""

from __future__ import annotations

import errno
import socket as sockets
from typing import TYPE_CHECKING, Any

import attrs
import zmq

from kvxfer.core.address import Address
from kvxfer.core.control_bind import bind_first_free
from kvxfer.core.control_hub import Hub, Inlet
from kvxfer.core.control_sockets import HANDSHAKE_FAILED, Monitor, configure, seed_identities
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from kvxfer.core.channel import Inbound
    from kvxfer.core.control_config import ChannelAuth, ControlConfig

__all__ = ["InboundRoute", "Listener"]

# Not EVENT_ACCEPT_FAILED: without descriptors libzmq tries, fails and reports in a tight loop.
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
# A connection is worth three reports at most; 20,000 connections may come and go while we are
# kept from reading. About 100 bytes each.
_MONITOR_DEPTH = 60_000
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


@attrs.frozen(cache_hash=True)
class InboundRoute:
    """One connection that a peer opened. Ends with it: a peer that comes back is a new route."""

    channel: int
    identity: bytes


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
        # A route and the descriptor of its connection, from its first message until it is lost.
        self._known: dict[bytes, tuple[InboundRoute, int]] = {}
        self._identities: dict[int, bytes] = {}
        self._open: set[int] = set()
        seed_identities()
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        try:
            host = _literal(config.bind_host)
            configure(socket, config, version=host.version, dials=False)
            if auth is not None:
                auth.configure_listener(socket)
            self._monitor = Monitor(context, socket, _EVENTS, _MONITOR_DEPTH)
            self.bound = _bind(socket, host, config)
        except BaseException:
            if self._monitor is not None:
                self._monitor.close()
            socket.close(0)
            raise
        super().__init__(hub, socket, config.max_message_nbytes)
        hub.watch(self._monitor.socket, self._on_monitor)

    def __len__(self) -> int:
        return len(self._known)

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
        if data is None:
            return
        known = self._known.get(identity)
        if known is not None:
            self.deliver(known[0], data, out)
            return
        reason = self._refusal(identity)
        if reason is not None:
            self.hub.counters[reason] += 1
            return
        route = InboundRoute(self._serial, identity)
        self.deliver(route, data, out)
        self._learn(route, _descriptor(frame))

    def _refusal(self, identity: bytes) -> str | None:
        # Ours never choose an identity. One that was chosen could be somebody else's former one.
        if len(identity) != 5 or identity[0] != 0:
            return "dropped_in_chosen_identity"
        return "dropped_in_too_many_routes" if len(self._known) >= self._max_routes else None

    def _learn(self, route: InboundRoute, fd: int) -> None:
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
        self._known[route.identity] = (route, fd)
        self._identities[fd] = route.identity

    def _forget(self, identity: bytes) -> None:
        known = self._known.pop(identity, None)
        if known is not None:
            self._identities.pop(known[1], None)
            self._lost(known[0])

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
            elif event == zmq.EVENT_DISCONNECTED:
                counters["inbound_closed"] += 1
                self._open.discard(value)
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


def _bind(socket: zmq.Socket[bytes], host: Address, config: ControlConfig) -> Address:
    def bind(endpoint: str) -> None:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error

    bind_first_free(bind, host.host, config.ports)
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return host.with_port(Address.parse(endpoint.rstrip(b"\0").decode()).port)


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
