"""Raw memory for tests: bytes that are written and read without the transport under test."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from typing import Any, ClassVar, Protocol

import numpy as np

from kvxfer.core.memory import MemoryKind, Span, span_of
from kvxfer.core.transport import Transport
from kvxfer.core.verdict import Op
from kvxfer.errors import ConfigError, InvalidInputError

__all__ = [
    "HostMemory",
    "MappedMemory",
    "Memory",
    "ReadOnlyHostMemory",
    "digest",
    "load",
    "pattern",
]


class Memory(Protocol):
    """A stretch of memory that a test owns. Offsets and sizes are bytes.

    For device memory, write a class with these members that copies through the device's own API.
    """

    ops: ClassVar[frozenset[Op]]
    """What a peer can do with such memory once it is registered. Tests of the other ops are
    replaced by one that demands their refusal."""

    def __init__(self, transport: Transport, nbytes: int, kind: MemoryKind) -> None:
        """``transport`` is the one that will register it."""

    @property
    def span(self) -> Span:
        """All of it, as a transport registers it."""

    def write(self, offset: int, data: bytes) -> None:
        """Put ``data`` at ``offset``, complete when this returns."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """What the owner of the memory sees now."""

    def close(self) -> None:
        """Free it. Idempotent."""


class HostMemory:
    """Ordinary host memory, page aligned, through numpy.

    Peers are expected to READ and WRITE it; see ``ReadOnlyHostMemory``.

    Raises:
        InvalidInputError: ``kind`` is not DRAM.
    """

    ops: ClassVar[frozenset[Op]] = frozenset(Op)

    def __init__(self, transport: Transport, nbytes: int, kind: MemoryKind) -> None:
        if kind is not MemoryKind.DRAM:
            raise InvalidInputError(
                f"HostMemory cannot provide {kind.value} memory",
                next_step="set TransportTests.memory to a factory that can",
            )
        page = 4096
        whole = np.zeros(nbytes + page, dtype=np.uint8)
        start = -int(whole.ctypes.data) % page
        self._array = whole[start : start + nbytes]
        self._span = span_of(self._array)

    @property
    def span(self) -> Span:
        return self._span

    def write(self, offset: int, data: bytes) -> None:
        _check(self.span, offset, len(data))
        ctypes.memmove(self.span.address + offset, data, len(data))

    def read(self, offset: int, nbytes: int) -> bytes:
        _check(self.span, offset, nbytes)
        return ctypes.string_at(self.span.address + offset, nbytes)

    def close(self) -> None:
        """Nothing to do: the array goes with its last reference."""


class ReadOnlyHostMemory(HostMemory):
    """Ordinary host memory, for engines that let peers READ it but not WRITE it."""

    ops: ClassVar[frozenset[Op]] = frozenset({Op.READ})


class MappedMemory(HostMemory):
    """Memory that peers of the ``shm`` backend map: they READ and WRITE it."""

    def __init__(self, transport: Transport, nbytes: int, kind: MemoryKind) -> None:
        from kvxfer.backends.shm import allocate_bytes

        self._span = allocate_bytes(nbytes)


def _check(span: Span, offset: int, nbytes: int) -> None:
    if offset < 0 or offset + nbytes > span.nbytes:
        raise InvalidInputError(
            f"bytes {offset} to {offset + nbytes} are outside a memory of {span.nbytes} bytes"
        )


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that depend on ``seed`` and nothing else, and do not repeat."""
    return np.random.Generator(np.random.PCG64(seed)).bytes(nbytes)


def digest(data: bytes) -> str:
    """A checksum that tells any two contents apart."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def load(spec: str) -> Any:
    """The object that ``spec``, written ``module:attribute``, names.

    Raises:
        ConfigError: the text has another form, or names nothing.
    """
    module, colon, attribute = spec.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{spec!r} must be written module:attribute")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{spec!r} cannot be loaded: {error}") from error
    return found
