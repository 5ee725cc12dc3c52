"""What kvxfer adds to a MoRI-IO call: ``post`` to DONE against the engine's own call.

Run it in an environment that ``python -m kvxfer.testing.softrdma setup`` made::

    VENV/bin/python benchmarks/moriio_overhead.py [--rounds N] [--json FILE]

All sides of a comparison use one engine and one session of one process.  Each round makes every
call once, in an order drawn anew, and a difference is taken within a round: what else the machine
does hits all of them alike.  All look for the end as often as they can.  Twice:

* from lists: the lists that the engine takes are made beforehand, for both;
* from vectors: three (the direct call) and four (kvxfer) numpy vectors are made into lists within
  the measured time, and kvxfer checks them as well.

The device is the software one, whose "wire" is a copy by a thread of this process: absolute times
say nothing about a NIC, the difference is kvxfer's own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from kvxfer import Agent, Blocks, KVLayout, KVSpec
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.backends.moriio.binding import status_class, verdict_of
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.softrdma import SoftRdma

PIECES = (1, 16, 128, 1024)
BLOCK = 4096
LIMIT_US, LIMIT_SHARE = 30.0, 0.15
"""What is allowed on top of the engine, median of the rounds: the larger of the two."""


def answer(pollable):
    while pollable.poll() == (None, None):
        time.sleep(0.0005)
    value, error = pollable.poll()
    if error is not None:
        raise error
    return value


def direct(session, op, lists, status, uid):
    """The engine's own call, as its Python package makes it: a status, a call, a wait."""
    (session.read if op is Op.READ else session.write)(*lists, status, uid)
    while status.InProgress():
        os.sched_yield()
    if not status.Succeeded():
        raise SystemExit(f"the engine failed: {verdict_of(status)}")


def ours(transport, path, op, batch):
    attempt = transport.post(op, path, batch)
    progress = transport.progress
    while not attempt.terminal:
        progress()
        os.sched_yield()
    if attempt.error is not None:
        raise SystemExit(f"kvxfer failed: {attempt.error}")


def measure(transport, path, op, pieces, rounds):
    """Microseconds by way of calling, one of each per round."""
    offset = np.arange(pieces) * 2 * BLOCK
    pair, size = np.zeros(pieces, np.int32), np.full(pieces, BLOCK)
    session = path.lanes[0].whole.session
    new_status = status_class()
    uids = itertools.count(1 << 40)
    batch = None

    def from_vectors():
        lists = offset.tolist(), offset.tolist(), size.tolist()
        direct(session, op, lists, new_status(), next(uids))

    ways = {
        "direct": lambda: direct(session, op, batch.lists()[1:], new_status(), next(uids)),
        "kvxfer": lambda: ours(transport, path, op, batch),
        "direct_vectors": from_vectors,
        "kvxfer_vectors": lambda: ours(transport, path, op, Batch(pair, offset, offset, size)),
    }
    times = {name: [] for name in ways}
    order, dice = list(ways), random.Random(pieces)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            batch = Batch(pair, offset, offset, size)
            batch.lists()
            start = time.perf_counter()
            ways[name]()
            times[name].append((time.perf_counter() - start) * 1e6)
    gc.enable()
    return times


def measure_pulls(rounds):
    """``Agent.pull`` to Received, between two agents of this process: with the control channel's
    round trip (grant asked for and given) and the hand-over between threads in it."""
    spec = KVSpec(tokens_per_block=16, heads=2, head_size=64, planes=2)
    config = MoriioConfig(rehearse=False)
    rows = []
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(Agent(MoriioTransport(config))) for _ in range(2)]
        for agent in agents:
            cache = np.zeros((2, 2048, 16, 2, 64), np.float16)
            layout = KVLayout.from_tensor(cache, spec)
            agent.register_kv_caches({"layers.0": cache}, layout)
        prefill, decode = agents
        for blocks in PIECES:
            times = []
            for i in range(rounds):
                where = Blocks.at(0, list(range(0, 2 * blocks, 2)))
                offer = prefill.hold(f"{blocks}-{i}", where)
                start = time.perf_counter()
                decode.wait(decode.pull(offer, where), timeout=30)
                times.append((time.perf_counter() - start) * 1e6)
            kinds = {type(e).__name__ for e in decode.poll()}
            if not kinds <= {"Received", "PeerUp"}:
                raise SystemExit(f"the pulls did not all arrive: {kinds}")
            prefill.poll()
            rows.append(
                {
                    "blocks": blocks,
                    "pieces": 2 * blocks,
                    "rounds": rounds,
                    "p10_us": round(quantile(times, 0.1)),
                    "p50_us": round(quantile(times, 0.5)),
                    "p90_us": round(quantile(times, 0.9)),
                }
            )
            sys.stdout.write(
                f"Agent.pull of {blocks:4} blocks (2 pieces each): {rows[-1]['p50_us']} us "
                f"(p10 {rows[-1]['p10_us']}, p90 {rows[-1]['p90_us']})\n"
            )
    return rows


def quantile(values, q):
    return sorted(values)[min(int(len(values) * q), len(values) - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    nbytes = 2 * BLOCK * max(PIECES)
    rows = []
    with SoftRdma():
        far = PeerProcess("moriio", options={"config": {"rehearse": False}})
        transport = MoriioTransport(MoriioConfig(rehearse=False))
        try:
            there = far.register(nbytes)
            region = transport.register(span_of(np.zeros(nbytes, np.uint8)))
            peer = answer(transport.connect(far.info))
            path = answer(transport.prepare(peer, [(region, there.descriptor)]))
            far.stop()  # it is not needed any more, and its engine would keep a core busy
            for op in Op:
                for pieces in PIECES:
                    measure(transport, path, op, pieces, 20)
                    rounds = max(arguments.rounds // (1 + pieces // 128), 20)
                    times = measure(transport, path, op, pieces, rounds)
                    rows.append(row(op, pieces, rounds, times))
                    sys.stdout.write(text(rows[-1]) + "\n")
                    sys.stdout.flush()
        finally:
            transport.close()
            far.dispose()
        pulls = measure_pulls(max(arguments.rounds // 20, 10))
    if arguments.json:
        result = {
            "benchmark": "moriio_overhead",
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_1min": os.getloadavg()[0],
            "post_to_done": rows,
            "agent_pull": pulls,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(r["within_limit"] and r["within_limit_vectors"] for r in rows) else 1


def row(op, pieces, rounds, times):
    found = {"op": op.value, "pieces": pieces, "rounds": rounds}
    for ending in ("", "_vectors"):
        base, with_kvxfer = times["direct" + ending], times["kvxfer" + ending]
        extra = statistics.median(b - a for a, b in zip(base, with_kvxfer, strict=True))
        limit = max(LIMIT_US, LIMIT_SHARE * statistics.median(base))
        found |= {
            f"direct{ending}_us": round(statistics.median(base), 1),
            f"kvxfer{ending}_us": round(statistics.median(with_kvxfer), 1),
            f"extra{ending}_us": round(extra, 1),
            f"extra{ending}_p10_us": round(quantile(with_kvxfer, 0.1) - quantile(base, 0.1), 1),
            f"limit{ending}_us": round(limit, 1),
            f"within_limit{ending}": extra <= limit,
        }
    return found


def text(r):
    lines = []
    for ending, name in (("", "lists"), ("_vectors", "vectors")):
        verdict = "ok" if r["within_limit" + ending] else "TOO MUCH"
        share = r[f"extra{ending}_us"] / r[f"direct{ending}_us"]
        lines.append(
            f"{r['op']:5} {r['pieces']:5} pieces from {name:7}: direct "
            f"{r[f'direct{ending}_us']:8.1f} us, kvxfer {r[f'kvxfer{ending}_us']:8.1f} us; "
            f"extra {r[f'extra{ending}_us']:6.1f} us ({share:4.0%}; between 10th percentiles "
            f"{r[f'extra{ending}_p10_us']:6.1f} us) {verdict}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
