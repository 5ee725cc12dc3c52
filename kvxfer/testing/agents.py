"""Tests of two agents over a real engine: READ and WRITE, byte for byte, and a peer that stops.

A suite to inherit from, as ``TransportTests`` is: set ``backend``.  It needs pytest.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.agent import Agent
from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Offer
from kvxfer.core.plugins import create_transport
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.life.geometry import Geometry
from kvxfer.testing.life.worker import Worker

__all__ = ["AgentTests", "Side"]

SHAPE = Geometry(layers=3, blocks=32, nbytes=4096)


class Side:
    """An agent with caches of its own."""

    def __init__(self, backend: str, options: Mapping[str, Any], seed: int, **timeouts: float):
        self.memory = SHAPE.memory(seed)
        self.before = self.memory.copy()
        self.agent = Agent(
            create_transport(backend, dict(options) or None),
            timeouts=Timeouts(**timeouts) if timeouts else None,
        )
        SHAPE.register(self.agent, self.memory)

    def holds(self, source: Any, there: list[int], here: list[int]) -> bool:
        """Whether it holds exactly these blocks of ``source``, and otherwise what it held."""
        expected = self.before.copy()
        expected[:, here] = source[:, there]
        return bool(np.array_equal(self.memory, expected))


class AgentTests:
    """Subclass it with a ``backend``; ``options`` are its configuration as JSON values."""

    backend: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def sides(self) -> Iterator[Callable[..., Side]]:
        made: list[Side] = []

        def make(seed: int, **timeouts: float) -> Side:
            made.append(Side(self.backend, self.options, seed, **timeouts))
            return made[-1]

        yield make
        for side in made:
            side.agent.close()

    def test_read(self, sides: Callable[..., Side]) -> None:
        """``pull`` brings exactly the blocks of the offer, all layers; the producer hears of it."""
        producer, consumer = sides(1), sides(2)
        offer = producer.agent.hold("r", Blocks.at(0, [3, 9, 4, 30]), lease=30)
        handle = consumer.agent.pull(offer, Blocks.at(0, [10, 11, 31, 0]))
        assert consumer.agent.wait(handle, timeout=60), "pull"
        assert handle.error is None
        assert consumer.holds(producer.before, [3, 9, 4, 30], [10, 11, 31, 0])
        assert producer.holds(producer.before, [], [])
        assert producer.agent.drain(timeout=60)

    def test_write(self, sides: Callable[..., Side]) -> None:
        """``push`` puts exactly the blocks into what was accepted; once the consumer publishes, the
        bytes are there."""
        producer, consumer = sides(3), sides(4)
        accepted = consumer.agent.accept("w", Blocks.at(0, [7, 8, 20]))
        pushed = producer.agent.push("w", Blocks.at(0, [1, 2, 29]), to=consumer.agent.endpoint)
        producer.agent.seal("w", b"first token")
        assert consumer.agent.wait(accepted, timeout=60), "accept"
        assert consumer.holds(producer.before, [1, 2, 29], [7, 8, 20])
        assert (accepted.error, accepted.payload) == (None, b"first token")
        assert producer.agent.wait(pushed, timeout=60)
        assert pushed.error is None

    def test_a_stopped_producer_process(self, sides: Callable[..., Side]) -> None:
        """Another process is the producer.  One pull is served; then it is stopped: the caller does
        not wait, and the second pull has failed by its deadline, as a value."""
        inbox: SimpleQueue[tuple[Worker, dict[str, Any]]] = SimpleQueue()
        consumer = sides(6, connect=20, queue=2, transfer=6, drain=2)
        worker = Worker("producer", inbox)
        try:
            worker.open(seed=5, geometry=SHAPE, backends=[(self.backend, dict(self.options))])
            _said(inbox, "ready")
            offers = []
            for name in ("t0", "t1"):
                worker.tell(op="hold", id=name, blocks=[3, 9, 4])
                offers.append(Offer.from_json(_said(inbox, "offer")["offer"]))
            first = consumer.agent.pull(offers[0], Blocks.at(0, [10, 11, 12]))
            assert consumer.agent.wait(first, timeout=60)
            assert first.error is None
            assert consumer.holds(SHAPE.content(5), [3, 9, 4], [10, 11, 12])
            worker.signal(signal.SIGSTOP)
            start = time.monotonic()
            second = consumer.agent.pull(offers[1], Blocks.at(0, [20, 21, 22]))
            consumer.agent.poll()
            assert time.monotonic() - start < 5.0, "the caller waited"
            assert consumer.agent.wait(second, timeout=90), "not terminal by its deadline"
            assert second.error is not None
        finally:
            worker.process.kill()
            worker.end()


def _said(inbox: SimpleQueue[tuple[Worker, dict[str, Any]]], op: str) -> dict[str, Any]:
    while True:
        _, message = inbox.get(timeout=90)
        if message["op"] == op:
            return message
        assert message["op"] == "event", message
