"""Agents with keepers in virtual time: either can be held up, stopped or killed by itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from agent_rig import HEAD_NBYTES, HEADS, TIMEOUTS, TOKENS, Rig, layout

from kvxfer.agent import Agent, AgentConfig
from kvxfer.agent.config import Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.events import Declined, Event, Expired, Failed, Role, Sent
from kvxfer.keeper.config import KeeperConfig
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.faults import Fault, FaultPlan
from kvxfer.testing.faulty import FaultyTransport
from kvxfer.testing.keeper import VirtualKeeper

LEASE, MARGIN = 3.0, 0.5
KEEPER = KeeperConfig(beat_interval=0.5, peer_timeout=4.0, hang_timeout=1.0)
LONG = Timeouts(connect=2.0, queue=20.0, post=1.0, transfer=40.0, ack=8.0, drain=1.0)


class KeptNode:
    """One agent, its caches and its keeper. ``held_until``: its GIL is held by a C call."""

    def __init__(
        self,
        rig: KeeperRig,
        name: str,
        *,
        posts: list[Fault | None] | None = None,
        timeouts: Timeouts = TIMEOUTS,
        keeper: KeeperConfig | None = KEEPER,
        num_blocks: int = 16,
        **config: Any,
    ) -> None:
        self.rig = rig
        self.name = name
        self.transport = FaultyTransport(
            LoopbackTransport(), FaultPlan(posts=posts or []), clock=rig.clock
        )
        settings = AgentConfig(
            name=name,
            progress=Progress.MANUAL,
            lease=config.pop("lease", LEASE),
            lease_margin=MARGIN,
            pump_interval=0.01,
            keeper=keeper,
            **config,
        )
        incarnation = f"agent-{name}"
        self.keeper: VirtualKeeper | None = None
        if keeper is not None:
            self.keeper = VirtualKeeper(
                settings,
                incarnation,
                rig.clock,
                rig.network.channel,
                delay=lambda: rig.rng.expovariate(1 / 0.0005),
            )
        self.agent = Agent(
            self.transport,
            config=settings,
            timeouts=timeouts,
            clock=rig.clock,
            rng=random.Random(1),
            channel=rig.network.channel(),
            incarnation=incarnation,
            keeper=self.keeper,
        )
        self.memory = {
            "layer": np.random.default_rng(len(rig.nodes)).integers(
                0, 256, size=(2, num_blocks, TOKENS, HEADS, HEAD_NBYTES), dtype=np.uint8
            )
        }
        self.agent.register_kv_caches(self.memory, layout(num_blocks))
        self.events: list[Event] = []
        self.held_until = 0.0
        self.dead = False
        rig.nodes.append(self)  # type: ignore[arg-type]

    def of(self, kind: type[Event], transfer_id: str | None = None) -> list[Any]:
        return [
            e for e in self.events if isinstance(e, kind) and transfer_id in (None, e.transfer_id)
        ]

    def content(self, ids: list[int]) -> bytes:
        return self.memory["layer"][:, ids].tobytes()

    @property
    def tables(self) -> dict[str, int]:
        return self.agent.snapshot().tables

    @property
    def counters(self) -> dict[str, int]:
        return self.agent.snapshot().counters

    @property
    def kept(self) -> VirtualKeeper:
        assert self.keeper is not None
        return self.keeper

    @property
    def keeping(self) -> Any:
        return self.agent._ctx.keeping

    def hold_gil(self, seconds: float) -> None:
        """Nothing of the agent runs for so long."""
        self.held_until = self.rig.clock.now() + seconds

    def die(self) -> None:
        """The process is killed, and its keeper with it."""
        self.dead = True
        self.agent._channel.close()
        if self.keeper is not None:
            self.keeper.close()

    def promised(self, transfer_id: str) -> float:
        """Until when this reader may believe that it can read."""
        found = [-1e9]
        pull = self.agent._engine.consumer.pulls.get(transfer_id)
        if pull is not None:
            found += [source.granted_until for source in pull._sources]
        for ref, watched in self.keeping._watched.items():
            if ref.transfer == transfer_id:
                found.append(watched.granted_until)
                if self.keeper is not None and self.keeper.keeper is not None:
                    entry = self.keeper.keeper.watches._entries.get(ref)
                    if entry is not None and entry.since >= watched.since:  # not of an earlier pull
                        found.append(entry.granted_until)
        return max(found)


class KeeperRig(Rig):
    """Checks after every step that nobody may read what has been freed."""

    def __init__(self, seed: int = 0, **network: float) -> None:
        super().__init__(**network)
        self.rng = random.Random(seed)
        self.freed: dict[str, float] = {}
        self.kept: list[KeptNode] = []

    def pair(self, **options: Any) -> tuple[KeptNode, KeptNode]:
        """A producer and a consumer whose keepers are up."""
        posts = options.pop("posts", None)
        timeouts = options.pop("timeouts", LONG)
        p = self.make("p", timeouts=timeouts, **options)
        c = self.make("c", timeouts=timeouts, posts=posts, **options)
        self.meet(p, c)
        return p, c

    def meet(self, p: KeptNode, c: KeptNode) -> None:
        c.agent.connect([p.agent.endpoint])
        both = (p, c)

        def met() -> bool:
            links = [n.agent._engine.links for n in both]
            return all(n.keeper is None or n.keeping._ready for n in both) and all(
                len(table) == 1
                and all(
                    link.up and link.keeper is not None and link.keeper.address == o.keeping.address
                    for link in table
                )
                for table, o in zip(links, reversed(both), strict=True)
            )

        self.run(met, seconds=5)
        self.pass_time(0.1)  # and the keepers know of it

    def make(self, name: str, **options: Any) -> KeptNode:
        node = KeptNode(self, name, **options)
        self.kept.append(node)
        return node

    def step(self) -> None:
        now = self.clock.now()
        times = [now + 0.5]
        for node in self.kept:
            if node.dead:
                continue
            times.append(node.held_until if node.held_until > now else node.agent.next_wake)
            if node.keeper is not None and (at := node.keeper.next_at()) is not None:
                times.append(at)
        at = self.network.next_at()
        if at is not None:
            times.append(at)
        self.clock.advance(max(1e-6, min(times) - now))
        self.network.deliver(self.clock.now())
        for node in self.kept:
            if node.dead:
                continue
            if node.keeper is not None:
                node.keeper.run()
            if node.held_until <= self.clock.now():
                new = node.agent.poll()
                node.events += new
                self._note(new)
        self.check()

    def _note(self, events: list[Event]) -> None:
        for event in events:
            ended = isinstance(event, (Sent, Expired, Declined)) or (
                isinstance(event, Failed) and event.role is Role.PRODUCER
            )
            if ended:
                self.freed[event.transfer_id] = self.clock.now()

    def check(self) -> None:
        """Promise 5: no source is free while a reader may believe that it is held for it."""
        now = self.clock.now()
        for transfer_id, since in self.freed.items():
            for node in self.kept:
                until = -1e9 if node.dead else node.promised(transfer_id)
                assert until <= now, (
                    f"{transfer_id} was freed at {since}, but {node.name} may read it until {until}"
                    f" (it is {now})"
                )
