"""A clock that moves only when told to."""

from __future__ import annotations

import threading

from kvxfer.errors import InvalidInputError

__all__ = ["FakeClock"]


class FakeClock:
    """A ``kvxfer.core.clock.Clock`` for tests and simulation. Any thread may use it.

    ``start`` is in seconds, like everything it returns.
    """

    __slots__ = ("_lock", "_now")

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FakeClock({self._now!r})"

    def now(self) -> float:
        """The current time in seconds."""
        return self._now

    def advance(self, dt: float) -> float:
        """Move on by ``dt`` seconds and return the new time.

        Raises:
            InvalidInputError: ``dt`` is negative: a monotonic clock never goes back.
        """
        if not dt >= 0:  # also refuses nan
            raise InvalidInputError(f"dt is {dt}: a monotonic clock cannot go back")
        with self._lock:
            self._now += dt
            return self._now
