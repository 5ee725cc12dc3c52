"""The zmq sockets of the control channel: how they are set up, and what libzmq says of them."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.core.control_config import ControlConfig

__all__ = ["Monitor", "configure", "make_context", "require_descriptors", "seed_identities"]

_SPARE = 16  # descriptors; a channel opens 10 while it is set up, a dialled route 4
_EVENT = struct.Struct("=Hi")  # number and value; zmq_socket_monitor(3)
_serial = itertools.count(1)

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def require_descriptors() -> None:
    """Check that there are file descriptors to spare.

    libzmq 4.3 aborts the process in some places where it gets none (``epoll.cpp``,
    ``ip_resolver.cpp``), so they are counted out beforehand.

    Raises:
        OSError: EMFILE or ENFILE.
    """
    spare: list[int] = []
    try:
        spare.append(os.eventfd(0, os.EFD_CLOEXEC))
        spare.extend(os.dup(spare[0]) for _ in range(_SPARE - 1))
    finally:
        for fd in spare:
            os.close(fd)


def make_context(config: ControlConfig) -> zmq.Context[zmq.Socket[bytes]]:
    """One context, and so one I/O thread, per channel: channels do not slow one another."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    # A dialled route takes three sockets: its own and both ends of its monitor.
    context.set(zmq.MAX_SOCKETS, 3 * config.max_routes + 64)
    context.set(zmq.BLOCKY, 0)  # sockets linger for no time unless told otherwise
    return context


def seed_identities() -> None:
    """Make the numbers unpredictable under which libzmq's ROUTER knows its connections.

    They count up from a value of C's ``rand()``, which libzmq 4.3 does not seed: every process
    begins with 0x6b8b4567.  A connection may also choose its own identity, and if one chooses the
    next number, the ROUTER aborts the process at the connection after it (zmq_assert in
    ``routing_socket_base_t::add_out_pipe``): two connections of a stranger would be enough.
    """
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


def configure(
    socket: zmq.Socket[bytes], config: ControlConfig, *, version: int | None, dials: bool
) -> None:
    """Set every option that bounds what the socket holds or waits for.

    Args:
        version: of the literal that is bound or dialled, 4 or 6.
        dials: whether it connects rather than binds.
    """
    options: dict[int, int] = {
        zmq.LINGER: 0,
        zmq.SNDHWM: config.send_queue_messages,
        zmq.RCVHWM: config.receive_queue_messages,
        # Twice the limit: a message somewhat too large is dropped by us and counted; libzmq
        # answers one beyond this by closing the connection.
        zmq.MAXMSGSIZE: 2 * config.max_message_nbytes,
        zmq.IPV6: int(version == 6),
        zmq.HANDSHAKE_IVL: _ms(config.handshake_timeout),
        # Both sides probe. The time-to-live in a peer's probes is not enough to know of its end:
        # libzmq forgets it with the next message that is no probe, and TCP goes on for a quarter of
        # an hour with what is not acknowledged.
        zmq.HEARTBEAT_IVL: _ms(config.heartbeat_interval),
        zmq.HEARTBEAT_TIMEOUT: _ms(config.heartbeat_timeout),
        zmq.HEARTBEAT_TTL: _ms(config.heartbeat_interval + config.heartbeat_timeout),
    }
    if dials:
        options |= {
            zmq.CONNECT_TIMEOUT: _ms(config.connect_timeout),
            zmq.RECONNECT_IVL: _ms(config.reconnect_min),
            zmq.RECONNECT_IVL_MAX: _ms(config.reconnect_max),
        }
    else:
        options |= {
            zmq.ROUTER_MANDATORY: 1,  # unroutable messages are an error, not silence
            # All ranks of a large deployment may dial at once; the kernel caps it at somaxconn.
            zmq.BACKLOG: 4096,
        }
    for option, value in options.items():
        socket.setsockopt(option, value)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class Monitor:
    """libzmq's reports about the connections of one socket.

    libzmq's I/O thread stops when the reports pile up beyond ``depth`` plus its own 1000, so they
    are read whenever there are any.
    """

    def __init__(
        self, context: zmq.Context[Any], watched: zmq.Socket[bytes], events: int, depth: int
    ) -> None:
        endpoint = f"inproc://kvxfer-monitor-{next(_serial)}"
        self.more = False
        """Whether the last ``read`` ended before the reports did."""
        self._most = depth + 1000
        self._watched = watched
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.RCVHWM, depth)
            watched.monitor(endpoint, events)
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            watched.disable_monitor()
            self.socket.close(0)
            raise

    def read(self) -> Iterator[tuple[int, int]]:
        """All (event, value) pairs that were there at the time of the call, and perhaps more."""
        self.more = False
        for _ in range(self._most):
            try:
                head = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.recv(zmq.NOBLOCK)  # the endpoint
            if len(head) == _EVENT.size:
                yield _EVENT.unpack(head)
        self.more = True

    def close(self) -> None:
        """To be called before the watched socket is closed.

        The order matters: with this end closed, libzmq's I/O thread would wait for ever at its
        next report, and with it every connection.  So the reports are switched off first, which
        in turn would wait for that thread if it stood before a full queue.
        """
        for _ in self.read():
            pass
        self._watched.disable_monitor()
        self.socket.close(0)
