"""What shm's copiers reach of a loop of memcpy in C, over the same memory, in the same run.

Contenders, in turns, each with blocks of its own, READs of 64 MiB from another process by one
thread:

* ``loop``: a loop of memcpy, compiled here, over the addresses of the mapped path;
* ``compiled``: a transport with the compiled copier;
* ``python``: a transport that copies in Python and numpy;
* ``in_place``: memory that is not mapped, read with process_vm_readv; ``readv`` is a loop of
  process_vm_readv in C over the same memory: what the kernel gives.

Then ``compiled_2``, with two copy threads, in turns with ``compiled`` alone: threads that had a
processor each a moment ago are more likely to have one again.

Times are from ``post`` to the end.  ``to_loop`` is the median of the ratios within a round;
``best_to_loop`` compares the best times, in which other work on the machine counts least, and
``cpu_to_loop`` the CPU seconds of the process (medians), in which it does not count.

Run: PYTHONPATH=. python benchmarks/shm_copy.py [--json FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvxfer.cli.bench.plan import Cell, Contender, in_words
from kvxfer.cli.bench.rig import Link, Rig
from kvxfer.cli.bench.shapes import batch_of, wrong_words
from kvxfer.core.batch import Batch

BUFFER = 256 << 20
TRANSFER = 64 << 20
SIZES = (4096, 16384, 65536, 1 << 20)
LEAST = {
    ("compiled", "contiguous", 1 << 20): 0.9,
    ("compiled", "random", 65536): 0.9,
    ("compiled", "random", 16384): 0.85,
    ("compiled", "random", 4096): 0.8,
    ("python", "random", 65536): 0.75,
    ("python", "random", 16384): 0.6,
    ("python", "random", 4096): 0.6,
}
"""What is wanted of the C loop. Below it, the run ends with status 1."""
TWO_FROM = 16384
"""Bytes of a block from which on two threads have to be ahead of one."""

C_LOOPS = r"""
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

void loop(const int64_t *to, const int64_t *of, const int64_t *n, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy((void *)to[i], (const void *)of[i], (size_t)n[i]);
}

int readv_loop(int pid, const int64_t *to, const int64_t *of, const int64_t *n, int64_t count)
{
    static struct iovec here[1024], there[1024];
    for (int64_t i = 0; i < count; ) {
        int64_t k = 0, sum = 0;
        for (; k < 1024 && i < count; k++, i++) {
            here[k] = (struct iovec){(void *)to[i], (size_t)n[i]};
            there[k] = (struct iovec){(void *)of[i], (size_t)n[i]};
            sum += n[i];
        }
        if (process_vm_readv(pid, here, k, there, k, 0) != sum)
            return 1;
    }
    return 0;
}
"""


def compiled_loops() -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("this needs a C compiler to compare with")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loops.c"), Path(folder, "loops.so")
        source.write_text(C_LOOPS)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Contenders:
    """Named calls that READ a batch; each returns the seconds that it took."""

    def __init__(self) -> None:
        mapped, in_place = Contender.named("shm")
        self.links = [Link(mapped, BUFFER), Link(in_place, BUFFER)]
        self.rigs: list[Rig] = []
        loops = compiled_loops()
        one = self._rig(mapped, 0, workers=1, copier="compiled")
        there = self._rig(in_place, 1, workers=1)
        self.calls: dict[str, Callable[[Batch], float]] = {
            "loop": self._loop(one, loops.loop),
            "compiled": one.read,
            "compiled_2": self._rig(mapped, 0, workers=2, copier="compiled").read,
            "python": self._rig(mapped, 0, workers=1, copier="python").read,
            "in_place": there.read,
            "readv": self._loop(there, loops.readv_loop, there.path.peer.address.pid),
        }

    def _rig(self, contender: Contender, link: int, **config: object) -> Rig:
        chosen = Contender(
            label=contender.label,
            backend="shm",
            options={"config": config},
            memory=contender.memory,
        )
        self.rigs.append(Rig(chosen, BUFFER, link=self.links[link]))
        return self.rigs[-1]

    @staticmethod
    def _loop(rig: Rig, function: Callable[..., int], *first: int) -> Callable[[Batch], float]:
        near, far = int(rig.path.near[0]), int(rig.path.far[0])

        def call(batch: Batch) -> float:
            vectors = (near + batch.local, far + batch.remote, batch.size)
            start = time.perf_counter()
            wrong = function(*first, *map(pointer, vectors), ctypes.c_int64(len(batch)))
            took = time.perf_counter() - start
            if first and wrong:
                raise SystemExit("process_vm_readv failed")
            return took

        return call

    def close(self) -> None:
        for thing in self.rigs:
            thing.close()
        for link in self.links:
            link.dispose()


Times = dict[str, list[float]]


def take_turns(
    contenders: Contenders, names: Sequence[str], cell: Cell, rounds: int
) -> tuple[Times, Times]:
    """Wall and CPU seconds of each, after one round that does not count."""
    rng = np.random.default_rng(cell.size)
    wall: Times = {name: [] for name in names}
    cpu: Times = {name: [] for name in names}
    for turn in range(-1, rounds):
        at = turn % len(names)
        for name in [*names[at:], *names[:at]]:
            batch = batch_of(cell, BUFFER, rng)
            before = time.process_time()
            seconds = contenders.calls[name](batch)
            if turn >= 0:
                cpu[name].append(time.process_time() - before)
                wall[name].append(seconds)
    return wall, cpu


def measure(contenders: Contenders, cell: Cell, rounds: int) -> dict[str, object]:
    single = [name for name in contenders.calls if name != "compiled_2"]
    wall, cpu = take_turns(contenders, single, cell, rounds)
    wrong = 0
    for rig in contenders.rigs:
        batch = batch_of(cell, BUFFER, np.random.default_rng(rounds))
        rig.read(batch)
        wrong += wrong_words(rig.words, batch)
    row: dict[str, object] = {"size": cell.size, "pattern": cell.pattern, "wrong_words": wrong}
    loop = wall["loop"]
    for name, times in wall.items():
        row[name] = {
            "gb_per_s": round(cell.nbytes / statistics.median(times) / 1e9, 2),
            "to_loop": round(statistics.median(a / b for a, b in zip(loop, times, strict=True)), 3),
            "best_to_loop": round(min(loop) / min(times), 3),
            "cpu_to_loop": round(statistics.median(cpu["loop"]) / statistics.median(cpu[name]), 3),
        }
    wall, _ = take_turns(contenders, ("compiled", "compiled_2"), cell, rounds)
    pairs = zip(wall["compiled"], wall["compiled_2"], strict=True)
    row["two_threads_gb_per_s"] = round(
        cell.nbytes / statistics.median(wall["compiled_2"]) / 1e9, 2
    )
    row["two_to_one"] = round(statistics.median(a / b for a, b in pairs), 3)
    row["best_two_to_one"] = round(min(wall["compiled"]) / min(wall["compiled_2"]), 3)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    contenders = Contenders()
    rows = []
    try:
        for pattern in ("contiguous", "random"):
            for size in SIZES if pattern == "random" else SIZES[-1:]:
                cell = Cell(size=size, count=TRANSFER // size, pattern=pattern)
                rows.append(measure(contenders, cell, options.rounds))
                print(text(rows[-1]), flush=True)
    finally:
        contenders.close()
    short = [
        (name, pattern, size)
        for (name, pattern, size), least in LEAST.items()
        for row in rows
        if (row["pattern"], row["size"]) == (pattern, size)
        and max(row[name]["to_loop"], row[name]["best_to_loop"]) < least
    ]
    short += [
        ("two threads", row["pattern"], row["size"])
        for row in rows
        if row["size"] >= TWO_FROM and max(row["two_to_one"], row["best_two_to_one"]) <= 1
    ]
    for name, pattern, size in short:
        print(f"short of what is wanted: {name}, {in_words(size)} {pattern}")
    result = {
        "benchmark": "shm_copy",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "rounds": options.rounds,
        "transfer_nbytes": TRANSFER,
        "rows": rows,
        "short_of_what_is_wanted": short,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if short or any(row["wrong_words"] for row in rows) else 0


def text(row: dict[str, object]) -> str:
    parts = [f"{in_words(row['size']):>7} {row['pattern']:<10}"]
    for name, found in row.items():
        if isinstance(found, dict):
            parts.append(
                f"{name} {found['gb_per_s']:.1f} GB/s ({found['to_loop']:.2f}, "
                f"best {found['best_to_loop']:.2f}, cpu {found['cpu_to_loop']:.2f})"
            )
    parts.append(f"two threads x{row['two_to_one']:.2f} (best x{row['best_two_to_one']:.2f})")
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
