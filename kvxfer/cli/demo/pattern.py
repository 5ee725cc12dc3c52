"""What every byte of every block must be: a function of where it is, not of what was sent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvxfer.cli.demo.geometry import Scaled

__all__ = ["Pattern"]

Bytes = npt.NDArray[np.uint8]
_STEPS = 65521
"""A prime: how many different blocks the table gives."""


class Pattern:
    """The expected content of (request, layer, block, byte), the same in both processes.

    A table of random bytes is read from a place that depends on request, layer and block: any
    shift, swap or mix-up of blocks or layers shows in almost every byte.
    """

    def __init__(self, scaled: Scaled) -> None:
        self._scaled = scaled
        self._size = scaled.geometry.planes * scaled.geometry.plane_nbytes
        rng = np.random.default_rng(20261129)
        self._table: Bytes = rng.integers(0, 256, size=self._size + _STEPS, dtype=np.uint8)

    def block(self, request: int, layer: int, position: int) -> Bytes:
        """uint8[planes, plane_nbytes]."""
        start = (request * 7919 + layer * 104729 + position * 1299709 + 17) % _STEPS
        flat = self._table[start : start + self._size]
        return flat.reshape(self._scaled.geometry.planes, -1)

    def fill(self, cache: Bytes, request: int, positions: range, ids: list[int]) -> None:
        """Write the content of a request into blocks of a cache shaped ``Scaled.shape``."""
        for position, block in zip(positions, ids, strict=True):
            for layer in range(self._scaled.layers):
                cache[layer, :, block] = self.block(request, layer, position)

    def wrong_bytes(self, cache: Bytes, request: int, positions: range, ids: list[int]) -> int:
        """How many bytes of a request's blocks are not what they must be."""
        wrong = 0
        for position, block in zip(positions, ids, strict=True):
            for layer in range(self._scaled.layers):
                found = cache[layer, :, block]
                wrong += int(np.count_nonzero(found != self.block(request, layer, position)))
        return wrong
