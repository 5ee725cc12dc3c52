"""A control channel that loses and repeats messages on purpose, counting each."""

from __future__ import annotations

import random

from kvxfer.core.channel import Channel, Inbound, Route

__all__ = ["LossyChannel"]


class LossyChannel(Channel):
    """Passes everything on to ``inner`` but for what it loses or sends twice.

    ``drop`` names a message type of which nothing gets through (the sabotage of releases).
    """

    def __init__(
        self,
        inner: Channel,
        *,
        lose: float,
        duplicate: float,
        rng: random.Random,
        drop: tuple[bytes, ...] = (),
    ) -> None:
        self._inner = inner
        self._lose = lose
        self._duplicate = duplicate
        self._rng = rng
        self._drop = drop
        self.lost = 0
        self.duplicated = 0

    @property
    def address(self) -> str:
        return self._inner.address

    def dial(self, address: str) -> Route:
        return self._inner.dial(address)

    def hang_up(self, route: Route) -> None:
        self._inner.hang_up(route)

    def send(self, route: Route, data: bytes) -> bool:
        if self._rng.random() < self._lose:
            self.lost += 1
            return True
        if any(name in data for name in self._drop):
            return True
        if self._rng.random() < self._duplicate:
            self.duplicated += 1
            self._inner.send(route, data)
        return self._inner.send(route, data)

    def receive(self, budget: int = 256) -> list[Inbound]:
        return self._inner.receive(budget)

    def lost_routes(self) -> list[Route]:
        return self._inner.lost_routes()

    def wait(self, timeout: float) -> None:
        self._inner.wait(timeout)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()

    @property
    def counters(self) -> dict[str, int]:
        return self._inner.counters
