"""Failover: which backend a peer is reached through while the preferred one fails.

Backends are in order of preference.  One that fails is left for the next one that has not failed
lately.  After a pause it is probed, and once several probes in a row have succeeded it is used
again.  One that fails soon after it came back has to wait twice as long, so that a backend which
only seems to work does not take every transfer through a detour.

Decisions only: ``now`` is an argument, nothing here touches an engine.  What a switch may do to
memory (never two engines writing one block) is the agent's business.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import attrs

from kvxfer.core.checks import at_least, seconds
from kvxfer.errors import ConfigError

__all__ = ["BackendState", "Change", "Failover", "Standing"]


def _order(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} must be backend names, not {value!r}"
        )
    if len(value) == 1 or len(set(value)) != len(value):
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} must name at least two backends, each "
            f"once, not {value!r}",
            next_step="leave it out to use the order in which the agent was given its backends",
        )


def _names(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen(kw_only=True)
class Failover:
    """When a peer is moved to its next backend, and when back. There is none unless it is given.

    Attributes:
        order: names of backends, the preferred one first; empty: as the agent was given them.
            Backends of the agent that it does not name are not used.
        faults: so many within ``window`` move a peer to its next backend. Each of them has cost a
            transfer a re-post, so few are enough.
        window: seconds; older faults do not count. A backend that was in use and does not connect
            again within them is left as well.
        pause: seconds before a backend that was left is probed, and between probes that fail. It
            doubles each time up to ``longest_pause``.
        longest_pause: seconds; and how long a backend must have served before its next failure
            counts as a first one.
        probes: so many in a row must succeed before it is used again.
        spacing: seconds between probes that succeed.

    Raises:
        ConfigError: names the field and the value.
    """

    order: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=_order)
    faults: int = attrs.field(default=2, validator=at_least(1))
    window: float = attrs.field(default=5.0, validator=seconds)
    pause: float = attrs.field(default=5.0, validator=seconds)
    longest_pause: float = attrs.field(default=60.0, validator=seconds)
    probes: int = attrs.field(default=3, validator=at_least(1))
    spacing: float = attrs.field(default=0.5, validator=seconds)

    def __attrs_post_init__(self) -> None:
        if self.longest_pause < self.pause:
            raise ConfigError(
                f"Failover.longest_pause is {self.longest_pause}, less than the pause "
                f"{self.pause} that it limits"
            )


@attrs.frozen(kw_only=True)
class Change:
    """From one backend to another. ``down``: to one that is less preferred."""

    before: str
    after: str
    down: bool
    reason: str


@attrs.frozen(kw_only=True)
class BackendState:
    """What people and metrics see of a peer that is not reached through its preferred backend.

    ``wait``: seconds until the preferred one is probed next.
    """

    peer: str
    backend: str
    preferred: str
    wait: float
    reason: str


class _Rung:
    """What is known of one backend towards one peer."""

    __slots__ = ("came_back", "faults", "good", "pause", "probe_at", "probing", "reason")

    def __init__(self, policy: Failover) -> None:
        self.faults: collections.deque[float] = collections.deque(maxlen=policy.faults)
        self.probe_at: float | None = None
        """It was left; when it may be probed. None: it was not."""
        self.probing = False
        self.good = 0
        self.pause = policy.pause
        self.came_back: float | None = None
        self.reason = ""


class Standing:
    """The backends of one peer. One thread at a time; times are clock seconds.

    ``backends``: those that both sides have, in order of preference.
    """

    def __init__(self, policy: Failover, backends: Sequence[str]) -> None:
        if not backends:
            raise ConfigError("no backend to stand on")
        self._policy = policy
        self._order = tuple(dict.fromkeys(backends))
        self._rungs = {name: _Rung(policy) for name in self._order}
        self.current = self._order[0]

    @property
    def order(self) -> tuple[str, ...]:
        return self._order

    @property
    def preferred(self) -> str:
        return self._order[0]

    @property
    def reason(self) -> str:
        """Why the preferred backend was left; empty while it is used."""
        return "" if self.current == self.preferred else self._rungs[self.preferred].reason

    def alternative(self) -> str | None:
        """Where the current backend would be left for; None: every other one was left too."""
        return next(
            (n for n in self._order if n != self.current and self._rungs[n].probe_at is None), None
        )

    def fault(
        self, backend: str, now: float, reason: str = "", *, final: bool = False
    ) -> Change | None:
        """Something failed over ``backend``; the change to make, if that was one too many.

        ``final``: it cannot be used at all.  Faults of a backend that is not the current one, such
        as late ones of the one before, change nothing.
        """
        if backend != self.current:
            return None
        rung = self._rungs[backend]
        rung.faults.append(now)
        full = len(rung.faults) == self._policy.faults
        if not final and not (full and now - rung.faults[0] < self._policy.window):
            return None
        after = self.alternative()
        if after is None:
            return None
        served = rung.came_back is not None and now - rung.came_back >= self._policy.longest_pause
        rung.pause = (
            self._policy.pause
            if rung.came_back is None or served
            else min(2 * rung.pause, self._policy.longest_pause)
        )
        rung.probe_at = now + rung.pause
        rung.good, rung.probing, rung.reason = 0, False, reason
        rung.faults.clear()
        self.current = after
        down = self._order.index(after) > self._order.index(backend)
        return Change(before=backend, after=after, down=down, reason=reason)

    def arrived(self, backend: str) -> None:
        """Something arrived over ``backend``: the faults before it were no row of them."""
        self._rungs[backend].faults.clear()

    # ---- the way back ------------------------------------------------------------------------

    def due(self, now: float) -> str | None:
        """The backend to probe now, the most preferred first; None: none.

        It counts as being probed until ``probed`` says how that went.
        """
        for name in self._better:
            rung = self._rungs[name]
            if rung.probe_at is not None and not rung.probing and now >= rung.probe_at:
                rung.probing = True
                return name
        return None

    def next_at(self) -> float | None:
        """When ``due`` has something next, if no probe is under way."""
        times = [
            rung.probe_at
            for name in self._better
            if (rung := self._rungs[name]).probe_at is not None and not rung.probing
        ]
        return min((t for t in times if t is not None), default=None)

    def probed(self, backend: str, now: float, *, ok: bool, reason: str = "") -> Change | None:
        """How the probe of ``backend`` went; the change to make, if it has proved itself."""
        rung = self._rungs[backend]
        if not rung.probing:
            return None
        rung.probing = False
        if not ok:
            rung.good = 0
            rung.reason = reason or rung.reason
            rung.pause = min(2 * rung.pause, self._policy.longest_pause)
            rung.probe_at = now + rung.pause
            return None
        rung.good += 1
        if rung.good < self._policy.probes:
            rung.probe_at = now + self._policy.spacing
            return None
        before, self.current = self.current, backend
        rung.probe_at, rung.good, rung.came_back = None, 0, now
        rung.faults.clear()
        return Change(
            before=before, after=backend, down=False, reason=f"{self._policy.probes} probes arrived"
        )

    def unproven(self, backend: str, now: float) -> None:
        """The probe ended without saying anything: another one may go."""
        rung = self._rungs[backend]
        if rung.probing:
            rung.probing = False
            rung.probe_at = max(rung.probe_at or now, now + self._policy.spacing)

    def wait(self, now: float) -> float:
        """Seconds until the preferred backend may be probed; 0 if it is used, or may now."""
        at = self._rungs[self.preferred].probe_at
        return 0.0 if at is None else max(0.0, at - now)

    @property
    def _better(self) -> tuple[str, ...]:
        return self._order[: self._order.index(self.current)]
