"""The outbound half of the control channel: one DEALER per dialled route.

libzmq connects and reconnects by itself, with growing pauses, on its own thread.  Two things are
added.  It gives a connection up for good after a protocol error (a stranger on the peer's port, a
message beyond all limits); such a route is dialled anew here.  And names are resolved elsewhere,
see ``control_names``.  With keys, a socket is for one key of the peer; while there are several, one
after the other is tried, see ``control_keying``.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs
import zmq

from kvxfer.core.control_curve import Candidate, CurveAuth
from kvxfer.core.control_hub import Hub, Inlet
from kvxfer.core.control_keying import Keying
from kvxfer.core.control_names import NameResolver
from kvxfer.core.control_sockets import HANDSHAKE_FAILED, Monitor, configure, require_descriptors
from kvxfer.core.limitedlog import LimitedLog
from kvxfer.errors import CapacityError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.core.address import Address
    from kvxfer.core.channel import Inbound
    from kvxfer.core.control_config import ChannelAuth, ControlConfig

__all__ = ["Dialled", "DialledRoute", "Dialler"]

logger = LimitedLog(logging.getLogger("kvxfer.control"))

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | HANDSHAKE_FAILED
)
_MONITOR_DEPTH = 1000
# libzmq says at once that it will try again; if it has not within this time, it gave up.
_GIVEN_UP = 0.1  # seconds
_serial = itertools.count(1)


@attrs.frozen(cache_hash=True)
class DialledRoute:
    """One connection that we opened; stays the same when it is lost and comes back."""

    serial: int


class Dialled(Inlet):
    """One route and its DEALER."""

    def __init__(
        self,
        dialler: Dialler,
        socket: zmq.Socket[bytes],
        monitor: Monitor,
        address: Address,
        config: ControlConfig,
        *,
        peer: str,
        candidate: Candidate | None,
    ) -> None:
        self.route = DialledRoute(next(_serial))
        self.address = address
        self.peer = peer
        """Whose key we want to meet; empty: any that is allowed, and once it answered, that one."""
        self.candidate = candidate
        """The key that the socket is for; None without keys."""
        self.cut_off = False
        """That key is not allowed any more: nothing goes out or comes in over the socket."""
        self.wants_socket = False
        """The next attempt must be made with another socket, because keys are others now."""
        self.next_key = False
        """And with the peer's next key, because this one failed."""
        self.literal: str | None = None
        """The host that libzmq is connected to or tries; None while a name is looked up."""
        self.given_up = False
        """Whether libzmq may have stopped trying."""
        self._dialler = dialler
        self._config = config
        self._monitor = monitor
        self.up = False
        self._complained = False
        self._pause = config.reconnect_min
        # For names and with keys: until it is up, another literal or another key may be tried, and
        # libzmq drops its queue then.
        self._backlog: deque[bytes] = deque()
        super().__init__(dialler.hub, socket, config.max_message_nbytes)
        self.hub.watch(monitor.socket, self._on_monitor)

    @property
    def named(self) -> bool:
        return self.address.version is None

    def connect(self, literal: str) -> None:
        """Have libzmq dial ``literal`` instead of what it dialled before, if anything."""
        self.disconnect()
        target = self.address.with_host(literal)
        self.socket.setsockopt(zmq.IPV6, int(target.version == 6))
        self.socket.connect(target.tcp())
        self.literal = literal
        self.given_up = False

    def disconnect(self) -> None:
        """Have libzmq forget what it dialled, and what is queued there."""
        if self.literal is None:
            return
        try:
            self.socket.disconnect(self.address.with_host(self.literal).tcp())
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # it knows no more of it: what is wanted
                raise
        self.literal = None

    def cut(self) -> None:
        """The peer's key is no longer allowed: nothing goes to it or comes from it."""
        self.cut_off = True
        self._backlog.clear()
        self.disconnect()
        if self.up:
            self.lost()

    def exchange(self, socket: zmq.Socket[bytes], monitor: Monitor, candidate: Candidate) -> None:
        """Go on with a new socket, for ``candidate``. What libzmq holds for the old one is gone."""
        if self.up:
            self.lost()
        self._release()
        self.candidate, self.literal = candidate, None
        self.cut_off = self.wants_socket = self.next_key = False
        self._monitor = monitor
        self.replace_socket(socket)
        self.hub.watch(monitor.socket, self._on_monitor)

    def _release(self) -> None:
        self.hub.unwatch(self._monitor.socket)
        self._monitor.close()

    def send(self, data: bytes) -> bool:
        if self.cut_off and not self.wants_socket:
            self.hub.counters["dropped_out_no_route"] += 1
            return False
        if (self.named or self.candidate is not None) and not self.up:
            if len(self._backlog) < self._config.send_queue_messages:
                self._backlog.append(data)
                return True
        elif self._send(data):
            return True
        self.hub.counters["dropped_out_queue_full"] += 1
        return False

    def next_pause(self) -> float:
        """How long to wait before the next attempt, in seconds; the one after waits longer."""
        pause = self._pause
        self._pause = min(2 * pause, self._config.reconnect_max)
        return pause

    def close(self) -> None:
        self._release()
        super().close()

    def _send(self, data: bytes) -> bool:
        self.touch()
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            if not self.writable():
                return False
            try:
                self.socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                return False
        return True

    def _read_one(self, out: list[Inbound]) -> None:
        data = self.accept(self.socket.recv(zmq.NOBLOCK, copy=False))
        if self.cut_off:
            self.hub.counters["dropped_in_not_allowed"] += 1
        elif data is not None:
            peer = "" if self.candidate is None else self.candidate.name
            self.deliver(self.route, data, peer, out)

    def _on_monitor(self) -> None:
        if self._closed:
            return
        for event, value in self._monitor.read():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_up()
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_down()
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self.hub.counters["dialled_retries"] += 1
                self.given_up = False
                self._dialler.retrying(self)
            else:
                self._on_failed_handshake(event, value)
        if self._monitor.more:
            self.hub.later(self._on_monitor)

    def _on_up(self) -> None:
        self.hub.counters["dialled_connected"] += 1
        self.up = True
        if self.candidate is not None:
            self.peer = self.candidate.name  # from now on only keys of that name are tried
            self.next_key = False
        self._pause = self._config.reconnect_min
        self._dialler.settled(self)
        while self._backlog:
            if not self._send(self._backlog.popleft()):
                self.hub.counters["dropped_out_queue_full"] += 1

    def _on_down(self) -> None:
        if self.up:
            self.lost()
        if self.cut_off:
            return
        self.given_up = True
        self._dialler.stalled(self)

    def lost(self) -> None:
        """The connection has ended."""
        self.up = False
        self.hub.counters["dialled_lost"] += 1
        self.hub.report_lost(self.route)

    def _on_failed_handshake(self, event: int, value: int) -> None:
        self.hub.counters["dialled_handshakes_failed"] += 1
        if self._dialler.keying is not None:
            self._dialler.keying.refused(self)
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not self._complained:
            self._complained = True
            logger.problem(
                "handshake_failed",
                "%s does not speak our protocol or refuses us (%s, code %#x); trying on, further "
                "failures are only counted (dialled_handshakes_failed)",
                self.address,
                zmq.Event(event).name,
                value,
            )


class Dialler:
    """All dialled routes. ``now`` is monotonic seconds."""

    def __init__(
        self,
        hub: Hub,
        context: zmq.Context[Any],
        config: ControlConfig,
        auth: ChannelAuth | None,
        clock: Callable[[], float],
    ) -> None:
        self.hub = hub
        self._context = context
        self._config = config
        self._auth = auth
        self._clock = clock
        self._routes: dict[DialledRoute, Dialled] = {}
        self._due: dict[DialledRoute, float] = {}
        self.keying: Keying | None = None
        if isinstance(auth, CurveAuth):
            self.keying = Keying(auth, hub, self._due, clock)
        waker = hub.waker
        assert waker is not None
        self._names = NameResolver(waker.wake)

    def __len__(self) -> int:
        return len(self._routes)

    def dial(self, address: Address, peer: str) -> DialledRoute:
        if len(self._routes) >= self._config.max_routes:
            raise CapacityError(
                f"cannot dial {address}: all {self._config.max_routes} routes are taken",
                next_step="Hang up routes that are no longer needed, or raise "
                "ControlConfig.max_routes",
            )
        if address.is_wildcard:
            raise InvalidInputError(f"address {address} stands for all interfaces of a machine")
        if self.keying is not None:
            self.keying.check(peer)
        elif peer:
            raise InvalidInputError(
                f"address {address}#{peer} names a key, but this side has no keys",
                next_step="set ControlConfig.security on both sides",
            )
        dialled = self._make(address, peer)
        self._routes[dialled.route] = dialled
        if dialled.named:
            self._names.ask(dialled.route, address.host)
        else:
            dialled.connect(address.host)
        return dialled.route

    def find(self, route: object) -> Dialled | None:
        return self._routes.get(route) if isinstance(route, DialledRoute) else None

    def hang_up(self, route: object) -> None:
        dialled = self.find(route)
        if dialled is not None:
            del self._routes[dialled.route]
            self._due.pop(dialled.route, None)
            self._names.forget(dialled.route)
            self.hub.lost.pop(dialled.route, None)
            dialled.close()

    def next_due(self) -> float | None:
        """When ``tick`` has something to do."""
        return min(self._due.values()) if self._due else None

    def tick(self, now: float) -> None:
        """Dial anew what is due, and what a name was found for."""
        for route, literals in self._names.answers():
            dialled = self.find(route)
            if dialled is not None:
                self._resolved(dialled, literals, now)
        for route in [route for route, due in self._due.items() if due <= now]:
            del self._due[route]
            dialled = self._routes[route]
            if dialled.named:
                self._names.ask(route, dialled.address.host)
            elif dialled.given_up or dialled.wants_socket:
                self._redial(dialled, dialled.address.host)

    def keys_changed(self, *, renewed: bool, now: float) -> None:
        """The allow-list is another one; ``renewed``: so is our own pair."""
        if self.keying is not None:
            for dialled in tuple(self._routes.values()):
                self.keying.changed(dialled, renewed=renewed, now=now)

    def settled(self, dialled: Dialled) -> None:
        """The connection is up."""
        self._due.pop(dialled.route, None)

    def stalled(self, dialled: Dialled) -> None:
        """The connection is down, and libzmq has not said that it will try again."""
        if dialled.wants_socket and dialled.route in self._due:
            return
        self._due[dialled.route] = self._clock() + max(dialled.next_pause(), _GIVEN_UP)

    def retrying(self, dialled: Dialled) -> None:
        """libzmq will try again by itself. With a name, the next literal may do better."""
        if dialled.wants_socket and not dialled.up:
            # Not by itself: with the keys that we have now.
            if dialled.route not in self._due:
                self._due[dialled.route] = self._clock() + dialled.next_pause()
        elif not dialled.named:
            self._due.pop(dialled.route, None)
        elif dialled.route not in self._due:
            self._due[dialled.route] = self._clock() + dialled.next_pause()

    def close(self) -> None:
        for dialled in self._routes.values():
            dialled.close()
        self._routes.clear()
        self._due.clear()
        self._names.close()

    def _resolved(self, dialled: Dialled, literals: list[str], now: float) -> None:
        if dialled.up or (dialled.cut_off and not dialled.wants_socket):
            return  # libzmq got through meanwhile, or nobody may
        if not literals:
            self.hub.counters["name_lookups_failed"] += 1
            self._due[dialled.route] = now + dialled.next_pause()
            return
        following = literals[0]
        if dialled.literal in literals:
            following = literals[(literals.index(dialled.literal) + 1) % len(literals)]
        if dialled.literal is None and not dialled.wants_socket:
            dialled.connect(following)
        elif following != dialled.literal or dialled.given_up or dialled.wants_socket:
            self._redial(dialled, following)

    def _redial(self, dialled: Dialled, literal: str) -> None:
        self.hub.counters["dialled_redials"] += 1
        if dialled.wants_socket and self.keying is not None:
            try:
                key = self.keying.pick(dialled.peer, dialled.candidate, following=dialled.next_key)
                dialled.exchange(*self._sockets(dialled.address, key), key)
            except (CapacityError, InvalidInputError):
                # No descriptor now, or no key any more: look again later.
                self._due[dialled.route] = self._clock() + dialled.next_pause()
                return
        dialled.connect(literal)

    def _make(self, address: Address, peer: str) -> Dialled:
        key = None
        if self.keying is not None:
            key = self.keying.pick(peer, None, following=False)
        socket, monitor = self._sockets(address, key)
        try:
            return Dialled(self, socket, monitor, address, self._config, peer=peer, candidate=key)
        except BaseException:
            monitor.close()
            socket.close(0)
            raise

    def _sockets(
        self, address: Address, key: Candidate | None
    ) -> tuple[zmq.Socket[bytes], Monitor]:
        """A DEALER that has not connected yet, for one key, and its reports."""
        monitor: Monitor | None = None
        socket: zmq.Socket[bytes] | None = None
        try:
            require_descriptors()
            socket = self._context.socket(zmq.DEALER)
            configure(socket, self._config, version=address.version, dials=True)
            if self._auth is not None:
                self._auth.configure_dialled(socket, address)
            if self.keying is not None and key is not None:
                self.keying.curve.aim(socket, key)
            monitor = Monitor(self._context, socket, _EVENTS, _MONITOR_DEPTH)
            return socket, monitor
        except BaseException as error:
            if monitor is not None:
                monitor.close()
            if socket is not None:
                socket.close(0)
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise CapacityError(
                    f"cannot dial {address}: no file descriptor is left; {len(self._routes)} "
                    "routes are open",
                    next_step="Raise the limit of open files (ulimit -n); a route takes 4",
                ) from error
            raise
