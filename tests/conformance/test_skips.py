"""What the suite skips follows from capabilities alone, and is what we expect of our backends."""

from __future__ import annotations

import attrs
import pytest

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.capabilities import FenceScope
from kvxfer.core.memory import MemoryKind
from kvxfer.core.plugins import create_transport
from kvxfer.core.verdict import Op
from kvxfer.testing.conformance import IN_PROCESS, TransportTests
from kvxfer.testing.expected import EXPECTED


class InProcess(TransportTests):
    modes = (IN_PROCESS,)


class ReadOnly(TransportTests):
    memory = "kvxfer.testing.memory:ReadOnlyHostMemory"


def reasons(suite, caps) -> dict[str, int]:
    """How many tests each word of the capabilities rules out."""
    counts: dict[str, int] = {}
    for reason in suite.skips(caps).values():
        word = reason.partition(":")[0]
        counts[word] = counts.get(word, 0) + 1
    return counts


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_expected_skips_follow_from_the_expected_capabilities(name):
    """The committed table: capabilities and the number of tests that they rule out belong together,
    for the engines that are not installed here as well."""
    expected = EXPECTED[name]
    assert len(TransportTests.skips(expected.capabilities)) == expected.skips
    words = set(reasons(TransportTests, expected.capabilities))
    assert words <= {"process_local", *attrs.fields_dict(type(expected.capabilities))}


@pytest.mark.parametrize("name", ["loopback", "shm"])
def test_our_backends(name):
    """What runs everywhere says of itself what the table holds."""
    transport = create_transport(name)
    try:
        assert transport.capabilities == EXPECTED[name].capabilities
    finally:
        transport.close()


def test_reads_in_place_are_not_writes():
    """With memory that peers cannot write, the tests of WRITE give way to one of its refusal."""
    found = reasons(ReadOnly, EXPECTED["shm"].capabilities)
    assert found == {"max_nbytes": 2, "ops": 4}


def test_capabilities_decide():
    """Less ability means more skips, each with a reason that names the capability."""
    transport = LoopbackTransport()
    full = transport.capabilities
    transport.close()
    reads = attrs.evolve(full, ops=frozenset({(Op.READ, MemoryKind.DRAM, MemoryKind.DRAM)}))
    skipped = InProcess.skips(reads)
    assert skipped["test_moves_exactly_the_pieces[in_process-write]"].startswith("ops: no write")
    assert "test_moves_exactly_the_pieces[in_process-read]" not in skipped
    assert "test_unsupported_op_is_refused[in_process]" not in skipped
    unfenced = InProcess.skips(attrs.evolve(full, fence=FenceScope.NONE))
    assert unfenced["test_receivers_fence_stops_writes[in_process]"] == "fence: no fence per peer"
