"""The embedded default passes the suite, with memory that peers map and with memory in place."""

from __future__ import annotations

from kvxfer.testing.conformance import FaultTests, TransportTests


class TestMapped(TransportTests):
    backend = "shm"
    memory = "kvxfer.testing.memory:MappedMemory"


class TestInPlace(TransportTests):
    """Memory that lies elsewhere is READ where it lies, and never written."""

    backend = "shm"
    memory = "kvxfer.testing.memory:ReadOnlyHostMemory"


class TestFaults(FaultTests):
    backend = "shm"
    memory = "kvxfer.testing.memory:MappedMemory"
