"""A keeper in virtual time: the shipped ``Keeper`` behind a port, without a process.

It can be killed, stopped and continued at any instruction that matters, and the pipe to it has
delays of its own.  ``Keeper`` and everything on the agent's side are what ships.
"""

from __future__ import annotations

import collections
import enum
from typing import TYPE_CHECKING, TypeVar

from kvxfer.agent.keeping import timing
from kvxfer.core.channel import Channel
from kvxfer.errors import ConfigError
from kvxfer.keeper import messages as m
from kvxfer.keeper.core import Keeper
from kvxfer.keeper.port import Died, KeeperPort, Started

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.agent.config import AgentConfig
    from kvxfer.core.channel import Inbound, Route
    from kvxfer.core.clock import Clock
    from kvxfer.keeper.config import KeeperConfig

__all__ = ["StopAt", "VirtualKeeper"]

_T = TypeVar("_T")

_AGAIN = 0.02
"""Seconds until news are tried again for which the pipe had no room."""


class StopAt(enum.Enum):
    """Between which two steps of a turn a keeper is stopped."""

    BEFORE = "before it receives anything"
    RECEIVED = "after it received messages, before it looks at the clock"
    TIMED = "after it looked at the clock, before it reads orders"
    READ = "after it read orders, before it decides"
    DECIDED = "after it decided, before anything leaves"
    TOLD = "after it told the agent, before the grants leave that waited for that"


class VirtualKeeper(KeeperPort):
    """Drive it with ``run`` whenever time moved on; ``next_at`` says when it wants to.

    Args:
        config: the agent's.
        channel: makes the keeper's channel, one per life; the one of before is closed.
        delay: gives the seconds that the next frame takes through the pipe.
        starting: seconds until a new keeper runs.
        room: frames that fit into the pipe, each way.

    Raises:
        ConfigError: the configuration has no keeper.
    """

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        clock: Clock,
        channel: Callable[[], Channel],
        *,
        delay: Callable[[], float] = lambda: 0.0001,
        starting: float = 0.2,
        room: int = 64,
    ) -> None:
        if config.keeper is None:
            raise ConfigError("AgentConfig.keeper is None: there is nothing to make")
        self._config: KeeperConfig = config.keeper
        self._setup = m.Setup(
            incarnation=incarnation, control={}, auth=None, **timing(config, config.keeper)
        )
        self._clock = clock
        self._make = channel
        self._delay = delay
        self._starting = starting
        self._room = room
        self.keeper: Keeper | None = None
        self.generation = 0
        self._channel: _Gate | None = None
        self._to_agent: collections.deque[tuple[float, Started | Died | bytes]] = (
            collections.deque()
        )
        self._orders: collections.deque[tuple[float, bytes]] = collections.deque()
        self._frame: bytes | None = None
        """News for which the pipe had no room."""
        self._rest: list[Callable[[], None]] = []
        """What is left of the turn in which it was stopped."""
        self._stopped = False
        self._stop_at: StopAt | None = None
        self._start_at: float | None = None
        self._pause = config.keeper.restart_min

    # ---- the port ----------------------------------------------------------------------------

    def open(self, channel: Channel) -> None:
        del channel
        self._start_at = self._clock.now() + self._starting

    def poll(self) -> list[Started | Died | bytes]:
        found: list[Started | Died | bytes] = []
        while self._to_agent and self._to_agent[0][0] <= self._clock.now():
            found.append(self._to_agent.popleft()[1])
        return found

    def send(self, frame: bytes) -> bool:
        if len(self._orders) >= self._room:
            return False
        _put(self._orders, self._clock.now() + self._delay(), frame)
        return True

    def kill(self) -> None:
        if self.keeper is None:
            return
        now = self._clock.now()
        self._end()
        why = "the keeper was killed by signal 9"
        _put(self._to_agent, now, Died(self.generation, now, why))
        self._start_at = now + self._pause + self._starting
        self._pause = min(2 * self._pause, self._config.restart_max)

    def close(self) -> None:
        self._end()
        self._start_at = None

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self.keeper = self._channel = self._frame = None
        self._rest.clear()
        self._orders.clear()
        self.go_on()

    # ---- the process -------------------------------------------------------------------------

    def stop(self, where: StopAt = StopAt.BEFORE) -> None:
        """As SIGSTOP at that instruction of its next turn."""
        self._stop_at = where

    def go_on(self) -> None:
        """As SIGCONT."""
        self._stopped, self._stop_at = False, None

    @property
    def stopped(self) -> bool:
        return self._stopped

    def next_at(self) -> float | None:
        """When ``run`` has something to do, unless a message comes first."""
        if self._stopped:
            return None
        if self.keeper is None:
            return self._start_at
        now = self._clock.now()
        times = [] if self._frame is None else [now + _AGAIN]
        at = self.keeper.next_at()
        if at is not None:
            times.append(at)
        if self._orders:
            times.append(self._orders[0][0])
        if self._to_agent and self._to_agent[0][0] > now:
            times.append(self._to_agent[0][0])  # so that somebody polls then
        return min(times) if times else None

    def run(self) -> None:
        """One turn, or as much of it as it is let."""
        now = self._clock.now()
        if self.keeper is None:
            if self._start_at is None or now < self._start_at:
                return
            self._start_at = None
            self.generation += 1
            _put(self._to_agent, now, Started(self.generation))
            self._channel = _Gate(self._make())
            self.keeper = Keeper(self._setup, self._channel, now=now)
        if self._stopped:
            return
        if not self._rest:
            assert self._channel is not None
            self._rest = self._steps(self.keeper, self._channel)
        while self._rest and not self._stopped:
            self._rest.pop(0)()

    def _steps(self, keeper: Keeper, channel: _Gate) -> list[Callable[[], None]]:
        """A turn as ``kvxfer.keeper.process`` makes it, cut where it may be stopped."""
        inbound: list[Inbound] = []
        orders: list[list[m.Order]] = []
        times: list[float] = []

        def read() -> None:
            while self._orders and self._orders[0][0] <= self._clock.now():
                orders.append(m.decode_orders(self._orders.popleft()[1]))

        def tell() -> None:
            while self._frame is not None or keeper.has_news:
                if self._frame is None:
                    self._frame = keeper.take_news()
                if len(self._to_agent) >= self._room:
                    return
                _put(self._to_agent, self._clock.now() + self._delay(), self._frame)
                self._frame = None

        def told() -> None:
            if self._frame is None:
                keeper.agent_was_told()

        return [
            lambda: self._maybe(StopAt.BEFORE),
            lambda: inbound.extend(channel.receive(1024)),
            lambda: self._maybe(StopAt.RECEIVED),
            lambda: times.append(self._clock.now()),
            lambda: self._maybe(StopAt.TIMED),
            read,
            lambda: self._maybe(StopAt.READ),
            lambda: keeper.turn(inbound, orders, times[0]),
            lambda: self._maybe(StopAt.DECIDED),
            channel.let_out,
            tell,
            lambda: self._maybe(StopAt.TOLD),
            told,
            channel.let_out,
        ]

    def _maybe(self, where: StopAt) -> None:
        if self._stop_at is where:
            self._stopped = True


def _put(queue: collections.deque[tuple[float, _T]], at: float, item: _T) -> None:
    """Into a pipe, which keeps the order."""
    queue.append((max(at, queue[-1][0]) if queue else at, item))


class _Gate(Channel):
    """A channel whose messages leave when they are let out."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: list[tuple[Route, bytes]] = []

    @property
    def address(self) -> str:
        return self._channel.address

    def dial(self, address: str) -> Route:
        return self._channel.dial(address)

    def hang_up(self, route: Route) -> None:
        self._channel.hang_up(route)

    def send(self, route: Route, data: bytes) -> bool:
        self._waiting.append((route, data))
        return True

    def let_out(self) -> None:
        for route, data in self._waiting:
            self._channel.send(route, data)
        self._waiting.clear()

    def receive(self, budget: int = 256) -> list[Inbound]:
        return self._channel.receive(budget)

    def wait(self, timeout: float) -> None:
        """Time passes elsewhere."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        self._channel.close()

    @property
    def counters(self) -> dict[str, int]:
        return self._channel.counters
