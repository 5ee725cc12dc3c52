"""One agent in a process of its own, told what to do in lines of JSON. See ``test_keeper_process``.

The main thread does nothing but wait for orders, so that the agent's threads have the GIL, except
while it is told to hold it in a C call.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import time
from typing import Any

import numpy as np
from agent_rig import HEAD_NBYTES, HEADS, TOKENS, at, layout

from kvxfer.agent import Agent, AgentConfig
from kvxfer.backends.shm import allocate
from kvxfer.core.offer import Offer
from kvxfer.keeper.config import KeeperConfig
from kvxfer.policies.timeouts import Timeouts

BLOCKS = 16
LAYERS = ("first", "second")


class Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        keeper = options.pop("keeper", {})
        self.agent = Agent(
            "shm",
            config=AgentConfig(
                keeper=None if keeper is None else KeeperConfig(**keeper), **options
            ),
            timeouts=Timeouts(connect=20, queue=30, transfer=60),
        )
        self.memory = {}
        for number, name in enumerate(LAYERS):
            array = allocate((2, BLOCKS, TOKENS, HEADS, HEAD_NBYTES), np.uint8)
            if options["name"] == "prefill":
                rng = np.random.default_rng(number)
                array[:] = rng.integers(0, 256, size=array.shape, dtype=np.uint8)
            self.memory[name] = array
        self.agent.register_kv_caches(self.memory, layout(BLOCKS))
        self.handles: dict[str, Any] = {}
        self.events: list[str] = []

    def answer(self, what: str, args: dict[str, Any]) -> Any:
        return getattr(self, what)(**args)

    def state(self) -> dict[str, Any]:
        self.events += [type(e).__name__ for e in self.agent.poll()]
        health = self.agent.health()
        port = self.agent._ctx.keeping._port
        return {
            "keeper": None if port is None else port.pid,
            "ready": self.told(),
            "address": self.agent._ctx.keeping.address,
            "peers": {
                link.incarnation: link.keeper.address if link.keeper else ""
                for link in self.agent._engine.links
            },
            "reasons": list(health.reasons),
            "events": self.events,
            "counters": self.agent.snapshot().counters,
            "tables": self.agent.snapshot().tables,
            "states": {name: h.state.value for name, h in self.handles.items()},
            "errors": {name: str(h.error) for name, h in self.handles.items()},
            "incarnation": self.agent.incarnation,
        }

    def told(self) -> bool:
        """The keeper is up and has heard all that the agent had to say when it came up."""
        keeping = self.agent._ctx.keeping
        quiet = not (keeping._orders or keeping._frames or keeping._untold)
        return keeping._ready and quiet and keeping._heard_at > keeping._ready_at

    def connect(self, address: str) -> None:
        self.agent.connect([address])

    def address(self) -> str:
        return self.agent.address

    def hold(self, transfer_id: str, ids: list[int]) -> str:
        return self.agent.hold(transfer_id, at(0, *ids)).to_json()

    def pull(self, offer: str, ids: list[int], layer: str, last: bool) -> None:
        parsed = Offer.from_json(offer)
        self.handles[parsed.transfer_id] = self.agent.pull(
            parsed, at(0, *ids), layers=[layer], last=last
        )

    def granted_until(self, transfer_id: str) -> float:
        pull = self.agent._engine.consumer.pulls.get(transfer_id)
        return -1.0 if pull is None else max(s.granted_until for s in pull._sources)

    def hold_gil(self, seconds: float) -> float:
        """A C call that does not let go of the GIL. Returns how long it really took."""
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))
        return time.monotonic() - began

    def digest(self, ids: list[int]) -> str:
        found = hashlib.sha256()
        for name in LAYERS:
            found.update(self.memory[name][:, ids].tobytes())
        return found.hexdigest()

    def close(self) -> None:
        self.agent.close()


def main() -> None:
    worker = Worker(json.loads(sys.stdin.readline()))
    print(json.dumps("up"), flush=True)
    for line in sys.stdin:
        what, args = json.loads(line)
        print(json.dumps(worker.answer(what, args)), flush=True)


if __name__ == "__main__":
    main()
