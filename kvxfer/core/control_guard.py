"""Bounds on what inbound connections may do to us before and beside whole messages.

libzmq collects what a connection sends, before it is authenticated and while a message is
incomplete, in memory of its own that no option of it bounds in total.  The kernel counts what each
connection has sent, so the channel can compare that with what came out, and hang up.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket as sockets
import struct
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.core.control_config import ControlConfig

__all__ = ["Connections", "hang_up_on", "received_nbytes"]

_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in ``struct tcp_info`` (linux/tcp.h, since Linux 4.1)."""
_TCP_INFO_NBYTES = _BYTES_RECEIVED + 8
_ALLOWANCE = 1024.0
"""Bytes per second that are never held against a connection: heartbeats and acknowledgements."""
_PER_SWEEP = 256
"""Connections looked at per sweep, about 5 us each."""
_GRACE = 1.0
"""Seconds that a connection has to send its first message when there are many of them. Ours do
within milliseconds, but all ranks of a large deployment may dial at once."""
_PENDING_FACTOR = 4
"""Connections that have not sent a whole message may have sent so many times ``max_unread_nbytes``
together: hellos have up to half a MiB each."""


def received_nbytes(fd: int) -> int | None:
    """Bytes that the connection behind ``fd`` has received so far; None if that is not known."""
    with _borrowed(fd) as connection:
        if connection is None:
            return None
        try:
            info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_NBYTES)
        except OSError:
            return None
    if len(info) < _TCP_INFO_NBYTES:
        return None  # an older kernel
    (count,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
    return int(count)


def hang_up_on(fd: int, port: int) -> bool:
    """End the connection behind a descriptor of libzmq's, if it is one that came in on ``port``.

    libzmq has no call for it.  It may have closed the descriptor meanwhile, and somebody else may
    have got its number: so what it stands for is looked at through a duplicate, which cannot
    change under us, and only then shut down.  libzmq sees the end and closes its own.
    """
    with _borrowed(fd) as connection:
        if connection is None:
            return False
        try:
            if connection.type != sockets.SOCK_STREAM or connection.getsockname()[1] != port:
                return False
            connection.getpeername()  # raises for the listener, which has the same port
            connection.shutdown(sockets.SHUT_RDWR)
        except (OSError, IndexError, TypeError):
            return False
    return True


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[sockets.socket | None]:
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        connection = sockets.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        yield None
        return
    with connection:
        yield connection


@attrs.define
class _Connection:
    opened: float
    heard: bool = False
    """A message has come over it."""
    delivered: bool = True
    """Something came out of it since the last look."""
    base: int = 0
    """Bytes it had received when it was last even with what came out."""
    since: float = 0.0


class Connections:
    """The inbound connections by descriptor. ``now`` is monotonic seconds."""

    def __init__(self, config: ControlConfig) -> None:
        self._max_pending = config.max_pending
        self._max_unread = config.max_unread_nbytes
        # Half of the descriptors stay for everything else: libzmq spins when there are none left.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_pending = config.max_routes + config.max_pending
        if descriptors != resource.RLIM_INFINITY:
            self._most_pending = max(1, min(self._most_pending, descriptors // 2))
        self._all: dict[int, _Connection] = {}
        self._pending: dict[int, None] = {}
        self._round: list[int] = []

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, fd: int) -> bool:
        return fd in self._all

    @property
    def pending(self) -> int:
        """How many have not sent a message."""
        return len(self._pending)

    def opened(self, fd: int, now: float) -> list[int]:
        """A connection was accepted; returns the ones that have to go for it."""
        self._all[fd] = _Connection(now, since=now)
        self._pending.pop(fd, None)
        self._pending[fd] = None
        return self._oldest(len(self._pending) - self._most_pending)

    def overdue(self, now: float) -> list[int]:
        """Connections that have to go because too many have sent no message for too long."""
        late = 0
        for fd in self._pending:  # oldest first
            if now - self._all[fd].opened < _GRACE:
                break
            late += 1
        return self._oldest(late - self._max_pending)

    def _oldest(self, count: int) -> list[int]:
        going = list(self._pending)[: max(0, count)]
        for fd in going:
            del self._pending[fd]
        return going

    def closed(self, fd: int) -> None:
        self._all.pop(fd, None)
        self._pending.pop(fd, None)

    def heard(self, fd: int) -> None:
        """A whole message came over it."""
        connection = self._all.get(fd)
        if connection is not None:
            connection.delivered = True
            if not connection.heard:
                connection.heard = True
                self._pending.pop(fd, None)

    def clear(self) -> None:
        self._all.clear()
        self._pending.clear()
        self._round.clear()

    def excessive(self, now: float) -> list[int]:
        """Connections that sent too much without a message coming out, as far as looked at.

        All that are pending are looked at each time, the others in turn.
        """
        going: list[int] = []
        sent = [(received_nbytes(fd) or 0, fd) for fd in self._pending]
        total = sum(count for count, _ in sent)
        for count, fd in sorted(sent, reverse=True):
            if total <= _PENDING_FACTOR * self._max_unread:
                break
            going.append(fd)
            total -= count
        if not self._round:
            self._round = [fd for fd, x in self._all.items() if x.heard]
        for _ in range(min(len(self._round), _PER_SWEEP)):
            fd = self._round.pop()
            connection = self._all.get(fd)
            if connection is not None and self._too_much(fd, connection, now):
                going.append(fd)
        return going

    def _too_much(self, fd: int, connection: _Connection, now: float) -> bool:
        count = received_nbytes(fd)
        if count is None:
            return False
        if connection.delivered:
            connection.delivered, connection.base, connection.since = False, count, now
            return False
        allowed = self._max_unread + _ALLOWANCE * (now - connection.since)
        return count - connection.base > allowed
