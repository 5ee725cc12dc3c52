"""The copy threads: few, bounded, taking turns among peers."""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvxfer.backends.shm.copying import SCRATCH_BYTES
from kvxfer.core.limitedlog import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

__all__ = ["CopyPool", "Task"]

logger = LimitedLog(logging.getLogger(__name__))


class Task(Protocol):
    """A bounded piece of work. Exactly one of the two methods is called, once."""

    def run(self, scratch: Any) -> None:
        """Do it, on a copy thread. Must not raise."""

    def drop(self) -> None:
        """It will not be done. On the thread that dropped it."""


class CopyPool:
    """Runs tasks under keys, one key per peer: each key with work gets its turn.

    One key never occupies more than ``workers`` threads, and threads that are stuck (longer than
    ``stuck_after`` seconds in one task) are replaced, up to ``workers_max`` in all: one peer whose
    memory cannot be touched does not stop the others.  All methods are for any thread; none waits
    but ``stop``.
    """

    def __init__(
        self,
        *,
        workers: int,
        workers_max: int,
        stuck_after: float,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._workers_max = workers_max
        self._stuck_after = stuck_after
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queues: collections.OrderedDict[Hashable, collections.deque[Task]] = (
            collections.OrderedDict()
        )
        self._running: collections.Counter[Hashable] = collections.Counter()
        self._guests: dict[Hashable, int] = {}
        """Work of other threads than ours, under way."""
        self._idle_calls: dict[Hashable, list[Callable[[], None]]] = {}
        self._threads: set[threading.Thread] = set()
        self._began: dict[threading.Thread, float] = {}
        self._stopped = False
        self.replaced = 0
        """Threads started because others were stuck."""

    def submit(self, key: Hashable, tasks: Iterable[Task]) -> None:
        """Queue tasks. After ``stop`` they are dropped."""
        tasks = list(tasks)
        with self._changed:
            refused = self._stopped
            if not refused and tasks:
                self._queues.setdefault(key, collections.deque()).extend(tasks)
                missing = min(self._workers, len(tasks) + len(self._began)) - len(self._threads)
                for _ in range(missing):
                    self._start_thread()
                self._changed.notify(len(tasks))
        if refused:
            for task in tasks:
                task.drop()

    def enter(self, key: Hashable) -> bool:
        """The calling thread begins work of its own under ``key``; False after ``stop``."""
        with self._lock:
            if not self._stopped:
                self._guests[key] = self._guests.get(key, 0) + 1
            return not self._stopped

    def leave(self, key: Hashable) -> None:
        """That work has ended."""
        with self._lock:
            self._guests[key] -= 1
            if not self._guests[key]:
                del self._guests[key]
            if self._stopped:
                self._changed.notify_all()
            calls = self._calls_if_idle(key)
        for call in calls:
            call()

    def withdraw(self, key: Hashable, task: Task) -> bool:
        """Take back the task that was queued last under ``key``; False if that is another one."""
        with self._lock:
            queue = self._queues.get(key)
            if queue is None or queue[-1] is not task:
                return False
            queue.pop()
            if not queue:
                del self._queues[key]
            return True

    def drop(self, key: Hashable) -> None:
        """Drop what is queued under ``key``. What runs goes on."""
        with self._changed:
            tasks = self._queues.pop(key, ())
        for task in tasks:
            task.drop()
        self._call_if_idle(key)

    def when_idle(self, key: Hashable, call: Callable[[], None]) -> None:
        """Have ``call`` called, on any thread, once nothing is queued or running under ``key``."""
        with self._changed:
            self._idle_calls.setdefault(key, []).append(call)
        self._call_if_idle(key)

    def relieve(self) -> None:
        """Start another thread if work waits and every thread is stuck. Cheap."""
        if not self._queues or len(self._began) < len(self._threads):
            return
        with self._changed:
            now = self._clock()
            if (
                self._queues
                and not self._stopped
                and len(self._threads) < self._workers_max
                and len(self._began) == len(self._threads)
                and all(now - began > self._stuck_after for began in self._began.values())
            ):
                self.replaced += 1
                self._start_thread()

    def stop(self, timeout: float) -> int:
        """Drop what is queued and end the threads; returns how many did not end in ``timeout`` s.

        Work of other threads is waited for and counted likewise.  Threads that did not end are
        daemons: they end with the call they are stuck in, or with the process.
        """
        deadline = self._clock() + timeout
        with self._changed:
            self._stopped = True
            dropped = [task for queue in self._queues.values() for task in queue]
            self._queues.clear()
            threads = tuple(self._threads)
            self._changed.notify_all()
        for task in dropped:
            task.drop()
        for key in tuple(self._idle_calls):
            self._call_if_idle(key)
        for thread in threads:
            thread.join(max(0.0, deadline - self._clock()))
        with self._changed:
            self._changed.wait_for(lambda: not self._guests, max(0.0, deadline - self._clock()))
            guests = sum(self._guests.values())
        return sum(thread.is_alive() for thread in threads) + guests

    # ---- inside ----------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        thread = threading.current_thread()
        scratch = np.empty(SCRATCH_BYTES, dtype=np.uint8)
        while True:
            with self._changed:
                taken = self._take()
                while taken is None:
                    if self._stopped or self._surplus():
                        self._threads.discard(thread)
                        return
                    self._changed.wait()
                    taken = self._take()
                key, task = taken
                self._running[key] += 1
                self._began[thread] = self._clock()
            try:
                task.run(scratch)
            except Exception as error:  # noqa: BLE001
                # A bug of ours in one task must not end the thread that serves every peer.
                logger.failed("copy", "shm copy: unexpected error", error=error)
            del task, taken
            with self._changed:
                del self._began[thread]
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]
                if key in self._queues:
                    self._changed.notify()
            self._call_if_idle(key)
            del key

    def _surplus(self) -> bool:
        """Whether enough threads are left that are not stuck, so that this idle one may go."""
        now = self._clock()
        stuck = sum(now - began > self._stuck_after for began in self._began.values())
        return len(self._threads) - stuck > self._workers

    def _take(self) -> tuple[Hashable, Task] | None:
        """The next task: of the key that waited longest and has a thread to spare."""
        for key, queue in self._queues.items():
            if self._running[key] < self._workers:
                task = queue.popleft()
                if queue:
                    self._queues.move_to_end(key)
                else:
                    del self._queues[key]
                return key, task
        return None

    def _call_if_idle(self, key: Hashable) -> None:
        with self._changed:
            calls = self._calls_if_idle(key)
        for call in calls:
            call()

    def _calls_if_idle(self, key: Hashable) -> Sequence[Callable[[], None]]:
        """Whom to call because nothing is queued or running under ``key``. Under the lock."""
        if key in self._queues or self._running.get(key) or self._guests.get(key):
            return ()
        return self._idle_calls.pop(key, ())
