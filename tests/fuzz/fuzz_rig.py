"""How long to fuzz, and an agent whose channel is a list of frames."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.agent.config import Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.channel import Channel, Inbound, Route
from kvxfer.core.layout import KVLayout

BLOCKS = 16


def rounds(usual: int) -> int:
    """``usual``, times the environment variable KVXFER_FUZZ (1 if it is not set)."""
    return usual * int(os.environ.get("KVXFER_FUZZ", "1"))


def layout() -> KVLayout:
    return KVLayout(
        num_blocks=BLOCKS,
        block_stride=64,
        planes=2,
        plane_stride=BLOCKS * 64,
        kernel_tokens=4,
        token_stride=16,
        heads=2,
        head_stride=8,
        head_nbytes=8,
        dtype="uint8",
    )


class Frames(Channel):
    """What is put into ``inbox`` arrives; what is sent is counted and forgotten."""

    def __init__(self, *, authenticated: bool) -> None:
        self.inbox: deque[Inbound] = deque()
        self.sent: list[bytes] = []
        self._authenticated = authenticated
        self._dialled = 0

    @property
    def address(self) -> str:
        return "tcp://127.0.0.1:9999#victim" if self._authenticated else "tcp://127.0.0.1:9999"

    @property
    def authenticated(self) -> bool:
        return self._authenticated

    def peer_of(self, route: Route) -> str:
        return str(route).partition("/")[0]

    def dial(self, address: str) -> Route:
        self._dialled += 1
        return f"mallory/dialled-{self._dialled}"

    def hang_up(self, route: Route) -> None:
        pass

    def send(self, route: Route, data: bytes) -> bool:
        self.sent.append(data)
        return True

    def receive(self, budget: int = 256) -> list[Inbound]:
        return [self.inbox.popleft() for _ in range(min(budget, len(self.inbox)))]

    def wait(self, timeout: float) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def counters(self) -> dict[str, int]:
        return {}


class Victim:
    """An agent that is polled by hand."""

    def __init__(self, *, authenticated: bool = True, clock: Any = None, **options: Any) -> None:
        self.channel = Frames(authenticated=authenticated)
        self.memory = np.zeros(2 * BLOCKS * 64, dtype=np.uint8)
        self.agent = Agent(
            options.pop("transport", None) or LoopbackTransport(),
            config=AgentConfig(name="victim", progress=Progress.MANUAL, lease=1e6, **options),
            channel=self.channel,
            clock=clock,
            incarnation="victim-1",
        )
        self.agent.register_kv_caches({"layer0": self.memory}, layout())

    def feed(self, frame: bytes, *, route: str = "mallory/1") -> list[Any]:
        peer = route.partition("/")[0] if self.channel.authenticated else ""
        self.channel.inbox.append(Inbound(route, frame, peer))
        self.channel.sent.clear()
        return self.agent.poll()
