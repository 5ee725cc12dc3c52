"""A transport here, its peers in other processes: what a test of one engine starts from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvxfer.core.attempt import Attempt
from kvxfer.core.batch import Batch
from kvxfer.core.memory import Descriptor, span_of
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Path, Peer, Transport
from kvxfer.core.verdict import Op
from kvxfer.testing.memory import pattern
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.station import Buffer

__all__ = ["BLOCK", "NBYTES", "TwoSides", "scattered"]

T = TypeVar("T")

BLOCK = 4096
"""Bytes of a block."""
NBYTES = 64 * BLOCK
"""Bytes of each buffer."""


def scattered(pieces: int, *, pair: int = 0, first: int = 0) -> Batch:
    """Every other block, so that no engine merges two; the far side one block further."""
    offset = (first + np.arange(pieces)) * 2 * BLOCK
    return Batch(np.full(pieces, pair), offset, offset + BLOCK, np.full(pieces, BLOCK))


class TwoSides:
    """Pairs of buffers of ``NBYTES`` here and in a peer's process, and a path between them.

    ``start`` makes a peer process. Every wait calls ``transport.progress`` and fails after
    ``timeout`` seconds with the name of what did not come. One thread.
    """

    def __init__(
        self,
        transport: Transport,
        start: Callable[[], PeerProcess],
        *,
        buffers: int = 2,
        timeout: float = 60.0,
    ) -> None:
        self.transport = transport
        self._start = start
        self._timeout = timeout
        self.fars: list[PeerProcess] = []
        self.arrays: list[npt.NDArray[np.uint8]] = [
            np.zeros(NBYTES, np.uint8) for _ in range(buffers)
        ]
        self.regions = [transport.register(span_of(array)) for array in self.arrays]
        self.there: list[Buffer] = []
        """The far buffers of the peer that was connected last."""
        self.peer: Peer
        """The peer that was connected last."""

    def far(self) -> PeerProcess:
        """One more peer process, not connected yet."""
        self.fars.append(self._start())
        return self.fars[-1]

    def connect(self, far: PeerProcess) -> Path:
        """A path to new buffers there, buffer i filled with pattern i; ours are zeroed."""
        for array in self.arrays:
            array[:] = 0
        self.there = [far.register(NBYTES) for _ in self.arrays]
        for seed, buffer in enumerate(self.there):
            far.fill(buffer, seed)
        self.peer = self.answer(self.transport.connect(far.info))
        return self.prepare()

    def prepare(self, descriptors: Sequence[Descriptor] | None = None) -> Path:
        """A path between our buffers and ``descriptors`` (default: those of the last peer)."""
        found = descriptors or [buffer.descriptor for buffer in self.there]
        pairs = list(zip(self.regions, found, strict=False))
        return self.answer(self.transport.prepare(self.peer, pairs))

    def until(
        self, condition: Callable[[], object], what: str, timeout: float | None = None
    ) -> None:
        """Make progress until ``condition()`` holds."""
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
            self.transport.progress()
            time.sleep(0.0002)

    def outcome(self, pollable: Pollable[Any]) -> tuple[Any, BaseException | None]:
        """What a pollable came to: its value or its error."""
        self.until(lambda: pollable.poll() != (None, None), "an answer")
        return pollable.poll()

    def answer(self, pollable: Pollable[T]) -> T:
        """The value of a pollable that must not fail."""
        value, error = self.outcome(pollable)
        assert error is None, error
        return cast(T, value)

    def ended(self, attempt: Attempt) -> Attempt:
        """The attempt, when it is terminal."""
        self.until(lambda: attempt.terminal, "the attempt ended")
        return attempt

    def moved(self, op: Op, path: Path, batch: Batch) -> Attempt:
        """Post and see it end."""
        return self.ended(self.transport.post(op, path, batch))

    def read(self, path: Path, batch: Batch) -> Attempt:
        return self.moved(Op.READ, path, batch)

    def landed(self, batch: Batch, buffer: int | None = None) -> list[bool]:
        """Which pieces of ``batch`` hold what the far side, as it was filled, has there: in the
        buffers of their pair, or in those of number ``buffer``."""
        found = []
        for pair, here, there, n in zip(*batch.lists(), strict=True):
            number = pair if buffer is None else buffer
            expected = pattern(number, NBYTES)[there : there + n]
            found.append(bytes(self.arrays[number][here : here + n]) == expected)
        return found

    def close(self) -> None:
        """Close the transport, end every peer."""
        self.transport.close()
        for far in self.fars:
            far.dispose()
