"""From the agent's block ids to the real engine's lists: layers of one storage share them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvxfer import Agent
from kvxfer.agent import AgentConfig
from kvxfer.backends.moriio import MoriioTransport
from kvxfer.backends.moriio import transport as moriio
from kvxfer.core.layout import Blocks, KVLayout

LAYERS, BLOCKS, MOVED = 6, 300, 120
TOKENS, HEADS, HEAD_NBYTES = 4, 2, 16
TOKEN = HEADS * HEAD_NBYTES
BLOCK = TOKENS * TOKEN

LAYOUT = KVLayout(
    num_blocks=BLOCKS,
    block_stride=BLOCK,
    planes=2,
    plane_stride=BLOCKS * BLOCK,
    kernel_tokens=TOKENS,
    token_stride=TOKEN,
    heads=HEADS,
    head_stride=HEAD_NBYTES,
    head_nbytes=HEAD_NBYTES,
    dtype="uint8",
)


def test_layers_of_one_storage_share_their_lists(softrdma, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine call per layer, all with the same list objects once the sessions of the layers'
    own registrations are there; the bytes are exact, before that too."""
    calls = []
    plan_of = moriio.plan_of

    def listening(*arguments):
        plan = plan_of(*arguments)
        calls.extend(plan)
        return plan

    monkeypatch.setattr(moriio, "plan_of", listening)
    agents, memory = [], []
    for name in ("producer", "consumer"):
        agent = Agent(MoriioTransport(), config=AgentConfig(name=name))
        shape = (LAYERS, 2, BLOCKS, TOKENS, HEADS, HEAD_NBYTES)
        whole = np.random.default_rng(len(memory)).integers(0, 256, shape, dtype=np.uint8)
        agent.register_kv_caches({f"layer{i}": whole[i] for i in range(LAYERS)}, LAYOUT)
        agents.append(agent)
        memory.append(whole)
    producer, consumer = agents
    source, target = memory
    rng = np.random.default_rng(3)
    try:
        shared = False
        deadline = time.monotonic() + 60.0
        number = 0
        while not shared:  # sessions are opened beside the requests that want them
            assert time.monotonic() < deadline, "the layers never got to share their lists"
            theirs, ours = (rng.permutation(BLOCKS)[:MOVED] for _ in range(2))
            calls.clear()
            offer = producer.hold(f"t{number}", Blocks.at(0, theirs))
            handle = consumer.pull(offer, Blocks.at(0, ours))
            while not handle.done:
                assert time.monotonic() < deadline, "the pull did not end"
                consumer.poll()
                producer.poll()
                time.sleep(0.001)
            assert handle.error is None
            assert np.array_equal(target[:, :, ours], source[:, :, theirs])
            shared = len(calls) == LAYERS and len({id(call[1]) for call in calls}) == 1
            number += 1
        assert len({id(call[0]) for call in calls}) == LAYERS, "each through a session of its own"
    finally:
        for agent in agents:
            agent.close()
