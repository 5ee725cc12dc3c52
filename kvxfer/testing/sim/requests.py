"""The life of one request through router, producer and consumer, and what each event must mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvxfer.core import wire
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
from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError, KvxferError
from kvxfer.testing.sim.config import NodeFault
from kvxfer.testing.sim.memory import LAYERS, content
from kvxfer.testing.sim.node import TIMEOUTS, SimNode
from kvxfer.testing.sim.phases import DRAINING, PHASES_OF, READ_AIMS, WRITE_AIMS

if TYPE_CHECKING:
    from kvxfer.testing.sim.world import World

__all__ = ["Ready", "Request", "Requests"]

_CONSUMER = TIMEOUTS.connect + TIMEOUTS.queue + TIMEOUTS.transfer + 0.5
_PUSH = TIMEOUTS.connect + TIMEOUTS.queue + TIMEOUTS.transfer + TIMEOUTS.ack + 0.5
_DRAIN = 2 * TIMEOUTS.drain + 0.5
_TRIES = 4
_RELEASES = 3


@attrs.define(eq=False)
class Request:
    """One transfer id. ``serial`` decides its content."""

    serial: int
    blocks: int
    write: bool
    producer: SimNode | None = None
    consumers: list[SimNode] = attrs.field(factory=list)
    start: dict[str, int] = attrs.field(factory=dict)
    """Where, by consumer, the wanted positions begin."""
    offer: Offer | None = None
    renewed: bool = False
    freed_at: float = float("inf")
    """When its lease was seen to have ended, in true time."""
    aim: tuple[NodeFault, str] | None = None
    """A fault that waits for a phase of this request."""
    received: bool = False
    received_at: float = 0.0
    sent: bool = False
    releases_lost: int = 0
    disturbed: bool = False
    """A fault has struck one of its processes: messages may rightly come too late."""

    @property
    def transfer_id(self) -> str:
        return f"t{self.serial}"


class Ready:
    """What a CUDA event says, in simulated time."""

    def __init__(self, world: World, at: float) -> None:
        self._world = world
        self.at = at

    def query(self) -> bool:
        return self._world.clock.now() > self.at


class Requests:
    """Begins requests and judges their events."""

    def __init__(self, world: World) -> None:
        self._world = world
        config = world.config
        # A hold may be renewed by each reader that tries, one after the other.
        self._hold_bound = _TRIES * (_CONSUMER + config.lease + config.margin)
        self.by_id: dict[str, Request] = {}
        self.unfinished = 0

    # ---- the way of a request ------------------------------------------------------------------

    def begin(self, serial: int) -> None:
        rng = self._world.rng
        request = Request(serial, rng.randint(1, 6), write=rng.random() < self._world.config.writes)
        self.by_id[request.transfer_id] = request
        request.aim = self._draw_aim(request)
        if request.write:
            self._accept(request, 30)
        else:
            self._hold(request, 30)
        for fault, chance in self._world.config.nodes.items():
            if rng.random() < chance:
                self._world.later(
                    rng.choice((0.02, 0.2, 2.0)) * rng.random() + 0.001,
                    partial(self._world.strike, fault, request),
                )

    def _draw_aim(self, request: Request) -> tuple[NodeFault, str] | None:
        world = self._world
        if world.rng.random() >= world.config.aim or not world.config.nodes:
            return None
        fault = world.rng.choice(list(world.config.nodes))
        return fault, world.rng.choice(WRITE_AIMS if request.write else READ_AIMS)

    def _aim_at_draining(self, node: SimNode, role: Role, name: str) -> None:
        """Few transfers come so far: a fault strikes more often there."""
        world, request = self._world, self.by_id[name]
        if world.config.nodes and world.rng.random() < min(1.0, 8 * world.config.aim):
            fault = world.rng.choice(list(world.config.nodes))
            node.aims[role, name] = fault, DRAINING[role, request.write]

    def _running(self, nodes: list[SimNode]) -> SimNode | None:
        """One of them that is not stopped: nobody calls into a process that is."""
        node = self._world.rng.choice(nodes)
        return None if node.stalled_until > self._world.clock.now() else node

    def _again(self, tries: int, what: Callable[[], None]) -> None:
        if tries:
            self._world.later(0.2, what)
        else:
            self._world.report.outcomes["gave up: no blocks"] += 1

    def _hold(self, request: Request, tries: int) -> None:
        """READ: the producer computes and offers."""
        world, name = self._world, request.transfer_id
        producer = self._running(world.producers)
        ids = _take(producer, Role.PRODUCER, request)
        if producer is None or ids is None:
            self._again(tries, lambda: self._hold(request, tries - 1))
            return
        producer.memory.cells[:, ids] = content(request.serial, request.blocks)
        request.producer = producer
        try:
            offer = producer.agent.hold(name, Blocks.at(0, ids))
        except CapacityError:
            producer.memory.give_back((Role.PRODUCER, name))
            return
        self._opened(producer, Role.PRODUCER, name, self._hold_bound)
        self._maybe_abort(producer, name, world.config.abort_producer)
        if world.rng.random() < world.config.lose_offer:
            world.report.outcomes["offer lost"] += 1
            return
        text = offer.to_json()
        world.later(world.router_delay(), lambda: self._pull(request, Offer.from_json(text), 5))

    def _pull(self, request: Request, offer: Offer, tries: int) -> None:
        world, name = self._world, request.transfer_id
        consumer = self._running(world.consumers)
        if consumer is None:
            self._again(tries, lambda: self._pull(request, offer, tries - 1))
            return
        if (Role.CONSUMER, name) in consumer.open or consumer.memory.ids((Role.CONSUMER, name)):
            return  # it tries already, or its last try is not drained
        if name in consumer.layerwise:
            return  # its engine still owes the last layers of an earlier try
        rng = world.rng
        if rng.random() < world.config.decline:
            consumer.agent.decline(offer)
            world.touch(consumer)
            world.trace(name, consumer, "declines")
            return
        if not request.renewed and rng.random() < world.config.renew:
            request.renewed = True
            consumer.agent.renew([offer])
            world.touch(consumer)
            world.later(rng.random(), lambda: self._pull(request, offer, tries))
            return
        start = rng.randrange(request.blocks) if rng.random() < 0.3 else 0
        ids = consumer.memory.take((Role.CONSUMER, name), request.blocks - start)
        if ids is None:
            consumer.agent.renew([offer])
            world.touch(consumer)
            self._again(tries, lambda: self._pull(request, offer, tries - 1))
            return
        blocks = Blocks.at(start, ids)
        layerwise = rng.random() < world.config.layerwise
        try:
            if layerwise:
                consumer.agent.pull(offer, blocks, layers=["layer0"], last=False)
            else:
                consumer.agent.pull(offer, blocks)
        except (InvalidInputError, CapacityError) as error:
            # Full, or still draining from an earlier try.
            world.trace(name, consumer, f"pull refused: {error}")
            self._check_pins(consumer, error, name)
            consumer.memory.give_back((Role.CONSUMER, name))
            return
        request.consumers.append(consumer)
        request.start[consumer.name] = start
        self._opened(consumer, Role.CONSUMER, name, _CONSUMER)
        self._maybe_abort(consumer, name, world.config.abort)
        request.offer = offer
        if layerwise:
            consumer.layerwise.add(name)
            if rng.random() < 0.8:  # else its last layers are never asked for
                world.later(
                    rng.expovariate(5.0), lambda: self._pull_rest(name, consumer, offer, start, ids)
                )

    def _pull_rest(
        self, name: str, consumer: SimNode, offer: Offer, start: int, ids: list[int]
    ) -> None:
        """The later layers of a pull, also of one that has failed meanwhile."""
        world = self._world
        if consumer.dead:
            return
        wait = consumer.stalled_until - world.clock.now()
        if wait > 0:
            world.later(wait, lambda: self._pull_rest(name, consumer, offer, start, ids))
            return
        consumer.layerwise.discard(name)
        for layer in range(1, LAYERS):
            consumer.agent.pull(
                offer, Blocks.at(start, ids), layers=[f"layer{layer}"], last=layer == LAYERS - 1
            )
        world.touch(consumer)

    def _accept(self, request: Request, tries: int) -> None:
        """WRITE: the consumer says where to."""
        world, name = self._world, request.transfer_id
        consumer = self._running(world.consumers)
        ids = _take(consumer, Role.CONSUMER, request)
        if consumer is None or ids is None:
            self._again(tries, lambda: self._accept(request, tries - 1))
            return
        try:
            consumer.agent.accept(name, Blocks.at(0, ids))
        except (InvalidInputError, CapacityError) as error:
            self._check_pins(consumer, error, name)
            consumer.memory.give_back((Role.CONSUMER, name))
            return
        request.consumers.append(consumer)
        request.start[consumer.name] = 0
        self._opened(consumer, Role.CONSUMER, name, TIMEOUTS.transfer + 0.5)
        self._maybe_abort(consumer, name, world.config.abort)
        if world.rng.random() < world.config.lose_offer:
            world.report.outcomes["destination lost"] += 1
            return
        endpoint = consumer.agent.endpoint
        world.later(world.router_delay(), lambda: self._push(request, endpoint, 5))

    def _push(self, request: Request, to: Endpoint, tries: int) -> None:
        world, name = self._world, request.transfer_id
        producer = self._running(world.producers)
        ids = _take(producer, Role.PRODUCER, request)
        if producer is None or ids is None:
            self._again(tries, lambda: self._push(request, to, tries - 1))
            return
        request.producer = producer
        agent, rng = producer.agent, world.rng
        try:
            for layer in range(LAYERS):
                ready = Ready(world, world.clock.now() + rng.expovariate(20.0))
                # Not earlier: what is posted before its data is there shows as wrong bytes.
                world.later(ready.at - world.clock.now(), partial(_compute, request, layer, ids))
                agent.push(name, Blocks.at(0, ids), to=to, layers=[f"layer{layer}"], ready=ready)
        except CapacityError:
            producer.memory.give_back((Role.PRODUCER, name))
            return
        self._opened(producer, Role.PRODUCER, name, _PUSH)
        self._maybe_abort(producer, name, world.config.abort_producer)
        if rng.random() < 0.5:
            self._seal(producer, name)
        else:  # the first token takes longer than the forward pass
            world.later(rng.expovariate(10.0), lambda: self._seal(producer, name))

    def _seal(self, producer: SimNode, name: str) -> None:
        world = self._world
        if producer.dead or (Role.PRODUCER, name) not in producer.open:
            return
        if producer.stalled_until > world.clock.now():
            world.later(
                producer.stalled_until - world.clock.now(), lambda: self._seal(producer, name)
            )
            return
        producer.agent.seal(name, name.encode())
        world.touch(producer)

    def _check_pins(self, node: SimNode, error: KvxferError, name: str) -> None:
        """Blocks that are free for the allocator must not be pinned any more."""
        if "into which bytes may still land" in error.message:
            self._world.violation(f"{node}: free blocks are refused for {name}: {error}", name)

    def _maybe_abort(self, node: SimNode, name: str, chance: float) -> None:
        world = self._world
        if world.rng.random() < chance:
            delay = world.rng.choice((0.01, 0.1, 1.0)) * world.rng.random()

            def abort() -> None:
                if not node.dead and node.stalled_until <= world.clock.now():
                    world.trace(name, node, "abort")
                    node.agent.abort(name)
                    world.touch(node)

            world.later(delay, abort)

    # ---- what has to end -----------------------------------------------------------------------

    def _opened(self, node: SimNode, role: Role, name: str, bound: float) -> None:
        world = self._world
        began = node.open[role, name] = world.clock.now()
        if began < node.disturbed_until:
            self.by_id[name].disturbed = True
        aim = self.by_id[name].aim
        if aim is not None and aim[1] in PHASES_OF[role]:
            node.aims[role, name] = aim
        self.unfinished += 1
        world.trace(name, node, f"begins as {role.value}")
        world.touch(node)
        self._expect(
            node, lambda: node.open.get((role, name)) == began, bound, f"{name} has not ended", name
        )

    def _expect(
        self, node: SimNode, pending: Callable[[], bool], bound: float, text: str, name: str
    ) -> None:
        """A violation if something is still pending after ``bound`` seconds of running time."""
        world = self._world
        stalled = node.stalled

        def look() -> None:
            if node.dead or not pending():
                return
            extra = max(node.stalled - stalled, node.stalled_until - world.clock.now())
            if extra > 0:
                self._expect(node, pending, extra + node.slow, text, name)
            else:
                world.violation(f"{node}: {text} after {bound:.1f} s", name)

        world.later(bound + 2 * node.slow, look)

    def dropped(self, node: SimNode) -> None:
        """It died: nothing of it will end."""
        self.unfinished -= len(node.open)
        node.open.clear()

    # ---- events --------------------------------------------------------------------------------

    def on_event(self, node: SimNode, event: Event, told: float) -> None:
        """``node`` published it at ``told``, in true time, and it was collected now."""
        name = event.transfer_id
        if not name:
            return
        self._world.trace(name, node, _describe(event))
        match event:
            case Received():
                self._received(node, event, told)
            case Sent():
                self._sent(node, name)
            case Expired():
                self._ended(node, Role.PRODUCER, name, "Expired")
                self.by_id[name].freed_at = self._world.clock.now()
                self._world.leases.freed(node, name, self.by_id[name].consumers)
                self._check_release(node, name)
                self._give_back(node, Role.PRODUCER, name)
            case Declined():
                self._ended(node, Role.PRODUCER, name, "Declined")
                self._give_back(node, Role.PRODUCER, name)
            case Failed():
                self._failed(node, event)
            case Drained():
                self._give_back(node, event.role, name)
            case Quarantined():
                self._world.report.outcomes["Quarantined"] += 1
                self._reclaim_when_safe(node, event.role, name)

    def _ended(self, node: SimNode, role: Role, name: str, what: str) -> None:
        self._world.report.outcomes[what] += 1
        if node.open.pop((role, name), None) is None:
            self._world.violation(f"{node}: {what} of {name}, which was not open", name)
        else:
            self.unfinished -= 1

    def _received(self, node: SimNode, event: Received, told: float) -> None:
        name = event.transfer_id
        request = self.by_id[name]
        self._ended(node, Role.CONSUMER, name, "Received")
        ids = node.memory.ids((Role.CONSUMER, name))
        wanted = content(request.serial, request.blocks)[:, request.start[node.name] :]
        if (node.memory.cells[:, ids] != wanted).any():
            self._world.violation(f"{node}: {name} was received with wrong bytes", name)
        if request.write and event.payload != name.encode():
            self._world.violation(f"{node}: {name} came with payload {event.payload!r}", name)
        if told > request.freed_at:
            self._world.violation(f"{node}: {name} was received after it had been freed", name)
        if not request.write:
            self._world.leases.received(node, name)
        request.received = True
        request.received_at = self._world.clock.now()
        self._give_back(node, Role.CONSUMER, name)

    def _sent(self, node: SimNode, name: str) -> None:
        request = self.by_id[name]
        self._ended(node, Role.PRODUCER, name, "Sent")
        request.sent = True
        if request.write and not request.received:
            consumer = request.consumers[0]
            if consumer.in_round:  # stopped between its answer and its event
                self._expect(
                    consumer, lambda: not request.received, 0.0, f"{name} was sent to it", name
                )
            elif not consumer.dead:
                self._world.violation(f"{node}: {name} was sent, but not received", name)
        self._give_back(node, Role.PRODUCER, name)

    def _failed(self, node: SimNode, event: Failed) -> None:
        name, role = event.transfer_id, event.role
        self._ended(node, role, name, f"Failed {event.kind.value} {role.value}")
        again = "already" in event.error.message  # a second try while the first one drains
        if event.kind in (ErrorKind.INVALID, ErrorKind.UNKNOWN) and not again:
            self._world.violation(f"{node}: {name} failed with {event.error}", name)
        if event.drained:
            self._give_back(node, role, name)
        else:
            self._aim_at_draining(node, role, name)
            held = node.memory.ids((role, name))
            self._expect(
                node,
                lambda: (
                    node.memory.ids((role, name)) is held and (role, name) not in node.quarantined
                ),
                _DRAIN,
                f"{name} is neither drained nor quarantined",
                name,
            )
        if role is Role.CONSUMER:
            self._retry(self.by_id[name])

    def _retry(self, request: Request) -> None:
        """The router tries another decode worker, as far as the offer is still good."""
        world, offer = self._world, request.offer
        if offer is None or len(request.consumers) >= _TRIES:
            return
        if world.rng.random() < world.config.retry_elsewhere:
            world.later(world.router_delay(), lambda: self._pull(request, offer, 0))

    def _give_back(self, node: SimNode, role: Role, name: str) -> None:
        node.quarantined.discard((role, name))
        node.aims.pop((role, name), None)
        wrong = node.memory.give_back((role, name))
        if wrong:
            self._world.violation(f"{node}: {name}: {wrong}", name)

    def _reclaim_when_safe(self, node: SimNode, role: Role, name: str) -> None:
        """The operator: waits until nothing can land any more, then takes the blocks back."""
        node.quarantined.add((role, name))

        def look() -> None:
            if node.dead or (role, name) not in node.quarantined:
                return
            ids = node.memory.ids((role, name))
            writer = self.by_id[name].producer if self.by_id[name].write else None
            if writer is not None and not writer.dead and (Role.PRODUCER, name) in writer.open:
                self._world.later(0.5, look)  # it may be stopped, and post once it goes on
            elif any(node.memory.landing[i] or node.memory.reading[i] for i in ids):
                self._world.later(0.5, look)
            else:
                node.agent.reclaim(name)
                self._world.touch(node)
                self._world.later(2.0 + node.slow, look)

        self._world.later(1.0, look)

    def release_lost(self, data: bytes) -> None:
        """A frame with a release does not arrive."""
        body = wire.decode(data).body
        request = self.by_id.get(body.ref.transfer) if isinstance(body, wire.Release) else None
        if request is not None:
            request.releases_lost += 1

    def _check_release(self, node: SimNode, name: str) -> None:
        """What was received long ago must not have to wait for the end of its lease."""
        request, now = self.by_id[name], self._world.clock.now()
        # A reader may be struck between its end of the transfer and its release's way out.
        sides = (node, *request.consumers)
        quiet = not request.disturbed and all(now > side.disturbed_until for side in sides)
        # It is sent so often at least before the lease ends; all of them can be lost.
        quiet = quiet and request.releases_lost < _RELEASES
        if quiet and request.received and request.received_at + 2.0 < now:
            self._world.violation(f"{node}: {name} was received, but never released", name)


def _compute(request: Request, layer: int, ids: list[int]) -> None:
    """One layer of the forward pass is over. A push that was aborted may have lost its blocks."""
    producer = request.producer
    if producer is not None and producer.memory.ids((Role.PRODUCER, request.transfer_id)) is ids:
        producer.memory.cells[layer, ids] = content(request.serial, request.blocks)[layer]


def _take(node: SimNode | None, role: Role, request: Request) -> list[int] | None:
    if node is None:
        return None
    return node.memory.take((role, request.transfer_id), request.blocks)


def _describe(event: Event) -> str:
    text = type(event).__name__
    if isinstance(event, Failed):
        text += f" {event.kind.value} drained={event.drained}: {event.error}"
    elif isinstance(event, (Drained, Quarantined)):
        text += f" {event.role.value}"
    return text
