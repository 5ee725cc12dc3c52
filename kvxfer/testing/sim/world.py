"""One simulated world: one thread, one seed, one queue of what happens next.

Replaced are the clock, the control channel, the transport and the randomness; agents, core and
policies are the ones that ship.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial

from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.core import wire
from kvxfer.core.attempt import Attempt
from kvxfer.core.channel import Inbound
from kvxfer.core.events import Role
from kvxfer.core.topology import Ranks
from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.testing.clock import FakeClock
from kvxfer.testing.sim.config import NodeFault, PostFault, SimConfig
from kvxfer.testing.sim.engine import Fabric, SimTransport
from kvxfer.testing.sim.leases import LeaseWatch
from kvxfer.testing.sim.network import SimChannel, SimNetwork
from kvxfer.testing.sim.node import TIMEOUTS, SimNode
from kvxfer.testing.sim.phases import message_phase, post_phase, transfer_phase
from kvxfer.testing.sim.report import SimReport, Violation
from kvxfer.testing.sim.requests import Request, Requests

__all__ = ["World"]

_BLOCKS = 96
_TRACE = 40
"""Lines of trace that are kept per transfer."""
_POLLS_AT_ONCE = 200
_AT_ONCE = 0.001
"""Rounds of one agent within so many seconds; with more it spins."""
_ROUNDS_PER_TRANSFER = 1500
_CROWD = 400
_SLOW_FOR = 10.0
"""Seconds that a slow poller is slow."""
_AFTERMATH = 30.0
"""Seconds after which a fault has no consequences any more: longer than any table keeps."""


class _Enough(Exception):
    """As many violations as were asked for."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines: thousands of faults are meant here.

    And a line looks at its agent's clock, so that a run would be another one with another level.
    """
    logger = logging.getLogger("kvxfer")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


class World:
    """See the module."""

    def __init__(self, seed: int, config: SimConfig) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.report = SimReport(seed=seed, config=config)
        self.network = SimNetwork(self.clock, self.rng, config)
        self.network.on_fault = self._message_fault
        self.fabric = Fabric(self.clock, self.rng, config, self.later)
        self.fabric.violation = self.violation
        self.fabric.on_fault = self._post_fault
        self.fabric.on_post = self._maybe_pause
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._names = itertools.count()
        self._traces: dict[str, collections.deque[str]] = {}
        self._by_channel: dict[int, SimNode] = {}
        self._paused: list[SimNode] = []
        self.nodes: list[SimNode] = []
        self.requests = Requests(self)
        self.leases = LeaseWatch(self)
        self.network.on_send = self._frame_sent
        self.network.on_arrival = self._frame_arrived
        # One for all nodes: it takes long to make and keeps nothing of one agent.
        self.classifier = ClassifierRegistry.from_plugins()
        self.producers = [self._node(Role.PRODUCER) for _ in range(config.producers)]
        self.consumers = [self._node(Role.CONSUMER) for _ in range(config.consumers)]

    def _node(self, role: Role, address: str | None = None) -> SimNode:
        name = f"{role.value[0]}{next(self._names)}"
        node = SimNode(self, name, role, blocks=_BLOCKS, address=address)
        self.nodes.append(node)
        self._by_channel[node.channel.number] = node
        return node

    # ---- time ------------------------------------------------------------------------------------

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Have ``action`` called ``delay`` seconds from now."""
        heapq.heappush(self._agenda, (self.clock.now() + delay, next(self._serial), action))

    def router_delay(self) -> float:
        return self.rng.expovariate(10.0)

    def touch(self, node: SimNode) -> None:
        """There is news for ``node``: it looks as soon as it can."""
        self._schedule(node, self.clock.now())

    def _schedule(self, node: SimNode, at: float) -> None:
        if node.dead:
            return
        at = max(at, node.stalled_until, node.polled_at + node.slow)
        if at >= node.scheduled_at:
            return
        node.scheduled_at = at
        node.version += 1
        version = node.version

        def due() -> None:
            if node.version == version and not node.dead:
                self._poll(node)

        heapq.heappush(self._agenda, (at, next(self._serial), due))

    def _poll(self, node: SimNode) -> None:
        now = self.clock.now()
        node.scheduled_at = float("inf")
        if now < node.stalled_until:
            self._schedule(node, node.stalled_until)
            return
        if now > node.at_once_since + _AT_ONCE:
            node.at_once_since, node.polls_at_once = now, 0
        node.polls_at_once += 1
        if node.polls_at_once > _POLLS_AT_ONCE:
            self.violation(f"{node}: it spins")
            return
        node.polled_at = now
        self.report.polls += 1
        node.in_round = True
        node.round_began = now
        node.paused_in_round = False
        try:
            events = node.agent.poll()
        except _Enough:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, poll must not raise
            self.violation(f"{node}: poll raised {type(error).__name__}: {error}")
            return
        finally:
            node.in_round = False
        if node.dead:
            return
        self.leases.polled(node)
        for event in events:
            self.requests.on_event(node, event, node.told.popleft())
        if node.aims:
            self._strike_aims(node)
            if node.dead:
                return
        # A nanosecond more: the difference of two clocks must not round to just before it is due.
        wake = node.clock.true(node.agent.next_wake) + 1e-9
        self._schedule(node, max(wake, self.clock.now()))

    def _step(self, limit: float) -> bool:
        """The next thing that happens until ``limit``; False if there is none."""
        at = self._agenda[0][0] if self._agenda else float("inf")
        arrives = self.network.next_at()
        if arrives is not None and arrives <= at:
            at = arrives
        else:
            arrives = None
        if at > limit:
            return False
        self.clock.advance(max(0.0, at - self.clock.now()))
        if arrives is not None:
            for channel in self.network.deliver(self.clock.now()):
                self.report.messages += 1
                node = self._by_channel[channel.number]
                self.touch(node)
            return True
        self.report.actions += 1
        heapq.heappop(self._agenda)[2]()
        return True

    # ---- faults of nodes -------------------------------------------------------------------------

    @property
    def may_pause(self) -> bool:
        """One node at a time is stopped in mid-round: stacks stay small."""
        return not self._paused

    def pause(self, node: SimNode, seconds: float) -> None:
        """``node`` is stopped where it is; everybody else goes on."""
        self._paused.append(node)
        node.paused_in_round = True
        node.stalled += seconds
        end = self.clock.now() + seconds
        node.stalled_until = node.transport.stalled_until = max(node.stalled_until, end + 1e-9)
        while self._step(end):
            pass
        self.clock.advance(max(0.0, end - self.clock.now()))
        self._paused.pop()

    def strike(self, fault: NodeFault, request: Request) -> None:
        """A fault of one side of a request, if it lives."""
        sides = [n for n in (request.producer, *request.consumers[-1:]) if n is not None]
        sides = [n for n in sides if not n.dead]
        if not sides:
            return
        self._strike(fault, self.rng.choice(sides))

    def _strike_aims(self, node: SimNode) -> None:
        """Faults that wait for a phase which a transfer of ``node`` is in now."""
        for (role, name), (fault, phase) in tuple(node.aims.items()):
            if not node.dead and transfer_phase(node.agent, role, name) == phase:
                del node.aims[role, name]
                self.trace(name, node, f"aimed at phase {phase}")
                self._strike(fault, node)

    def _strike(self, fault: NodeFault, node: SimNode) -> None:
        node.disturbed_until = self.clock.now() + _AFTERMATH
        for role, name in node.memory.holders:
            self.requests.by_id[name].disturbed = True
            phase = transfer_phase(node.agent, role, name)
            if phase:
                self.report.faults[fault.value, phase] += 1
            self.trace(name, node, f"fault {fault.value} in phase {phase or 'none'}")
        rng, now = self.rng, self.clock.now()
        match fault:
            case NodeFault.KILL:
                self._kill(node, same_address=False)
            case NodeFault.RESTART:
                self._kill(node, same_address=True)
            case NodeFault.STALL:
                lease = self.config.lease + self.config.margin
                seconds = rng.choice((0.2, lease, 2.0, 12.0)) * rng.random()
                node.stalled += seconds
                until = max(node.stalled_until, now + seconds)
                node.stalled_until = node.transport.stalled_until = until
                node.scheduled_at = float("inf")
                self._schedule(node, node.stalled_until)
            case NodeFault.PAUSE:
                self._pause_soon(node)
            case NodeFault.JUMP:
                # No two within one lease: together they could be more than its margin.
                if now > node.jumped_at + self.config.lease + self.config.margin:
                    node.jumped_at = now
                    node.clock.offset += rng.random() * self.config.margin * 0.9
                self.touch(node)
            case NodeFault.SLOW:
                node.slow = rng.choice((0.05, 0.3, self.config.lease / 3))
                node.stalled += node.slow
                self.later(_SLOW_FOR, partial(setattr, node, "slow", 0.0))
            case NodeFault.CUT:
                until = now + rng.choice((0.3, 3.0)) * rng.random()
                channel = node.channel
                channel.mute_until = max(channel.mute_until, until)
                channel.deaf_until = max(channel.deaf_until, until)
                node.transport.cut_until = max(node.transport.cut_until, until)
            case NodeFault.DEAF:
                seconds = rng.choice((0.3, 2 * self.config.lease)) * rng.random()
                node.channel.deaf_until = max(node.channel.deaf_until, now + seconds)
            case NodeFault.MUTE:
                seconds = rng.choice((0.3, 2 * self.config.lease)) * rng.random()
                node.channel.mute_until = max(node.channel.mute_until, now + seconds)
            case NodeFault.CROWD:
                self._crowd(node)

    def _kill(self, node: SimNode, *, same_address: bool) -> None:
        if node in self._paused:
            return  # its round is on our stack
        node.dead = True
        node.transport.die()
        node.channel.close()
        self.requests.dropped(node)
        for other in self.nodes:
            if not other.dead and self.rng.random() < 0.5:
                lost = [r for r in other.channel.routes if r[3] == node.channel.address]  # type: ignore[index]
                other.channel.lost += lost
                if lost:
                    self.touch(other)
        group = self.producers if node.role is Role.PRODUCER else self.consumers
        address = node.channel.address if same_address else None
        group[group.index(node)] = self._node(node.role, address)
        self.nodes.remove(node)

    def _crowd(self, node: SimNode) -> None:
        """Strangers and early birds, more than any table holds."""
        ranks = ranks_to_wire(Ranks(tp_size=1, latent=True))
        incarnation = node.agent.incarnation
        for i in range(_CROWD):
            ref = wire.Ref(f"crowd-{next(self._serial)}", incarnation, 1)
            body: wire.Message = (
                wire.Release(ref, ranks, True) if i % 2 else wire.Decline(ref, ranks)
            )
            frame = wire.encode(f"x-{i % 7}", body, i + 1)
            node.channel.inbox.append(Inbound(("crowd", 0, 0, "tcp://10.9.9.9:1"), frame))
        self.touch(node)

    def _maybe_pause(self, transport: SimTransport) -> None:
        """A process can be stopped while its bytes are on their way."""
        if self.rng.random() < self.config.nodes.get(NodeFault.PAUSE, 0.0):
            node = next(n for n in self.nodes if n.transport is transport)
            self._pause_soon(node)

    def _pause_soon(self, node: SimNode) -> None:
        node.looks_until_pause = self.rng.randint(1, 12)
        node.pause_for = self.rng.choice((0.1, 1.0, 8.0)) * self.rng.random()
        node.clock.on_look = node.pause_at_look
        self.touch(node)

    def _frame_sent(self, source: SimChannel, to: SimChannel | None, data: bytes) -> None:
        receiver = None if to is None else self._by_channel.get(to.number)
        self.leases.sent(self._by_channel[source.number], receiver, data)

    def _frame_arrived(self, channel: SimChannel, data: bytes) -> None:
        self.leases.arrived(self._by_channel[channel.number], data)

    def _message_fault(self, name: str, data: bytes) -> None:
        phase = message_phase(data)
        self.report.faults[name, phase] += 1
        if phase == "release" and name != "duplicated":
            self.requests.release_lost(data)

    def _post_fault(self, fault: PostFault, attempt: Attempt) -> None:
        self.report.faults[fault.value, post_phase(attempt)] += 1
        self.report.posts += 1

    # ---- what is found ----------------------------------------------------------------------

    def trace(self, transfer_id: str, node: SimNode, text: str) -> None:
        lines = self._traces.get(transfer_id)
        if lines is None:
            lines = self._traces[transfer_id] = collections.deque(maxlen=_TRACE)
        lines.append(f"t={self.clock.now():.4f} {node}: {text}")

    def violation(self, text: str, transfer_id: str = "") -> None:
        trace = tuple(self._traces.get(transfer_id, ()))
        self.report.violations.append(Violation(at=self.clock.now(), text=text, trace=trace))
        if len(self.report.violations) >= self.config.max_violations:
            raise _Enough

    # ---- the run ----------------------------------------------------------------------------

    def run(self) -> SimReport:
        """Until everything that was begun has ended and what follows has settled."""
        with _quiet(), contextlib.suppress(_Enough):
            self._run()
        self.report.seconds = self.clock.now()
        return self.report

    def _run(self) -> None:
        at = 0.0
        for serial in range(self.config.transfers):
            at += self.rng.expovariate(self.config.rate)
            heapq.heappush(
                self._agenda,
                (at, next(self._serial), lambda serial=serial: self.requests.begin(serial)),  # type: ignore[misc]
            )
        limit = at + 60.0
        while self._step(limit) or self.requests.unfinished:
            if self.clock.now() >= limit or not self._agenda:
                break
            if self.report.polls > _ROUNDS_PER_TRANSFER * (self.config.transfers + 20):
                self.violation("the world does not come to rest")
        self._settle()

    def _settle(self) -> None:
        """Everything late has come, every confirmation was given up: now nothing is left."""
        end = self.clock.now() + 3 * TIMEOUTS.ack
        while self._step(end):
            pass
        for node in self.nodes:
            for role, name in node.open:
                self.violation(f"{node}: {name} never ended as {role.value}", name)
            tables = node.agent.snapshot().tables
            if any(tables.values()):
                self.violation(f"{node}: tables are not empty: {tables}")
            if node.memory.free != node.memory.blocks:
                holders = node.memory.holders
                name = holders[0][1] if holders else ""
                self.violation(
                    f"{node}: {node.memory.blocks - node.memory.free} blocks leaked: {holders}",
                    name,
                )

    def close(self) -> None:
        """Let go of everything."""
        for node in self.nodes:
            node.transport.close(0.0)
