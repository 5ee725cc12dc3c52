"""Circuit breakers: how often a peer may fail before it is left alone for a while.

A peer whose connection breaks as soon as it is made is made again at once by every transfer, dozens
of times a second, at the cost of everybody else.  A breaker counts such faults.  After too many
within a window it opens: nothing is tried for a pause.  Then it is half open: one probe may go
through, which closes it or opens it for another pause.

Decisions only: ``now`` is an argument, nothing here touches a network.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Hashable
from typing import Generic, TypeVar

import attrs

from kvxfer.core.checks import at_least, seconds
from kvxfer.errors import ErrorKind

__all__ = ["Breaker", "BreakerPolicy", "BreakerState", "BreakerTable", "Circuit"]

K = TypeVar("K", bound=Hashable)


_LONG = 10
"""So many pauses after it could have been probed, a breaker is forgotten: that peer is not coming
back, or nobody needs it."""


class Circuit(enum.Enum):
    """CLOSED lets everything through, OPEN nothing, HALF_OPEN one probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@attrs.frozen(kw_only=True)
class BreakerPolicy:
    """When a breaker opens. The defaults are those of Mooncake, where the storm was first seen.

    Attributes:
        faults: so many within ``window`` open it.
        window: seconds; older faults do not count.
        pause: seconds for which it stays open, and for which a probe that says nothing keeps
            others out.

    Raises:
        ConfigError: names the field and the value.
    """

    faults: int = attrs.field(default=5, validator=at_least(1))
    window: float = attrs.field(default=5.0, validator=seconds)
    pause: float = attrs.field(default=10.0, validator=seconds)

    def begin(self) -> Breaker:
        """A closed breaker."""
        return Breaker(self)


class Breaker:
    """The breaker of one peer. One thread at a time; times are clock seconds."""

    __slots__ = ("_faults", "_open_until", "_policy", "_probed_at", "kind", "reason")

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._faults: collections.deque[float] = collections.deque(maxlen=policy.faults)
        self._open_until: float | None = None
        self._probed_at: float | None = None
        self.kind = ErrorKind.CONNECTION
        """Of the last fault."""
        self.reason = ""
        """What the last fault was."""

    def state(self, now: float) -> Circuit:
        if self._open_until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._open_until else Circuit.HALF_OPEN

    def wait(self, now: float) -> float:
        """Seconds until something may be tried; 0 if it may now. Changes nothing."""
        if self._open_until is None:
            return 0.0
        free_at = self._open_until
        if self._probed_at is not None:
            free_at = max(free_at, self._probed_at + self._policy.pause)
        return max(0.0, free_at - now)

    def allows(self, now: float) -> bool:
        """Whether something may be tried now. While half open, True makes it the probe."""
        if self.wait(now) > 0:
            return False
        if self._open_until is not None:
            self._probed_at = now
        return True

    def fault(self, now: float, reason: str = "", kind: ErrorKind = ErrorKind.CONNECTION) -> bool:
        """Something failed; whether that opened the breaker. While it is open nothing changes."""
        self.reason, self.kind = reason, kind
        state = self.state(now)
        if state is Circuit.OPEN:
            return False
        self._faults.append(now)
        full = len(self._faults) == self._policy.faults
        if state is Circuit.CLOSED and not (full and now - self._faults[0] < self._policy.window):
            return False
        self._open_until = now + self._policy.pause
        self._probed_at = None
        return True

    def success(self, now: float) -> bool:
        """Something worked; whether that closed the breaker.

        What was begun before the breaker opened may still work: that closes nothing.
        """
        if self.state(now) is not Circuit.HALF_OPEN:
            return False
        self._open_until = self._probed_at = None
        self._faults.clear()
        return True

    def unproven(self) -> None:
        """The probe ended without saying anything: another one may go."""
        self._probed_at = None

    def forgettable(self, now: float) -> bool:
        """Whether a new breaker would decide alike, or nobody has asked for long."""
        if self._open_until is not None:
            return self.wait(now) == 0 and now - self._open_until >= _LONG * self._policy.pause
        return not self._faults or now - self._faults[-1] >= self._policy.window


@attrs.frozen(kw_only=True)
class BreakerState:
    """What people and metrics see of a breaker that is not closed. ``wait``: seconds."""

    name: str
    state: Circuit
    wait: float
    reason: str


class BreakerTable(Generic[K]):
    """A breaker per key, made by its first fault; bounded. ``policy`` None: there are none."""

    def __init__(self, policy: BreakerPolicy | None, *, most: int = 4096) -> None:
        self._policy = policy
        self._most = most
        self._breakers: collections.OrderedDict[K, Breaker] = collections.OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._breakers)

    def of(self, key: K) -> Breaker | None:
        """None: there was no fault that still counts."""
        return self._breakers.get(key)

    def fault(
        self, key: K, now: float, reason: str = "", kind: ErrorKind = ErrorKind.CONNECTION
    ) -> bool:
        """As ``Breaker.fault``."""
        if self._policy is None:
            return False
        breaker = self._breakers.pop(key, None) or self._policy.begin()
        self._breakers[key] = breaker  # the latest fault is at the end
        opened = breaker.fault(now, reason, kind)
        if len(self._breakers) > self._most:
            self._make_room(now)
        return opened

    def _make_room(self, now: float) -> None:
        for key in [k for k, b in self._breakers.items() if b.forgettable(now)]:
            del self._breakers[key]
        while len(self._breakers) > self._most:
            self._breakers.popitem(last=False)
            self.evicted += 1

    def allows(self, key: K, now: float) -> bool:
        """As ``Breaker.allows``."""
        breaker = self._breakers.get(key)
        return breaker is None or breaker.allows(now)

    def wait(self, key: K, now: float) -> float:
        """As ``Breaker.wait``."""
        breaker = self._breakers.get(key)
        return 0.0 if breaker is None else breaker.wait(now)

    def success(self, key: K, now: float) -> bool:
        """As ``Breaker.success``."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return False
        closed = breaker.success(now)
        if closed:
            del self._breakers[key]
        return closed

    def unproven(self, key: K) -> None:
        """As ``Breaker.unproven``."""
        breaker = self._breakers.get(key)
        if breaker is not None:
            breaker.unproven()

    def states(self, now: float) -> tuple[BreakerState, ...]:
        """Those that are not closed, nor forgotten. Any thread."""
        return tuple(
            BreakerState(
                name=str(key),
                state=breaker.state(now),
                wait=breaker.wait(now),
                reason=breaker.reason,
            )
            for key, breaker in tuple(self._breakers.items())
            if breaker.state(now) is not Circuit.CLOSED and not breaker.forgettable(now)
        )
