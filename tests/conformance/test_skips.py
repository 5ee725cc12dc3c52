"""What the suite skips follows from capabilities alone, and is what we expect of our backends."""

from __future__ import annotations

import attrs
import pytest

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.backends.shm import ShmTransport
from kvxfer.core.capabilities import FenceScope
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import Op
from kvxfer.testing.conformance import IN_PROCESS, TransportTests


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


@pytest.mark.parametrize(
    ("suite", "engine", "expected"),
    [
        (
            InProcess,
            LoopbackTransport,
            {
                "process_local": 5,
                "credits": 2,
                "max_pieces": 2,
                "max_nbytes": 2,
                "fence": 1,
                "ops": 1,
            },
        ),
        (TransportTests, ShmTransport, {"max_nbytes": 4, "fence": 2, "ops": 2}),
        (ReadOnly, ShmTransport, {"max_nbytes": 2, "ops": 4}),
    ],
)
def test_our_backends(suite, engine, expected):
    """The committed table: a change of capabilities that hides a test shows here."""
    transport = engine()
    caps = transport.capabilities
    transport.close()
    assert reasons(suite, caps) == expected


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
