"""A small deterministic simulation: shipped agents over a fake clock, network and engine.

Replaced are the clock, the control channel, the transport (loopback behind ``FaultyTransport``) and
the randomness; everything else is what ships.  One thread, one seed: equal seeds give equal runs.

``run(seed)`` lets producers hold and consumers pull, decline and abort, with messages lost,
duplicated and delayed, posts refused, half-posted, late or silent, and producers killed.  It
checks that every transfer ends once on each side and in time, that what was received is right, that
nothing lands in a block after it was handed back, and that all tables are empty at the end.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Hashable, Mapping
from typing import Any

import attrs
import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.agent.config import Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.channel import Channel, Inbound, Route
from kvxfer.core.events import (
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    Quarantined,
    Received,
    Role,
    Sent,
)
from kvxfer.core.layout import Blocks, KVLayout
from kvxfer.core.offer import Offer
from kvxfer.core.verdict import EngineError
from kvxfer.errors import KvxferError
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.clock import FakeClock
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint
from kvxfer.testing.faulty import FaultyTransport

__all__ = ["SimChannel", "SimConfig", "SimNetwork", "SimReport", "run"]

_BLOCKS, _NBYTES = 48, 64
_FREE = 0xEE
_TIMEOUTS = Timeouts(connect=2.0, queue=3.0, post=1.0, transfer=4.0, ack=8.0, drain=1.0)
_LEASE, _MARGIN = 3.0, 0.5
_SAID = {
    kind: EngineError(backend="moriio", code=13, message=message)
    for kind, message in {
        FaultKind.REFUSE: "SQ full (batch): ep=0 depth=60 requested=8 max=64",
        FaultKind.REFUSE_VALUE: "SQ full (batch): ep=0 depth=60 requested=8 max=64",
        FaultKind.PARTIAL: "ibv_post_send failed with 12: Cannot allocate memory (posted 3/6 WRs)",
        FaultKind.FAIL: "EP is degraded, rejecting new submissions",
        FaultKind.FAIL_DRAINED: "Work Request Flushed Error",
    }.items()
}
"""What the faulty engine says: real texts, so that the real rules decide."""
_STEPS_PER_TRANSFER = 400
"""About twenty are usual; beyond this somebody spins."""
_LONGEST = 60.0
"""No transfer, with all its phases, may take longer than this in simulated seconds."""


@attrs.frozen(kw_only=True)
class SimConfig:
    """How many of what, and how likely each fault is (per message or per call)."""

    producers: int = 2
    consumers: int = 3
    transfers: int = 200
    lose: float = 0.02
    duplicate: float = 0.02
    delay: float = 0.05
    posts: Mapping[FaultKind, float] = attrs.field(
        factory=lambda: {
            FaultKind.REFUSE: 0.05,
            FaultKind.REFUSE_VALUE: 0.03,
            FaultKind.PARTIAL: 0.02,
            FaultKind.FAIL_DRAINED: 0.02,
            FaultKind.LATE: 0.02,
            FaultKind.LATE_REPORT: 0.02,
            FaultKind.DUPLICATE: 0.03,
            FaultKind.NEVER: 0.005,
        }
    )
    abort: float = 0.05
    decline: float = 0.05
    kill: float = 0.01
    lose_offer: float = 0.02
    """The router loses it: nobody reads, the hold must expire."""


@attrs.define
class SimReport:
    """What happened. ``violations`` is empty if every promise held."""

    seed: int
    violations: list[str] = attrs.field(factory=list)
    outcomes: dict[str, int] = attrs.field(factory=dict)
    faults: dict[str, int] = attrs.field(factory=dict)
    seconds: float = 0.0
    steps: int = 0

    def count(self, table: dict[str, int], name: str, n: int = 1) -> None:
        table[name] = table.get(name, 0) + n


class SimNetwork:
    """Carries frames between ``SimChannel``s, late, twice or not at all, by one generator."""

    def __init__(self, clock: FakeClock, rng: random.Random, config: SimConfig) -> None:
        self.clock = clock
        self._rng = rng
        self._config = config
        self._flying: list[tuple[float, int, SimChannel, Inbound]] = []
        self._serial = itertools.count()
        self.channels: dict[str, SimChannel] = {}
        self.counts: dict[str, int] = {"lost": 0, "duplicated": 0}

    def channel(self) -> SimChannel:
        channel = SimChannel(self, f"tcp://10.0.0.1:{10000 + len(self.channels)}")
        self.channels[channel.address] = channel
        return channel

    def carry(self, target: SimChannel | None, route: Route, data: bytes) -> None:
        for _ in range(2 if self._roll(self._config.duplicate, "duplicated") else 1):
            if target is None or self._roll(self._config.lose, "lost"):
                continue
            at = self.clock.now() + self._rng.expovariate(1 / self._config.delay)
            heapq.heappush(self._flying, (at, next(self._serial), target, Inbound(route, data)))

    def _roll(self, chance: float, name: str) -> bool:
        hit = self._rng.random() < chance
        self.counts[name] += hit
        return hit

    def next_at(self) -> float | None:
        return self._flying[0][0] if self._flying else None

    def deliver(self, now: float) -> list[SimChannel]:
        """Put what has arrived into its channels; returns those channels."""
        touched = []
        while self._flying and self._flying[0][0] <= now:
            _, _, channel, inbound = heapq.heappop(self._flying)
            if not channel.closed:
                channel.inbox.append(inbound)
                touched.append(channel)
        return touched


class SimChannel(Channel):
    """A route is (who dialled, number); both ends know it by the same name."""

    def __init__(self, network: SimNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._routes: dict[Route, str] = {}
        self._count = itertools.count()
        self.inbox: list[Inbound] = []
        self.closed = False

    @property
    def address(self) -> str:
        return self._address

    def dial(self, address: str) -> Route:
        route: Hashable = (self._address, next(self._count), address)
        self._routes[route] = address
        return route

    def hang_up(self, route: Route) -> None:
        self._routes.pop(route, None)

    def send(self, route: Route, data: bytes) -> bool:
        assert isinstance(route, tuple)
        target = route[2] if route[0] == self._address else route[0]
        self._network.carry(self._network.channels.get(target), route, data)
        return True

    def receive(self, budget: int = 256) -> list[Inbound]:
        taken, self.inbox = self.inbox[:budget], self.inbox[budget:]
        return taken

    def wait(self, timeout: float) -> None:
        """Time passes elsewhere."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        self.closed = True

    @property
    def counters(self) -> dict[str, int]:
        return {}


class _Node:
    """One agent with its memory and a block allocator that notices what lands in free blocks."""

    def __init__(self, world: _World, name: str) -> None:
        self.world = world
        self.memory = np.full((_BLOCKS, _NBYTES), _FREE, dtype=np.uint8)
        plan = FaultPlan(chances={FaultPoint.POST: world.post_faults()}, rng=world.rng)
        self.transport = FaultyTransport(
            LoopbackTransport(incarnation=f"t-{name}"), plan, clock=world.clock
        )
        self.agent = Agent(
            self.transport,
            config=AgentConfig(
                name=name,
                progress=Progress.MANUAL,
                lease=_LEASE,
                lease_margin=_MARGIN,
                pump_interval=0.01,
                idle_interval=0.5,
            ),
            timeouts=_TIMEOUTS,
            clock=world.clock,
            rng=random.Random(world.rng.random()),
            channel=world.network.channel(),
            incarnation=f"a-{name}",
        )
        layout = KVLayout(
            num_blocks=_BLOCKS,
            block_stride=_NBYTES,
            kernel_tokens=4,
            token_stride=_NBYTES // 4,
            head_nbytes=_NBYTES // 4,
            dtype="uint8",
        )
        self.agent.register_kv_caches({"layer": self.memory}, layout)
        self.free = list(range(_BLOCKS))
        self.used: dict[str, list[int]] = {}
        self.open: dict[str, float] = {}
        self.dead = False

    def allocate(self, transfer_id: str, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        ids = [self.free.pop(self.world.rng.randrange(len(self.free))) for _ in range(count)]
        if (self.memory[ids] != _FREE).any():
            self.world.violation(f"{transfer_id}: bytes landed in a free block of {self.agent}")
        self.used[transfer_id] = ids
        return ids

    def hand_back(self, transfer_id: str) -> None:
        ids = self.used.pop(transfer_id, [])
        self.memory[ids] = _FREE
        self.free.extend(ids)


class _World:
    def __init__(self, seed: int, config: SimConfig) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.network = SimNetwork(self.clock, self.rng, config)
        self.report = SimReport(seed=seed)
        self.names = itertools.count()
        self.all_nodes: list[_Node] = []
        self.received: set[str] = set()
        self.producers = [self.node("p") for _ in range(config.producers)]
        self.consumers = [self.node("c") for _ in range(config.consumers)]
        self.agenda: list[tuple[float, int, Any]] = []
        self.serial = itertools.count()

    def node(self, role: str) -> _Node:
        node = _Node(self, f"{role}{next(self.names)}")
        self.all_nodes.append(node)
        return node

    def close(self) -> None:
        """Let go of everything, also after a run that ended in an exception."""
        for node in self.all_nodes:
            node.transport.close(0.0)

    def post_faults(self) -> dict[Fault, float]:
        return {
            Fault(kind=kind, error=_SAID.get(kind), after=0.4): chance
            for kind, chance in self.config.posts.items()
        }

    def violation(self, text: str) -> None:
        self.report.violations.append(f"t={self.clock.now():.3f} {text}")

    def later(self, delay: float, action: Any) -> None:
        heapq.heappush(self.agenda, (self.clock.now() + delay, next(self.serial), action))

    # ---- the life of one request -----------------------------------------------------------

    def prefill(self, transfer_id: str, tries: int = 50) -> None:
        producer = self.rng.choice(self.producers)
        ids = producer.allocate(transfer_id, self.rng.randint(1, 6))
        if ids is None:
            if tries:
                self.later(0.2, lambda: self.prefill(transfer_id, tries - 1))
            return
        producer.memory[ids] = _content(transfer_id, len(ids))
        offer = producer.agent.hold(transfer_id, Blocks.at(0, ids))
        producer.open[transfer_id] = self.clock.now()
        text = offer.to_json()
        if self.rng.random() >= self.config.lose_offer:
            self.later(self.rng.expovariate(5.0), lambda: self.decode(Offer.from_json(text)))
        if self.rng.random() < self.config.kill:
            self.later(self.rng.random(), lambda: self.kill(producer))

    def decode(self, offer: Offer, tries: int = 5) -> None:
        consumer = self.rng.choice(self.consumers)
        transfer_id = offer.transfer_id
        if self.rng.random() < self.config.decline:
            consumer.agent.decline(offer)
            return
        ids = consumer.allocate(transfer_id, len(offer.groups[0]))
        if ids is None:
            if tries:
                self.later(0.2, lambda: self.decode(offer, tries - 1))
            return
        try:
            consumer.agent.pull(offer, Blocks.at(0, ids))
        except KvxferError as error:
            self.violation(f"{transfer_id}: pull was refused: {error}")
            return
        consumer.open[transfer_id] = self.clock.now()
        if self.rng.random() < self.config.abort:
            self.later(self.rng.expovariate(5.0), lambda: consumer.agent.abort(transfer_id))

    def kill(self, producer: _Node) -> None:
        """Gone without a word; another one takes its place."""
        if producer.dead:
            return
        producer.dead = True
        producer.agent._channel.close()
        producer.transport.close(0.0)
        self.producers[self.producers.index(producer)] = self.node("p")
        self.report.count(self.report.faults, "kill")

    def on_event(self, node: _Node, event: Event) -> None:
        transfer_id = event.transfer_id
        if isinstance(event, (Received, Sent, Declined, Expired, Failed)):
            began = node.open.pop(transfer_id, None)
            if began is None:
                self.violation(f"{transfer_id}: {type(event).__name__}, but it was not open")
            elif self.clock.now() - began > _LONGEST:
                self.violation(f"{transfer_id}: took {self.clock.now() - began:.1f} s")
            name = type(event).__name__
            if isinstance(event, Failed):
                name += f" {event.kind.value}"
            self.report.count(self.report.outcomes, name)
        if isinstance(event, Received):
            ids = node.used[transfer_id]
            if (node.memory[ids] != _content(transfer_id, len(ids))).any():
                self.violation(f"{transfer_id}: received wrong bytes")
            self.received.add(transfer_id)
        if isinstance(event, Expired) and transfer_id in self.received:
            self.violation(f"{transfer_id}: was received, but the producer never learnt it")
        if isinstance(event, Failed) and event.role is Role.CONSUMER and not event.drained:
            return  # Drained or Quarantined follows
        if isinstance(event, Quarantined):
            self.report.count(self.report.outcomes, "Quarantined")
            node.agent.reclaim(transfer_id)  # nothing can land by then, the test checks it
            return
        if isinstance(event, (Received, Sent, Declined, Expired, Failed, Drained)):
            node.hand_back(transfer_id)

    # ---- the loop ---------------------------------------------------------------------------

    def run(self) -> SimReport:
        for n in range(self.config.transfers):
            self.later(
                self.rng.uniform(0, self.config.transfers * 0.05),
                lambda n=n: self.prefill(f"t{n}"),
            )
        idle_until = None
        while True:
            nodes = [n for n in (*self.producers, *self.consumers) if not n.dead]
            busy = bool(self.agenda) or any(n.open or n.used for n in nodes)
            if busy:
                idle_until = None
            elif idle_until is None:
                idle_until = self.clock.now() + 2 * _TIMEOUTS.ack
            elif self.clock.now() >= idle_until:
                break
            steps = _STEPS_PER_TRANSFER * (self.config.transfers + 20)
            if self.clock.now() > 600 + self.config.transfers or self.report.steps > steps:
                self.violation(f"not over: {[n.open for n in nodes]} {[n.used for n in nodes]}")
                break
            self._advance(nodes)
        self._check_end(nodes)
        return self.report

    def _advance(self, nodes: list[_Node]) -> None:
        times = [n.agent.next_wake for n in nodes]
        if self.agenda:
            times.append(self.agenda[0][0])
        at = self.network.next_at()
        if at is not None:
            times.append(at)
        self.clock.advance(max(1e-6, min(times) - self.clock.now()))
        now = self.clock.now()
        touched = set(map(id, self.network.deliver(now)))
        while self.agenda and self.agenda[0][0] <= now:
            heapq.heappop(self.agenda)[2]()
            touched = {id(n.agent._channel) for n in nodes}
        for node in nodes:
            if node.dead or (node.agent.next_wake > now and id(node.agent._channel) not in touched):
                continue
            self.report.steps += 1
            for event in node.agent.poll():
                self.on_event(node, event)

    def _check_end(self, nodes: list[_Node]) -> None:
        for node in nodes:
            tables = node.agent.snapshot().tables
            if any(tables.values()):
                self.violation(f"{node.agent}: tables are not empty: {tables}")
            if len(node.free) != _BLOCKS:
                self.violation(f"{node.agent}: {_BLOCKS - len(node.free)} blocks leaked")
            for name, count in node.transport.counters.items():
                self.report.count(self.report.faults, name, count)
        self.report.faults.update(self.network.counts)
        self.report.seconds = self.clock.now()


def _content(transfer_id: str, blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rng = np.random.default_rng([int(transfer_id[1:]), 7])
    return rng.integers(0, 0xEE, size=(blocks, _NBYTES), dtype=np.uint8)


def run(seed: int, config: SimConfig | None = None) -> SimReport:
    """One whole run; about 200 transfers a second."""
    world = _World(seed, config or SimConfig())
    try:
        return world.run()
    finally:
        world.close()
