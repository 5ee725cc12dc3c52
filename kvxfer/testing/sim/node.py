"""One simulated process: a shipped agent over a simulated engine, channel and clock."""

from __future__ import annotations

import collections
import random
from typing import TYPE_CHECKING

from kvxfer.agent import Agent, AgentConfig
from kvxfer.agent.config import Limits, Progress
from kvxfer.core.events import Role
from kvxfer.core.layout import KVLayout
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.sim.clock import NodeClock
from kvxfer.testing.sim.config import NodeFault
from kvxfer.testing.sim.engine import SimTransport
from kvxfer.testing.sim.memory import CELL, LAYERS, BlockMemory

if TYPE_CHECKING:
    from kvxfer.testing.sim.world import World

__all__ = ["TIMEOUTS", "SimNode"]

TIMEOUTS = Timeouts(connect=2.0, queue=3.0, post=1.0, transfer=4.0, ack=8.0, drain=1.0)

_LIMITS = Limits(early=256, early_ttl=10.0, quarantined=256)


class SimNode:
    """See the module. ``open`` holds what has begun on this side and has not ended."""

    def __init__(
        self, world: World, name: str, role: Role, *, blocks: int, address: str | None = None
    ) -> None:
        self.world = world
        self.name = name
        self.role = role
        rng = random.Random(world.rng.random())
        self.memory = BlockMemory(blocks, rng)
        self.transport = SimTransport(world.fabric, self.memory, incarnation=f"t-{name}")
        self.clock = NodeClock(world.clock, offset=rng.uniform(0.0, 1000.0))
        self.channel = world.network.channel(address)
        self.agent = Agent(
            self.transport,
            config=AgentConfig(
                name=name,
                progress=Progress.MANUAL,
                lease=world.config.lease,
                lease_margin=world.config.margin,
                pump_interval=0.01,
                # The only wake-ups are those that the agent asks for.
                idle_interval=1e6,
                limits=_LIMITS,
            ),
            timeouts=TIMEOUTS,
            clock=self.clock,
            classifier=world.classifier,
            rng=random.Random(rng.random()),
            channel=self.channel,
            incarnation=f"a-{name}",
        )
        layout = KVLayout(
            num_blocks=blocks,
            block_stride=CELL,
            kernel_tokens=1,
            token_stride=CELL,
            head_nbytes=CELL,
            dtype="uint8",
        )
        self.agent.register_kv_caches(
            {f"layer{i}": self.memory.cells[i].view("uint8") for i in range(LAYERS)}, layout
        )
        self.transport.on_change(lambda: world.touch(self))
        self.told: collections.deque[float] = collections.deque()
        """When, in true time, the agent published each event that was not collected yet: it can be
        stopped between that and the end of its round."""
        # No observer: those look at the clock, and a node can be stopped at each look.
        self.agent._listeners[self] = lambda: self.told.append(world.clock.now())
        self.open: dict[tuple[Role, str], float] = {}
        self.quarantined: set[tuple[Role, str]] = set()
        self.layerwise: set[str] = set()
        """Pulls whose last layers are still to be asked for."""
        self.dead = False
        self.in_round = False
        self.round_began = 0.0
        """True time."""
        self.paused_in_round = False
        self.jumped_at = float("-inf")
        self.aims: dict[tuple[Role, str], tuple[NodeFault, str]] = {}
        """Transfers that a fault waits for, and the phase in which it strikes."""
        self.stalled_until = 0.0
        self.stalled = 0.0
        """Seconds that it could not run, or ran late, all together."""
        self.disturbed_until = 0.0
        """Until when a fault that struck it may have consequences."""
        self.slow = 0.0
        """Seconds between two looks for news."""
        self.looks_until_pause = 0
        self.pause_for = 0.0
        self.scheduled_at = float("inf")
        self.version = 0
        self.polls_at_once = 0
        self.at_once_since = -1.0
        self.polled_at = -1.0

    def __repr__(self) -> str:
        return self.name

    def pause_at_look(self) -> None:
        """Behind the clock: stop in the middle of a round, once."""
        if not self.in_round:
            return
        self.looks_until_pause -= 1
        if self.looks_until_pause <= 0 and self.world.may_pause:
            self.clock.on_look = None
            self.world.pause(self, self.pause_for)
