"""Manual progress: rounds are run by whoever polls or waits, one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvxfer.agent.pump import sleep_time
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.agent.engine import Engine
    from kvxfer.core.clock import Clock

__all__ = ["Driver"]

_RETRY = 0.05
"""Seconds after which a thread that needs a round of its own wakes the one that sleeps again."""


class Driver:
    """Lets one thread at a time run rounds and sleep in the channel. Any thread may call it."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._owner: int | None = None
        self._wanted = 0
        """Threads that wait for ``exclusively``: who drives lets them in."""
        self.next_wake = 0.0
        """When the next round has something to do, as the last one knew it."""

    @property
    def inside(self) -> bool:
        """Whether this thread is in a round now: in an observer or a callback."""
        return self._owner == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether some thread drives now, perhaps asleep in the channel."""
        return self._lock.locked()

    def refuse_inside(self, verb: str) -> None:
        """Waiting for what only the round that called us could do would last for ever.

        Raises:
            InvalidInputError: this thread is in a round.
        """
        if self.inside:
            raise InvalidInputError(
                f"{verb} was called from an observer or a callback, inside the round it waits for",
                next_step="return from it, and wait elsewhere",
            )

    def step(self) -> None:
        """One round, or, while another thread drives, have that one make a round soon."""
        if not self._lock.acquire(blocking=False):
            if not self.inside:
                self._engine.ctx.channel.wake()
            return
        try:
            self._round()
        finally:
            self._release()

    def drive(self, over: Callable[[], bool], left: float | None) -> bool:
        """One round and, unless ``over()`` then holds, one sleep of at most ``left`` seconds.

        False while another thread drives: the caller waits in its own way, and comes again, because
        that thread may stop at any time.
        """
        if self._wanted or not self._lock.acquire(blocking=False):
            return False
        try:
            pause = self._round()
            if not over():
                self._engine.ctx.channel.wait(pause if left is None else min(pause, left))
        finally:
            self._release()
        return True

    @contextmanager
    def exclusively(self, timeout: float | None = None) -> Iterator[bool]:
        """Nobody else is in a round meanwhile. Yields False if that was not reached in time.

        Waits for the other thread's round. Inside a round of this thread it is so already.
        """
        if self.inside:
            yield True
            return
        if not self._claim(timeout):
            yield False
            return
        self._owner = threading.get_ident()
        try:
            yield True
        finally:
            self._release()

    def _claim(self, timeout: float | None) -> bool:
        end = None if timeout is None else self._clock.now() + timeout
        with self._counting:
            self._wanted += 1
        try:
            while True:
                left = _RETRY if end is None else min(_RETRY, max(0.0, end - self._clock.now()))
                self._engine.ctx.channel.wake()
                if self._lock.acquire(timeout=left):
                    return True
                if end is not None and self._clock.now() >= end:
                    return False
        finally:
            with self._counting:
                self._wanted -= 1

    def _round(self) -> float:
        self._owner = threading.get_ident()
        now = self._clock.now()
        pause = sleep_time(self._engine, self._engine.round(now), now)
        self.next_wake = now + pause
        return pause

    def _release(self) -> None:
        self._owner = None
        self._lock.release()
