"""Single transfers: shm beside the engines that a host has for the same bytes, in one run.

Each contender is a process of its own with a peer of its own.  They take turns, a few transfers
each, so that whatever else the machine does hits all of them; who waits is stopped (SIGSTOP),
because NIXL's threads look for work all the time.  A READ is timed from ``post`` to its end, alone,
each time of other blocks; the first of a turn does not count, the bytes of the last are checked.

``ahead`` is the median, over rounds, of the other engine's time by shm's: 2 means that shm took
half.  At 256 random blocks of 4, 16 and 64 KiB it has to be 1.5, and nowhere below 1; ``LEAST`` and
``SLACK`` say what ends the run with status 1.

Run: PYTHONPATH=. python benchmarks/shm_engines.py [--json FILE] [--seconds N] [--other NAME ...]
It needs an environment in which those engines are installed (nixl and mooncake by default).  NIXL
gets UCX_TLS=sm,tcp unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvxfer.cli.bench.plan import Cell, Contender, in_words
from kvxfer.cli.bench.rig import Rig
from kvxfer.cli.bench.shapes import batch_of, wrong_words

KIB, MIB = 1 << 10, 1 << 20
PR_SET_PDEATHSIG = 1
BUFFER = 256 * MIB
OTHERS = ("nixl", "mooncake")
LARGEST = 64 * MIB
SHAPES = [
    *((size, count) for size in (4 * KIB, 16 * KIB, 64 * KIB) for count in (1, 16, 256, 4096)),
    *((size, count) for size in (256 * KIB, MIB) for count in (1, 2, 4, 16, 64)),
    *((size, 1) for size in (4 * MIB, 16 * MIB, 64 * MIB)),
]
LEAST = {("random", size, 256): 1.5 for size in (4 * KIB, 16 * KIB, 64 * KIB)}
SLACK = 0.95
"""Of 1, elsewhere: medians of few rounds on a machine that does other things differ by so much."""
ENVIRONMENT = {"UCX_TLS": "sm,tcp", "UCX_MODULES": "^ib"}


def cells() -> list[Cell]:
    return [
        Cell(size=size, count=count, pattern=pattern)
        for pattern in ("contiguous", "random")
        for size, count in SHAPES
        if size * count <= LARGEST
    ]


# ---- a contender ---------------------------------------------------------------------------


def serve(contender: Contender) -> None:
    """READ what standard input says; answer with seconds, or with what was wrong."""
    # Stopped as we mostly are, we would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print to standard output
    rig = Rig(contender, BUFFER)
    rng = np.random.default_rng(1)
    results.write("ready\n")
    try:
        for line in sys.stdin:
            told = json.loads(line)
            cell = Cell(**told["cell"])
            batches = [batch_of(cell, BUFFER, rng) for _ in range(1 + told["times"])]
            took = [rig.read(batch) for batch in batches]
            wrong = wrong_words(rig.words, batches[-1]) if told["check"] else 0
            results.write(json.dumps({"took": took[1:], "wrong": wrong}) + "\n")
    finally:
        rig.close()


class Other:
    """A contender, from outside."""

    def __init__(self, contender: Contender) -> None:
        self.label = contender.label
        words = ("--serve", json.dumps(attrs.asdict(contender)))
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**ENVIRONMENT, **os.environ},
            start_new_session=True,
        )
        if self._line() != "ready\n":
            raise SystemExit(f"{self.label} does not open: see kvxfer doctor")
        self._signal(signal.SIGSTOP)

    def _signal(self, which: signal.Signals) -> None:
        """To the process and its peer."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, which)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def read(self, cell: Cell, times: int, *, check: bool = False) -> tuple[list[float], int]:
        """Seconds of each, and wrong words of the last."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        asked = {"cell": attrs.asdict(cell), "times": times, "check": check}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self._line()
        self._signal(signal.SIGSTOP)
        if not line:
            raise SystemExit(f"{self.label}: its process ended while it moved {cell}")
        told = json.loads(line)
        return told["took"], told["wrong"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()


# ---- the comparison ------------------------------------------------------------------------


def measure(contenders: list[Other], cell: Cell, seconds: float) -> dict[str, Any]:
    times = 10 if cell.nbytes <= MIB else 3
    took: dict[str, list[float]] = {contender.label: [] for contender in contenders}
    until = time.monotonic() + seconds
    rounds = 0
    while rounds < 3 or (time.monotonic() < until and rounds < 100):
        turn = rounds % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            took[contender.label].append(statistics.median(contender.read(cell, times)[0]))
        rounds += 1
    row: dict[str, Any] = {**attrs.asdict(cell), "rounds": rounds, "transfers": rounds * times}
    row["wrong_words"] = sum(contender.read(cell, 1, check=True)[1] for contender in contenders)
    row["us"] = {name: round(statistics.median(times) * 1e6, 1) for name, times in took.items()}
    ours = took["shm"]
    row["ahead"] = {
        name: round(statistics.median(b / a for a, b in zip(ours, times, strict=True)), 2)
        for name, times in took.items()
        if name in OTHERS
    }
    return row


def text(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {us:.0f} us" for name, us in row["us"].items())
    ahead = "  ".join(f"{name} x{ratio:.2f}" for name, ratio in row["ahead"].items())
    shape = f"{row['count']:>5} x {in_words(row['size']):>7} {row['pattern']:<10}"
    return f"{shape}  {times}   shm ahead of {ahead}"


def short_of(row: dict[str, Any]) -> list[str]:
    least = LEAST.get((row["pattern"], row["size"], row["count"]), SLACK)
    return [name for name, ratio in row["ahead"].items() if ratio < least]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", action="append", choices=OTHERS)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve")
    options = parser.parse_args()
    if options.serve:
        serve(Contender(**json.loads(options.serve)))
        return 0
    named = ["shm", *(options.other or OTHERS)]
    load = os.getloadavg()[0]
    contenders: list[Other] = []
    rows = []
    try:
        for name in named:
            contenders += [Other(contender) for contender in Contender.named(name)]
        for cell in cells():
            rows.append(measure(contenders, cell, options.seconds))
            print(text(rows[-1]), flush=True)
    finally:
        for contender in contenders:
            contender.close()
    short = [(str(name), text(row)) for row in rows for name in short_of(row)]
    result = {
        "benchmark": "shm_engines",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "rows": rows,
        "short_of_what_is_wanted": short,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in short:
        print(f"short of what is wanted against {name}: {row}")
    return 1 if short or any(row["wrong_words"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
