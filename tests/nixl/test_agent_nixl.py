"""Agents over the real NIXL over UCX tcp: READ and WRITE, byte for byte, and a peer that stops."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from kvxfer import Agent, Blocks, KVLayout, KVSpec
from kvxfer.policies.timeouts import Timeouts

SPEC = KVSpec(tokens_per_block=4, heads=2, head_size=16, planes=2)
SHAPE = (2, 32, 4, 2, 16)
LAYERS = ["layers.0", "layers.1", "layers.2"]


class Side:
    """An agent with caches of its own over NIXL."""

    def __init__(self, seed, **timeouts):
        rng = np.random.default_rng(seed)
        self.caches = {
            name: rng.integers(0, 255, SHAPE, dtype=np.uint8).view(np.uint8) for name in LAYERS
        }
        self.before = {name: cache.copy() for name, cache in self.caches.items()}
        self.agent = Agent("nixl", timeouts=Timeouts(**timeouts) if timeouts else None)
        layout = KVLayout.from_tensor(self.caches[LAYERS[0]], SPEC)
        self.agent.register_kv_caches(self.caches, layout)


@pytest.fixture
def sides(monkeypatch):
    # Shared memory would finish a READ of a stopped peer: tcp needs the peer's help.
    monkeypatch.setenv("UCX_TLS", "tcp")
    made = []

    def make(seed, **timeouts):
        made.append(Side(seed, **timeouts))
        return made[-1]

    yield make
    for side in made:
        side.agent.close()


def moved(source, destination, pairs):
    """What ``destination`` must hold after blocks went from ``source``."""
    expected = {name: cache.copy() for name, cache in destination.before.items()}
    for name in LAYERS:
        for there, here in pairs:
            expected[name][:, here] = source.before[name][:, there]
    return expected


def same(caches, expected):
    return all(np.array_equal(caches[name], expected[name]) for name in LAYERS)


def test_read(sides):
    """``pull`` brings exactly the blocks of the offer, in all layers; the producer hears of it."""
    producer, consumer = sides(1), sides(2)
    offer = producer.agent.hold("r", Blocks.at(0, [3, 9, 4, 30]), lease=30)
    handle = consumer.agent.pull(offer, Blocks.at(0, [10, 11, 31, 0]))
    assert consumer.agent.wait(handle, timeout=30), "pull"
    assert handle.error is None
    expected = moved(producer, consumer, [(3, 10), (9, 11), (4, 31), (30, 0)])
    assert same(consumer.caches, expected)
    assert same(producer.caches, producer.before)
    assert producer.agent.drain(timeout=30)


def test_write(sides):
    """``push`` puts exactly the blocks into what was accepted; once the consumer publishes, the
    bytes are there."""
    producer, consumer = sides(3), sides(4)
    accepted = consumer.agent.accept("w", Blocks.at(0, [7, 8, 20]))
    pushed = producer.agent.push("w", Blocks.at(0, [1, 2, 29]), to=consumer.agent.endpoint)
    producer.agent.seal("w", b"first token")
    assert consumer.agent.wait(accepted, timeout=30), "accept"
    assert same(consumer.caches, moved(producer, consumer, [(1, 7), (2, 8), (29, 20)]))
    assert (accepted.error, accepted.payload) == (None, b"first token")
    assert producer.agent.wait(pushed, timeout=30)
    assert pushed.error is None


PRODUCER = """
import sys
import numpy as np
from kvxfer import Agent, Blocks, KVLayout, KVSpec
spec = KVSpec(tokens_per_block=4, heads=2, head_size=16, planes=2)
rng = np.random.default_rng(5)
caches = {f"layers.{i}": rng.integers(0, 255, (2, 32, 4, 2, 16), dtype=np.uint8) for i in range(3)}
agent = Agent("nixl")
agent.register_kv_caches(caches, KVLayout.from_tensor(caches["layers.0"], spec))
for i in range(2):
    print(agent.hold(f"t{i}", Blocks.at(0, [3, 9, 4]), lease=60).to_json(), flush=True)
sys.stdin.read()
"""


def test_a_stopped_producer_process(sides):
    """Another process is the producer. One pull is served; then it is stopped: the caller does not
    wait, and the second pull has failed by its deadline, as a value."""
    from kvxfer import Offer

    consumer = sides(6, connect=20, queue=2, transfer=6, drain=2)
    child = subprocess.Popen(
        [sys.executable, "-c", PRODUCER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        offers = [Offer.from_json(child.stdout.readline()) for _ in range(2)]
        first = consumer.agent.pull(offers[0], Blocks.at(0, [10, 11, 12]))
        assert consumer.agent.wait(first, timeout=30)
        assert first.error is None
        rng = np.random.default_rng(5)
        for name in LAYERS:
            there = rng.integers(0, 255, SHAPE, dtype=np.uint8)
            assert np.array_equal(consumer.caches[name][:, [10, 11, 12]], there[:, [3, 9, 4]])
        child.send_signal(19)
        start = time.monotonic()
        second = consumer.agent.pull(offers[1], Blocks.at(0, [20, 21, 22]))
        consumer.agent.poll()
        assert time.monotonic() - start < 3.0, "the caller waited"
        assert consumer.agent.wait(second, timeout=60), "not terminal by its deadline"
        assert second.error is not None
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
