"""The control channel's stand-in: frames travel late, twice, out of order, or not at all."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Protocol

from kvxfer.core.channel import Channel, Inbound, Route
from kvxfer.testing.clock import FakeClock

__all__ = ["Rates", "SimChannel", "SimNetwork"]


class Rates(Protocol):
    """What the network takes of a ``SimConfig``."""

    @property
    def lose(self) -> float: ...
    @property
    def duplicate(self) -> float: ...
    @property
    def delay(self) -> float: ...


def _nothing(*_: object) -> None:
    """Nobody wants to know."""


class SimNetwork:
    """Carries frames between ``SimChannel``s by one generator.

    ``on_fault(name, data)`` is told of each frame that is lost, repeated or cut off.
    """

    def __init__(self, clock: FakeClock, rng: random.Random, config: Rates) -> None:
        self.clock = clock
        self._rng = rng
        self._config = config
        self._flying: list[tuple[float, int, SimChannel, Inbound]] = []
        self._serial = itertools.count()
        self.channels: dict[str, SimChannel] = {}
        self.counts: dict[str, int] = {"lost": 0, "duplicated": 0, "cut": 0}
        self.on_fault: Callable[[str, bytes], None] = lambda name, data: None
        self.on_send: Callable[[SimChannel, SimChannel | None, bytes], None] = _nothing
        """Told of each frame before its fate is known: from, to, frame."""
        self.on_arrival: Callable[[SimChannel, bytes], None] = _nothing
        """Told of each frame that comes into a channel."""

    def channel(self, address: str | None = None) -> SimChannel:
        """A new channel, on an address of its own or in the place of a closed one."""
        if address is None:
            number = len(self.channels)
            address = f"tcp://10.0.{number // 60000}.1:{2000 + number % 60000}"
        channel = SimChannel(self, address, next(self._serial))
        self.channels[address] = channel
        return channel

    def carry(self, source: SimChannel, target: str, route: Route, data: bytes) -> None:
        """Send one frame on its way to whoever will be at ``target`` when it arrives."""
        channel = self.channels.get(target)
        self.on_send(source, channel, data)
        now = self.clock.now()
        if now < source.mute_until or (channel is not None and now < channel.deaf_until):
            self._count("cut", data)
            return
        rng, config = self._rng, self._config
        copies = 1
        if rng.random() < config.duplicate:
            copies = 2
            self._count("duplicated", data)
        for _ in range(copies):
            if channel is None or rng.random() < config.lose:
                self._count("lost", data)
                continue
            at = now + rng.expovariate(1 / config.delay)
            heapq.heappush(self._flying, (at, next(self._serial), channel, Inbound(route, data)))

    def _count(self, name: str, data: bytes) -> None:
        self.counts[name] += 1
        self.on_fault(name, data)

    def next_at(self) -> float | None:
        """When the next frame arrives."""
        return self._flying[0][0] if self._flying else None

    def deliver(self, now: float) -> list[SimChannel]:
        """Put what has arrived into its channels; returns those channels."""
        touched = []
        while self._flying and self._flying[0][0] <= now:
            _, _, channel, inbound = heapq.heappop(self._flying)
            # A connection ends with its process: what answers there later never gets the rest.
            if not channel.closed:
                channel.inbox.append(inbound)
                self.on_arrival(channel, inbound.data)
                touched.append(channel)
        return touched


class SimChannel(Channel):
    """A route is (who dialled, number, who was dialled); both ends know it by the same name."""

    def __init__(self, network: SimNetwork, address: str, number: int) -> None:
        self._network = network
        self.number = number
        """Tells a channel from its successor at the same address."""
        self._address = address
        self._count = itertools.count()
        self.inbox: list[Inbound] = []
        self.lost: list[Route] = []
        self.routes: dict[Route, None] = {}
        """Dialled ones."""
        self.mute_until = 0.0
        """Until then nothing that it sends arrives,"""
        self.deaf_until = 0.0
        """and nothing that is sent to it."""
        self.closed = False

    @property
    def address(self) -> str:
        return self._address

    def dial(self, address: str) -> Route:
        route: Hashable = (self._address, self.number, next(self._count), address)
        self.routes[route] = None
        return route

    def hang_up(self, route: Route) -> None:
        self.routes.pop(route, None)

    def send(self, route: Route, data: bytes) -> bool:
        assert isinstance(route, tuple)
        dialled = route[1] == self.number
        target = route[3] if dialled else route[0]
        if not dialled:
            there = self._network.channels.get(target)
            if there is None or there.number != route[1]:
                return False  # whoever dialled is gone, and its connection with it
        self._network.carry(self, target, route, data)
        return True

    def receive(self, budget: int = 256) -> list[Inbound]:
        if not self.inbox:
            return []
        taken, self.inbox = self.inbox[:budget], self.inbox[budget:]
        return taken

    def lost_routes(self) -> list[Route]:
        lost, self.lost = self.lost, []
        return lost

    def wait(self, timeout: float) -> None:
        """Time passes elsewhere."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        self.closed = True

    @property
    def counters(self) -> dict[str, int]:
        return {}
