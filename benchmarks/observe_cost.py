"""What observing costs: a pull with nobody looking, with metrics, with traces, with both.

Two agents over the loopback engine and a simulated network, one block of 256 bytes per pull: the
transfer costs next to nothing, so what observing adds shows as much as it ever can.  CPU time of
the thread, which does all the work of both agents; contenders are interleaved, ratios are taken
within a round, and their median is reported.  A scrape is timed apart: it happens on another
thread.

Run: PYTHONPATH=. python benchmarks/observe_cost.py [--json FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from kvxfer import Agent, AgentConfig, Blocks, KVLayout, Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.observe.metrics import AgentMetrics
from kvxfer.testing.clock import FakeClock
from kvxfer.testing.sim import SimConfig, SimNetwork

BOUNDS = {"metrics": 1.1, "metrics and traces": 1.5}
"""Greatest ratio allowed, of a pull that moves 256 bytes."""
LAYOUT = KVLayout(
    num_blocks=16,
    block_stride=256,
    planes=1,
    plane_stride=4096,
    kernel_tokens=1,
    token_stride=256,
    heads=1,
    head_stride=256,
    head_nbytes=256,
    dtype="uint8",
)


class Pair:
    """A holder and a reader; ``pull`` runs one transfer to its end on both sides."""

    def __init__(self, *, metrics: bool = False, traces: bool = False) -> None:
        self.clock = FakeClock(100.0)
        config = SimConfig(lose=0.0, duplicate=0.0, delay=0.0005)
        self.network = SimNetwork(self.clock, random.Random(0), config)
        self.p, self.c = (self._agent(name) for name in "pc")
        self.registry = CollectorRegistry()
        self._spans: Any = None
        self._count = 0
        if metrics:
            exported = AgentMetrics(self.registry)
            for agent in (self.p, self.c):
                exported.watch(agent)
        if traces:
            self._trace()

    def _trace(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from kvxfer.observe.tracing import AgentTracing

        self._spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        for agent in (self.p, self.c):
            AgentTracing(agent, provider=provider)

    def _agent(self, name: str) -> Agent:
        agent = Agent(
            LoopbackTransport(),
            config=AgentConfig(name=name, progress=Progress.MANUAL),
            clock=self.clock,
            channel=self.network.channel(),
            rng=random.Random(1),
        )
        agent.register_kv_caches({"l": np.zeros((16, 256), np.uint8)}, LAYOUT)
        return agent

    def pull(self) -> None:
        self._count += 1
        offer = self.p.hold(f"t{self._count}", Blocks.at(0, [3]))
        handle = self.c.pull(offer, Blocks.at(0, [4]))
        while not handle.done or len(self.p._engine.producer.leases):
            at = min(self.p.next_wake, self.c.next_wake, self.network.next_at() or float("inf"))
            self.clock.advance(max(1e-6, at - self.clock.now()))
            self.network.deliver(self.clock.now())
            self.p.poll()
            self.c.poll()
        if self._spans is not None and self._count % 1000 == 0:
            self._spans.clear()

    def close(self) -> None:
        self.p.close(0.0)
        self.c.close(0.0)


def cpu(work: Callable[[], object], times: int) -> float:
    """Seconds per call."""
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times


def measure(rounds: int, times: int) -> dict[str, Any]:
    pairs = {
        "nobody": Pair(),
        "metrics": Pair(metrics=True),
        "metrics and traces": Pair(metrics=True, traces=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in pairs}
    try:
        for pair in pairs.values():
            cpu(pair.pull, times)  # warm
        for n in range(rounds):
            for name in list(pairs)[n % 3 :] + list(pairs)[: n % 3]:
                taken[name].append(cpu(pairs[name].pull, times))
        both = pairs["metrics"]
        scrape = cpu(lambda: generate_latest(both.registry), 20)
        series = generate_latest(both.registry).count(b"\n")
    finally:
        for pair in pairs.values():
            pair.close()
    rows = {
        name: {
            "us": 1e6 * statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(found, taken["nobody"], strict=True)),
        }
        for name, found in taken.items()
    }
    return {"pull": rows, "scrape": {"ms": 1e3 * scrape, "agents": 2, "lines": series}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(argv)
    found = measure(arguments.rounds, 100)
    missed = []
    for name, row in found["pull"].items():
        print(f"{name:20} {row['us']:8.1f} us of CPU per pull, both sides   x{row['ratio']:.3f}")
        if row["ratio"] > BOUNDS.get(name, 2.0):
            missed.append(name)
    scrape = found["scrape"]
    print(f"a scrape of 2 agents {scrape['ms']:8.1f} ms, {scrape['lines']} lines")
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(machine | found, indent=1) + "\n")
    if missed:
        print("not reached:", ", ".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
