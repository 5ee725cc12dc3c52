"""Two sides over the real Mooncake engine: a transport here, its peers in other processes."""

from __future__ import annotations

import time

import numpy as np

from kvxfer.backends.mooncake import MooncakeConfig, MooncakeTransport
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
from kvxfer.testing.memory import pattern
from kvxfer.testing.peer_process import PeerProcess

BACKEND = "kvxfer.backends.mooncake:MooncakeTransport"
BLOCK = 4096
NBYTES = 64 * BLOCK


class Rig:
    """A transport here, peers in other processes, two pairs of buffers and a path between them."""

    def __init__(self, **config):
        self.transport = MooncakeTransport(MooncakeConfig(**config))
        self.fars = []
        self.arrays = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
        self.regions = [self.transport.register(span_of(a)) for a in self.arrays]

    def far(self):
        far = PeerProcess(BACKEND, timeout=60.0)
        self.fars.append(far)
        return far

    def connect(self, far):
        for array in self.arrays:
            array[:] = 0
        self.there = [far.register(NBYTES) for _ in range(2)]
        for seed, buffer in enumerate(self.there):
            far.fill(buffer, seed)
        self.peer = self.answer(self.transport.connect(far.info))
        return self.prepare()

    def prepare(self, descriptors=None):
        found = descriptors or [b.descriptor for b in self.there]
        pairs = list(zip(self.regions, found, strict=False))
        return self.answer(self.transport.prepare(self.peer, pairs))

    def until(self, condition, what, timeout=60.0):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
            self.transport.progress()
            time.sleep(0.0002)

    def outcome(self, pollable):
        self.until(lambda: pollable.poll() != (None, None), "an answer")
        return pollable.poll()

    def answer(self, pollable):
        value, error = self.outcome(pollable)
        assert error is None, error
        return value

    def moved(self, op, path, batch):
        attempt = self.transport.post(op, path, batch)
        self.until(lambda: attempt.terminal, "the attempt ended")
        return attempt

    def read(self, path, batch):
        return self.moved(Op.READ, path, batch)

    def close(self):
        self.transport.close()
        for far in self.fars:
            far.dispose()


def landed(rig, batch):
    """Which pieces of ``batch`` hold what the far side has there."""
    return [
        bytes(rig.arrays[p][a : a + n]) == pattern(p, NBYTES)[b : b + n]
        for p, a, b, n in zip(*batch.lists(), strict=True)
    ]


BLOCKS = Batch([0, 1, 1, 0], [0, 4096, 8192, 12288], [8192, 0, 4096, 16384], [4096] * 4)
FIRST = Batch([0], [0], [0], [BLOCK])
