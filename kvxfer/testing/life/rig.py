"""A decode worker in this process between a victim and a healthy peer, and the judge of all three.

The decode worker READs from both and is written to by both, over real engines.  Its free blocks
hold a pattern that no peer sends: whoever takes one looks, and so does ``check_free``, so that a
byte that lands after a block was handed back is seen as a trespass.
"""

from __future__ import annotations

import collections
import errno
import faulthandler
import queue
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.agent import Agent, AgentConfig
from kvxfer.core.events import BackendChanged, Drained, Event, Failed, Quarantined, Received
from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Offer
from kvxfer.core.plugins import create_transport
from kvxfer.errors import KvxferError
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.life.geometry import FREE, Geometry
from kvxfer.testing.life.worker import Worker
from kvxfer.testing.softrdma.codes import WcStatus

if TYPE_CHECKING:
    from kvxfer.policies.failover import Failover
    from kvxfer.testing.softrdma import SoftRdma

__all__ = ["SLACK", "TIMEOUTS", "Backends", "Life"]

Backends = Sequence[tuple[str, dict[str, Any]]]
"""Names of backends and their options as JSON values, the preferred one first."""

# A busy machine must be able to keep them: the healthy peer's transfers never fail.
TIMEOUTS = Timeouts(connect=5.0, queue=10.0, post=10.0, transfer=10.0, ack=10.0, drain=3.0)
LEASE, MARGIN = 20.0, 0.5
SLACK = 30.0
"""Seconds that a busy machine may add to a deadline."""
STALL = 3.0
"""Seconds without a round after which all stacks are printed."""
SHAPE = Geometry(layers=2, blocks=96, nbytes=4096)
BLOCKS = 8
IN_FLIGHT = 4
"""Per peer."""


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
    again: bool = False
    """Its first try failed, and this one has fresh blocks."""


class Seen:
    """What a run has seen so far."""

    def __init__(self) -> None:
        self.tables: dict[Worker, dict[str, int]] = {}
        self.counters: dict[Worker, dict[str, int]] = {}
        """What a peer said at the end."""
        self.executed: dict[Worker, int] = {}
        """Work requests that a peer's software RDMA device has carried out, as it said last."""
        self.changes: list[BackendChanged] = []
        """Of this side."""
        self.their_changes: list[tuple[Worker, str, str, bool]] = []
        """Of the peers: before, backend, whether down."""
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.slowest: dict[str, float] = {}
        self.wrong = 0
        self.trespasses = 0
        self.landed_late = 0
        """Failed transfers of whose bytes some were there before the blocks were handed back."""
        self.tried_again = 0
        """Pushes that were begun again into fresh blocks."""
        self.they_were_asked = 0
        """Pushes of which the peer was told that they need fresh blocks."""
        self.reclaimed = 0
        """Transfers of the dead whose blocks nothing but their user could take back."""
        self.quarantined: dict[str, str] = {}
        """Why, by transfer."""
        self.problems: list[str] = []
        self.longest_gap = 0.0
        """Seconds between two rounds of this process: what the machine or a held GIL costs."""

    def __str__(self) -> str:
        slowest = {name: round(seconds, 2) for name, seconds in self.slowest.items()}
        return (
            f"{dict(self.outcomes)}\nslowest {slowest}, longest gap {self.longest_gap:.2f} s\n"
            f"tried again {self.tried_again}, landed late {self.landed_late}, reclaimed "
            f"{self.reclaimed}, problems {len(self.problems)}\nquarantined for a while: "
            f"{self.quarantined}"
        )


class Life(Seen):
    """See the module. ``step`` does everything; nothing else waits.

    Args:
        backends: of all three.
        fences: what a dead or stopped peer leaves undrained is proven drained by a fence. Where no
            fence is to be had, such blocks stay in quarantine until the peer goes on, or, if it is
            dead, until they are reclaimed at the end.
        softrdma: the device under MoRI-IO, which ``slow`` slows down: seconds per work request.
        writes: peers push as well.
        aborts: the engine may end the process (SIGABRT) of a peer that was stopped and goes on:
            UCX over tcp does, see docs/limits.md. Another one takes its place then.

    With ``failover``, a push that is given up because nothing proves it drained is begun again into
    fresh blocks, as its error says; at the second try it must be received.
    """

    def __init__(
        self,
        backends: Backends,
        *,
        seed: int = 1,
        fences: bool = False,
        failover: Failover | None = None,
        softrdma: SoftRdma | None = None,
        slow: float = 0.0,
        writes: bool = True,
        aborts: bool = False,
        shape: Geometry = SHAPE,
        timeouts: Timeouts = TIMEOUTS,
        lease: float = LEASE,
    ) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.backends = [(name, dict(options)) for name, options in backends]
        self.fences = fences
        self.failover = failover
        self.softrdma = softrdma
        self.slow = slow
        self.writes = writes
        self.aborts = aborts
        self.shape = shape
        self.timeouts = timeouts
        self.lease = lease
        self.longest = timeouts.connect + timeouts.queue + timeouts.transfer + lease + MARGIN
        """No transfer may be open for longer, in seconds: its phases one after the other."""
        self.inbox: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.transports = {n: create_transport(n, options or None) for n, options in backends}
        self.agent = Agent(
            list(self.transports.values()),
            config=AgentConfig(name="decode", lease=lease, lease_margin=MARGIN, failover=failover),
            timeouts=timeouts,
        )
        self.memory = shape.memory(0)
        self.memory[:] = FREE
        shape.register(self.agent, self.memory)
        self.free = list(range(shape.blocks))
        self.open: dict[str, Request] = {}
        self.undrained: dict[str, Request] = {}
        self._again: list[Request] = []
        """Pushes that wait for fresh blocks."""
        self.contents: dict[int, Any] = {}
        self.asked: dict[str, tuple[Worker, list[int]]] = {}
        self.stock: list[tuple[str, Worker, list[int], Offer]] = []
        """Offers that are not pulled yet."""
        self.stocking: set[str] = set()
        self.count = 0
        self.seeds = 0
        self.ready: set[Worker] = set()
        self.all_workers: list[Worker] = []
        self.stopped: set[Worker] = set()
        self.went_on: set[Worker] = set()
        """Peers that were stopped once."""
        self.aborted = 0
        """Of those, how many their engine has ended."""
        self.ports: dict[Worker, int] = {}
        self.dead: set[Worker] = set()
        self.cut: set[Worker] = set()
        """Peers of which one engine has ended."""
        self._last_step = self._watched_at = time.monotonic()
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
        self.contents[self.seeds] = self.shape.content(self.seeds)
        self.ports[worker] = port or free_port()
        worker.open(
            seed=self.seeds,
            geometry=self.shape,
            port=self.ports[worker],
            backends=self.backends,
            failover=None if self.failover is None else attrs.asdict(self.failover),
            lease=self.lease,
            timeouts=attrs.asdict(self.timeouts),
        )
        if self.slow:
            seconds = self.slow if worker.name == "healthy" else 4 * self.slow
            worker.tell(op="delay", seconds=seconds)
        return worker

    def replace_victim(self, *, same_port: bool) -> None:
        """Another process in the place of the one that is gone."""
        old, self.victim = self.victim, self.spare
        self.open_worker(self.victim, self.ports[old] if same_port else 0)
        self.spare = self.worker("victim")

    def kill(self, *, vanish: bool = False) -> None:
        """``vanish``: its connections do not end with it."""
        if vanish:
            self.victim.tell(op="vanish")
        else:
            self.victim.process.kill()
        self.victim.process.wait()
        gone = self.victim
        self._forget(gone)

    def _forget(self, gone: Worker) -> None:
        """It is dead: nothing is expected of it any more."""
        self.dead.add(gone)
        self.stock = [entry for entry in self.stock if entry[1] is not gone]
        self.asked = {name: x for name, x in self.asked.items() if x[0] is not gone}
        self._again = [request for request in self._again if request.worker is not gone]

    def stop(self) -> None:
        self.victim.signal(signal.SIGSTOP)
        self.stopped.add(self.victim)

    def resume(self) -> None:
        self.victim.signal(signal.SIGCONT)
        self.stopped.discard(self.victim)
        self.went_on.add(self.victim)

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
        source = self.rng.sample(range(self.shape.blocks), BLOCKS)
        if not self.writes or self.rng.random() < 0.5:
            return self._ask(worker, source)
        return self._accept(worker, source)

    def _accept(self, worker: Worker, source: list[int], first: Request | None = None) -> str:
        name = f"write-{self.count}"
        ids = self.take()
        if ids is None:
            return name
        self._opened(name, worker, source, ids)
        if first is not None:
            self.open[name].again = True
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
            self.stocking.add(self._ask(worker, self.rng.sample(range(self.shape.blocks), BLOCKS)))
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
        kind = f"{who} {what.partition(' ')[0]}"
        self.slowest[kind] = max(self.slowest.get(kind, 0.0), age)
        if request.worker is self.healthy and what != "received":
            self.problems.append(f"healthy {name}: {what} after {age:.1f} s")
        if age > self.longest + SLACK:
            self.problems.append(f"{who} {name}: {what} after {age:.1f} s")

    # ---- one round of everything -------------------------------------------------------------

    def step(self) -> None:
        now = time.monotonic()
        self.longest_gap = max(self.longest_gap, now - self._last_step)
        self._last_step = now
        if now >= self._watched_at + STALL / 4:
            self._watched_at = now
            faulthandler.dump_traceback_later(
                STALL, file=sys.__stderr__ or sys.stderr
            )  # says who holds up this process
        try:
            worker, message = self.inbox.get(timeout=0.002)
        except queue.Empty:
            pass
        else:
            self._message(worker, message)
        for event in self.agent.poll():
            self._event(event)
        self._begin_again()

    def _message(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["op"] == "ready":
            self.ready.add(worker)
        elif message["op"] == "tables":
            self._check_tables(worker, message)
            self.tables[worker] = message["tables"]
            self.counters[worker] = message["counters"]
        elif message["op"] == "gone" and worker not in self.dead:
            status = worker.process.wait(10)
            if self.aborts and worker in self.went_on and status == -signal.SIGABRT:
                self.aborted += 1
                self._forget(worker)
            else:
                self.problems.append(f"{worker} died by itself, with status {status}")
        elif message["op"] == "event":
            self.they_were_asked += message["fresh"]
        elif message["op"] == "device":
            self.executed[worker] = message["executed"]
        elif message["op"] == "changed":
            change = (worker, message["before"], message["backend"], message["down"])
            self.their_changes.append(change)
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

    def _check_tables(self, worker: Worker, message: dict[str, Any]) -> None:
        """Nothing is left, also of one whose WRITEs failed while it stood still.

        An engine that has no fence cannot say that it reads their source no more: then those blocks
        are in quarantine, visibly, until their user takes them back.
        """
        left = {k: n for k, n in message["tables"].items() if n}
        kept = message["quarantined"]
        if kept and not self.fences and worker is not self.healthy:
            left.pop("in_flight_pieces", 0)
            left = {k: n for k, n in left.items() if k not in ("pushes", "draining") or n != kept}
            kept = 0
        if left or kept:
            self.problems.append(f"{worker}: {message}")

    def _event(self, event: Event) -> None:
        name = event.transfer_id
        if isinstance(event, BackendChanged):
            self.changes.append(event)
        elif isinstance(event, Quarantined):
            self.quarantined[name] = event.reason
        elif isinstance(event, Received):
            request = self.open.pop(name)
            expected = self.contents[request.seed][:, request.source]
            self.wrong += int((self.memory[:, request.blocks] != expected).sum())
            self.give_back(request.blocks)
            self._over(name, request, "received")
        elif isinstance(event, Failed):
            request = self.open.pop(name)
            self._over(name, request, f"failed {event.kind.value}")
            self._try_again(request, event)
            if event.drained:
                self.give_back(request.blocks)
            else:
                self.undrained[name] = request
        elif isinstance(event, Drained):
            request = self.undrained.pop(name)
            if event.drained_by == "reclaim":
                self.memory[:, request.blocks] = FREE
            self.landed_late += bool((self.memory[:, request.blocks] != FREE).any())
            self.give_back(request.blocks)

    def _try_again(self, request: Request, event: Failed) -> None:
        """A push that nothing proves drained, because its engine died, into fresh blocks."""
        name, worker = event.transfer_id, request.worker
        if event.fresh_blocks and name.startswith("write") and not request.again:
            if worker not in self.dead:
                self.tried_again += 1
                self._again.append(request)
        elif worker in self.cut:
            self.problems.append(f"{name} is lost: {event.error}")

    def _begin_again(self) -> None:
        """What waits for fresh blocks, as far as there are any."""
        while self._again and len(self.free) >= BLOCKS:
            self.count += 1
            request = self._again.pop(0)
            self._accept(request.worker, request.source, request)

    def end_engine(self, worker: Worker, backend: str) -> None:
        """End one engine of a peer, which lives on."""
        self.cut.add(worker)
        worker.tell(op="end_engine", backend=backend)

    def end_own_engine(self, backend: str) -> None:
        """End one engine of this side."""

        def end(_now: float) -> None:
            self.transports[backend].close(1.0)

        self.agent._engine.order(end)
        self.cut |= {self.victim, self.healthy}

    def break_device(self, worker: Worker) -> None:
        """The RDMA device of a peer makes no queue pair until ``mend_device``, and one of those
        over which we read from it dies.

        The other peer is left alone until that has happened, so that it is not the one that is hit.
        """
        assert self.softrdma is not None
        device = self.softrdma
        worker.tell(op="break_device", error=errno.ENOMEM)
        self.alone(worker)
        failed = device.counters().failed
        device.fail_next(WcStatus.GENERAL)
        self.until(lambda: device.counters().failed > failed, "a failure", 30, worker)

    def mend_device(self, worker: Worker) -> None:
        worker.tell(op="mend_device")

    def alone(self, worker: Worker) -> None:
        """Go on until nothing is under way with any other peer."""

        def others() -> bool:
            asked = any(w is not worker for w, _ in self.asked.values())
            return asked or any(self.under_way(w) for w in self.ready if w is not worker)

        self.until(lambda: not others(), "the other peers are quiet", self.longest, worker)

    def count_devices(self, worker: Worker) -> tuple[int, int]:
        """Work requests that our RDMA device and that of a peer have carried out."""
        assert self.softrdma is not None
        self.executed.pop(worker, None)
        worker.tell(op="count_device")
        self.until(lambda: worker in self.executed, "what the device has done", 30)
        return self.softrdma.counters().executed, self.executed[worker]

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

    def is_open(self, worker: Worker) -> bool:
        return any(r.worker is worker for r in (*self.open.values(), *self._again))

    def under_way(self, worker: Worker) -> bool:
        undrained = any(r.worker is worker for r in self.undrained.values())
        return undrained or self.is_open(worker)

    def settle(self, what: str, worker: Worker) -> float:
        """Until nothing with that peer is open or may still land, the healthy one being served
        unless it is that peer.

        Where only the peer itself could tell what still lands, while it cannot: until nothing is
        open.
        """

        def under_way() -> bool:
            # Looked at each time: a peer may die in between.
            silent = not self.fences and worker in (self.stopped | self.dead | self.cut)
            return self.is_open(worker) if silent else self.under_way(worker)

        seconds = self.until(
            lambda: not under_way(),
            what,
            self.longest + 2 * self.timeouts.drain + SLACK,
            *(() if worker is self.healthy else (self.healthy,)),
        )
        self.check_free()
        return seconds

    def serves(self, what: str, worker: Worker) -> None:
        """The peer's next transfers of each kind are received."""
        kinds = ("read", "write") if self.writes else ("read",)
        keys = [f"{worker.name} {op} received" for op in kinds]
        before = [self.outcomes[key] for key in keys]
        failed = self.failed(worker)

        def served() -> bool:
            return all(self.outcomes[k] - b >= 2 for k, b in zip(keys, before, strict=True))

        self.until(served, f"{what}: served again", self.longest + SLACK, worker, self.healthy)
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
        self.until(lambda: not (self.open or self._again), "the last pulls", 30)
        self.check_free()
        for name, request in tuple(self.undrained.items()):
            if self.fences or request.worker not in self.dead | self.cut:
                continue
            # Nobody is left who could tell. Whoever takes the blocks back knows that.
            self._until_quarantined(name)
            self.agent.reclaim(name)
            self.reclaimed += 1
        self.until(lambda: not self.undrained, "the last pulls, drained", 30)
        for worker in (self.victim, self.healthy):
            worker.tell(op="tables")
        self.until(lambda: {self.victim, self.healthy} <= set(self.tables), "tables", 60)
        for name, *_, offer in self.stock:
            self.problems.append(f"offer {name} {offer.transfer_id} is left")
        self.agent.drain(30.0)
        self.check_free()

    def _until_quarantined(self, name: str) -> None:
        seconds = 2 * self.timeouts.drain + SLACK
        self.until(lambda: name in self.quarantined, f"{name}: in quarantine", seconds)

    def judge(self, *, hit: bool = True) -> None:
        """Raise AssertionError unless everything held. ``hit``: some transfers must have failed."""
        assert not self.problems, self.problems
        assert (self.wrong, self.trespasses) == (0, 0)
        snapshot = self.agent.snapshot()
        assert snapshot.quarantine == (), snapshot.quarantine
        assert len(self.free) == len(set(self.free)) == self.shape.blocks
        assert not any(snapshot.tables.values()), snapshot.tables
        failed = sum(n for what, n in self.outcomes.items() if "failed" in what)
        assert failed > 0 or not hit, "nothing was hit: the rounds show nothing"

    # ---- what happens to a peer --------------------------------------------------------------

    def round(self, number: int, what: str) -> float:
        """Under load, ``killed``, ``vanished``, ``stopped`` or ``restarted``; then it serves again.

        Returns how many seconds that took.
        """
        name = f"round {number}, {what}"
        self.gather(self.victim, 2)
        self.traffic(self.rng.uniform(0.05, 0.4), self.victim, self.healthy)
        began = time.monotonic()
        getattr(self, f"_{what}")(name)
        self.until(lambda: self.victim in self.ready, f"{name}: it is up", 60, self.healthy)
        self.serves(name, self.victim)
        return time.monotonic() - began

    def _killed(self, what: str) -> None:
        """Dead for as long as its transfers take to end; another process takes over later."""
        self.kill()
        self.pull_stock()
        self.settle(f"{what}: after the death", self.victim)
        self.replace_victim(same_port=False)

    def _vanished(self, what: str) -> None:
        """As if its machine had lost power: it is dead, and its connections stay open."""
        self.kill(vanish=True)
        self.pull_stock()
        self.settle(f"{what}: after the death", self.victim)
        self.replace_victim(same_port=False)

    def _restarted(self, what: str) -> None:
        """Another process at the same address at once, while the transfers of the old one fail."""
        old = self.victim
        self.kill()
        self.pull_stock()
        self.replace_victim(same_port=True)
        self.settle(f"{what}: the old one's transfers", old)

    def _stopped(self, what: str) -> None:
        """SIGSTOP until all its transfers have ended, then SIGCONT: late bytes harm nobody."""
        self.stop()
        self.pull_stock()
        self.settle(f"{what}: while it stands still", self.victim)
        self.resume()
        self.settle(f"{what}: after it goes on", self.victim)
        self.traffic(0.3, self.healthy)  # in which it sends what it still had to send
        self.check_free()
        if self.victim in self.dead:
            self.replace_victim(same_port=False)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self.softrdma is not None:
            self.softrdma.reset()
        self.agent.close()
        for worker in self.all_workers:
            if worker in self.stopped:
                worker.signal(signal.SIGCONT)
            worker.end()
