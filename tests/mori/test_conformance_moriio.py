"""The real MoRI-IO engine passes the conformance suite, unchanged, over software RDMA."""

from __future__ import annotations

import contextlib
import itertools
from typing import ClassVar

import pytest

from kvxfer.backends.moriio import MoriioConfig, PollMode
from kvxfer.core.plugins import create_transport
from kvxfer.testing.conformance import FaultTests, TransportTests
from kvxfer.testing.contract.base import TWO_PROCESS
from kvxfer.testing.contract.settling import Settles
from kvxfer.testing.expected import EXPECTED


class OnSoftRdma:
    @pytest.fixture(autouse=True)
    def fabric(self, softrdma):
        """The engine of this process and those of peer processes share one fabric."""
        self.softrdma = softrdma


class TestMoriio(OnSoftRdma, TransportTests):
    """As it comes: POLLING, one queue pair, no notifications; the peer in this process and in
    another one."""

    backend = "moriio"


# The engine's modes, so that each value of each setting meets each value of each other one: POLLING
# or EVENT, one or four queue pairs, notifications off or on. The fourth combination is above.


class TestEventFourQueuePairs(OnSoftRdma, TransportTests):
    backend = "moriio"
    modes = (TWO_PROCESS,)
    options: ClassVar = {
        "config": {"rehearse": False, "poll_cq_mode": "event", "qp_per_transfer": 4}
    }


class TestFourQueuePairsNotifications(OnSoftRdma, TransportTests):
    backend = "moriio"
    modes = (TWO_PROCESS,)
    options: ClassVar = {
        "config": {"rehearse": False, "qp_per_transfer": 4, "enable_notification": True}
    }


class TestEventNotifications(OnSoftRdma, TransportTests):
    backend = "moriio"
    modes = (TWO_PROCESS,)
    options: ClassVar = {
        "config": {"rehearse": False, "poll_cq_mode": "event", "enable_notification": True}
    }


CLASSES = (
    TestMoriio,
    TestEventFourQueuePairs,
    TestFourQueuePairsNotifications,
    TestEventNotifications,
)


def test_every_mode_is_covered() -> None:
    """Every value of each setting meets every value of each other one in one of the classes, and
    each class is the whole contract, between two processes at least: READ and WRITE, one piece
    (``test_terminal_state_is_final``) and many (``test_moves_exactly_the_pieces``)."""
    configs = [MoriioConfig.from_options(c.options.get("config", {})) for c in CLASSES]
    names = ("poll_cq_mode", "qp_per_transfer", "enable_notification")
    values = (tuple(PollMode), (1, 4), (False, True))
    for (a, left), (b, right) in itertools.combinations(zip(names, values, strict=True), 2):
        met = {(getattr(c, a), getattr(c, b)) for c in configs}
        assert met == set(itertools.product(left, right)), (a, b)
    assert all(issubclass(c, TransportTests) and TWO_PROCESS in c.modes for c in CLASSES)


class TestMoriioHeld(OnSoftRdma, Settles):
    """Work requests of this process are held where a test wants to see them unfinished."""

    backend = "moriio"

    @contextlib.contextmanager
    def hold(self, pair):
        with self.softrdma.hold():
            yield True


class TestHeldSpread(TestMoriioHeld):
    """The engine spreads each call over two queue pairs: its refusals are not atomic."""

    modes = (TWO_PROCESS,)
    options: ClassVar = {"config": {"rehearse": False, "qp_per_transfer": 2, "post_batch_size": 4}}


class TestFaults(OnSoftRdma, FaultTests):
    """Every fault of ``FaultyTransport``, above the engine."""

    backend = "moriio"
    modes = (TWO_PROCESS,)


def test_capabilities_are_the_expected_ones(softrdma):
    """The engine, as it comes, says what the committed table holds; what is skipped follows from
    that."""
    transport = create_transport("moriio", {})
    try:
        assert transport.capabilities == EXPECTED["moriio"].capabilities
    finally:
        transport.close()
