"""Agents over a fake clock and network and the loopback engine: virtual time, no sleeping."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.agent.config import Limits, Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.events import Event
from kvxfer.core.layout import Blocks, KVLayout
from kvxfer.core.topology import Ranks
from kvxfer.core.transport import Transport
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.clock import FakeClock
from kvxfer.testing.faults import Fault, FaultPlan
from kvxfer.testing.faulty import FaultyTransport
from kvxfer.testing.sim import SimConfig, SimNetwork

TIMEOUTS = Timeouts(connect=2.0, queue=3.0, post=1.0, transfer=5.0, ack=8.0, drain=1.0)
TOKENS, HEADS, HEAD_NBYTES = 4, 2, 8


def layout(num_blocks: int, heads: int = HEADS, head_nbytes: int = HEAD_NBYTES) -> KVLayout:
    """K and V planes outermost, token-major."""
    token = heads * head_nbytes
    block = TOKENS * token
    return KVLayout(
        num_blocks=num_blocks,
        block_stride=block,
        planes=2,
        plane_stride=num_blocks * block,
        kernel_tokens=TOKENS,
        token_stride=token,
        heads=heads,
        head_stride=head_nbytes,
        head_nbytes=head_nbytes,
        dtype="uint8",
    )


class Node:
    """One agent with its caches: ``memory[layer]`` is uint8[2, blocks, tokens, heads, bytes]."""

    def __init__(
        self,
        rig: Rig,
        name: str,
        *,
        num_blocks: int = 16,
        layers: int = 2,
        posts: list[Fault | None] | None = None,
        plan: FaultPlan | None = None,
        transport: Transport | None = None,
        ranks: Ranks | None = None,
        heads: int = HEADS,
        limits: Limits | None = None,
        timeouts: Timeouts = TIMEOUTS,
        **config: Any,
    ) -> None:
        self.rig = rig
        self.name = name
        self.transport = transport or FaultyTransport(
            LoopbackTransport(), plan or FaultPlan(posts=posts or []), clock=rig.clock
        )
        self.agent = Agent(
            self.transport,
            config=AgentConfig(
                name=name,
                progress=Progress.MANUAL,
                lease=config.pop("lease", 3.0),
                lease_margin=config.pop("lease_margin", 0.5),
                pump_interval=0.01,
                limits=limits or Limits(),
                **config,
            ),
            timeouts=timeouts,
            clock=rig.clock,
            rng=random.Random(1),
            channel=rig.network.channel(),
            ranks=ranks,
        )
        rng = np.random.default_rng(len(rig.nodes))
        self.memory = {
            f"layer{i}": rng.integers(
                0, 256, size=(2, num_blocks, TOKENS, heads, HEAD_NBYTES), dtype=np.uint8
            )
            for i in range(layers)
        }
        self.agent.register_kv_caches(self.memory, layout(num_blocks, heads))
        self.events: list[Event] = []
        rig.nodes.append(self)

    def of(self, kind: type[Event], transfer_id: str | None = None) -> list[Any]:
        """Events of one kind so far."""
        return [
            e for e in self.events if isinstance(e, kind) and transfer_id in (None, e.transfer_id)
        ]

    def content(self, ids: list[int]) -> bytes:
        return b"".join(self.memory[name][:, ids].tobytes() for name in sorted(self.memory))

    @property
    def tables(self) -> dict[str, int]:
        return self.agent.snapshot().tables

    @property
    def counters(self) -> dict[str, int]:
        return self.agent.snapshot().counters


class Rig:
    """Moves virtual time on from one wake-up to the next."""

    def __init__(self, **network: float) -> None:
        self.clock = FakeClock(100.0)
        rates = {"lose": 0.0, "duplicate": 0.0, "delay": 0.001, **network}
        self.network = SimNetwork(self.clock, random.Random(0), SimConfig(**rates))
        self.nodes: list[Node] = []

    def node(self, name: str, **options: Any) -> Node:
        return Node(self, name, **options)

    def step(self) -> None:
        """Time goes on to the next wake-up, then everybody has one round."""
        times = [node.agent.next_wake for node in self.nodes]
        at = self.network.next_at()
        if at is not None:
            times.append(at)
        self.clock.advance(max(1e-6, min(times) - self.clock.now()))
        self.network.deliver(self.clock.now())
        for node in self.nodes:
            node.events += node.agent.poll()

    def run(self, until: Callable[[], bool] | None = None, *, seconds: float = 60.0) -> float:
        """Go on until ``until()`` holds; returns how long that took. Fails after ``seconds``."""
        begin = self.clock.now()
        while until is None or not until():
            if self.clock.now() - begin >= seconds:
                assert until is None, f"not reached within {seconds} simulated seconds"
                break
            self.step()
        return self.clock.now() - begin

    def pass_time(self, seconds: float) -> None:
        self.run(seconds=seconds)


def at(start: int, *ids: int) -> Blocks:
    return Blocks.at(start, list(ids))
