"""The real Mooncake engine passes the conformance suite, unchanged, over tcp."""

from __future__ import annotations

from kvxfer.core.plugins import create_transport
from kvxfer.testing.conformance import TWO_PROCESS, FaultTests, TransportTests
from kvxfer.testing.expected import EXPECTED


class TestTcp(TransportTests):
    backend = "mooncake"


class TestFaults(FaultTests):
    backend = "mooncake"
    modes = (TWO_PROCESS,)


def test_capabilities_are_the_expected_ones():
    """The engine, made from a mapping, says what the committed table holds; what is skipped follows
    from that."""
    transport = create_transport("mooncake", {"max_pieces": 256})
    try:
        assert transport.capabilities == EXPECTED["mooncake"].capabilities
    finally:
        transport.close()
