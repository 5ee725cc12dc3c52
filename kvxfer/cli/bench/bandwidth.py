"""Bandwidth of one shape: kvxfer, the engine called directly and memmove, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from kvxfer.cli.bench.direct import direct_call, memmove_call
from kvxfer.cli.bench.plan import Cell, rounded
from kvxfer.cli.bench.rig import Rig
from kvxfer.cli.bench.shapes import batch_of, wrong_words
from kvxfer.core.batch import Batch

__all__ = ["Bandwidth"]

_ROUNDS = 3
"""At least."""
_ROUNDS_MAX = 2000
_CHECKED = 64
"""Blocks of the last transfer whose bytes are looked at."""


class Bandwidth:
    """Measures one cell after another on one rig."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._rng = np.random.default_rng(seed)
        self._calls: dict[str, Callable[[Batch], float]] = {"kvxfer": rig.read}
        direct = direct_call(rig)
        if direct is not None:
            self._calls["direct"] = lambda batch: _timed(direct, batch)
        memmove = memmove_call(rig)
        self._calls["memmove"] = lambda batch: _timed(memmove, batch)

    def measure(self, cell: Cell, seconds: float) -> dict[str, Any]:
        """One row of the result, in GB/s (10^9 bytes); ratios are medians of ratios per round."""
        for call in self._calls.values():
            call(self._batch(cell))
        took: dict[str, list[float]] = {name: [] for name in self._calls}
        order = list(self._calls.items())
        until = time.monotonic() + seconds
        rounds = 0
        while rounds < _ROUNDS or (time.monotonic() < until and rounds < _ROUNDS_MAX):
            turn = rounds % len(order)
            for name, call in order[turn:] + order[:turn]:
                # Blocks of its own: the last one's are in the processor's cache.
                took[name].append(call(self._batch(cell)))
            rounds += 1
        batch = self._batch(cell)
        self._rig.read(batch)
        wrong = wrong_words(self._rig.words, batch.slice(0, _CHECKED))
        row: dict[str, Any] = {**attrs.asdict(cell), "rounds": rounds, "wrong_words": wrong}
        for name, times in took.items():
            row[name] = rounded(cell.nbytes / statistics.median(times) / 1e9)
            row[f"{name}_best"] = rounded(cell.nbytes / min(times) / 1e9)
        for name in took.keys() - {"kvxfer"}:
            pairs = zip(took[name], took["kvxfer"], strict=True)
            row[f"to_{name}"] = rounded(statistics.median(base / ours for base, ours in pairs))
        return row

    def _batch(self, cell: Cell) -> Batch:
        return batch_of(cell, self._rig.nbytes, self._rng)


def _timed(call: Callable[[Batch], None], batch: Batch) -> float:
    start = time.perf_counter()
    call(batch)
    return time.perf_counter() - start
