"""The real NIXL agent passes the conformance suite, unchanged, over UCX."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvxfer.core.plugins import create_transport
from kvxfer.testing.conformance import TWO_PROCESS, FaultTests, TransportTests
from kvxfer.testing.contract.base import ContractBase
from kvxfer.testing.expected import EXPECTED


class OverUcx(ContractBase):
    backend = "nixl"
    ucx_tls: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.peer_env = {"UCX_TLS": cls.ucx_tls}

    @pytest.fixture(autouse=True)
    def ucx(self, monkeypatch):
        """UCX reads the variable whenever an agent is made."""
        monkeypatch.setenv("UCX_TLS", self.ucx_tls)


class TestTcp(OverUcx, TransportTests):
    ucx_tls = "tcp"


class TestSharedMemoryAndTcp(OverUcx, TransportTests):
    """The copy runs inside ``post`` here."""

    ucx_tls = "sm,tcp"


class TestFaults(OverUcx, FaultTests):
    ucx_tls = "tcp"
    modes = (TWO_PROCESS,)


def test_capabilities_are_the_expected_ones():
    """The engine, made from a mapping, says what the committed table holds; what is skipped follows
    from that."""
    transport = create_transport("nixl", {"ucx_tls": "tcp"})
    try:
        assert transport.capabilities == EXPECTED["nixl"].capabilities
    finally:
        transport.close()
