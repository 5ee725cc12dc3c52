"""Both halves of a connector, for an engine of your own: block tables above, KV caches below.

An engine has a scheduler, which knows requests and block ids and has no memory, and a worker per
tensor-parallel rank, which has the memory and decides nothing.  kvxfer is cut the same way: a
``SchedulerAgent`` makes orders out of block ids, an ``Agent`` per worker carries them out and
reports.  Orders, reports and offers are plain data, whatever carries them.

Here prefill has two ranks and decode four, all in this process.

Run: python examples/minimal_connector.py
"""

from __future__ import annotations

import pickle
import time

import numpy as np

from kvxfer import Agent, Blocks, KVLayout, KVSpec, Offer
from kvxfer.agent import AgentConfig, SchedulerAgent
from kvxfer.core.events import Declined, Drained, Expired, Failed, Quarantined, Received, Role, Sent
from kvxfer.core.topology import Ranks

HEADS, TOKENS, SIZE, BLOCKS = 4, 16, 32, 64
LAYERS = ("layers.0", "layers.1")


class Worker:
    """One rank: its part of the heads, in a cache of its own."""

    def __init__(self, rank: int, tp: int) -> None:
        heads = HEADS // tp
        spec = KVSpec(tokens_per_block=TOKENS, heads=heads, head_size=SIZE, planes=2)
        shape = (2, BLOCKS, TOKENS, heads, SIZE)
        self.caches = {name: np.zeros(shape, np.float16) for name in LAYERS}
        ranks = Ranks(tp_size=tp, tp_rank=rank, total_kv_heads=HEADS)
        # The fingerprint names the model: equal shapes of another one must not be mixed up.
        config = AgentConfig(name=f"rank-{rank}", fingerprint="a-model, fp16", keeper=None)
        self.agent = Agent("loopback", ranks=ranks, config=config)
        self.agent.register_kv_caches(
            self.caches, KVLayout.from_tensor(self.caches[LAYERS[0]], spec)
        )

    def step(self, orders: bytes) -> bytes:
        """Once per forward pass, before it. Nothing here waits."""
        self.agent.execute(pickle.loads(orders))
        return pickle.dumps(self.agent.report())


class Scheduler:
    """The block table, and what happens to it when a transfer ends."""

    def __init__(self, workers: list[Worker]) -> None:
        self.agent = SchedulerAgent(worker.agent.info for worker in workers)
        self.free = list(range(BLOCKS))
        self.table: dict[str, list[int]] = {}
        self.ready: list[str] = []  # requests whose KV has arrived
        self.recompute: list[str] = []  # requests whose KV will not come

    def allocate(self, request: str, count: int) -> list[int]:
        self.table[request], self.free = self.free[:count], self.free[count:]
        return self.table[request]

    def hand_over(self, request: str) -> str:
        """Prefill: the request is computed. Its blocks stay until decode has read them."""
        return self.agent.hold(request, Blocks.at(0, self.table[request])).to_json()

    def admit(self, request: str, offer: str, cached: int = 0) -> None:
        """Decode: fetch what ``cached`` blocks of a prefix hit do not cover already."""
        held = Offer.from_json(offer)
        blocks = self.allocate(request, len(held.groups[0]) - cached)
        # Pairing is by position: these blocks begin ``cached`` blocks into the prompt.
        self.agent.pull(held, Blocks.at(cached, blocks))

    def step(self, reports: list[bytes]) -> None:
        """Once per step: an event comes out when all ranks have reported theirs."""
        for event in self.agent.apply(pickle.loads(report) for report in reports):
            request = event.transfer_id
            match event:
                case Received():
                    self.ready.append(request)
                case Sent() | Declined() | Expired():
                    self._release(request)
                case Failed(role=role, drained=drained):
                    if role is Role.CONSUMER:
                        self.recompute.append(request)
                    if drained:  # otherwise bytes may still land: the blocks wait for Drained
                        self._release(request)
                case Drained():
                    self._release(request)
                case Quarantined():
                    print(f"{request}: nobody knows whether its blocks are safe; they stay pinned")

    def _release(self, request: str) -> None:
        self.free += self.table.pop(request, [])


class Engine:
    """An instance: one scheduler, a worker per rank, and a loop."""

    def __init__(self, tp: int) -> None:
        self.workers = [Worker(rank, tp) for rank in range(tp)]
        self.scheduler = Scheduler(self.workers)

    def step(self) -> None:
        orders = pickle.dumps(self.scheduler.agent.take_orders())
        self.scheduler.step([worker.step(orders) for worker in self.workers])
        # Here an engine runs its forward pass.

    def heads(self, layer: str, block: int) -> np.ndarray:
        """One block with the heads of all ranks."""
        parts = [worker.caches[layer][:, block] for worker in self.workers]
        return np.concatenate(parts, axis=2)


def run(prefill: Engine, decode: Engine, request: str, blocks: int, cached: int) -> None:
    """One request, from the router's point of view."""
    mine = prefill.scheduler.allocate(request, blocks)
    for worker in prefill.workers:
        for cache in worker.caches.values():
            cache[:, mine] = np.random.rand(*cache[:, mine].shape)
    offer = prefill.scheduler.hand_over(request)
    decode.scheduler.admit(request, offer, cached)
    deadline = time.monotonic() + 60
    while request not in decode.scheduler.ready or request in prefill.scheduler.table:
        assert request not in decode.scheduler.recompute
        assert time.monotonic() < deadline
        prefill.step()
        decode.step()
    for theirs, ours in zip(mine[cached:], decode.scheduler.table[request], strict=True):
        for layer in LAYERS:
            assert np.array_equal(prefill.heads(layer, theirs), decode.heads(layer, ours))
    print(f"{request}: {blocks - cached} blocks, every byte of {HEADS} heads is right")


def main() -> None:
    prefill, decode = Engine(tp=2), Engine(tp=4)
    run(prefill, decode, "request-1", blocks=7, cached=0)
    run(prefill, decode, "request-2", blocks=9, cached=4)
    assert len(prefill.scheduler.free) == BLOCKS  # nothing leaked
    for worker in (*prefill.workers, *decode.workers):
        worker.agent.close()


if __name__ == "__main__":
    main()
