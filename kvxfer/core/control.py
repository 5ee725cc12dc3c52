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
from kvxfer.core.control_config import ChannelAuth, ControlConfig, exposure, fixed_port
from kvxfer.core.control_dialler import DialledRoute, Dialler
from kvxfer.core.control_hub import Hub
from kvxfer.core.control_listener import InboundRoute, Listener
from kvxfer.core.control_sockets import make_context, require_descriptors
from kvxfer.errors import CapacityError, ClosedError, ConfigError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "Address",
    "ChannelAuth",
    "ControlConfig",
    "DialledRoute",
    "InboundRoute",
    "PortRange",
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
        auth: configures every socket before it is bound or connected; None is no authentication.

    Raises:
        ConfigError: the address cannot be bound; names what holds the port if that can be known.
        CapacityError: no file descriptor is left.
    """

    def __init__(
        self, config: ControlConfig | None = None, *, auth: ChannelAuth | None = None
    ) -> None:
        self.config = ControlConfig() if config is None else config
        if not isinstance(self.config, ControlConfig):
            raise ConfigError(f"config must be a ControlConfig, not {config!r}")
        self._auth = auth
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
            InvalidInputError: not an address, or one without a port, or a wildcard.
            CapacityError: ``max_routes`` are open, or no file descriptor is left.
            ClosedError: the channel was closed.
        """
        self._check()
        target = Address.parse(address)
        target.tcp()
        return self._dialler.dial(target)

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
        self._dialler.tick(now)
        due = self._dialler.next_due()
        if due is not None:
            timeout = min(timeout, max(due - now, 0.0))
        self._hub.gather(timeout)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the control channel is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the control channel belongs to process {self._pid}; this is {os.getpid()}, "
                "forked from it",
                next_step="Open a channel of its own in every process",
            )
