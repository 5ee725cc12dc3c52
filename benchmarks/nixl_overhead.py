"""What kvxfer adds to a NIXL call: ``post`` to DONE against direct calls of the same engine.

All contenders use one agent, one connection to a peer process and one pair of regions; each round
makes every call once, in an order drawn anew, and a difference is taken within a round.

* ``rows``: NIXL's ``initialize_xfer`` with every piece described: what a program without prepared
  lists does;
* ``prepped``: ``make_prepped_xfer`` from lists prepared once, indices made beforehand: the least
  that NIXL itself can cost;
* ``kvxfer``: ``post`` and ``progress`` with a ``Batch`` of four vectors, checked.

Each ends with the handle released.  ``posting`` is the time inside ``post``.

Run: PYTHONPATH=. python benchmarks/nixl_overhead.py [--json FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.backends.nixl import NixlConfig, NixlTransport
from kvxfer.backends.nixl.pieces import Grid
from kvxfer.core.batch import Batch
from kvxfer.core.memory import MemoryKind, span_of
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Path as TransferPath
from kvxfer.core.verdict import Op
from kvxfer.testing.peer_process import PeerProcess

SHAPES = [(1, 4096), (16, 4096), (128, 4096), (1024, 4096), (128, 65536)]
"""Pieces and bytes of each."""
NBYTES = 256 << 16


def answer(pollable: Pollable[Any]) -> Any:
    while pollable.poll() == (None, None):
        time.sleep(0.001)
    value, error = pollable.poll()
    if error is not None:
        raise error
    return value


class Bench:
    def __init__(self, tls: str) -> None:
        os.environ["UCX_TLS"] = tls
        self.transport = NixlTransport(NixlConfig())
        self.far = PeerProcess("kvxfer.backends.nixl:NixlTransport", env={"UCX_TLS": tls})
        self.here = np.zeros(NBYTES, np.uint8)
        region = self.transport.register(span_of(self.here))
        there = self.far.register(NBYTES)
        self.far.fill(there, 1)
        peer = answer(self.transport.connect(self.far.info))
        self.path: TransferPath = answer(self.transport.prepare(peer, [(region, there.descriptor)]))
        self.agent = self.transport._agent
        self.posting = 0.0

    def close(self) -> None:
        self.transport.close()
        self.far.dispose()

    def contenders(self, pieces: int, size: int) -> dict[str, Callable[[], None]]:
        rng = np.random.default_rng(pieces)
        local, remote = (rng.permutation(NBYTES // size)[:pieces] * size for _ in range(2))
        pair, sizes = np.zeros(pieces, np.int32), np.full(pieces, size, np.int64)
        agent, path, name = self.agent, self.path, self.path.remote.name
        kin = path._kin[0]
        dram = MemoryKind.DRAM
        near, far = (Grid.over(side, size, local) for side in (kin.local, kin.remote))
        assert near is not None
        assert far is not None
        ours = agent.prepare("", dram, near.rows(kin.local))
        theirs = agent.prepare(name, dram, far.rows(kin.remote))
        index, other = near.index(pair, local), far.index(pair, remote)
        rows = [np.empty((pieces, 3), np.uint64) for _ in range(2)]
        for row, side, offset in zip(rows, (kin.local, kin.remote), (local, remote), strict=True):
            row[:, 0] = side.address[0] + offset.astype(np.uint64)
            row[:, 1], row[:, 2] = size, 0

        def wait(handle: Any) -> None:
            state = agent.start(handle)
            while state == "PROC":
                os.sched_yield()
                state = agent.state(handle)
            if state != "DONE":
                raise RuntimeError(state)
            handle.release()

        def kvxfer() -> None:
            batch = Batch(pair, local, remote, sizes)
            start = time.perf_counter()
            attempt = self.transport.post(Op.READ, path, batch)
            self.posting = time.perf_counter() - start
            while not attempt.terminal:
                os.sched_yield()
                self.transport.progress()
            self.transport.progress()
            if attempt.error is not None:
                raise RuntimeError(str(attempt.error))

        return {
            "rows": lambda: wait(agent.transfer(Op.READ, (dram, dram), rows[0], rows[1], name)),
            "prepped": lambda: wait(agent.pick(Op.READ, ours, index, theirs, other)),
            "kvxfer": kvxfer,
        }


def measure(bench: Bench, pieces: int, size: int, rounds: int) -> dict[str, Any]:
    contenders = bench.contenders(pieces, size)
    took: dict[str, list[float]] = {name: [] for name in contenders}
    posting: list[float] = []
    order, dice = list(contenders), random.Random(pieces)
    for call in contenders.values():
        call()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            start = time.perf_counter()
            contenders[name]()
            took[name].append((time.perf_counter() - start) * 1e6)
            if name == "kvxfer":
                posting.append(bench.posting * 1e6)
    gc.enable()

    def over(other: str) -> float:
        pairs = zip(took["kvxfer"], took[other], strict=True)
        return statistics.median(a - b for a, b in pairs)

    return {
        "pieces": pieces,
        "nbytes_each": size,
        **{f"{name}_us": round(statistics.median(times), 1) for name, times in took.items()},
        "posting_us": round(statistics.median(posting), 1),
        "over_prepped_us": round(over("prepped"), 1),
        "over_prepped_us_per_piece": round(over("prepped") / pieces, 3),
        "over_rows_us": round(over("rows"), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "engine": version("nixl"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    for tls in ("tcp", "sm,tcp"):
        bench = Bench(tls)
        try:
            rows = [measure(bench, pieces, size, options.rounds) for pieces, size in SHAPES]
        finally:
            bench.close()
        report[tls] = rows
        for row in rows:
            print(
                f"{tls:6} {row['pieces']:4d} x {row['nbytes_each']:5d} B  rows "
                f"{row['rows_us']:8.1f} us  prepped {row['prepped_us']:8.1f} us  kvxfer "
                f"{row['kvxfer_us']:8.1f} us  over prepped {row['over_prepped_us']:7.1f} us, "
                f"{row['over_prepped_us_per_piece']:6.3f} us a piece; over rows "
                f"{row['over_rows_us']:7.1f} us; in post {row['posting_us']:.1f} us"
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
