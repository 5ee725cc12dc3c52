"""The embedded default passes the suite, with memory that peers map and with memory in place."""

from __future__ import annotations

from typing import ClassVar

from kvxfer.backends.shm import allocate_bytes
from kvxfer.core.memory import MemoryKind, Span
from kvxfer.core.transport import Transport
from kvxfer.core.verdict import Op
from kvxfer.testing.conformance import TransportTests
from kvxfer.testing.memory import HostMemory


class MappedMemory(HostMemory):
    """Memory of ``shm.allocate_bytes``: peers map it."""

    ops: ClassVar[frozenset[Op]] = frozenset(Op)

    def __init__(self, transport: Transport, nbytes: int, kind: MemoryKind) -> None:
        self._mapped: Span = allocate_bytes(nbytes)

    @property
    def span(self) -> Span:
        return self._mapped


class TestMapped(TransportTests):
    backend = "shm"
    memory = "test_conformance_shm:MappedMemory"


class TestInPlace(TransportTests):
    """Memory that lies elsewhere is READ where it lies, and never written."""

    backend = "shm"
    memory = "kvxfer.testing.memory:ReadOnlyHostMemory"
