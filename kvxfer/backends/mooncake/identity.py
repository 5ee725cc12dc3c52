"""Who a peer is: bytes in its memory that name its incarnation, and the places we read them into.

The engine knows peers by address only.  So every transport registers a few bytes that nobody but
this incarnation has, and every post reads the peer's, as its last piece.  A process that died
answers nothing: bytes that match show that the incarnation meant was alive when the pieces before
them had begun.
"""

from __future__ import annotations

import collections
import hashlib

import numpy as np

__all__ = ["NBYTES", "Tokens", "token_of"]

NBYTES = 32
"""Bytes of an identity."""


def token_of(incarnation: str) -> bytes:
    """The identity of a transport."""
    return hashlib.sha256(b"kvxfer mooncake " + incarnation.encode()).digest()


class Tokens:
    """Our own identity, and ``slots`` places for those of peers, in one stretch of memory.

    A place is given back only when nothing lands in it any more.  Not locked.
    """

    def __init__(self, incarnation: str, slots: int) -> None:
        self._memory = np.zeros((slots + 1, NBYTES), np.uint8)
        self._memory[0] = np.frombuffer(token_of(incarnation), np.uint8)
        self._free = collections.deque(range(1, slots + 1))
        self.address = int(self._memory.ctypes.data)
        """Of the whole memory, and of our own identity."""
        self.nbytes = self._memory.nbytes

    def take(self) -> int | None:
        """An empty place, None while all are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._memory[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def address_of(self, slot: int) -> int:
        return self.address + slot * NBYTES

    def holds(self, slot: int, token: bytes) -> bool:
        """Whether ``token`` was read into the place."""
        return bytes(self._memory[slot]) == token
