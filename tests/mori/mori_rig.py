"""A moriio transport in this process, peers in others, buffers and a path between them."""

from __future__ import annotations

import time

import numpy as np

from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
from kvxfer.testing.memory import pattern
from kvxfer.testing.peer_process import PeerProcess

BACKEND = "kvxfer.backends.moriio:MoriioTransport"
BLOCK = 4096
NBYTES = 64 * BLOCK


def scattered(pieces, *, pair=0, first=0):
    """Every other block, so that the engine merges nothing; the far side one block further."""
    offset = (first + np.arange(pieces)) * 2 * BLOCK
    return Batch(np.full(pieces, pair), offset, offset + BLOCK, np.full(pieces, BLOCK))


class Far:
    """A peer process with its buffers, and the path to them."""

    def __init__(self, rig, process):
        self.rig = rig
        self.process = process
        self.there = [process.register(NBYTES) for _ in rig.regions]
        for seed, buffer in enumerate(self.there):
            process.fill(buffer, seed)

    @property
    def pairs(self):
        return list(zip(self.rig.regions, (b.descriptor for b in self.there), strict=True))

    def connect(self):
        self.peer = self.rig.answer(self.rig.transport.connect(self.process.info))
        self.path = self.prepare()
        return self.path

    def prepare(self):
        return self.rig.answer(self.rig.transport.prepare(self.peer, self.pairs))


class Rig:
    def __init__(self, softrdma, *, regions=2, **config):
        self.softrdma = softrdma
        # The first registration of a process takes half a second to try: test_rehearsal has it.
        self.transport = MoriioTransport(MoriioConfig(**{"rehearse": False, **config}))
        self.processes = []
        self.arrays = [np.zeros(NBYTES, np.uint8) for _ in range(regions)]
        self.regions = [self.transport.register(span_of(a)) for a in self.arrays]

    def far(self, **config):
        options = {"config": {"rehearse": False, **config}}
        process = PeerProcess("moriio", options=options, timeout=30.0)
        self.processes.append(process)
        return Far(self, process)

    def until(self, condition, what):
        deadline = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline, f"not within 30 s: {what}"
            self.transport.progress()
            time.sleep(0.0002)

    def outcome(self, pollable):
        self.until(lambda: pollable.poll() != (None, None), "an answer")
        return pollable.poll()

    def answer(self, pollable):
        value, error = self.outcome(pollable)
        assert error is None, error
        return value

    def ended(self, attempt):
        self.until(lambda: attempt.terminal, "the attempt ended")
        return attempt

    def post(self, op, path, batch):
        return self.ended(self.transport.post(op, path, batch))

    def read(self, path, batch):
        return self.post(Op.READ, path, batch)

    def landed(self, batch, buffer=0):
        """How many pieces of ``batch``, read from the far pattern of ``buffer``, are here."""
        here, there = bytes(self.arrays[buffer]), pattern(buffer, NBYTES)
        _, local, remote, size = batch.lists()
        return sum(
            here[a : a + n] == there[b : b + n] for a, b, n in zip(local, remote, size, strict=True)
        )

    def close(self):
        self.softrdma.reset()
        self.transport.close()
        for process in self.processes:
            process.dispose()
