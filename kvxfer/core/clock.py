"""Time as an argument.

Decisions in the core take ``now`` (monotonic seconds) as a parameter.  Only the rim, which runs
threads and sockets, asks a ``Clock``; tests and the simulator pass their own.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Anything that tells monotonic seconds. Must be callable from any thread."""

    def now(self) -> float: ...


class SystemClock:
    """``time.monotonic``."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()
