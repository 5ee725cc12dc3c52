"""The process behind ``Worker``: an agent over real engines, told what to do.

Commands are JSON lines on standard input, messages JSON lines on what standard output was at start.
Its cache is filled once, from a seed, and only read.  The process does its imports first and waits,
so that a restart costs no more than an engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from kvxfer.agent import Agent, AgentConfig
from kvxfer.core.control_config import ControlConfig
from kvxfer.core.events import BackendChanged, Event, Failed
from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Endpoint
from kvxfer.core.plugins import create_transport
from kvxfer.errors import KvxferError
from kvxfer.policies.failover import Failover
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.life.geometry import Geometry
from kvxfer.testing.peer import _die_with_parent

if TYPE_CHECKING:
    from kvxfer.core.transport import Transport
    from kvxfer.testing.softrdma import SoftRdma


class _Inside:
    def __init__(self, name: str, replies: int) -> None:
        self._name = name
        self._replies = os.fdopen(replies, "w")
        self._saying = threading.Lock()
        self._open_for_good = contextlib.ExitStack()
        self._softrdma: SoftRdma | None = None
        self._transports: dict[str, Transport] = {}
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._agent: Agent | None = None

    def say(self, **message: Any) -> None:
        with self._saying:
            self._replies.write(json.dumps(message) + "\n")
            self._replies.flush()

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                command = self._commands.get(timeout=0.005)
                if command is None:
                    break
                try:
                    getattr(self, command.pop("op"))(**command)
                except KvxferError as error:
                    self.say(op="refused", id=command.get("id", ""), why=str(error))
            if self._agent is not None:
                for event in self._agent.poll():
                    self._event(event)
        if self._agent is not None:
            self._agent.close()
        self._open_for_good.close()

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put(None)

    def _event(self, event: Event) -> None:
        if event.transfer_id:
            fresh = isinstance(event, Failed) and event.fresh_blocks
            self.say(op="event", id=event.transfer_id, what=type(event).__name__, fresh=fresh)
        elif isinstance(event, BackendChanged):
            self.say(op="changed", before=event.before, backend=event.backend, down=event.down)

    # ---- commands --------------------------------------------------------------------------

    def open(
        self,
        *,
        seed: int,
        geometry: dict[str, int],
        port: int,
        backends: list[tuple[str, dict[str, Any]]],
        failover: dict[str, Any] | None = None,
        lease: float = 30.0,
        timeouts: dict[str, float] | None = None,
    ) -> None:
        shape = Geometry(**geometry)
        memory = shape.memory(seed)
        if any(backend == "moriio" for backend, _ in backends):
            from kvxfer.testing.softrdma import SoftRdma

            self._softrdma = self._open_for_good.enter_context(SoftRdma())
        self._transports = {
            backend: create_transport(backend, options or None) for backend, options in backends
        }
        self._agent = Agent(
            list(self._transports.values()),
            config=AgentConfig(
                name=self._name,
                lease=lease,
                lease_margin=0.3,
                failover=None if failover is None else Failover(**failover),
            ),
            control=ControlConfig(port=port),
            timeouts=Timeouts(**(timeouts or {})),
        )
        shape.register(self._agent, memory)
        self.say(op="ready", address=self._agent.address)

    @property
    def agent(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def hold(self, id: str, blocks: list[int]) -> None:  # noqa: A002 - as the message has it
        self.say(op="offer", id=id, offer=self.agent.hold(id, Blocks.at(0, blocks)).to_json())

    def push(self, id: str, blocks: list[int], address: str, of: str) -> None:  # noqa: A002
        self.agent.push(id, Blocks.at(0, blocks), to=Endpoint(address=address, incarnation=of))
        self.agent.seal(id, id.encode())

    def delay(self, seconds: float) -> None:
        """Slow the software RDMA device down."""
        assert self._softrdma is not None
        self._softrdma.delay(seconds)

    def break_device(self, error: int) -> None:
        """The software RDMA device makes no queue pair until ``mend_device``: that fails with this
        errno."""
        from kvxfer.testing.softrdma import SetupCall

        assert self._softrdma is not None
        self._softrdma.fail_setup(SetupCall.CREATE_QP, error)

    def mend_device(self) -> None:
        from kvxfer.testing.softrdma import SetupCall

        assert self._softrdma is not None
        self._softrdma.fail_setup(SetupCall.CREATE_QP, 0)

    def count_device(self) -> None:
        """Say how many work requests of the software RDMA device have succeeded."""
        assert self._softrdma is not None
        self.say(op="device", executed=self._softrdma.counters().executed)

    def end_engine(self, backend: str) -> None:
        """End one engine, on the thread that drives it. The process and its agent go on."""
        self.agent._engine.order(lambda now: self._end(backend))

    def _end(self, backend: str) -> None:
        self._transports[backend].close(1.0)
        self.say(op="ended", backend=backend)

    def vanish(self) -> None:
        """Die, and leave every connection open: a copy of this process holds them and does nothing.

        It ends with the standard input that it has from here.
        """
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        while os.read(0, 4096):
            pass
        os._exit(0)

    def tables(self) -> None:
        """Say what is left, once nothing is under way or 8 s have passed."""
        self.agent.drain(8.0)
        snapshot = self.agent.snapshot()
        self.say(
            op="tables",
            tables=snapshot.tables,
            quarantined=len(snapshot.quarantine),
            counters=snapshot.counters,
        )


def _main() -> None:
    # Engines print to standard output; the protocol keeps a descriptor of its own.
    replies = os.dup(1)
    os.dup2(2, 1)
    _die_with_parent()
    _Inside(sys.argv[1], replies).run()


if __name__ == "__main__":
    _main()
