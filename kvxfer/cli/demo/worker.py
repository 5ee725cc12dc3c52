"""What both child processes share: cache, agent with faults, commands in, messages out."""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.cli.demo.allocator import BlockAllocator
from kvxfer.cli.demo.lossy import LossyChannel
from kvxfer.cli.demo.pattern import Pattern
from kvxfer.cli.demo.plan import DemoPlan, Sabotage
from kvxfer.core.control import ZmqChannel
from kvxfer.core.events import BackendChanged, Event
from kvxfer.core.plugins import create_transport
from kvxfer.core.transport import Transport
from kvxfer.policies.breaker import BreakerPolicy
from kvxfer.policies.failover import Failover
from kvxfer.policies.retry import Budget, RetryPolicy
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.faults import FaultPlan, FaultPoint
from kvxfer.testing.faulty import FaultyTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.observe.http import StatusServer

__all__ = ["Worker"]


class Worker:
    """One child process. Commands are JSON lines on stdin, messages JSON lines on stdout."""

    def __init__(self, plan: DemoPlan, name: str, *, faulty_posts: bool) -> None:
        # Ctrl-C reaches every process of a terminal: the parent decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if plan.faults != "none" or plan.sabotage is not None:
            # What is broken on purpose is in the table at the end; a warning would alarm.
            logging.getLogger("kvxfer").setLevel(logging.ERROR)
        # Engines print to standard output; the messages keep a descriptor of their own.
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.plan = plan
        self.scaled = plan.scaled
        self.pattern = Pattern(self.scaled)
        transport = create_transport(plan.backend)
        spare = [] if plan.failover is None else [create_transport(plan.failover)]
        self.cache = _cache([transport, *spare], self.scaled.shape)
        self.blocks = BlockAllocator(self.cache)
        seed = random.Random(f"{plan.seed} {name}").randrange(2**32)  # noqa: S311
        self.faults = FaultPlan(
            chances={FaultPoint.POST: plan.faults_per_post()} if faulty_posts else None,
            rng=random.Random(seed),  # noqa: S311
        )
        self.transport = FaultyTransport(transport, self.faults)
        drop = (b"release", b"decline") if plan.sabotage is Sabotage.DROP_RELEASE else ()
        self.channel = LossyChannel(
            ZmqChannel(),
            lose=plan.level.lose,
            duplicate=plan.level.duplicate,
            rng=random.Random(seed + 1),  # noqa: S311
            drop=drop,
        )
        self.agent = Agent(
            [self.transport, *spare],
            config=AgentConfig(
                name=name,
                fingerprint=plan.model,
                lease=plan.lease,
                lease_margin=0.5,
                # Connections fail here more often than any real one may: a breaker would open, and
                # of some hundred requests one would meet four failures in a row.
                breaker=None if plan.faults != "none" else BreakerPolicy(),
                retry=RetryPolicy(budget=Budget(reposts=12, rebuilds=9))
                if plan.faults != "none"
                else None,
                failover=None if plan.failover is None else Failover(),
            ),
            timeouts=Timeouts(connect=5, queue=8, transfer=8, drain=2),
            channel=self.channel,
            rng=random.Random(seed + 2),  # noqa: S311
        )
        self.agent.register_kv_caches(
            {f"layers.{i}": self.cache[i] for i in range(self.scaled.layers)},
            {f"layers.{i}": self.scaled.layout(i) for i in range(self.scaled.layers)},
        )
        self.status = _status_server(plan.status_port(name), self.agent)
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._out = threading.Lock()
        self.finishing = False

    def say(self, **message: Any) -> None:
        with self._out:
            self._replies.write(json.dumps(message) + "\n")
            self._replies.flush()

    def run(self) -> None:
        """Until the parent says finish and everything is over, or the parent is gone."""
        threading.Thread(target=self._read, daemon=True).start()
        port = None if self.status is None else self.status.port
        self.say(op="ready", address=self.agent.address, status_port=port)
        while True:
            try:
                command = self._commands.get(timeout=0.001)
                while True:
                    if command is None:
                        self.agent.close(0.0)
                        return
                    self.on_command(command)
                    command = self._commands.get_nowait()
            except queue.Empty:
                pass
            for event in self.agent.poll():
                if isinstance(event, BackendChanged):
                    self.say(op="changed", side=self.agent.config.name, event=_words(event))
                self.on_event(event)
            self.tick()
            if self.finishing and self.quiet():
                self.say(op="final", **self.summary())
                self.agent.close()
                return

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put(None)

    def quiet(self) -> bool:
        """Nothing is under way, not even a message that was not confirmed."""
        return not any(self.agent.snapshot().tables.values()) and not self.blocks.holders()

    def summary(self) -> dict[str, Any]:
        snapshot = self.agent.snapshot()
        faults = {
            name.removeprefix("post."): count
            for name, count in self.transport.counters.items()
            if name.startswith("post.")
        }
        faults.update(lost_messages=self.channel.lost, repeated_messages=self.channel.duplicated)
        return {
            "leaked": self.blocks.leaked,
            "tables": snapshot.tables,
            "quarantined": len(snapshot.quarantine),
            "counters": snapshot.counters,
            "faults": faults,
            "healthy": self.agent.health().ready,
        }

    # ---- what each side adds -----------------------------------------------------------------

    def on_command(self, command: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_event(self, event: Event) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Called about every millisecond."""


def _status_server(port: int | None, agent: Agent) -> StatusServer | None:
    """Metrics and health over HTTP, if they are wanted."""
    if port is None:
        return None
    from kvxfer.observe.http import StatusServer
    from kvxfer.observe.metrics import AgentMetrics

    metrics = AgentMetrics()
    metrics.watch(agent)
    return StatusServer([agent], port, registry=metrics.registry)


def _words(event: BackendChanged) -> str:
    return f"over {event.backend} instead of {event.before}: {event.reason}"


def _cache(
    transports: Sequence[Transport], shape: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory where these backends are at their best."""
    if any(transport.name == "shm" for transport in transports):
        from kvxfer.backends.shm import allocate

        cache: np.ndarray[Any, np.dtype[np.uint8]] = allocate(shape, np.uint8)
        return cache
    return np.zeros(shape, dtype=np.uint8)
