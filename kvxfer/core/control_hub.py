"""Waiting for many zmq sockets at a cost that does not grow with the idle ones.

A zmq socket shows one file descriptor that becomes readable when something *may* have happened,
and any call on the socket may take that signal back.  So the rule here is: whenever a socket was
touched, its ``EVENTS`` are looked at before the next sleep, and a socket that has messages stays
in ``ready`` until it is empty.  epoll then reports sockets with news only.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

import zmq

from kvxfer.core.channel import Inbound

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.core.channel import Route

__all__ = ["Hub", "Inlet", "Waker"]

# Plain integers: the operators of zmq's enums cost more than the call they test.
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_BATCH = 256  # descriptors per epoll call; the others are reported by the next call

COUNTERS = (
    "messages_in",
    "messages_out",
    "bytes_in",
    "bytes_out",
    "dropped_in_oversize",
    "dropped_in_multi_frame",
    "dropped_in_chosen_identity",
    "dropped_in_too_many_routes",
    "dropped_in_not_allowed",
    "dropped_out_oversize",
    "dropped_out_queue_full",
    "dropped_out_no_route",
    "dropped_out_unroutable",
    "dialled_connected",
    "dialled_lost",
    "dialled_retries",
    "dialled_redials",
    "dialled_handshakes_failed",
    "name_lookups_failed",
    "inbound_accepted",
    "inbound_closed",
    "inbound_lost",
    "inbound_handshakes_failed",
    "inbound_cut_pending",
    "inbound_cut_unread",
    "inbound_cut_keys",
    "dialled_cut_keys",
    "keys_admitted",
    "keys_refused",
    "keys_reloaded",
    "keys_not_reloaded",
    "lost_reports_dropped",
)


def _number(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value


class Waker:
    """Ends an epoll wait from any thread. Wakes that come close together count as one.

    The descriptor lives as long as this object: a thread inside ``wake`` holds a reference, so
    closing the channel meanwhile cannot make it write into a descriptor that was reused.
    """

    __slots__ = ("_pending", "fd")

    def __init__(self) -> None:
        self._pending = False
        self.fd = -1
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        if not self._pending:
            self._pending = True
            os.eventfd_write(self.fd, 1)

    def take(self) -> None:
        """Take the signal back. A ``wake`` before this call is answered by the waiter's return."""
        os.eventfd_read(self.fd)
        self._pending = False  # only now: else a wake in between would be dropped for ever

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Hub:
    """The sockets of one channel, its counters and its reports of lost routes."""

    def __init__(self, max_lost: int) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.ready: deque[Inlet] = deque()
        self.lost: dict[Route, None] = {}
        self.waker: Waker | None = Waker()
        self.woken = False
        self._max_lost = max_lost
        self._later: list[Callable[[], None]] = []
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        self._watch_fd(self.waker.fd, self._on_wake)

    def watch(self, socket: zmq.Socket[bytes], on_event: Callable[[], None]) -> None:
        """Call ``on_event`` from ``gather`` whenever the socket may have something."""
        self._watch_fd(_number(socket, zmq.FD), on_event)
        self.later(on_event)  # what happened before the descriptor was watched

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before the socket is closed."""
        fd = _number(socket, zmq.FD)
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def watch_descriptor(self, fd: int) -> None:
        """Have a readable ``fd``, which is none of zmq's, end a wait."""
        self._watch_fd(fd, self._on_descriptor)

    def unwatch_descriptor(self, fd: int) -> None:
        """To be called before ``fd`` is closed; unknown ones are fine."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def later(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the beginning of the next ``gather``."""
        self._later.append(callback)

    def gather(self, timeout: float) -> None:
        """Look after the sockets that have news; wait for some, at most ``timeout`` seconds."""
        later, self._later = self._later, []
        for callback in later:
            callback()
        if self.ready or self.woken or self._later:
            timeout = 0.0
        for fd, _ in self._epoll.poll(timeout, _BATCH):
            found = self._callbacks.get(fd)
            if found is not None:
                found()

    def report_lost(self, route: Route) -> None:
        """Remember ``route`` for ``lost_routes``; beyond the bound the oldest report goes."""
        self.woken = True  # once: whoever never asks for lost routes must not spin
        self.lost[route] = None
        if len(self.lost) > self._max_lost:
            del self.lost[next(iter(self.lost))]
            self.counters["lost_reports_dropped"] += 1

    def close(self) -> None:
        self._epoll.close()
        self._callbacks.clear()
        self._later.clear()
        self.ready.clear()
        self.lost.clear()
        self.waker = None

    def _watch_fd(self, fd: int, callback: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback

    def _on_descriptor(self) -> None:
        self.woken = True

    def _on_wake(self) -> None:
        if self.waker is not None:
            self.waker.take()
        self.woken = True


class Inlet(ABC):
    """A zmq socket that carries messages both ways."""

    def __init__(self, hub: Hub, socket: zmq.Socket[bytes], max_nbytes: int) -> None:
        self.hub = hub
        self.socket = socket
        self.max_nbytes = max_nbytes
        self._queued = False
        self._touched = False
        self._closed = False
        hub.watch(socket, self.check)

    def check(self) -> None:
        """Enter ``ready`` if there are messages."""
        self._touched = False
        if self._queued or self._closed:
            return
        if _number(self.socket, zmq.EVENTS) & _POLLIN:
            self._queued = True
            self.hub.ready.append(self)

    def touch(self) -> None:
        """The socket was used for sending, which may have taken back its signal."""
        if not self._touched and not self._queued:
            self._touched = True
            self.hub.later(self.check)

    def writable(self) -> bool:
        """Whether a send can succeed now. Unlike a send, this looks at all news from the peer:
        libzmq lets sends skip that for a millisecond and may find a queue full that is not."""
        self.touch()
        return bool(_number(self.socket, zmq.EVENTS) & _POLLOUT)

    def take(self, quantum: int, out: list[Inbound]) -> int:
        """Move up to ``quantum`` messages to ``out``; returns how many were read, dropped ones
        included. Must just have been taken from ``ready``; goes back there if more is left."""
        for count in range(quantum):
            try:
                self._read_one(out)
            except zmq.Again:
                self._queued = False
                return count
        self._queued = False
        self.check()
        return quantum

    def accept(self, frame: zmq.Frame) -> bytes | None:
        """The data of a message's first payload frame, or None if it is dropped, and counted."""
        if frame.more:
            while frame.more:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            self.hub.counters["dropped_in_multi_frame"] += 1
            return None
        if len(frame) > self.max_nbytes:
            self.hub.counters["dropped_in_oversize"] += 1
            return None
        return frame.bytes

    def deliver(self, route: Route, data: bytes, peer: str, out: list[Inbound]) -> None:
        self.hub.counters["messages_in"] += 1
        self.hub.counters["bytes_in"] += len(data)
        out.append(Inbound(route, data, peer))

    def replace_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Go on with another socket; what was not read from the present one is dropped."""
        self._let_go()
        self.socket = socket
        self.hub.watch(socket, self.check)

    def close(self) -> None:
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._queued:
            self.hub.ready.remove(self)
            self._queued = False
        self.hub.unwatch(self.socket)
        self.socket.close(0)

    @abstractmethod
    def _read_one(self, out: list[Inbound]) -> None:
        """Read one message. Raises ``zmq.Again`` when there is none."""
