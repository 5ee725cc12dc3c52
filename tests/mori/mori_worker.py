"""A prefill worker in a process of its own: an agent over the real engine, told what to do.

Commands are JSON lines on standard input, messages JSON lines on what standard output was at start.
Its cache is filled once, from a seed, and only read: whoever has the seed can check every byte.
The process does its imports first and waits, so that a restart costs no more than an engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.core.control_config import ControlConfig
from kvxfer.core.events import Event
from kvxfer.core.layout import Blocks, KVLayout
from kvxfer.core.offer import Endpoint
from kvxfer.errors import KvxferError
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.peer import _die_with_parent
from kvxfer.testing.softrdma import SoftRdma

__all__ = ["FREE", "Geometry", "Worker"]

FREE = 0xEE
"""What free blocks of a consumer hold; no byte of a worker's cache has this value."""
TOKENS = 16


@attrs.frozen(kw_only=True)
class Geometry:
    """The caches of both sides."""

    layers: int = 2
    blocks: int = 64
    nbytes: int = 4096

    def layout(self) -> KVLayout:
        return KVLayout(
            num_blocks=self.blocks,
            block_stride=self.nbytes,
            kernel_tokens=TOKENS,
            token_stride=self.nbytes // TOKENS,
            head_nbytes=self.nbytes // TOKENS,
            dtype="uint8",
        )

    def content(self, seed: int) -> Any:
        """uint8[layers, blocks, nbytes] without ``FREE``."""
        shape = (self.layers, self.blocks, self.nbytes)
        return np.random.default_rng(seed).integers(0, FREE, shape, np.uint8)

    def register(self, agent: Agent, memory: Any) -> None:
        agent.register_kv_caches({f"layer{i}": m for i, m in enumerate(memory)}, self.layout())


class Worker:
    """Such a process, seen from the test. ``inbox`` gets ``(worker, message)``."""

    def __init__(self, name: str, inbox: queue.SimpleQueue[tuple[Worker, dict[str, Any]]]) -> None:
        self.name = name
        self._inbox = inbox
        self.seed = -1
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.process.pid}>"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # killed in mid-line
                self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {"op": "gone"}))

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def open(self, *, seed: int, geometry: Geometry, port: int = 0, **options: Any) -> None:
        """Have it make its agent; it says "ready" then. ``options`` are ``config`` and so on."""
        self.seed = seed
        self.tell(op="open", seed=seed, geometry=attrs.asdict(geometry), port=port, **options)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Let it end by itself; its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


# ---- inside the process --------------------------------------------------------------------


class _Inside:
    def __init__(self, name: str, replies: int, softrdma: SoftRdma) -> None:
        self._name = name
        self._replies = os.fdopen(replies, "w")
        self._softrdma = softrdma
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._agent: Agent | None = None

    def say(self, **message: Any) -> None:
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

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put(None)

    def _event(self, event: Event) -> None:
        if event.transfer_id:
            self.say(op="event", id=event.transfer_id, what=type(event).__name__)

    # ---- commands --------------------------------------------------------------------------

    def open(
        self,
        *,
        seed: int,
        geometry: dict[str, int],
        port: int,
        config: dict[str, Any] | None = None,
        lease: float = 30.0,
        timeouts: dict[str, float] | None = None,
    ) -> None:
        shape = Geometry(**geometry)
        memory = shape.content(seed)
        self._agent = Agent(
            MoriioTransport(MoriioConfig(rehearse=False, **(config or {}))),
            config=AgentConfig(name=self._name, lease=lease, lease_margin=0.3),
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
        self._softrdma.delay(seconds)

    def tables(self) -> None:
        """Say what is left, once nothing is under way or 8 s have passed."""
        self.agent.drain(8.0)
        snapshot = self.agent.snapshot()
        self.say(op="tables", tables=snapshot.tables, quarantined=len(snapshot.quarantine))


def _main() -> None:
    # Engines print to standard output; the protocol keeps a descriptor of its own.
    replies = os.dup(1)
    os.dup2(2, 1)
    _die_with_parent()
    with SoftRdma() as softrdma:
        _Inside(sys.argv[1], replies, softrdma).run()


if __name__ == "__main__":
    _main()
