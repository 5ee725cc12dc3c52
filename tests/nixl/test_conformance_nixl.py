"""The real NIXL agent passes the conformance suite, unchanged, over UCX."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvxfer.testing.conformance import TransportTests


class OverUcx(TransportTests):
    backend = "nixl"
    ucx_tls: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.peer_env = {"UCX_TLS": cls.ucx_tls}

    @pytest.fixture(autouse=True)
    def ucx(self, monkeypatch):
        """UCX reads the variable whenever an agent is made."""
        monkeypatch.setenv("UCX_TLS", self.ucx_tls)


class TestTcp(OverUcx):
    ucx_tls = "tcp"


class TestSharedMemoryAndTcp(OverUcx):
    """The copy runs inside ``post`` here."""

    ucx_tls = "sm,tcp"
