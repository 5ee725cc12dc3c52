"""The progress thread: runs the engine, sleeps in the channel, never dies silently."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvxfer.agent.failures import Failures

if TYPE_CHECKING:
    from kvxfer.agent.engine import Engine
    from kvxfer.core.clock import Clock

__all__ = ["Pump", "sleep_time"]

_AFTER_A_BAD_ROUND = 0.05
"""Seconds before the next round: a bug must not burn a core."""


def sleep_time(engine: Engine, next_at: float | None, now: float) -> float:
    """How long nothing has to be looked at, at most, in seconds.

    Messages, orders and engines that call back end a sleep early; engines that must be polled
    are looked at every ``pump_interval`` while something is in flight.
    """
    config = engine.ctx.config
    longest = config.pump_interval if engine.must_poll else config.idle_interval
    return longest if next_at is None else max(0.0, min(longest, next_at - now))


class Pump:
    """One thread for one engine."""

    def __init__(self, engine: Engine, clock: Clock, name: str) -> None:
        self._engine = engine
        self._clock = clock
        self._stop = False
        self.failures = Failures()
        """Rounds that ended in an exception: a bug of ours or of a plug-in."""
        self.last_round = clock.now()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvxfer-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End the thread; False if it did not end in time (an engine call is stuck), or is ours."""
        self._stop = True
        self._engine.ctx.channel.wake()
        if self.is_current_thread():
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while not self._stop:
            try:
                now = self.last_round = self._clock.now()
                next_at = self._engine.round(now)
                self._engine.ctx.channel.wait(sleep_time(self._engine, next_at, now))
            except Exception as error:  # noqa: BLE001
                # One bad round must not end progress for every transfer of this process.
                if self._stop:
                    return
                self.failures.note(self._clock.now())
                self._engine.ctx.log.failed(
                    "round", "a round of the progress thread failed", error=error
                )
                self._pause.wait(_AFTER_A_BAD_ROUND)
