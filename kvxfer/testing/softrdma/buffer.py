"""Memory for transfers, in the form mori takes it, with contents that can be told apart."""

from __future__ import annotations

import ctypes
import random
from typing import Any

from kvxfer.errors import ConfigError

__all__ = ["Buffer", "pattern"]


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that differ everywhere and are the same for the same seed."""
    return random.Random(seed).randbytes(nbytes)


class Buffer:
    """Memory of this process, registered with an engine. Made by ``MoriEngine.buffer``."""

    def __init__(self, nbytes: int) -> None:
        self._memory = (ctypes.c_char * nbytes)()
        self.nbytes = nbytes
        self.descriptor: Any = None
        """The engine's own description; None once deregistered."""

    @property
    def capsule(self) -> Any:
        """Its address in the form in which mori's ``RegisterMemory`` takes it."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(self.address, None, None)

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(self._memory)

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A copy of ``nbytes`` bytes from ``offset`` on; None reads to the end."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ConfigError(f"{nbytes} bytes at {offset} are not within {self.nbytes} bytes")
        return ctypes.string_at(self.address + offset, nbytes)

    def write(self, offset: int, content: bytes) -> None:
        """Put bytes into it."""
        if offset < 0 or offset + len(content) > self.nbytes:
            raise ConfigError(f"{len(content)} bytes at {offset} do not fit {self.nbytes} bytes")
        ctypes.memmove(self.address + offset, content, len(content))

    def fill(self, seed: int) -> bytes:
        """Fill it with ``pattern(seed, nbytes)`` and return that."""
        content = pattern(seed, self.nbytes)
        self.write(0, content)
        return content
