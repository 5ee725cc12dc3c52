"""One connection over a Unix socket: whole messages, file descriptors beside them, never a wait."""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING

from kvxfer.backends.shm.loop import READ, WRITE
from kvxfer.backends.shm.protocol import MAX_MESSAGE, MAX_REGIONS
from kvxfer.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.backends.shm.loop import HandoverLoop

__all__ = ["Link", "socket_name"]

MAX_QUEUED = 256
"""Messages that wait for a peer that does not read, before the connection is dropped."""
_CONTROL_BYTES = socket.CMSG_SPACE(MAX_REGIONS * array.array("i").itemsize)


def socket_name(text: str) -> str | bytes:
    """``Address.socket`` as the socket calls take it."""
    return b"\0" + text[1:].encode() if text.startswith("@") else text


class Link:
    """A connected SOCK_SEQPACKET socket on a loop. Loop thread only.

    ``on_message(data, fds)`` removes from ``fds`` what it keeps; the rest is closed.  It may raise
    ``WireError``, which ends the connection like a message that is too long.  ``on_closed(reason)``
    comes once, however it ends but by ``close``; the reason is empty when the other side hung up.
    """

    def __init__(
        self,
        loop: HandoverLoop,
        sock: socket.socket,
        *,
        on_message: Callable[[bytes, list[int]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self.closed = False
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._queued: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        loop.watch(sock.fileno(), READ, self._ready)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send, or queue, one message. Duplicates ``fds`` when it has to keep them."""
        if self.closed:
            return
        if not self._queued and self._try(data, fds):
            return
        if self.closed:
            return
        if len(self._queued) >= MAX_QUEUED:
            self._end("it does not read")
            return
        self._queued.append((data, [os.dup(fd) for fd in fds]))
        self._loop.watch(self._sock.fileno(), READ | WRITE, self._ready)

    def close(self) -> None:
        """Hang up, without a call back. What is queued is lost. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        for _, fds in self._queued:
            _close_all(fds)
        self._queued.clear()

    # ---- inside ----------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_closed(reason)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            while self._queued and not self.closed:
                data, fds = self._queued[0]
                if not self._try(data, fds):
                    break
                self._queued.popleft()
                _close_all(fds)
            if not self._queued and not self.closed:
                self._loop.watch(self._sock.fileno(), READ, self._ready)
        if events & READ and not self.closed:
            self._receive()

    def _try(self, data: bytes, fds: Sequence[int]) -> bool:
        """False if the socket is full, or broke (then the link is closed)."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                return True  # it hung up: its last message may still be there to read
            self._end(str(error))  # ETOOMANYREFS: too many descriptors in flight for our uid
            return False
        return True

    def _receive(self) -> None:
        # One message per turn: the loop comes back while there are more, and others get theirs.
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                MAX_MESSAGE, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionResetError:
            return  # said once, when it hung up on unread messages; what it sent still follows
        except OSError as error:
            self._end(str(error))
            return
        fds = _descriptors(ancillary)
        try:
            if not data and not fds:
                self._end("")
            elif flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                self._end("a message is too long, or brings more descriptors than allowed")
            else:
                self._on_message(data, fds)
        except WireError as error:
            self._end(str(error))
        finally:
            _close_all(fds)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
