"""What the agent's own work costs: polls, renewals, releases, peers.

No network and no engine: frames are put into an agent's inbox, and what it sends is thrown away.
What is measured is CPU time of the calling thread, so that other work on the machine does not
count.  Contenders are interleaved within a round; ratios are taken within a round, and their median
is reported.

* ``poll`` with 100,000 held leases and 10 transfers under way, against none held, while no message
  arrives; the cost of one renewal with 100,000 held against 10.
* A release from the bytes of its frame on, through the whole agent: decoded, known for a repeat,
  reconciled, counted, confirmed.  "early" is one that comes before the order to hold, and waits in
  the buffer with a time to live; "progress" is one of several ranks; "last" is the one that
  completes a hold, up to the reconciler's word that it does.  What comes after that word, ending
  the hold and telling the user, is no longer the release's: "end of a hold" has both.
* A transfer with 1,000 connected peers against 10: what is idle costs the others nothing.

Run: PYTHONPATH=. python benchmarks/agent_cost.py [--json FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
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

from kvxfer.agent import Agent, AgentConfig, Progress
from kvxfer.agent.config import Limits
from kvxfer.agent.context import Counters
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core import wire
from kvxfer.core.acks import AckReconciler
from kvxfer.core.channel import Channel, Inbound, Route
from kvxfer.core.layout import Blocks, KVLayout, LayoutKind
from kvxfer.core.offer import Offer
from kvxfer.core.reliable import Inbox
from kvxfer.core.topology import Ranks
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.clock import FakeClock
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport

BOUNDS = {
    "poll, 100,000 held / none": 2.0,
    "renewal, 100,000 held / 10": 1.25,
    "transfer, 1,000 peers / 10": 1.25,
}
"""Greatest ratio allowed."""
RELEASES = 150_000
"""Least number of releases per second of CPU time, but for ending the hold."""

BLOCKS, NBYTES = 64, 256
FOR_EVER = Timeouts(connect=1e6, queue=1e6, post=1e6, transfer=1e6, ack=1e6, drain=1e6)


class Line(Channel):
    """Delivers at once, or, while ``cut``, throws away."""

    def __init__(self, lines: dict[str, Line]) -> None:
        self._lines = lines
        self._address = f"tcp://10.0.{len(lines) // 250}.{len(lines) % 250 + 1}:7000"
        lines[self._address] = self
        self._dialled = 0
        self.inbox: list[Inbound] = []
        self.cut = False
        self.sent = 0

    @property
    def address(self) -> str:
        return self._address

    def dial(self, address: str) -> Route:
        self._dialled += 1
        return (self._address, self._dialled, address)

    def hang_up(self, route: Route) -> None:
        """Nothing is kept."""

    def send(self, route: Route, data: bytes) -> bool:
        self.sent += 1
        if not self.cut:
            assert isinstance(route, tuple)
            other = route[2] if route[0] == self._address else route[0]
            there = self._lines.get(other)
            if there is None:
                return False
            there.inbox.append(Inbound(route, data))
        return True

    def receive(self, budget: int = 256) -> list[Inbound]:
        if not self.inbox:
            return []
        taken, self.inbox = self.inbox[:budget], self.inbox[budget:]
        return taken

    def wait(self, timeout: float) -> None:
        """Nobody waits."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        self._lines.pop(self._address, None)

    @property
    def counters(self) -> dict[str, int]:
        return {}


class Stage:
    """Agents on one clock, with lines between them."""

    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.lines: dict[str, Line] = {}
        self.agents: list[Agent] = []

    def agent(self, posts: list[Fault | None] | None = None, *, caches: bool = True) -> Agent:
        transport = LoopbackTransport()
        agent = Agent(
            FaultyTransport(transport, FaultPlan(posts=posts), clock=self.clock)
            if posts
            else transport,
            config=AgentConfig(
                progress=Progress.MANUAL,
                lease=1e6,
                limits=Limits(early=1_000_000, early_ttl=1e6),
            ),
            timeouts=FOR_EVER,
            clock=self.clock,
            rng=random.Random(1),
            channel=Line(self.lines),
            ranks=Ranks(tp_size=1, latent=True),
        )
        if caches:
            memory = np.zeros((BLOCKS, NBYTES), np.uint8)
            agent.register_kv_caches({"layer": memory}, _layout())
        self.agents.append(agent)
        return agent

    def settle(self, until: Callable[[], bool]) -> None:
        """Let time pass until it is so."""
        for _ in range(10_000):
            if until():
                return
            self.clock.advance(0.001)
            for agent in self.agents:
                agent.poll()
        raise RuntimeError("not reached")

    def close(self) -> None:
        for agent in self.agents:
            agent.close(0.0)


def _layout() -> KVLayout:
    return KVLayout(
        num_blocks=BLOCKS,
        block_stride=NBYTES,
        kernel_tokens=4,
        token_stride=NBYTES // 4,
        head_nbytes=NBYTES // 4,
        dtype="uint8",
        kind=LayoutKind.LATENT,
    )


def line_of(agent: Agent) -> Line:
    channel = agent._channel
    assert isinstance(channel, Line)
    return channel


def cpu(run: Callable[[], object], times: int) -> float:
    """Seconds of CPU time per call."""
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time()
        for _ in range(times):
            run()
        return (time.thread_time() - began) / times
    finally:
        gc.enable()


# ---- held leases -----------------------------------------------------------------------------


class Held:
    """An agent that holds ``leases`` for a peer and has ``active`` reads of its own under way."""

    def __init__(self, leases: int, *, active: int = 10) -> None:
        stage = self.stage = Stage()
        self.agent = stage.agent(posts=[Fault(kind=FaultKind.NEVER)] * active)
        self.peer = stage.agent()
        for n in range(active):
            self.agent.pull(self.peer.hold(f"read-{n}", Blocks.at(0, [n])), Blocks.at(0, [n]))
        # The peer becomes known as a reader, too.
        done = self.peer.pull(self.agent.hold("first", Blocks.at(0, [60])), Blocks.at(0, [63]))
        stage.settle(lambda: done.done and self.agent.snapshot().in_flight_pieces == active)
        kept = min(leases, 1000)
        for n in range(leases - kept):
            self.agent._hold(f"quiet-{n}", 10**6 + n, 1e6)
        self.offers = [self.agent.hold(f"held-{n}", Blocks.at(0, [61])) for n in range(kept)]
        self.agent.poll()
        self.line = line_of(self.agent)
        self.line.cut = True
        self.line.inbox.clear()
        self._next = 0
        self._route = (line_of(self.peer).address, 1, self.line.address)
        self._frames = [self._renewal(offer) for offer in self.offers]

    def _renewal(self, offer: Offer) -> bytes:
        open_ = wire.Open(10**6, [offer.ref(offer.endpoints[0])])
        return wire.encode(self.peer.incarnation, open_)

    def poll(self) -> None:
        """One round in which nothing arrives."""
        self.stage.clock.advance(1e-4)
        self.agent.poll()

    def renew(self) -> None:
        """One round in which one renewal arrives."""
        self._next = (self._next + 1) % len(self._frames)
        self.line.inbox.append(Inbound(self._route, self._frames[self._next]))
        self.poll()


# ---- releases --------------------------------------------------------------------------------


class Releases:
    """An agent and ``count`` releases of a connected reader, as frames."""

    def __init__(self, kind: str, count: int) -> None:
        stage = self.stage = Stage()
        self.agent, reader = stage.agent(), stage.agent()
        done = reader.pull(self.agent.hold("first", Blocks.at(0, [1])), Blocks.at(0, [1]))
        stage.settle(lambda: done.done and not self.agent.snapshot().holds)
        self.line = line_of(self.agent)
        self.line.cut = True
        self.line.inbox.clear()
        self.kind, self.count = kind, count
        if kind != "early":
            readers = [0, 1] if kind == "progress" else None
            for n in range(count):
                self.agent.hold(f"held-{n}", Blocks.at(0, [2]), readers=readers)
            self.agent.poll()
        self._route = (line_of(reader).address, 1, self.line.address)
        self._frames = [
            wire.encode(
                reader.incarnation,
                wire.Release(wire.Ref(f"held-{n}", self.agent.incarnation, 2 + n), {}, True),
                10**6 + n,
            )
            for n in range(count)
        ]

    def run(self) -> float:
        """Seconds of CPU time per release, all of them taken once."""
        self.line.inbox = [Inbound(self._route, frame) for frame in self._frames]

        def work() -> None:
            while self.line.inbox:
                self.agent.poll()

        seconds = cpu(work, 1) / self.count
        assert self.agent.snapshot().counters[f"acks.{self.kind}"] >= self.count
        self.stage.close()
        return seconds


def last_rank(count: int = 5_000) -> float:
    """Seconds per release that completes a hold: all that the agent does until it knows."""
    acks, inbox, counters = AckReconciler(), Inbox(), Counters()
    for n in range(count):
        acks.expect(f"held-{n}", sources=[0], owners=("r",), deadline=1e9, now=1.0, epoch=n)
    frames = [
        wire.encode("reader", wire.Release(wire.Ref(f"held-{n}", "k", n), {}, True), n + 1)
        for n in range(count)
    ]

    def work() -> None:
        only = frozenset((0,))
        for frame in frames:
            envelope = wire.decode(frame)
            sender, mid, body = envelope.sender, envelope.mid, envelope.body
            assert isinstance(body, wire.Release)
            if not inbox.seen(sender, mid):
                outcome = acks.take(body.ref.transfer, 0, body.ref.epoch, only, 1.0)
                counters.count(f"acks.{outcome.value}")
                inbox.remember(sender, mid, 1.0)

    seconds = cpu(work, 1) / count
    assert acks.counters["complete"] == count
    return seconds


def plain_decode(count: int = 20_000) -> float:
    """Seconds per release for decoding its frame alone: the floor."""
    frame = wire.encode("0123456789abcdef", wire.Release(wire.Ref("held-7", "k", 2), {}, True), 9)
    return cpu(lambda: wire.decode(frame), count)


# ---- peers -----------------------------------------------------------------------------------


class Peers:
    """A reader with ``count`` connected producers; transfers come from one of them."""

    def __init__(self, count: int) -> None:
        stage = self.stage = Stage()
        self.reader = stage.agent()
        self.producers = [stage.agent() for _ in range(count)]
        self.reader.connect([p.endpoint for p in self.producers])
        stage.settle(lambda: len(self.reader.snapshot().peers) == count)
        stage.settle(lambda: all(len(p.snapshot().peers) == 1 for p in self.producers))
        self._n = 0

    def transfer(self) -> None:
        """One hold and pull between the reader and its first producer, to the end of both."""
        producer = self.producers[0]
        self._n += 1
        offer = producer.hold(f"t-{self._n}", Blocks.at(0, [1]))
        handle = self.reader.pull(offer, Blocks.at(0, [2]))
        ended = False
        while not (handle.done and ended):
            self.stage.clock.advance(1e-4)
            self.reader.poll()
            ended = bool(producer.poll()) or ended


# ---- the report ------------------------------------------------------------------------------


def compare(few: Callable[[], object], many: Callable[[], object], rounds: int, times: int) -> Any:
    """Costs of both, interleaved, and the median ratio of ``many`` to ``few``."""
    cpu(few, times), cpu(many, times)  # warm
    pairs = []
    for n in range(rounds):
        if n % 2:
            b = cpu(many, times)
            pairs.append((cpu(few, times), b))
        else:
            a = cpu(few, times)
            pairs.append((a, cpu(many, times)))
    return {
        "few_us": 1e6 * statistics.median(a for a, _ in pairs),
        "many_us": 1e6 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def leases(rounds: int, held: int = 100_000) -> dict[str, Any]:
    none, ten, many = Held(0), Held(10), Held(held)
    try:
        return {
            "poll, 100,000 held / none": compare(none.poll, many.poll, rounds, 500),
            "renewal, 100,000 held / 10": compare(ten.renew, many.renew, rounds, 500),
        }
    finally:
        for stage in (none, ten, many):
            stage.stage.close()


def peers(rounds: int, many: int = 1000) -> dict[str, Any]:
    few, crowd = Peers(10), Peers(many)
    try:
        return {"transfer, 1,000 peers / 10": compare(few.transfer, crowd.transfer, rounds, 50)}
    finally:
        few.stage.close()
        crowd.stage.close()


def releases(rounds: int, count: int = 5_000) -> dict[str, Any]:
    found: dict[str, Any] = {"decode alone_us": 1e6 * plain_decode()}
    runs: dict[str, Callable[[], float]] = {
        "early": lambda: Releases("early", count).run(),
        "progress": lambda: Releases("progress", count).run(),
        "last": lambda: last_rank(count),
        "end of a hold": lambda: Releases("complete", count).run(),
    }
    for kind, run in runs.items():
        seconds = min(run() for _ in range(rounds))
        found[kind] = {"us": 1e6 * seconds, "per_second": round(1 / seconds)}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    missed = []
    ratios: dict[str, Any] = {}
    for part in (leases, peers):
        for name, row in part(arguments.rounds).items():
            ratios[name] = row
            print(f"{name:32} {row['few_us']:8.2f} {row['many_us']:8.2f} us  x{row['ratio']:.2f}")
            missed += [name] if row["ratio"] > BOUNDS[name] else []
            sys.stdout.flush()
    taken = releases(max(3, arguments.rounds // 3))
    print(f"decoding a release alone         {taken['decode alone_us']:8.2f} us")
    for kind in ("early", "progress", "last", "end of a hold"):
        row = taken[kind]
        print(f"release, {kind:23} {row['us']:8.2f} us  {row['per_second']:>9,} per second")
        if kind != "end of a hold" and row["per_second"] < RELEASES:
            missed.append(f"release, {kind}")
    results = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "ratios": ratios,
        "releases": taken,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if missed:
        print("not reached:", ", ".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
