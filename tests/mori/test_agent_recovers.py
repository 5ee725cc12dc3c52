"""Two agents over the real engine: a dead queue pair costs a retry, not an incarnation."""

from __future__ import annotations

import errno
import time

import numpy as np
import pytest

from kvxfer import Agent, Blocks, KVLayout, KVSpec
from kvxfer.agent.config import AgentConfig
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.core.events import Drained, Failed, Quarantined, Received, Sent
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.softrdma import WcStatus

SPEC = KVSpec(tokens_per_block=16, heads=2, head_size=64, planes=2)
SHAPE = (2, 32, 16, 2, 64)


class Side:
    def __init__(self, name, *, timeouts=None, **config):
        self.transport = MoriioTransport(MoriioConfig(rehearse=False, **config))
        self.agent = Agent(
            self.transport, config=AgentConfig(name=name), timeouts=timeouts or Timeouts()
        )
        self.caches = {f"layers.{i}": np.zeros(SHAPE, np.float16) for i in range(2)}
        layout = KVLayout.from_tensor(self.caches["layers.0"], SPEC)
        self.agent.register_kv_caches(self.caches, layout)
        self.events = []

    def until(self, kind, transfer_id, seconds=30.0):
        end = time.monotonic() + seconds
        while True:
            self.events += self.agent.poll()
            for event in self.events:
                if isinstance(event, kind) and event.transfer_id == transfer_id:
                    return event
            assert time.monotonic() < end, f"no {kind.__name__}: {self.events}"
            time.sleep(0.001)

    def fill(self, value):
        for i, cache in enumerate(self.caches.values()):
            cache[:] = value + i

    def holds(self, value, blocks):
        return all(
            (cache[:, blocks] == value + i).all() for i, cache in enumerate(self.caches.values())
        )


@pytest.fixture
def sides(softrdma):
    made = []

    def make(*names, **options):
        for name in names:
            made.append(Side(name, **options))
        return made[-len(names) :]

    yield make
    softrdma.reset()
    for side in made:
        side.agent.close()


def pull(prefill, decode, transfer_id, value=1.0):
    """One transfer of four blocks, from the offer to its end on both sides."""
    prefill.fill(value)
    offer = prefill.agent.hold(transfer_id, Blocks.at(0, [3, 9, 4, 1]))
    decode.agent.pull(offer, Blocks.at(0, [10, 11, 12, 13]))
    event = decode.until((Received, Failed), transfer_id)
    assert isinstance(event, Received), event
    assert decode.holds(value, [10, 11, 12, 13])
    prefill.until(Sent, transfer_id)


def test_dead_queue_pair_is_rebuilt(softrdma, sides):
    """A completion error in the middle of the service: the transfer it hit is retried over a new
    engine generation and received, and so are later ones, with no restart of either side. After
    the old engine has ended, both directions work."""
    prefill, decode = sides("prefill", "decode", generation_linger_s=0.5)
    pull(prefill, decode, "before")
    softrdma.fail_next(WcStatus.GENERAL)
    pull(prefill, decode, "hit", 2.0)
    assert decode.transport.generation == 2
    pull(prefill, decode, "later", 3.0)
    while len(decode.transport._generations.live) == 2:
        time.sleep(0.01)
    pull(prefill, decode, "after the end", 4.0)
    pull(decode, prefill, "the other way", 5.0)
    assert prefill.transport.generation == 1


def test_again_and_again(softrdma, sides):
    """Queue pairs that die in every fourth transfer are rebuilt each time, with never more than two
    engines."""
    prefill, decode = sides("prefill", "decode", generation_linger_s=0.1)
    for i in range(12):
        if i % 4 == 1:
            softrdma.fail_next(WcStatus.REMOTE_OPERATION)
        pull(prefill, decode, f"t{i}", float(i))
        assert len(decode.transport._generations.live) <= 2
    assert decode.transport.generation == 4


def test_healthy_producer_beside_a_broken_one(softrdma, sides):
    """While the connection to one producer is rebuilt, transfers from another one do not fail and
    are not retried."""
    one, two, decode = sides("one", "two", "decode", generation_linger_s=0.5)
    pull(one, decode, "a0")
    pull(two, decode, "b0", 2.0)
    softrdma.fail_next(WcStatus.GENERAL)
    pull(one, decode, "a1", 3.0)
    retried = decode.agent.snapshot().counters.get("posts.retried.connection", 0)
    for i in range(8):
        pull(two, decode, f"b{i + 1}", 4.0 + i)
    after = decode.agent.snapshot().counters
    assert after.get("posts.retried.connection", 0) == retried == 1
    assert not [event for event in decode.events if isinstance(event, Failed)]
    assert decode.transport.generation == 2


def test_fence_returns_the_blocks(softrdma, sides):
    """A READ of which nobody can say whether it still lands (posted in part) is proven drained by
    the end of its engine: the blocks come back without quarantine or restart."""
    prefill, decode = sides(
        "prefill", "decode", timeouts=Timeouts(transfer=1.0, drain=1.0), generation_linger_s=0.3
    )
    pull(prefill, decode, "before")
    prefill.fill(2.0)
    offer = prefill.agent.hold("partly", Blocks.at(0, [3, 9, 4, 1]))
    softrdma.refuse_posts(errno.ENOMEM, after=3)
    decode.agent.pull(offer, Blocks.at(0, [10, 11, 12, 13]))
    ended = decode.until((Received, Failed), "partly")
    if isinstance(ended, Failed) and not ended.drained:
        decode.until(Drained, "partly")
    assert not [e for e in decode.events if isinstance(e, Quarantined)]
    pull(prefill, decode, "after", 3.0)
