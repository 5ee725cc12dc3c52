"""A wrapper that injects nothing passes the suite like the engine inside it."""

from __future__ import annotations

import contextlib
import random

from kvxfer.backends.loopback import CopyIn, LoopbackConfig, LoopbackTransport
from kvxfer.backends.shm import ShmTransport
from kvxfer.testing.conformance import IN_PROCESS, TransportTests
from kvxfer.testing.contract.reaching import ReachesPeers
from kvxfer.testing.contract.settling import Settles
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint
from kvxfer.testing.faulty import FaultyTransport


class TestNothingPlanned(TransportTests):
    modes = (IN_PROCESS,)

    def make_transport(self):
        return FaultyTransport(LoopbackTransport(LoopbackConfig(copy_in=CopyIn.PROGRESS)))


class TestEverythingLate(Settles):
    """Every post reaches the engine only once it is released: what ``hold`` is for."""

    modes = (IN_PROCESS,)

    def make_transport(self):
        return FaultyTransport(LoopbackTransport(), _WhileHeld())

    @contextlib.contextmanager
    def hold(self, pair):
        transport = pair.near.transport
        transport.plan.holding = True
        try:
            yield True
        finally:
            transport.plan.holding = False
            transport.release()


class TestLegalMisbehaviour(TransportTests):
    """Refusals, late and repeated reports and slow answers are within the contract: the suite must
    not fail an engine for them."""

    modes = (IN_PROCESS,)

    def make_transport(self):
        chances = {
            FaultPoint.POST: {
                Fault(kind=FaultKind.REFUSE): 0.1,
                Fault(kind=FaultKind.REFUSE_VALUE): 0.1,
                Fault(kind=FaultKind.DUPLICATE): 0.2,
                Fault(kind=FaultKind.LATE_REPORT, after=0.003): 0.1,
                Fault(kind=FaultKind.LATE, after=0.003): 0.1,
            },
            FaultPoint.CONNECT: {Fault(kind=FaultKind.LATE, after=0.003): 0.5},
            FaultPoint.PREPARE: {Fault(kind=FaultKind.LATE, after=0.003): 0.5},
            FaultPoint.FENCE: {Fault(kind=FaultKind.LATE, after=0.003): 0.5},
        }
        plan = FaultPlan(chances=chances, rng=random.Random(7))
        return FaultyTransport(LoopbackTransport(), plan)


class TestOverShm(Settles, ReachesPeers):
    """The wrapper beside an engine with threads, whose peers live in other processes."""

    backend = "shm"
    memory = "kvxfer.testing.memory:MappedMemory"

    def make_transport(self):
        return FaultyTransport(ShmTransport())


class _WhileHeld(FaultPlan):
    """Delays posts while a test wants to see them unfinished."""

    holding = False

    def draw(self, point):
        number, _ = super().draw(point)
        late = self.holding and point.value == "post"
        return number, Fault(kind=FaultKind.LATE) if late else None
