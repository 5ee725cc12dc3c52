"""Memory for measurements: page aligned, really there, and every word says where it lies."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvxfer.core.memory import MemoryKind, Span, span_of
from kvxfer.core.transport import Transport
from kvxfer.core.verdict import Op
from kvxfer.testing.station import GUARD

__all__ = ["WORD", "PrivateMemory", "SharedMemory", "words_of"]

WORD = 8
PAGE = 4096

Words = npt.NDArray[np.uint64]


class PrivateMemory:
    """Ordinary memory of a process.

    Byte ``GUARD``, where a peer process registers from, begins a page: blocks of whole pages then
    lie on pages, as they do in a KV cache.  From there on, each 8-byte word holds its own index.
    """

    ops: ClassVar[frozenset[Op]] = frozenset({Op.READ})

    def __init__(self, transport: Transport, nbytes: int, kind: MemoryKind) -> None:
        nbytes -= nbytes % WORD
        whole = self._have(nbytes + 2 * PAGE)
        start = (whole.address + GUARD + PAGE - 1) // PAGE * PAGE - GUARD
        self._span = Span(address=start, nbytes=nbytes, owner=whole)
        words = words_of(Span(address=start + GUARD, nbytes=nbytes - GUARD, owner=whole))
        words[:] = np.arange(len(words), dtype=np.uint64)  # which also makes the pages exist

    @staticmethod
    def _have(nbytes: int) -> Span:
        return span_of(np.zeros(nbytes, np.uint8))

    @property
    def span(self) -> Span:
        return self._span

    def write(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self._span.address + offset, data, len(data))

    def read(self, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(self._span.address + offset, nbytes)

    def close(self) -> None:
        """It goes with its last user."""


class SharedMemory(PrivateMemory):
    """Memory that shm maps."""

    ops: ClassVar[frozenset[Op]] = frozenset(Op)

    @staticmethod
    def _have(nbytes: int) -> Span:
        from kvxfer.backends.shm import allocate_bytes

        return allocate_bytes(nbytes)


class _Exposed:
    def __init__(self, span: Span) -> None:
        self._span = span
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (span.nbytes - span.nbytes % WORD,),
            "data": (span.address, False),
        }


def words_of(span: Span) -> Words:
    """The whole words of a span; the array keeps its owner."""
    exposed: Any = _Exposed(span)
    return np.asarray(exposed).view(np.uint64)
