"""Batches for tests, and what they must do to the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op

__all__ = ["applied", "scattered", "whole"]


def scattered(
    seed: int, near: Sequence[int], far: Sequence[int], *, pieces: int, slot: int = 512
) -> Batch:
    """About ``pieces`` pieces of odd sizes over pairs of regions of ``near[i]``/``far[i]`` bytes.

    No two pieces share a byte on either side, so that they may land in any order.  The first and
    the last byte of every region are in a piece.  ``slot`` is the largest piece, in bytes; every
    region must hold at least two.
    """
    rng = np.random.default_rng(seed)
    per_pair = -(-pieces // len(near))
    columns: list[list[int]] = [[], [], [], []]
    for pair, (here, there) in enumerate(zip(near, far, strict=True)):
        slots_here, slots_there = here // slot, there // slot
        n = min(max(per_pair, 2), slots_here, slots_there)
        # Slot 0 and the end of the region on both sides, crosswise; the rest anywhere.
        local = [0, here - slot]
        remote = [there - slot, 0]
        local += (1 + rng.permutation(max(slots_here - 2, 0))[: n - 2]).astype(int).tolist()
        remote += (1 + rng.permutation(max(slots_there - 2, 0))[: n - 2]).astype(int).tolist()
        for i in range(n):
            size = slot if i < 2 else int(rng.integers(1, slot + 1))
            scale, shift = (1, 0) if i < 2 else (slot, int(rng.integers(0, slot - size + 1)))
            columns[0].append(pair)
            columns[1].append(local[i] * scale + shift)
            columns[2].append(remote[i] * scale + shift)
            columns[3].append(size)
    order = rng.permutation(len(columns[0]))
    pair_, local_, remote_, size_ = (np.array(c)[order] for c in columns)
    return Batch(pair_, local_, remote_, size_)


def whole(nbytes: int, *, pieces: int = 1, pair: int = 0) -> Batch:
    """``nbytes`` from the start of one pair's regions, in equal consecutive pieces."""
    size = nbytes // pieces
    offsets = np.arange(pieces) * size
    return Batch(np.full(pieces, pair), offsets, offsets, np.full(pieces, size))


def applied(
    op: Op, batch: Batch, near: Sequence[bytes], far: Sequence[bytes]
) -> tuple[list[bytes], list[bytes]]:
    """Both sides' regions after ``batch``, given their contents before it."""
    after_near = [bytearray(b) for b in near]
    after_far = [bytearray(b) for b in far]
    for pair, local, remote, size in zip(*batch.lists(), strict=True):
        if op is Op.READ:
            after_near[pair][local : local + size] = far[pair][remote : remote + size]
        else:
            after_far[pair][remote : remote + size] = near[pair][local : local + size]
    return [bytes(b) for b in after_near], [bytes(b) for b in after_far]
