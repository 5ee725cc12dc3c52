"""Threads and engines: slow calls away from the caller, and no engine ended with a thread in it."""

from __future__ import annotations

import atexit
import collections
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from kvxfer.core.pollable import Deferred, Pollable
from kvxfer.core.verdict import EngineError
from kvxfer.errors import CapacityError, ClosedError, KvxferError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Gate", "JobThread", "Turnstile"]

T = TypeVar("T")

MAX_JOBS = 1024
"""Jobs that may wait for one thread. A peer that is stopped must not fill our memory."""


EXIT_WAIT_S = 6.0
"""How long the interpreter's exit waits for threads inside engines: it would abort on them.
MoRI-IO gives up on a silent peer after 5 s."""


class Gate:
    """Counts the threads inside an engine: ``with gate:`` around every call that may wait there.

    Once closed, none gets in any more: entering raises ``ClosedError``.  Any thread; a thread may
    be inside more than once.  All gates are closed when the interpreter exits.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inside = 0
        self._closed = False
        self._lock = threading.Lock()
        self._empty = threading.Event()
        _gates.add(self)

    def __enter__(self) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"the {self._name} transport is closed")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._closed and not self._inside:
                self._empty.set()

    def close(self, timeout: float) -> bool:
        """Let nobody in, and wait at most ``timeout`` seconds until nobody is left; whether so."""
        with self._lock:
            self._closed = True
            if not self._inside:
                return True
        return self._empty.wait(timeout)


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


@atexit.register
def _empty_engines() -> None:
    end = time.monotonic() + EXIT_WAIT_S
    for gate in tuple(_gates):
        gate.close(max(end - time.monotonic(), 0.0))


MISSES = 8
"""How often in a row a poller may find an engine taken before it is let in first."""
POLLER_PATIENCE_S = 0.01
"""How long a thread that works on an engine steps back for a poller that found it taken. A thread
that polls without pause is back within microseconds; one that sleeps in between, within this."""


class Turnstile:
    """A lock for a poller that never waits and for others that may.

    ``with turnstile:`` waits for the lock.  ``try_enter`` does not: where it has found the lock
    taken ``MISSES`` times in a row, whoever comes next waits for it to get in, for
    ``POLLER_PATIENCE_S`` at most.  A plain lock would starve it: a thread that takes the lock
    again as soon as it has released it is faster than one that looks now and then.  Any thread;
    not reentrant; one poller.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses = 0
        self._served = threading.Event()
        self._served.set()

    def __enter__(self) -> None:
        if not self._served.is_set() and not self._served.wait(POLLER_PATIENCE_S):
            self._served.set()  # it does not poll at the moment
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def try_enter(self) -> bool:
        """Take the lock if it is free; the caller must ``leave`` then."""
        if self._lock.acquire(blocking=False):
            self._misses = 0
            self._served.set()
            return True
        self._misses += 1
        if self._misses >= MISSES:
            self._served.clear()
        return False

    def leave(self) -> None:
        """Give back what ``try_enter`` took."""
        self._lock.release()


class JobThread:
    """Runs jobs one after another on a daemon thread of its own, one per peer.

    A job that hangs inside an engine holds up the jobs of this thread only.  ``submit`` and
    ``stop`` may be called from any thread and never wait.
    """

    def __init__(self, name: str, *, backend: str) -> None:
        self._backend = backend
        self._jobs: collections.deque[tuple[Callable[[], Any], Deferred[Any]]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Pollable[T]:
        """Run ``job`` after those before it; what it returns or raises is the answer.

        A job that was not begun when ``stop`` came is answered with ``ClosedError``.
        """
        answer: Deferred[T] = Deferred()
        with self._wake:
            if self._stopping:
                answer.fail(ClosedError("the connection is closed"))
            elif len(self._jobs) >= MAX_JOBS:
                answer.fail(
                    CapacityError(f"{MAX_JOBS} calls to the {self._backend} engine are waiting")
                )
            else:
                self._jobs.append((job, answer))
                self._wake.notify()
        return answer

    def stop(self, last: Callable[[], None] | None = None) -> None:
        """Run ``last`` after the job that is running, then end. Idempotent."""
        with self._wake:
            if self._stopping:
                return
            self._stopping = True
            waiting = list(self._jobs)
            self._jobs.clear()
            if last is not None:
                self._jobs.append((last, Deferred()))
            self._wake.notify()
        for _, answer in waiting:
            answer.fail(ClosedError("the connection is closed"))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs:
                    if self._stopping:
                        return
                    self._wake.wait()
                job, answer = self._jobs.popleft()
            try:
                answer.resolve(job())
            except KvxferError as error:
                answer.fail(error)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
                answer.fail(
                    TransportError(
                        f"the {self._backend} engine failed: {error}",
                        engine=EngineError.of(self._backend, error),
                    )
                )
