"""The virtual-time rig of the agent's tests, with what the reports need on top."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import attrs
from agent_rig import TOKENS, Node, Rig

from kvxfer.agent import SchedulerAgent
from kvxfer.agent.orders import Report
from kvxfer.core import wire
from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.channel import Inbound, Route
from kvxfer.core.events import Event
from kvxfer.core.layout import KVLayout, LayoutKind
from kvxfer.core.topology import Ranks
from kvxfer.core.verdict import EngineError
from kvxfer.testing.faults import Fault, FaultKind
from kvxfer.testing.sim.network import SimChannel

NOWHERE = ("tcp://10.9.9.9:1", -1, 0, "nowhere")
"""A route on which nobody listens."""
INVALID = EngineError(backend="moriio", code=11, message="length out of range")
"""Permanent: the same call fails again."""
SQ_FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): ep=0 depth=60 requested=8 max=64"
)


@attrs.frozen
class Carried:
    """One frame that was handed to the network."""

    at: float
    sender: str
    to: str
    mid: int
    body: wire.Message


class ReportRig(Rig):
    """``began`` is when the clock of the report starts; ``carried`` is all that was sent."""

    def __init__(self, **network: float) -> None:
        super().__init__(**network)
        self.began = self.clock.now()
        self.carried: list[Carried] = []
        self.lose: Any = lambda carried: False
        """Frames for which this is true do not arrive."""
        self._carry = self.network.carry
        self.network.carry = self._tap  # type: ignore[method-assign]
        self._mids = itertools.count(10**9)

    @property
    def now(self) -> float:
        """Seconds since ``began``."""
        return self.clock.now() - self.began

    def begin(self) -> None:
        """The report's zero is now."""
        self.began = self.clock.now()

    def until(self, seconds: float) -> None:
        """Everything up to ``seconds`` after ``began`` happens, and nothing after it."""
        end = self.began + seconds
        self._round()  # what was ordered just now begins just now
        while self._next_at() < end:
            self.step()
        self.clock.advance(max(0.0, end - self.clock.now()))
        self._round()

    def settle(self, seconds: float = 1.0) -> None:
        """Some more time, for what is on its way."""
        self.until(self.now + seconds)

    def _next_at(self) -> float:
        times = [node.agent.next_wake for node in self.nodes]
        at = self.network.next_at()
        return min(times if at is None else [*times, at])

    def _round(self) -> None:
        self.network.deliver(self.clock.now())
        for node in self.nodes:
            node.events += node.agent.poll()

    def close(self) -> None:
        for node in self.nodes:
            node.agent.close(0.0)

    # ---- the network -------------------------------------------------------------------------

    def _tap(self, source: SimChannel, target: str, route: Route, data: bytes) -> None:
        envelope = wire.decode(data)
        carried = Carried(self.now, envelope.sender, target, envelope.mid, envelope.body)
        self.carried.append(carried)
        if not self.lose(carried):
            self._carry(source, target, route, data)

    def sent(self, kind: type[Any], by: Node | None = None, to: Node | None = None) -> list[Any]:
        """Messages of one kind that were handed to the network, re-sends included."""
        return [
            c.body
            for c in self.carried
            if isinstance(c.body, kind)
            and (by is None or c.sender == by.agent.incarnation)
            and (to is None or c.to == to.agent.address)
        ]

    def inject(self, to: Node, body: wire.Message, *, sender: str = "x", mid: int = 0) -> None:
        """A frame arrives at ``to`` from somewhere; a ``mid`` of -1 is a new one."""
        mid = next(self._mids) if mid < 0 else mid
        to.agent._channel.inbox.append(  # type: ignore[attr-defined]
            Inbound(NOWHERE, wire.encode(sender, body, mid))
        )

    def route(self, node: Node, peer: Node) -> Any:
        """How ``node`` reaches ``peer``."""
        link = node.agent._engine.links.of(peer.agent.incarnation)
        assert link is not None
        return link.mailbox.route

    def at_address(self, address: str) -> None:
        """The next node's channel has this address, as after a restart at the same place."""
        make = self.network.channel

        def once() -> SimChannel:
            self.network.channel = make  # type: ignore[method-assign]
            return make(address)

        self.network.channel = once  # type: ignore[assignment, method-assign]

    def kill(self, node: Node) -> None:
        """Gone without a word."""
        node.agent._channel.close()
        node.transport.close(0.0)
        self.nodes.remove(node)

    # ---- waiting -----------------------------------------------------------------------------

    def make_waits_virtual(self, node: Node) -> list[float]:
        """``wait`` of this node's agent lets simulated time pass; returns its pauses."""
        pauses: list[float] = []

        def wait(timeout: float) -> None:
            pauses.append(timeout)
            self.clock.advance(timeout)
            self.network.deliver(self.clock.now())
            for other in self.nodes:
                if other is not node:
                    other.events += other.agent.poll()

        node.agent._channel.wait = wait  # type: ignore[method-assign]
        return pauses


def late(seconds: float) -> Fault:
    """The engine moves the bytes only then."""
    return Fault(kind=FaultKind.LATE, after=seconds)


def refused(error: EngineError = INVALID) -> Fault:
    """Failed at once, nothing posted."""
    return Fault(kind=FaultKind.REFUSE_VALUE, error=error)


HELD = Fault(kind=FaultKind.LATE_REPORT)
"""The bytes land; how the attempt ends is the test's business: see ``end``."""


def end(node: Node, attempt: Attempt, error: EngineError | None = None) -> None:
    """The engine says how a held attempt ended; nothing of it lands any more."""
    if error is None:
        attempt.complete()
    else:
        attempt.fail(error, accepted=Accepted.UNKNOWN, drained_by="completion")
    node.transport._report(attempt)


def make_latent(node: Node, num_blocks: int = 16) -> None:
    """One latent vector per token, the same on every rank, instead of keys and values."""
    node.memory = {name: array[:1].copy() for name, array in node.memory.items()}
    token = node.memory["layer0"][0, 0, 0].nbytes
    node.agent.register_kv_caches(
        node.memory,
        KVLayout(
            num_blocks=num_blocks,
            block_stride=TOKENS * token,
            kernel_tokens=TOKENS,
            token_stride=token,
            head_nbytes=token,
            dtype="uint8",
            kind=LayoutKind.LATENT,
        ),
    )


class Instance:
    """All ranks of one engine instance, and its scheduler half."""

    def __init__(
        self,
        rig: ReportRig,
        name: str,
        tp: int,
        *,
        heads: int = 8,
        latent: bool = False,
        dp: tuple[int, int] = (1, 0),
        **node: Any,
    ) -> None:
        dp_size, dp_rank = dp
        self.nodes = [
            rig.node(
                f"{name}{rank}",
                heads=1 if latent else max(1, heads // tp),
                ranks=Ranks(
                    tp_size=tp,
                    tp_rank=rank,
                    total_kv_heads=None if latent else heads,
                    latent=latent,
                    dp_size=dp_size,
                    dp_rank=dp_rank,
                ),
                **node,
            )
            for rank in range(tp)
        ]
        if latent:
            for each in self.nodes:
                make_latent(each)
        self.scheduler = SchedulerAgent([node.agent.info for node in self.nodes])
        self.events: list[Event] = []
        self._taken = [0] * tp

    def hand_down(self) -> None:
        """The scheduler half's orders reach all ranks, through a pickle."""
        orders = pickle.loads(pickle.dumps(self.scheduler.take_orders()))
        for node in self.nodes:
            node.agent.execute(orders)

    def of(self, kind: type[Event]) -> list[Any]:
        """Combined events of one kind so far."""
        for rank, node in enumerate(self.nodes):
            new = tuple(node.events[self._taken[rank] :])
            self._taken[rank] += len(new)
            self.events += self.scheduler.apply(Report(rank=rank, events=new))
        return [event for event in self.events if isinstance(event, kind)]
