"""A decode worker in this process between a victim and a healthy peer, and the judge of all three.

The decode worker READs from both and is written to by both.  Its free blocks hold a pattern that no
peer sends: whoever takes one looks, and so does ``check_free``, so that a byte that lands after a
block was handed back is seen as a trespass.
"""

from __future__ import annotations

import collections
import faulthandler
import queue
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs
from mori_worker import FREE, Geometry, Worker

from kvxfer import Agent, Blocks
from kvxfer.agent.config import AgentConfig
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.core.events import Drained, Event, Failed, Quarantined, Received
from kvxfer.core.offer import Offer
from kvxfer.errors import KvxferError
from kvxfer.policies.timeouts import Timeouts

__all__ = ["LONGEST", "Life"]

# A busy machine must be able to keep them: the healthy peer's transfers never fail.
TIMEOUTS = Timeouts(connect=5.0, queue=10.0, post=10.0, transfer=10.0, ack=10.0, drain=3.0)
LEASE, MARGIN = 20.0, 0.5
LONGEST = TIMEOUTS.connect + TIMEOUTS.queue + TIMEOUTS.transfer + LEASE + MARGIN
"""No transfer may be open for longer, in seconds: its phases one after the other."""
SLACK = 30.0
"""Seconds that a busy machine may add to a deadline."""
STALL = 3.0
"""Seconds without a round after which all stacks are printed."""
SHAPE = Geometry(layers=2, blocks=96, nbytes=4096)
BLOCKS = 8
IN_FLIGHT = 4
"""Per peer."""
SLOW = 0.0005
"""Seconds per work request, so that some are under way at any moment."""
CONFIG = {"generation_linger_s": 1.0, "generation_drain_s": 2.0, "qp_retry_count": 3}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@attrs.define(kw_only=True)
class Request:
    """One transfer into blocks of ours."""

    worker: Worker
    seed: int
    source: list[int]
    blocks: list[int]
    began: float
    failed_after: float | None = None


class Life:
    """See the module. ``step`` does everything; nothing else waits."""

    def __init__(self, softrdma: Any, seed: int) -> None:
        self.rng = random.Random(seed)
        self.softrdma = softrdma
        self.inbox: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.transport = MoriioTransport(MoriioConfig(rehearse=False, **CONFIG))
        self.agent = Agent(
            self.transport,
            config=AgentConfig(name="decode", lease=LEASE, lease_margin=MARGIN),
            timeouts=TIMEOUTS,
        )
        self.memory = SHAPE.content(0)
        self.memory[:] = FREE
        SHAPE.register(self.agent, self.memory)
        self.free = list(range(SHAPE.blocks))
        self.open: dict[str, Request] = {}
        self.undrained: dict[str, Request] = {}
        self.contents: dict[int, Any] = {}
        self.asked: dict[str, tuple[Worker, list[int]]] = {}
        self.stock: list[tuple[str, Worker, list[int], Offer]] = []
        """Offers that are not pulled yet."""
        self.stocking: set[str] = set()
        self.tables: dict[Worker, dict[str, int]] = {}
        self.count = 0
        self.seeds = 0
        self.ready: set[Worker] = set()
        self.all_workers: list[Worker] = []
        self.stopped: set[Worker] = set()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.landed_late = 0
        """Failed transfers of whose bytes some were there before the blocks were handed back."""
        self.wrong = 0
        self.trespasses = 0
        self.quarantined: list[str] = []
        """Why."""
        self.slowest: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self._last_step = self._watched_at = time.monotonic()
        self.longest_gap = 0.0
        """Seconds between two rounds of this process: what the machine or a held GIL costs."""
        self.healthy = self.open_worker(self.worker("healthy"))
        self.victim = self.open_worker(self.worker("victim"))
        self.spare = self.worker("victim")
        self.until(lambda: {self.healthy, self.victim} <= self.ready, "both peers are up", 60)

    # ---- peers -----------------------------------------------------------------------------

    def worker(self, name: str) -> Worker:
        self.all_workers.append(Worker(name, self.inbox))
        return self.all_workers[-1]

    def open_worker(self, worker: Worker, port: int = 0) -> Worker:
        self.seeds += 1
        self.contents[self.seeds] = SHAPE.content(self.seeds)
        worker.port = port or free_port()
        worker.open(
            seed=self.seeds,
            geometry=SHAPE,
            port=worker.port,
            config=CONFIG,
            lease=LEASE,
            timeouts=attrs.asdict(TIMEOUTS),
        )
        worker.tell(op="delay", seconds=SLOW if worker.name == "healthy" else 4 * SLOW)
        return worker

    def replace_victim(self, *, same_port: bool) -> None:
        """Another process in the place of the one that is gone."""
        old, self.victim = self.victim, self.spare
        self.open_worker(self.victim, old.port if same_port else 0)
        self.spare = self.worker("victim")

    def kill(self) -> None:
        self.victim.process.kill()
        self.victim.process.wait()
        gone = self.victim
        self.stock = [entry for entry in self.stock if entry[1] is not gone]
        self.asked = {name: x for name, x in self.asked.items() if x[0] is not gone}

    def stop(self) -> None:
        self.victim.signal(signal.SIGSTOP)
        self.stopped.add(self.victim)

    def resume(self) -> None:
        self.victim.signal(signal.SIGCONT)
        self.stopped.discard(self.victim)

    # ---- blocks ----------------------------------------------------------------------------

    def take(self) -> list[int] | None:
        if len(self.free) < BLOCKS:
            return None
        self.rng.shuffle(self.free)
        ids, self.free = self.free[:BLOCKS], self.free[BLOCKS:]
        if (self.memory[:, ids] != FREE).any():
            self.trespasses += 1
        return ids

    def give_back(self, ids: list[int]) -> None:
        self.memory[:, ids] = FREE
        self.free.extend(ids)

    def check_free(self) -> None:
        if (self.memory[:, self.free] != FREE).any():
            self.trespasses += 1
            self.memory[:, self.free] = FREE

    # ---- requests --------------------------------------------------------------------------

    def begin(self, worker: Worker) -> str:
        """One more READ from or WRITE by this peer."""
        self.count += 1
        source = self.rng.sample(range(SHAPE.blocks), BLOCKS)
        if self.rng.random() < 0.5:
            return self._ask(worker, source)
        name = f"write-{self.count}"
        ids = self.take()
        if ids is None:
            return name
        self._opened(name, worker, source, ids)
        try:
            self.agent.accept(name, Blocks.at(0, ids))
        except KvxferError as error:
            self._refused(name, error)
            return name
        end = self.agent.endpoint
        worker.tell(op="push", id=name, blocks=source, address=end.address, of=end.incarnation)
        return name

    def _ask(self, worker: Worker, source: list[int]) -> str:
        name = f"read-{self.count}"
        self.asked[name] = (worker, source)
        worker.tell(op="hold", id=name, blocks=source)
        return name

    def gather(self, worker: Worker, offers: int) -> None:
        """Get offers and keep them, to be pulled later."""
        for _ in range(offers):
            self.count += 1
            self.stocking.add(self._ask(worker, self.rng.sample(range(SHAPE.blocks), BLOCKS)))
        self.until(lambda: not self.stocking, "offers in stock", 30)

    def pull_stock(self) -> None:
        stock, self.stock = self.stock, []
        for entry in stock:
            self._pull(*entry)

    def _pull(self, name: str, worker: Worker, source: list[int], offer: Offer) -> None:
        ids = self.take()
        if ids is None:
            self.agent.decline(offer)
            return
        self._opened(name, worker, source, ids)
        try:
            self.agent.pull(offer, Blocks.at(0, ids))
        except KvxferError as error:
            self._refused(name, error)

    def _opened(self, name: str, worker: Worker, source: list[int], ids: list[int]) -> None:
        self.open[name] = Request(
            worker=worker, seed=worker.seed, source=source, blocks=ids, began=time.monotonic()
        )

    def _refused(self, name: str, error: KvxferError) -> None:
        request = self.open.pop(name)
        self.give_back(request.blocks)
        self._over(name, request, f"refused {error.kind.value}")

    def _over(self, name: str, request: Request, what: str) -> None:
        who, op = request.worker.name, name.partition("-")[0]
        age = time.monotonic() - request.began
        self.outcomes[f"{who} {op} {what}"] += 1
        self.slowest[f"{who} {what.partition(' ')[0]}"] = max(
            self.slowest[f"{who} {what.partition(' ')[0]}"], age
        )
        if request.worker is self.healthy and what != "received":
            self.problems.append(f"healthy {name}: {what} after {age:.1f} s")
        if age > LONGEST + SLACK:
            self.problems.append(f"{who} {name}: {what} after {age:.1f} s")

    # ---- one round of everything -------------------------------------------------------------

    def step(self) -> None:
        now = time.monotonic()
        self.longest_gap = max(self.longest_gap, now - self._last_step)
        self._last_step = now
        if now >= self._watched_at + STALL / 4:
            self._watched_at = now
            faulthandler.dump_traceback_later(
                STALL, file=sys.__stderr__
            )  # says who holds up this process
        try:
            worker, message = self.inbox.get(timeout=0.002)
        except queue.Empty:
            pass
        else:
            self._message(worker, message)
        for event in self.agent.poll():
            self._event(event)

    def _message(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["op"] == "ready":
            self.ready.add(worker)
        elif message["op"] == "tables":
            # Also of one whose WRITEs failed while it stood still: their source blocks came back.
            if any(message["tables"].values()) or message["quarantined"]:
                self.problems.append(f"{worker}: {message}")
            self.tables[worker] = message["tables"]
        elif message["op"] == "offer":
            _, source = self.asked.pop(message["id"], (worker, None))
            if source is None:
                return  # the last words of a dead one
            entry = (message["id"], worker, source, Offer.from_json(message["offer"]))
            if message["id"] in self.stocking:
                self.stocking.discard(message["id"])
                self.stock.append(entry)
            else:
                self._pull(*entry)
        elif message["op"] == "refused" and worker is self.healthy:
            self.problems.append(f"healthy refused {message['id']}: {message['why']}")

    def _event(self, event: Event) -> None:
        name = event.transfer_id
        if isinstance(event, Quarantined):
            self.quarantined.append(f"{name}: {event.reason}")
        elif isinstance(event, Received):
            request = self.open.pop(name)
            expected = self.contents[request.seed][:, request.source]
            self.wrong += int((self.memory[:, request.blocks] != expected).sum())
            self.give_back(request.blocks)
            self._over(name, request, "received")
        elif isinstance(event, Failed):
            request = self.open.pop(name)
            self._over(name, request, f"failed {event.kind.value}")
            if event.drained:
                self.give_back(request.blocks)
            else:
                self.undrained[name] = request
        elif isinstance(event, Drained):
            request = self.undrained.pop(name)
            self.landed_late += bool((self.memory[:, request.blocks] != FREE).any())
            self.give_back(request.blocks)

    def keep_busy(self, *workers: Worker) -> None:
        """Begin what is missing to ``IN_FLIGHT`` with each of these peers."""
        for worker in workers:
            under_way = sum(r.worker is worker for r in self.open.values())
            under_way += sum(w is worker for w, _ in self.asked.values())
            if under_way < IN_FLIGHT:
                self.begin(worker)

    def until(self, done: Callable[[], bool], what: str, seconds: float, *busy: Worker) -> float:
        """Go on until ``done``, with traffic to the peers ``busy``; how long it took."""
        began = time.monotonic()
        while not done():
            if time.monotonic() - began > seconds:
                self.problems.append(
                    f"{what}: not within {seconds:.0f} s; open {list(self.open)}, undrained "
                    f"{list(self.undrained)}, quarantined {self.quarantined}, {self.agent.health()}"
                )
                break
            self.keep_busy(*busy)
            self.step()
        return time.monotonic() - began

    def traffic(self, seconds: float, *workers: Worker) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, "traffic", seconds + 60, *workers)

    def under_way(self, worker: Worker) -> bool:
        return any(r.worker is worker for r in (*self.open.values(), *self.undrained.values()))

    def settle(self, what: str, worker: Worker) -> float:
        """Until nothing with that peer is open or may still land, the healthy one being served."""
        seconds = self.until(
            lambda: not self.under_way(worker),
            what,
            LONGEST + 2 * TIMEOUTS.drain + SLACK,
            self.healthy,
        )
        self.check_free()
        return seconds

    def serves(self, what: str, worker: Worker) -> None:
        """The peer's next four transfers of each kind are received."""
        keys = [f"{worker.name} {op} received" for op in ("read", "write")]
        before = [self.outcomes[key] for key in keys]
        failed = self.failed(worker)

        def served() -> bool:
            return all(self.outcomes[k] - b >= 2 for k, b in zip(keys, before, strict=True))

        self.until(served, f"{what}: served again", LONGEST + SLACK, worker, self.healthy)
        if self.failed(worker) != failed:
            self.problems.append(f"{what}: failures after it was up again: {self.outcomes}")

    def failed(self, worker: Worker) -> int:
        return sum(
            n
            for what, n in self.outcomes.items()
            if what.startswith(worker.name) and not what.endswith("received")
        )

    # ---- the end ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Let everything end, and count what is left."""
        for worker in (self.victim, self.healthy):
            self.settle("the end", worker)
        self.until(lambda: not self.asked, "offers", 30)
        self.until(lambda: not self.open and not self.undrained, "the last pulls", 30)
        for worker in (self.victim, self.healthy):
            worker.tell(op="tables")
        self.until(lambda: {self.victim, self.healthy} <= set(self.tables), "tables", 60)
        for name, *_, offer in self.stock:
            self.problems.append(f"offer {name} {offer.transfer_id} is left")
        self.agent.drain(30.0)
        self.check_free()

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.softrdma.reset()
        self.agent.close()
        for worker in self.all_workers:
            if worker in self.stopped:
                worker.signal(signal.SIGCONT)
            worker.end()
