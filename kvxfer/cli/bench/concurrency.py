"""Latencies of equal transfers while so many of them are under way."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvxfer.cli.bench.plan import Cell, rounded
from kvxfer.cli.bench.rig import Rig
from kvxfer.cli.bench.shapes import batch_of
from kvxfer.errors import TransportError

__all__ = ["PERCENTILES", "latencies"]

PERCENTILES = (50, 90, 99)
_LEAST = 20
"""Transfers, however long they take."""
_BATCHES = 64
"""Made beforehand and taken in turns."""


def latencies(rig: Rig, cell: Cell, under_way: int, *, seconds: float, seed: int) -> dict[str, Any]:
    """Keep ``under_way`` transfers of ``cell`` in flight; one row of the result, in milliseconds.

    A transfer's latency counts from when it was to be posted, also while it waits for room in the
    engine's queue.
    """
    rng = np.random.default_rng(seed)
    batches = [batch_of(cell, rig.nbytes, rng) for _ in range(_BATCHES)]
    took: list[float] = []
    begun = 0
    start = time.perf_counter()
    while True:
        spent = time.perf_counter() - start
        over = spent > seconds and begun >= _LEAST
        if over and begun == len(took):
            break
        if spent > seconds + 60.0:
            raise TransportError(f"{rig.contender.label}: transfers did not end within a minute")
        while not over and begun - len(took) < under_way:
            rig.begin(batches[begun % _BATCHES])
            begun += 1
        for flight in rig.look():
            if flight.error:
                raise TransportError(f"{rig.contender.label}: {flight.error}")
            took.append(time.perf_counter() - flight.began)
    percentiles = np.percentile(np.array(took) * 1e3, PERCENTILES)
    return {
        "under_way": under_way,
        "transfers": len(took),
        "gb_per_s": rounded(len(took) * cell.nbytes / spent / 1e9),
        **{f"p{p}_ms": rounded(float(x)) for p, x in zip(PERCENTILES, percentiles, strict=True)},
    }
