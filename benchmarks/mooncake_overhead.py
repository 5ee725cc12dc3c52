"""What a READ through the mooncake backend costs over direct calls of the same engine.

Contenders, interleaved in one run, over the same connections to a peer process:

* ``sync``: the engine's ``batch_transfer_sync_read``, one call for all pieces. It waits by asking
  in a loop and keeps a core busy;
* ``async``: one ``batch_transfer_async_read`` per piece, each asked for until it has ended: what
  the backend does, without anything around it;
* ``kvxfer``: ``post`` and ``progress``; ``unverified`` with ``verify_peer=False``.

Wall time of one transfer, medians.  "Overhead" is the difference to ``async``, taken within a
round.  ``posting`` is the time inside ``post``, during which the caller's thread is held.

Run: PYTHONPATH=. python benchmarks/mooncake_overhead.py [--json FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvxfer.backends.mooncake import MooncakeConfig, MooncakeTransport
from kvxfer.backends.mooncake.binding import installed_version
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Path as TransferPath
from kvxfer.core.verdict import Op
from kvxfer.testing.peer_process import PeerProcess

SHAPES = [(1, 4096), (16, 4096), (64, 4096), (256, 4096), (64, 65536)]
"""Pieces and bytes of each."""
NBYTES = 256 * 65536


def answer(pollable: Pollable[Any]) -> Any:
    while pollable.poll() == (None, None):
        time.sleep(0.001)
    value, error = pollable.poll()
    if error is not None:
        raise error
    return value


class Bench:
    def __init__(self) -> None:
        self.transport = MooncakeTransport()
        self.far = PeerProcess("kvxfer.backends.mooncake:MooncakeTransport")
        self.here = np.zeros(NBYTES, np.uint8)
        region = self.transport.register(span_of(self.here))
        there = self.far.register(NBYTES)
        self.far.fill(there, 1)
        peer = answer(self.transport.connect(self.far.info))
        self.path: TransferPath = answer(self.transport.prepare(peer, [(region, there.descriptor)]))
        self.raw = self.transport._engine._raw
        self.unverified = attrs.evolve(self.transport.config, verify_peer=False)
        self.posting = 0.0

    def close(self) -> None:
        self.transport.close()
        self.far.dispose()

    def contenders(self, pieces: int, size: int) -> dict[str, Callable[[], None]]:
        rng = np.random.default_rng(pieces)
        blocks = NBYTES // size
        local, remote = (rng.permutation(blocks)[:pieces] * size for _ in range(2))
        sizes = np.full(pieces, size, np.int64)
        batch = Batch(np.zeros(pieces, np.int32), local, remote, sizes)
        name = self.path.remote.name
        here = [self.path.local_base[0] + a for a in local.tolist()]
        there = [self.path.remote_base[0] + b for b in remote.tolist()]
        raw = self.raw

        def sync() -> None:
            if raw.batch_transfer_sync_read(name, here, there, [size] * pieces):
                raise RuntimeError("the engine failed")

        def one_by_one() -> None:
            begun = [
                raw.batch_transfer_async_read(name, [a], [b], [size])
                for a, b in zip(here, there, strict=True)
            ]
            for number in begun:
                while (state := raw.transfer_check_status(number)) == 0:
                    pass
                if state != 1:
                    raise RuntimeError("the engine failed")

        def ours(config: MooncakeConfig) -> None:
            self.transport.config = config
            start = time.perf_counter()
            attempt = self.transport.post(Op.READ, self.path, batch)
            self.posting = time.perf_counter() - start
            while not attempt.terminal:
                self.transport.progress()
            if attempt.error is not None:
                raise RuntimeError(str(attempt.error))

        config = self.transport.config
        return {
            "sync": sync,
            "async": one_by_one,
            "kvxfer": lambda: ours(config),
            "unverified": lambda: ours(self.unverified),
        }


def measure(bench: Bench, pieces: int, size: int, rounds: int) -> dict[str, Any]:
    took: dict[str, list[float]] = {}
    posting: list[float] = []
    contenders = bench.contenders(pieces, size)
    for call in contenders.values():
        call()
    for turn in range(rounds):
        order = list(contenders.items())
        for name, call in order[turn % 4 :] + order[: turn % 4]:
            start = time.perf_counter()
            call()
            took.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
            if name == "kvxfer":
                posting.append(bench.posting * 1e6)
    over = statistics.median(a - b for a, b in zip(took["kvxfer"], took["async"], strict=True))
    bare = statistics.median(a - b for a, b in zip(took["unverified"], took["async"], strict=True))
    return {
        "pieces": pieces,
        "nbytes_each": size,
        **{f"{name}_us": round(statistics.median(times), 1) for name, times in took.items()},
        "posting_us": round(statistics.median(posting), 1),
        "overhead_us": round(over, 1),
        "overhead_unverified_us": round(bare, 1),
        "overhead_us_per_piece": round(over / pieces, 2),
        "to_sync": round(
            statistics.median(a / b for a, b in zip(took["kvxfer"], took["sync"], strict=True)), 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench()
    try:
        rows = [measure(bench, pieces, size, options.rounds) for pieces, size in SHAPES]
    finally:
        bench.close()
    report = {
        "engine": installed_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    for row in rows:
        print(
            f"{row['pieces']:4d} x {row['nbytes_each']:6d} B  sync {row['sync_us']:9.1f} us  "
            f"async {row['async_us']:9.1f} us  kvxfer {row['kvxfer_us']:9.1f} us  "
            f"overhead {row['overhead_us']:8.1f} us, {row['overhead_us_per_piece']:6.2f} us a "
            f"piece; x {row['to_sync']:.2f} of sync; in post {row['posting_us']:.1f} us"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
