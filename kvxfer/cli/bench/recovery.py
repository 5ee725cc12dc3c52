"""What a dead peer costs: transfers go on at full speed, the peer is killed, another takes over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer.cli.bench.plan import Cell
from kvxfer.cli.bench.rig import Flight, Rig
from kvxfer.cli.bench.shapes import batch_of

__all__ = ["recovery"]

_UNDER_WAY = 8
_BUCKET = 0.05
"""Seconds that one point of the curve stands for."""
_PATIENCE = 20.0
"""Seconds after which an engine that tells nothing is taken not to notice the death."""


def recovery(rig: Rig, cell: Cell, *, seconds: float, seed: int) -> dict[str, Any]:
    """Kill the peer after a third of ``seconds``; the curve and the times, in seconds.

    The peer that takes over runs already. ``noticed``: from the kill to the first failed transfer,
    refused post or lost peer. ``recovered``: from the kill to the first transfer that the other
    peer served.  None where it did not come within 20 s.
    """
    return _Run(rig, cell, seconds, seed).go()


class _Run:
    def __init__(self, rig: Rig, cell: Cell, seconds: float, seed: int) -> None:
        self.rig = rig
        self.cell = cell
        self.seconds = seconds
        rng = np.random.default_rng(seed)
        self.batches = [batch_of(cell, rig.nbytes, rng) for _ in range(64)]
        self.path = rig.path
        self.under_way: set[Flight] = set()
        self.begun = 0
        self.done: list[tuple[float, int]] = []
        """When transfers ended well, and their bytes."""
        self.failed = 0
        self.trouble = ""
        self.noticed: float | None = None
        self.recovered: float | None = None

    def go(self) -> dict[str, Any]:
        first, second = self.rig.links[0], self.rig.link()
        start = time.perf_counter()
        self._pump(lambda: time.perf_counter() - start > self.seconds / 3)
        killed = time.perf_counter()
        first.process.kill()
        self._pump(lambda: bool(self.trouble) or time.perf_counter() - killed > _PATIENCE)
        if self.trouble:
            self.noticed = time.perf_counter() - killed
            self.failed += len(self.under_way)  # given up: the dead peer's
            self.under_way.clear()
            self.rig.forget_waiting()
            self.rig.transport.disconnect(self.path.peer)
            self.rig.path = self.path = self.rig.reach(second)
            self.trouble = ""
            before = len(self.done)
            self._pump(lambda: len(self.done) > before or time.perf_counter() - killed > _PATIENCE)
            if len(self.done) > before:
                self.recovered = self.done[before][0] - killed
            resumed = time.perf_counter()
            self._pump(lambda: time.perf_counter() - resumed > self.seconds / 3)
        end = time.perf_counter()
        self._pump_out()
        return {
            "fault": "peer killed",
            "killed_at": round(killed - start, 4),
            "noticed_after": None if self.noticed is None else round(self.noticed, 4),
            "recovered_after": None if self.recovered is None else round(self.recovered, 4),
            "failed_transfers": self.failed,
            "seconds": round(end - start, 4),
            "bucket": _BUCKET,
            "gb_per_s": self._curve(start, end),
        }

    def _pump(self, enough: Callable[[], bool]) -> None:
        """Keep transfers under way until ``enough()``, or until there is trouble."""
        while not (enough() or self.trouble):
            while len(self.under_way) < _UNDER_WAY:
                self.under_way.add(self.rig.begin(self.batches[self.begun % 64], self.path))
                self.begun += 1
            self._collect()
            if self.path.peer in self.rig.transport.lost_peers():
                self.trouble = self.trouble or "the engine says that the peer is lost"

    def _pump_out(self) -> None:
        until = time.perf_counter() + _PATIENCE
        while self.under_way and time.perf_counter() < until:
            self._collect()

    def _collect(self) -> None:
        for flight in self.rig.look(0.005):
            if flight not in self.under_way:
                continue  # given up before
            self.under_way.discard(flight)
            if flight.error:
                self.failed += 1
                self.trouble = self.trouble or flight.error
            else:
                self.done.append((time.perf_counter(), flight.nbytes))

    def _curve(self, start: float, end: float) -> list[float]:
        buckets = np.zeros(int((end - start) / _BUCKET) + 1)
        for at, nbytes in self.done:
            if at <= end:
                buckets[int((at - start) / _BUCKET)] += nbytes
        # The last one is not whole.
        return [round(float(x) / _BUCKET / 1e9, 3) for x in buckets[:-1]]
