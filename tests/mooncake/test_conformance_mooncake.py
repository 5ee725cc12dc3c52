"""The real Mooncake engine passes the conformance suite, unchanged, over tcp."""

from __future__ import annotations

from kvxfer.testing.conformance import TransportTests


class TestTcp(TransportTests):
    backend = "mooncake"
