"""One worker process of the soak: an agent (over shm unless it is given another one), a block
allocator, and a check of every byte.

Commands are JSON lines on standard input, messages JSON lines on standard output.  Both READ and
WRITE, both roles.  Blocks that are free hold a pattern, and whoever takes them checks it: what
landed after a block was handed back is counted as a trespass.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from typing import Any

import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.backends.shm import ShmTransport, allocate
from kvxfer.core.events import (
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    Quarantined,
    Received,
    Sent,
)
from kvxfer.core.layout import Blocks, KVLayout
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.errors import KvxferError
from kvxfer.policies.timeouts import Timeouts

LAYERS, BLOCKS, NBYTES, TOKENS = 3, 64, 128 << 10, 16
FREE = 0xEE
TIMEOUTS = Timeouts(connect=2.0, queue=3.0, post=2.0, transfer=5.0, ack=4.0, drain=0.5)
LEASE, MARGIN = 4.0, 0.3
LONGEST = TIMEOUTS.connect + TIMEOUTS.queue + TIMEOUTS.transfer + TIMEOUTS.ack + LEASE + MARGIN
"""No transfer may be open for longer, in seconds."""

LAYOUT = KVLayout(
    num_blocks=BLOCKS,
    block_stride=NBYTES,
    kernel_tokens=TOKENS,
    token_stride=NBYTES // TOKENS,
    head_nbytes=NBYTES // TOKENS,
    dtype="uint8",
)
_TABLE = np.random.default_rng(7).integers(0, FREE, size=NBYTES + 65521, dtype=np.uint8)


def content(index: int, layer: int, position: int) -> Any:
    """What a block of a request holds: uint8[NBYTES]."""
    start = (index * 7919 + layer * 104729 + position * 1299709) % 65521
    return _TABLE[start : start + NBYTES]


class Worker:
    """See the module."""

    def __init__(self, agent: Agent) -> None:
        self.memory = allocate((LAYERS, BLOCKS, NBYTES), np.uint8)
        self.memory[:] = FREE
        self.agent = agent
        layers = {f"layer{i}": self.memory[i] for i in range(LAYERS)}
        self.agent.register_kv_caches(layers, LAYOUT)
        self.free = list(range(BLOCKS))
        self.held: dict[str, list[int]] = {}
        self.index: dict[str, int] = {}
        self.receiving: set[str] = set()
        self.trespasses = 0
        self.waiting: list[dict[str, Any]] = []
        self.finishing = False
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    # ---- blocks --------------------------------------------------------------------------------

    def take(self, name: str, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        ids = [self.free.pop() for _ in range(count)]
        if (self.memory[:, ids] != FREE).any():
            self.trespasses += 1
            self.memory[:, ids] = FREE
        self.held[name] = ids
        return ids

    def give_back(self, name: str) -> None:
        ids = self.held.pop(name, [])
        self.memory[:, ids] = FREE
        self.free.extend(ids)
        self.receiving.discard(name)

    def fill(self, index: int, ids: list[int]) -> None:
        for position, block in enumerate(ids):
            for layer in range(LAYERS):
                self.memory[layer, block] = content(index, layer, position)

    def wrong(self, index: int, ids: list[int]) -> int:
        return sum(
            int(np.count_nonzero(self.memory[layer, block] != content(index, layer, position)))
            for position, block in enumerate(ids)
            for layer in range(LAYERS)
        )

    # ---- commands ------------------------------------------------------------------------------

    def begin(self, command: dict[str, Any]) -> bool:
        """False while there are too few free blocks."""
        name, index = command["id"], command["index"]
        ids = self.take(name, command["blocks"])
        if ids is None:
            return False
        self.index[name] = index
        blocks = Blocks.at(0, ids)
        try:
            match command["op"]:
                case "hold":
                    self.fill(index, ids)
                    self.say(op="offer", id=name, offer=self.agent.hold(name, blocks).to_json())
                case "pull":
                    self.receiving.add(name)
                    self.agent.pull(Offer.from_json(command["offer"]), blocks)
                case "accept":
                    self.receiving.add(name)
                    self.agent.accept(name, blocks)
                    end = self.agent.endpoint
                    self.say(op="target", id=name, address=end.address, of=end.incarnation)
                case "push":
                    self.fill(index, ids)
                    to = Endpoint(address=command["address"], incarnation=command["of"])
                    self.agent.push(name, blocks, to=to)
                    self.agent.seal(name, name.encode())
        except KvxferError as error:
            self.give_back(name)
            self.say(op="over", id=name, outcome=f"refused: {error}", wrong=0)
        return True

    def on_event(self, event: Event) -> None:
        name = event.transfer_id
        match event:
            case Received():
                wrong = self.wrong(self.index[name], self.held[name])
                self.say(op="over", id=name, outcome="received", wrong=wrong)
            case Sent() | Declined() | Expired():
                self.say(op="over", id=name, outcome=type(event).__name__.lower(), wrong=0)
            case Failed():
                outcome = f"failed {event.kind.value}"
                self.say(op="over", id=name, outcome=outcome, wrong=0, why=str(event.error))
                if not event.drained:
                    return
            case Quarantined():
                self.say(op="quarantined", id=name, reason=event.reason)
                return
            case Drained():
                self.say(op="drained", id=name)
            case _:
                return
        self.give_back(name)

    # ---- the loop ------------------------------------------------------------------------------

    def say(self, **message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        self.say(op="ready")
        while True:
            for command in self._take_commands():
                if command is None:
                    self.agent.close(0.0)
                    return
                match command["op"]:
                    case "finish":
                        self.finishing = True
                    case "reclaim":
                        self.agent.reclaim(command["id"])
                    case _:
                        self.waiting.append(command)
            while self.waiting and self.begin(self.waiting[0]):
                del self.waiting[0]
            for event in self.agent.poll():
                self.on_event(event)
            if self.finishing and not self.waiting and not self.held:
                snapshot = self.agent.snapshot()
                if not any(snapshot.tables.values()):
                    self.finish(snapshot)
                    return

    def finish(self, snapshot: Any) -> None:
        taken = self.take("all", len(self.free)) or []
        self.say(
            op="final",
            leaked=BLOCKS - len(taken),
            trespasses=self.trespasses,
            quarantined=len(snapshot.quarantine),
            tables=snapshot.tables,
        )
        self.agent.close()

    def _take_commands(self) -> list[dict[str, Any] | None]:
        found = []
        try:
            found.append(self._commands.get(timeout=0.002))
            while True:
                found.append(self._commands.get_nowait())
        except queue.Empty:
            return found

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put(None)


def main() -> None:
    """A worker over shm, called by the first argument."""
    config = AgentConfig(name=sys.argv[1], lease=LEASE, lease_margin=MARGIN)
    Worker(Agent(ShmTransport(), config=config, timeouts=TIMEOUTS)).run()


if __name__ == "__main__":
    main()
