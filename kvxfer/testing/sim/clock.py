"""A node's own clock: true time plus an offset, and a hook at every look."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.testing.clock import FakeClock

__all__ = ["NodeClock"]


class NodeClock:
    """Clocks of different processes show different times and never go back.

    ``on_look`` is called before each look once it is set: the node is stopped there for a while,
    and the rest of the world goes on.
    """

    def __init__(self, true: FakeClock, offset: float) -> None:
        self._true = true
        self.offset = offset
        self.on_look: Callable[[], None] | None = None

    def now(self) -> float:
        if self.on_look is not None:
            self.on_look()
        return self._true.now() + self.offset

    def look(self) -> float:
        """What it shows, without stopping anybody: for the checks."""
        return self._true.now() + self.offset

    def true(self, at: float) -> float:
        """The true time at which this clock shows ``at``."""
        return at - self.offset
