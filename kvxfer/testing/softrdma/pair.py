"""An engine here and a peer process, connected, with what tests of transfers keep asking."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvxfer.testing.softrdma.buffer import Buffer, pattern
from kvxfer.testing.softrdma.engine import MoriEngine
from kvxfer.testing.softrdma.peer import MoriPeer
from kvxfer.testing.softrdma.session import Session

__all__ = ["PIECE", "MoriPair", "scattered"]

PIECE = 4096
"""The size in bytes of the pieces of ``scattered``."""


def scattered(count: int, first: int = 0) -> list[int]:
    """Offsets of ``count`` pieces with gaps between them, so that mori cannot merge any two."""
    return [index * 2 * PIECE for index in range(first, first + count)]


@attrs.frozen(kw_only=True)
class MoriPair:
    """An engine of this process, connected to one of another process."""

    engine: MoriEngine
    buffer: Buffer
    """As large as the peer's; all zeros at first."""
    peer: MoriPeer
    session: Session
    source: bytes
    """What the peer's buffer held at first."""

    @classmethod
    def connect(cls, engine: MoriEngine, peer: MoriPeer, *, seed: int) -> MoriPair:
        """Connect an engine and a peer whose buffer was filled with ``seed``."""
        buffer = engine.buffer(peer.nbytes)
        return cls(
            engine=engine,
            buffer=buffer,
            peer=peer,
            session=engine.connect(buffer, peer),
            source=pattern(seed, peer.nbytes),
        )

    def landed(self, offsets: Sequence[int]) -> int:
        """How many of the pieces at these offsets have arrived here, unchanged in place."""
        return sum(
            self.buffer.read(offset, PIECE) == self.source[offset : offset + PIECE]
            for offset in offsets
        )

    def landed_there(self, offsets: Sequence[int]) -> int:
        """How many of the pieces at these offsets have arrived in the peer's buffer."""
        theirs = self.peer.read()
        return sum(
            self.buffer.read(offset, PIECE) == theirs[offset : offset + PIECE] for offset in offsets
        )
