"""The real MoRI-IO engine passes the conformance suite, unchanged, over software RDMA."""

from __future__ import annotations

import contextlib

import pytest

from kvxfer.testing.conformance import TransportTests
from kvxfer.testing.contract.settling import Settles


class TestMoriio(TransportTests):
    backend = "moriio"

    @pytest.fixture(autouse=True)
    def fabric(self, softrdma):
        """The engine of this process and those of peer processes share one fabric."""
        self.softrdma = softrdma


class TestMoriioHeld(Settles):
    """Work requests of this process are held where a test wants to see them unfinished."""

    backend = "moriio"

    @pytest.fixture(autouse=True)
    def fabric(self, softrdma):
        self.softrdma = softrdma

    @contextlib.contextmanager
    def hold(self, pair):
        with self.softrdma.hold():
            yield True
