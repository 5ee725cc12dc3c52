"""``close`` may come from any thread: no engine is ended under one that is inside ``progress``."""

from __future__ import annotations

import threading
import time

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.transport import PROGRESS_GRACE_S


class Watched(LoopbackTransport):
    """``_advance`` stays inside until ``leave`` says so; what happens is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.Event()
        self.leave = threading.Event()
        self.leave_when_closed = True
        self.seen: list[str] = []

    def _advance(self, budget: int) -> None:
        self.inside.set()
        while not (self.leave.is_set() or (self.closed and self.leave_when_closed)):
            time.sleep(0.001)
        self.seen.append("progress has left")

    def _close(self, deadline: float) -> None:
        self.seen.append("stuck" if self._progressing else "nobody inside")
        super()._close(deadline)


def closed_under_progress(transport: Watched) -> threading.Thread:
    thread = threading.Thread(target=transport.progress)
    thread.start()
    assert transport.inside.wait(60.0)
    transport.close(0.0)
    return thread


def test_close_lets_progress_end_first() -> None:
    """Though it was given no time at all."""
    transport = Watched()
    closed_under_progress(transport).join()
    assert transport.seen == ["progress has left", "nobody inside"]


def test_close_does_not_wait_for_a_stuck_thread() -> None:
    """The backend is told that a thread is inside, and leaves alone what it uses."""
    transport = Watched()
    transport.leave_when_closed = False
    began = time.monotonic()
    thread = closed_under_progress(transport)
    took = time.monotonic() - began
    assert transport.seen == ["stuck"]
    assert took >= PROGRESS_GRACE_S
    transport.leave.set()
    thread.join()


def test_progress_after_close_asks_the_engine_nothing() -> None:
    """Nor will any ``_advance`` run after it."""
    transport = Watched()
    transport.close()
    assert transport.progress() == []
    assert transport.seen == ["nobody inside"]
