"""What kvxfer adds to a MoRI-IO call: ``post`` to DONE against the engine's own call.

Run it in an environment that ``python -m kvxfer.testing.softrdma setup`` made::

    VENV/bin/python benchmarks/moriio_overhead.py [--rounds N] [--json FILE]

Both sides of each comparison use one engine and one session of one process, in turns, and look for
the end as often as they can.  The lists that the engine takes are made beforehand for both ("new
batch": not for kvxfer).  The device is the software one, whose "wire" is a copy by a thread of this
process: absolute times say nothing about a NIC, the difference is kvxfer's own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from kvxfer import Agent, Blocks, KVLayout, KVSpec
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.backends.moriio.binding import new_status, verdict_of
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.softrdma import SoftRdma

PIECES = (1, 16, 128, 1024)
BLOCK = 4096
LIMIT_US, LIMIT_SHARE = 30.0, 0.15
"""What is allowed on top of the engine: the larger of the two."""


def answer(pollable):
    while pollable.poll() == (None, None):
        time.sleep(0.0005)
    value, error = pollable.poll()
    if error is not None:
        raise error
    return value


def direct(session, op, lists, uids):
    """The engine's own call, as its Python package makes it: a status, a call, a wait."""
    start = time.perf_counter()
    status = new_status()
    (session.read if op is Op.READ else session.write)(*lists, status, next(uids))
    while status.InProgress():
        os.sched_yield()
    took = time.perf_counter() - start
    if not status.Succeeded():
        raise SystemExit(f"the engine failed: {verdict_of(status)}")
    return took


def ours(transport, path, op, batch):
    start = time.perf_counter()
    attempt = transport.post(op, path, batch)
    progress = transport.progress
    while not attempt.terminal:
        progress()
        os.sched_yield()
    took = time.perf_counter() - start
    if attempt.error is not None:
        raise SystemExit(f"kvxfer failed: {attempt.error}")
    return took


def measure(transport, path, op, pieces, rounds):
    offset = np.arange(pieces) * 2 * BLOCK
    pair, size = np.zeros(pieces, np.int32), np.full(pieces, BLOCK)
    lane = path.lanes[0].whole
    uids = iter(range(1 << 40, 1 << 41))
    times = {"direct": [], "kvxfer": [], "kvxfer_new_batch": []}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        batch = Batch(pair, offset, offset, size)
        lists = batch.lists()[1:]
        times["direct"].append(direct(lane.session, op, lists, uids))
        batch = Batch(pair, offset, offset, size)
        batch.lists()
        times["kvxfer"].append(ours(transport, path, op, batch))
        batch = Batch(pair, offset, offset, size)
        times["kvxfer_new_batch"].append(ours(transport, path, op, batch))
    gc.enable()
    return {name: [x * 1e6 for x in values] for name, values in times.items()}


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
            rows.append({"blocks": blocks, "rounds": rounds, "p50_us": round(quantile(times, 0.5))})
            sys.stdout.write(
                f"Agent.pull of {blocks:4} blocks (2 pieces each): {rows[-1]['p50_us']} us\n"
            )
    return rows


def quantile(values, q):
    return sorted(values)[min(int(len(values) * q), len(values) - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=400)
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
                    rounds = max(arguments.rounds // (1 + pieces // 64), 20)
                    times = measure(transport, path, op, pieces, rounds)
                    rows.append(row(op, pieces, rounds, times))
                    sys.stdout.write(text(rows[-1]) + "\n")
                    sys.stdout.flush()
        finally:
            transport.close()
            far.dispose()
        pulls = measure_pulls(max(arguments.rounds // 10, 10))
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
    return 0 if all(r["within_limit"] for r in rows) else 1


def row(op, pieces, rounds, times):
    base = statistics.median(times["direct"])
    extra = statistics.median(times["kvxfer"]) - base
    return {
        "op": op.value,
        "pieces": pieces,
        "rounds": rounds,
        "direct_us": round(base, 1),
        "kvxfer_us": round(statistics.median(times["kvxfer"]), 1),
        "kvxfer_new_batch_us": round(statistics.median(times["kvxfer_new_batch"]), 1),
        "extra_us": round(extra, 1),
        "direct_min_us": round(min(times["direct"]), 1),
        "extra_min_us": round(min(times["kvxfer"]) - min(times["direct"]), 1),
        "extra_p10_us": round(quantile(times["kvxfer"], 0.1) - quantile(times["direct"], 0.1), 1),
        "within_limit": extra <= max(LIMIT_US, LIMIT_SHARE * base),
    }


def text(r):
    verdict = "ok" if r["within_limit"] else "TOO MUCH"
    return (
        f"{r['op']:5} {r['pieces']:5} pieces: direct {r['direct_us']:8.1f} us, kvxfer "
        f"{r['kvxfer_us']:8.1f} us, new batch {r['kvxfer_new_batch_us']:8.1f} us, extra "
        f"{r['extra_us']:7.1f} us (p10 {r['extra_p10_us']:6.1f}, "
        f"fastest {r['extra_min_us']:6.1f} on {r['direct_min_us']:6.1f}) {verdict}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
