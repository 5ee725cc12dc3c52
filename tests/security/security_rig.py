"""What the tests of keys share: key files, agents with keys on real sockets, and peers that lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core import wire
from kvxfer.core.channel import Inbound, Route
from kvxfer.core.control import ControlConfig, Security, ZmqChannel
from kvxfer.core.control_curve import generate_key_pair
from kvxfer.core.keyfiles import allow, forbid, write_key_pair
from kvxfer.core.layout import Blocks, KVLayout
from kvxfer.policies.timeouts import Timeouts

PATIENCE = 30.0  # seconds until a test gives up on something that takes milliseconds
BLOCKS = 16
TIMEOUTS = Timeouts(connect=10.0, queue=10.0, transfer=20.0, ack=10.0, drain=2.0)
QUICK: dict[str, Any] = {"reconnect_min": 0.01, "reconnect_max": 0.05}


def until(done: Callable[[], Any], what: str = "it", step: Callable[[], Any] | None = None) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.002) if step is None else step()


class Keyring:
    """Key files under one directory, and one allow-list that everybody shares."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.list = directory / "allowed"

    def make(self, name: str, *, file: str = "", allowed: bool = True) -> Path:
        """A new pair for ``name``; the path of the secret."""
        secret, public = write_key_pair(self.directory / (file or name), generate_key_pair(name))
        if allowed:
            allow(self.list, str(public))
        return secret

    def security(self, name: str, *, allowed: bool = True, **options: Any) -> Security:
        """The keys of ``name``, made now if need be; looked at for changes only when asked."""
        secret = self.directory / name
        if not secret.exists():
            self.make(name, allowed=allowed)
        options.setdefault("reload_interval", None)
        return Security(secret_key_file=str(secret), allowed_keys=str(self.list), **options)

    def forbid(self, who: str) -> None:
        forbid(self.list, who)


def layout() -> KVLayout:
    return KVLayout(
        num_blocks=BLOCKS,
        block_stride=64,
        kernel_tokens=4,
        token_stride=16,
        heads=2,
        head_stride=8,
        head_nbytes=8,
        dtype="uint8",
        planes=2,
        plane_stride=BLOCKS * 64,
    )


class Node:
    """An agent with keys and a small cache."""

    def __init__(self, name: str, control: ControlConfig, **options: Any) -> None:
        config = {"lease": 20.0, "grant_interval": 0.05, **options.pop("config", {})}
        transport = options.pop("transport", None) or LoopbackTransport()
        self.agent = Agent(
            transport,
            config=AgentConfig(name=name, **config),
            control=control,
            timeouts=options.pop("timeouts", TIMEOUTS),
            **options,
        )
        self.memory = np.random.default_rng(len(name)).integers(
            0, 256, size=2 * BLOCKS * 64, dtype=np.uint8
        )
        self.agent.register_kv_caches({"layer0": self.memory}, layout())

    @property
    def counters(self) -> dict[str, int]:
        return self.agent.snapshot().counters

    @property
    def holds(self) -> int:
        return self.agent.snapshot().holds

    def content(self, blocks: list[int]) -> bytes:
        return self.memory.reshape(2, BLOCKS, 64)[:, blocks].tobytes()


def at(*ids: int) -> Blocks:
    return Blocks.at(0, list(ids))


class Mallory:
    """A peer with a channel of its own that says whatever it likes."""

    def __init__(self, config: ControlConfig) -> None:
        self.channel = ZmqChannel(config)
        self.got: list[Inbound] = []

    def dial(self, address: str) -> Route:
        return self.channel.dial(address)

    def say(self, route: Route, sender: str, body: wire.Message, mid: int = 0) -> bytes:
        frame = wire.encode(sender, body, mid)
        assert self.channel.send(route, frame)
        return frame

    def pump(self) -> None:
        self.channel.wait(0.005)
        self.got += self.channel.receive()

    def until(self, done: Callable[[], Any], what: str = "it") -> None:
        until(done, what, self.pump)

    def bodies(self, kind: type[Any]) -> list[Any]:
        found = [wire.decode(m.data).body for m in self.got]
        return [body for body in found if isinstance(body, kind)]


def hello_of(node: Node, **changes: Any) -> wire.Hello:
    """A hello like the one that ``node`` says, with some of it changed."""
    import msgspec

    mine = node.agent._local.message(answer=False, session=1)
    return msgspec.structs.replace(mine, **changes)
