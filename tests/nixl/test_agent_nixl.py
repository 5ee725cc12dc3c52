"""Agents over the real NIXL over UCX tcp."""

from __future__ import annotations

import pytest

from kvxfer.testing.agents import AgentTests


class TestNixl(AgentTests):
    backend = "nixl"

    @pytest.fixture(autouse=True)
    def tcp(self, monkeypatch):
        """Shared memory would finish a READ of a stopped peer: tcp needs the peer's help."""
        monkeypatch.setenv("UCX_TLS", "tcp")
