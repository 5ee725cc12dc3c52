"""Backends with something wrong with them, for the tests of ``kvxfer bench``."""

from __future__ import annotations

import ctypes
import os

from kvxfer.backends.shm import ShmTransport
from kvxfer.errors import TransportError


class Wrong(ShmTransport):
    """Says DONE over a byte that it changed."""

    def _report(self, attempt):
        address = attempt.path.pairs[0][0].span.address + int(attempt.batch.local[0])
        byte = ctypes.c_ubyte.from_address(address)
        byte.value ^= 1
        super()._report(attempt)


class Dying(ShmTransport):
    """Ends its process in its first post, as some engines do."""

    def _post(self, attempt):
        os.abort()


class Refusing(ShmTransport):
    """Refuses every post."""

    def _post(self, attempt):
        raise TransportError("refused on purpose")
