"""The control channel between processes: zmq over TCP, one thread, nothing that waits.

This and its ``control_*`` parts are the only modules of the core that do I/O; importing it loads
zmq.  How it behaves is told in ``docs/reference/control-channel.md``.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from typing import TYPE_CHECKING

import zmq

from kvxfer.core.address import Address, PortRange
from kvxfer.core.channel import Channel, Inbound, Route
from kvxfer.core.control_config import (
    ChannelAuth,
    ControlConfig,
    Security,
    exposure,
    fixed_port,
)
from kvxfer.core.control_curve import CurveAuth
from kvxfer.core.control_dialler import DialledRoute, Dialler
from kvxfer.core.control_hub import Hub
from kvxfer.core.control_listener import InboundRoute, Listener
from kvxfer.core.control_sockets import make_context, require_descriptors
from kvxfer.core.keys import join_peer, split_peer
from kvxfer.errors import CapacityError, ClosedError, ConfigError, KvxferError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "Address",
    "ChannelAuth",
    "ControlConfig",
    "DialledRoute",
    "InboundRoute",
    "PortRange",
    "Security",
    "ZmqChannel",
    "exposure",
    "fixed_port",
]

logger = logging.getLogger("kvxfer.control")

_QUANTUM = 32  # messages taken from one socket before the next one has its turn
_LONGEST_WAIT = 3600.0  # seconds; epoll counts milliseconds in 32 bits
_channels = itertools.count(1)


class ZmqChannel(Channel):
    """A ``Channel`` over TCP.

    Bound when the constructor returns: ``address`` is what peers dial, with the port that was
    really taken.  All methods but ``wake`` are called from one thread at a time.  A channel does
    not survive a fork: in the child every method but ``close`` raises ``ClosedError``.

    Args:
        config: see ``ControlConfig``; the default listens on loopback, on a port of the operating
            system's choice.
        auth: configures every socket before it is bound or connected, in place of
            ``config.security``. With neither there is no authentication.

    Raises:
        ConfigError: the address cannot be bound (names what holds the port if that can be known);
            it could be reached by strangers, and there are no keys; or a key file is not right.
        MissingDependencyError: there are keys, and libzmq was built without CURVE.
        CapacityError: no file descriptor is left.
    """

    def __init__(
        self, config: ControlConfig | None = None, *, auth: ChannelAuth | None = None
    ) -> None:
        self.config = ControlConfig() if config is None else config
        if not isinstance(self.config, ControlConfig):
            raise ConfigError(f"config must be a ControlConfig, not {config!r}")
        if self.config.security is not None:
            if auth is not None:
                raise ConfigError("both ControlConfig.security and auth are given")
            auth = CurveAuth(self.config.security)
        self._auth = auth
        self._curve = auth if isinstance(auth, CurveAuth) else None
        self._reload_at = self._next_look(time.monotonic())
        self._closed = False
        self._pid = os.getpid()
        try:
            require_descriptors()
            self._hub = Hub(max_lost=4 * self.config.max_routes)
            self._context = make_context(self.config)
            self._listener = self._listen()
        except (zmq.ZMQError, OSError) as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise CapacityError(
                f"the control channel cannot be set up: {error.strerror}",
                next_step="Look at the limit of open files (ulimit -n)",
            ) from error
        self._dialler = Dialler(self._hub, self._context, self.config, auth, time.monotonic)
        advertised = self._listener.bound
        if self.config.advertise_host is not None:
            advertised = advertised.with_host(self.config.advertise_host)
        self._address = advertised.tcp()
        if self._curve is not None:
            self._address = join_peer(self._address, self._curve.own.name)
        warning = exposure(self._listener.bound, auth)
        if warning is not None:
            logger.warning("%s", warning)

    def _listen(self) -> Listener:
        auth = self._auth
        started = False
        try:
            if auth is not None:
                auth.start(self._context)
                started = True
            if self._curve is not None:
                self._curve.attach(self._hub)
            return Listener(self._hub, self._context, self.config, auth, serial=next(_channels))
        except BaseException:
            if auth is not None and started:
                auth.stop()
            self._context.term()
            self._hub.close()
            raise

    @property
    def address(self) -> str:
        return self._address

    @property
    def bound(self) -> Address:
        """Where the channel listens; differs from ``address`` if another host is advertised."""
        return self._listener.bound

    def dial(self, address: str) -> Route:
        """See ``Channel.dial``. A name is looked up on another thread; messages wait meanwhile.

        Raises:
            InvalidInputError: not an address, or one without a port, or a wildcard; or the peer it
                names has no key in the allow-list.
            CapacityError: ``max_routes`` are open, or no file descriptor is left.
            ClosedError: the channel was closed.
        """
        self._check()
        text, peer = split_peer(address)
        target = Address.parse(text)
        target.tcp()
        return self._dialler.dial(target, peer)

    def hang_up(self, route: Route) -> None:
        """See ``Channel.hang_up``. Inbound routes are ignored: their end is the peer's matter."""
        self._check()
        self._dialler.hang_up(route)

    def send(self, route: Route, data: bytes) -> bool:
        """See ``Channel.send``.

        On a dialled route, True says that the message was queued: it leaves when the connection
        is up.  On an inbound route, False also says that the connection has ended.
        """
        self._check()
        counters = self._hub.counters
        if len(data) > self.config.max_message_nbytes:
            if not counters["dropped_out_oversize"]:
                logger.warning(
                    "a message of %d bytes is not sent: max_message_nbytes is %d; further ones are "
                    "only counted (dropped_out_oversize)",
                    len(data),
                    self.config.max_message_nbytes,
                )
            counters["dropped_out_oversize"] += 1
            return False
        if isinstance(route, InboundRoute):
            sent = self._listener.send(route, data)
        else:
            dialled = self._dialler.find(route)
            if dialled is None:
                counters["dropped_out_no_route"] += 1
                return False
            sent = dialled.send(data)
        if sent:
            counters["messages_out"] += 1
            counters["bytes_out"] += len(data)
        return sent

    def receive(self, budget: int = 256) -> list[Inbound]:
        """See ``Channel.receive``. Dropped messages count against ``budget`` too."""
        self._check()
        self._turn(0.0)
        found: list[Inbound] = []
        ready = self._hub.ready
        while ready and budget > 0:
            budget -= ready.popleft().take(min(budget, _QUANTUM), found)
        return found

    def wait(self, timeout: float) -> None:
        """See ``Channel.wait``. Losing a route ends it too."""
        self._check()
        hub = self._hub
        deadline = time.monotonic() + min(max(timeout, 0.0), _LONGEST_WAIT)
        while True:
            remaining = deadline - time.monotonic()
            self._turn(max(remaining, 0.0))
            if hub.woken or hub.ready:
                hub.woken = False
                return
            if remaining <= 0:
                return

    def wake(self) -> None:
        """See ``Channel.wake``. Without effect on a closed channel."""
        waker = self._hub.waker
        if waker is None:
            return
        if os.getpid() != self._pid:
            self._check()
        waker.wake()

    @property
    def authenticated(self) -> bool:
        """See ``Channel.authenticated``. With an ``auth`` of somebody else's it is False."""
        return self._curve is not None

    def peer_of(self, route: Route) -> str:
        """See ``Channel.peer_of``."""
        self._check()
        if isinstance(route, InboundRoute):
            return self._listener.peer(route)
        dialled = self._dialler.find(route)
        return "" if dialled is None else dialled.peer

    def reload_keys(self) -> None:
        """Read the key files again. Without effect on a channel without keys.

        New keys are let in from now on; connections of keys that went are closed.  If our own pair
        changed, connections that we open from now on show the new one, and connections that peers
        opened are closed: they come back under the new one.

        Raises:
            ConfigError: a file is not right; everything stays as it was.
        """
        self._check()
        if self._curve is None:
            return
        try:
            renewed = self._curve.reload()
        except KvxferError:
            self._hub.counters["keys_not_reloaded"] += 1
            raise
        self._hub.counters["keys_reloaded"] += 1
        now = time.monotonic()
        self._dialler.keys_changed(renewed=renewed, now=now)
        self._listener.keys_changed(renewed=renewed, now=now)

    def watch_descriptor(self, fd: int) -> None:
        """See ``Channel.watch_descriptor``. Level-triggered: read it empty, or be woken again."""
        self._check()
        self._hub.watch_descriptor(fd)

    def unwatch_descriptor(self, fd: int) -> None:
        """See ``Channel.unwatch_descriptor``."""
        if not self._closed:
            self._hub.unwatch_descriptor(fd)

    def lost_routes(self) -> list[Route]:
        """Routes whose connection ended since the last call, each once, oldest first.

        A dialled route is still valid: it is being dialled again, and messages queue up.  An
        inbound route is over; a peer that comes back has a new one.  An inbound route may be
        named before its last messages are received, and again after them.  This is a hint about
        a connection, not a proof that the process behind it is dead.
        """
        self._check()
        lost = list(self._hub.lost)
        self._hub.lost.clear()
        return lost

    def close(self) -> None:
        """See ``Channel.close``. Takes milliseconds; closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:
            self._dialler.close()
            self._listener.close()
            if self._auth is not None:
                self._auth.stop()
            self._context.term()
        self._hub.close()

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the start, by the names listed in ``docs/reference/control-channel.md``."""
        return dict(self._hub.counters)

    @property
    def routes(self) -> dict[str, int]:
        """How many routes there are now, ``dialled`` and ``inbound``."""
        return {"dialled": len(self._dialler), "inbound": len(self._listener)}

    def __enter__(self) -> ZmqChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _turn(self, timeout: float) -> None:
        """One round over everything that has news; waits at most ``timeout`` seconds for some."""
        now = time.monotonic()
        self._look_for_keys(now)
        self._dialler.tick(now)
        self._listener.tick(now)
        for due in (self._dialler.next_due(), self._listener.next_due(), self._reload_at):
            if due is not None:
                timeout = min(timeout, max(due - now, 0.0))
        self._hub.gather(timeout)

    def _next_look(self, now: float) -> float | None:
        security = self.config.security
        interval = None if security is None else security.reload_interval
        return None if interval is None else now + interval

    def _look_for_keys(self, now: float) -> None:
        if self._curve is None or self._reload_at is None or now < self._reload_at:
            return
        self._reload_at = self._next_look(now)
        if self._curve.changed():
            try:
                self.reload_keys()
            except KvxferError as error:
                self._curve.complain(error)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the control channel is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the control channel belongs to process {self._pid}; this is {os.getpid()}, "
                "forked from it",
                next_step="Open a channel of its own in every process",
            )
