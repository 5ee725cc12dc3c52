"""Two agents in this process over the loopback engine, driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer import Agent, AgentConfig, Blocks, KVLayout, Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.faults import FaultPlan
from kvxfer.testing.faulty import FaultyTransport

BLOCKS, NBYTES = 64, 256
LAYOUT = KVLayout(
    num_blocks=BLOCKS,
    block_stride=NBYTES,
    planes=1,
    plane_stride=BLOCKS * NBYTES,
    kernel_tokens=1,
    token_stride=NBYTES,
    heads=1,
    head_stride=NBYTES,
    head_nbytes=NBYTES,
    dtype="uint8",
)


def agent(name: str, plan: FaultPlan | None = None, **options: Any) -> Agent:
    """With its caches; manual progress unless ``config`` says otherwise."""
    made = Agent(
        FaultyTransport(LoopbackTransport(), plan or FaultPlan()),
        config=AgentConfig(
            name=name, keeper=None, **{"progress": Progress.MANUAL} | options.pop("config", {})
        ),
        timeouts=options.pop("timeouts", Timeouts(drain=0.05)),
        **options,
    )
    made.register_kv_caches({"l": np.zeros((BLOCKS, NBYTES), np.uint8)}, LAYOUT)
    return made


def at(start: int, *ids: int) -> Blocks:
    return Blocks.at(start, list(ids))


def drive(*agents: Agent, until: Callable[[], bool], seconds: float = 60.0) -> list[Any]:
    """Poll all of them until ``until()`` holds; their events. Fails after ``seconds``."""
    clock, found = agents[0].clock, []
    end = clock.now() + seconds
    while not until():
        assert clock.now() < end, f"not reached within {seconds} s"
        for one in agents:
            found += one.poll()
    return found
