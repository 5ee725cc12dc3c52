"""The handover thread: one thread per transport that waits for sockets, process ends and timers.

It never copies and never waits for one peer, so a stopped or hostile one delays nobody.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

from kvxfer.core.limitedlog import LimitedLog

__all__ = ["HandoverLoop", "Timer"]

logger = LimitedLog(logging.getLogger(__name__))

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Timer:
    """Something that happens once, unless it is cancelled. Loop thread only."""

    __slots__ = ("call", "cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class HandoverLoop:
    """``call`` and ``stop`` are for any thread; everything else is for the loop's own."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()  # the fd may be closed by the ending thread
        self._selector.register(self._wake, READ, self._woken)
        self._stopping = False
        self.failures = 0
        """Exceptions that only a bug of ours can raise: logged, counted, survived."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def discard(self) -> None:
        """Free it without ever having started it."""
        self._close()

    def call(self, function: Callable[[], None]) -> None:
        """Have ``function`` called on the loop's thread, soon. Ignored once the loop has ended."""
        self._calls.append(function)
        with self._wake_lock:
            if self._wake >= 0:
                with contextlib.suppress(BlockingIOError):  # it is signalled already
                    os.eventfd_write(self._wake, 1)

    def stop(self, timeout: float) -> bool:
        """End the thread after the calls made so far; whether it ended within ``timeout`` s."""
        self.call(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def later(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer(function)
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._order), timer))
        return timer

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call ``callback(events)`` whenever ``fd`` is ready. Again changes the events."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, callback)
        else:
            self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Idempotent. Before the fd is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    # ---- inside ----------------------------------------------------------------------------

    def _stop(self) -> None:
        self._stopping = True

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._timeout()):
                    # A callback before this one may have unwatched it.
                    if self._selector.get_map().get(key.fd) is key:
                        self._guarded(lambda key=key, events=events: key.data(events))  # type: ignore[misc]
                while self._calls:
                    self._guarded(self._calls.popleft())
                self._fire()
        finally:
            self._close()

    def _close(self) -> None:
        with self._wake_lock:
            self._selector.close()
            os.close(self._wake)
            self._wake = -1

    def _timeout(self) -> float | None:
        if self._calls:
            return 0.0
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - self._clock()) if self._timers else None

    def _fire(self) -> None:
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                self._guarded(timer.call)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            # This thread serves every peer: a bug met on behalf of one must not end it for all.
            self.failures += 1
            logger.failed("handover", "shm handover: unexpected error", error=error)
