"""Buffers with known contents on both sides, and what must be in them afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvxfer.core.batch import Batch
from kvxfer.core.capabilities import Visibility
from kvxfer.core.transport import Path
from kvxfer.core.verdict import Op
from kvxfer.testing.memory import digest, pattern
from kvxfer.testing.pair import Pair
from kvxfer.testing.pieces import applied
from kvxfer.testing.station import Buffer, Far

__all__ = ["Rig"]


@attrs.frozen(kw_only=True)
class Rig:
    """Pairs of buffers with known contents on both sides, and a path between them."""

    pair: Pair
    far: Far
    buffers: Sequence[tuple[Buffer, Buffer]]
    path: Path
    near_bytes: list[bytes]
    far_bytes: list[bytes]

    def expect(self, op: Op, batch: Batch, *, what: str = "") -> None:
        """Both sides hold what ``batch`` makes of their first contents, and nothing else changed.

        Where DONE means visible, this must be true at the first look.
        """
        near, far = applied(op, batch, self.near_bytes, self.far_bytes)
        if self.pair.near.transport.capabilities.visible(op) is not Visibility.VISIBLE:
            self.pair.until(
                lambda: self._matches(near, far), f"bytes of {what or op.value} visible after DONE"
            )
        for i, (here, there) in enumerate(self.buffers):
            _compare(self.pair.near, here, near[i], f"near buffer {i} {what}")
            _compare(self.far, there, far[i], f"far buffer {i} {what}")
            assert self.pair.near.guards_intact(here), (
                f"bytes around near buffer {i} changed {what}"
            )
            assert self.far.guards_intact(there), f"bytes around far buffer {i} changed {what}"

    def expect_untouched(self, what: str) -> None:
        """Nothing changed on either side."""
        self.expect(Op.READ, Batch([], [], [], []), what=what)

    def _matches(self, near: list[bytes], far: list[bytes]) -> bool:
        return all(
            self.pair.near.digest(here) == digest(near[i])
            and self.far.digest(there) == digest(far[i])
            for i, (here, there) in enumerate(self.buffers)
        )

    def overwrite_destinations(self, op: Op, seed: int) -> None:
        """Give the memory back and let its next owner fill it: whatever lands now is a fault."""
        for i, (here, there) in enumerate(self.buffers):
            if op is Op.READ:
                self.near_bytes[i] = pattern(seed + i, here.nbytes)
                self.pair.near.fill(here, seed + i)
            else:
                self.far_bytes[i] = pattern(seed + i, there.nbytes)
                self.far.fill(there, seed + i)


def _compare(side: Far, buffer: Buffer, expected: bytes, where: str) -> None:
    # No assert on the bytes themselves: explaining the difference of megabytes takes minutes.
    if side.digest(buffer) != digest(expected):
        found = np.frombuffer(side.read(buffer), np.uint8)
        wrong = np.flatnonzero(found != np.frombuffer(expected, np.uint8))
        first = int(wrong[0]) if len(wrong) else "none any more: they came late"
        raise AssertionError(f"{where}: {len(wrong)} wrong bytes, the first at {first}")
