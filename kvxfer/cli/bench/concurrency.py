"""Latencies of equal transfers while so many of them are under way."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvxfer.cli.bench.plan import Cell
from kvxfer.cli.bench.rig import Rig
from kvxfer.cli.bench.shapes import batch_of
from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.errors import BackpressureError, TransportError

__all__ = ["PERCENTILES", "latencies"]

PERCENTILES = (50, 90, 99)
_LEAST = 20
"""Transfers, however long they take."""
_BATCHES = 64
"""Made beforehand and taken in turns."""


def latencies(rig: Rig, cell: Cell, under_way: int, *, seconds: float, seed: int) -> dict[str, Any]:
    """Keep ``under_way`` transfers of ``cell`` in flight; one row of the result, in milliseconds.

    A transfer's latency is from its first ``post`` call on, also where the engine refused that one
    for a full queue.
    """
    rng = np.random.default_rng(seed)
    batches = [batch_of(cell, rig.nbytes, rng) for _ in range(_BATCHES)]
    waiting: dict[Attempt, _Flight] = {}
    took: list[float] = []
    refused = begun = 0
    start = time.perf_counter()
    pending: _Flight | None = None
    while True:
        now = time.perf_counter()
        over = now - start > seconds and begun >= _LEAST
        if over and not waiting:
            break
        if now - start > seconds + 60.0:
            raise TransportError(f"{rig.contender.label}: transfers did not end within a minute")
        while not over and len({id(f) for f in waiting.values()}) < under_way:
            pending = pending or _Flight(time.perf_counter())
            try:
                attempts = rig.post(batches[begun % _BATCHES])
            except BackpressureError:
                refused += 1
                break
            pending.left = len(attempts)
            waiting.update(dict.fromkeys(attempts, pending))
            pending = None
            begun += 1
        for attempt in rig.look():
            if not attempt.terminal or attempt not in waiting:
                continue
            if attempt.state is not AttemptState.DONE:
                raise TransportError(f"{rig.contender.label}: {attempt.error}")
            flight = waiting.pop(attempt)
            flight.left -= 1
            if not flight.left:
                took.append(time.perf_counter() - flight.start)
    spent = time.perf_counter() - start
    percentiles = np.percentile(np.array(took) * 1e3, PERCENTILES)
    return {
        "under_way": under_way,
        "transfers": len(took),
        "refused_posts": refused,
        "gb_per_s": round(len(took) * cell.nbytes / spent / 1e9, 3),
        **{f"p{p}_ms": round(float(x), 4) for p, x in zip(PERCENTILES, percentiles, strict=True)},
    }


class _Flight:
    __slots__ = ("left", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.left = 0
