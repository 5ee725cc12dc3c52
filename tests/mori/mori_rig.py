"""A moriio transport in this process, peers in others, buffers and a path between them."""

from __future__ import annotations

from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.two_sides import NBYTES, TwoSides

QUICK = {"rehearse": False}
"""The first registration of a process takes half a second to try: test_rehearsal has it."""


class MoriSides(TwoSides):
    """Two sides over the software RDMA device, whose faults end with the test."""

    def __init__(self, softrdma, *, regions=2, **config):
        self.softrdma = softrdma
        transport = MoriioTransport(MoriioConfig(**{**QUICK, **config}))
        super().__init__(transport, self._peer, buffers=regions, timeout=30.0)

    @staticmethod
    def _peer(**config):
        options = {"config": {**QUICK, **config}}
        return PeerProcess("moriio", options=options, timeout=30.0)

    def landed(self, batch, buffer=0):
        """How many pieces of ``batch``, read from the far pattern of ``buffer``, are here."""
        return sum(super().landed(batch, buffer))

    def close(self):
        self.softrdma.reset()
        super().close()


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


class Rig(MoriSides):
    """With several peers at a time, each with buffers and a path of its own."""

    def far(self, **config):
        self.fars.append(self._peer(**config))
        return Far(self, self.fars[-1])
