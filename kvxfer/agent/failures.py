"""How often something failed that must not, and when it did so last."""

from __future__ import annotations

import attrs

__all__ = ["RECENT", "Failures"]

RECENT = 60.0
"""Seconds for which a failure speaks against new requests: several probes of a load balancer long,
so that what fails in every round keeps a worker out, and what failed once does not for ever."""


@attrs.define
class Failures:
    """Of one kind. Written by one thread, read by any.

    Attributes:
        count: since the agent was opened.
        last: when the last one was, in seconds of the agent's clock; None: never.
    """

    count: int = 0
    last: float | None = None

    def note(self, now: float) -> None:
        """One more."""
        self.last = now
        self.count += 1

    def age(self, now: float) -> float:
        """Seconds since the last one; infinite if there was none."""
        return float("inf") if self.last is None else max(0.0, now - self.last)
