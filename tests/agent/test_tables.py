"""Promise 8: after N requests of every outcome all tables but the quarantine are empty again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import attrs
import pytest
from agent_rig import Node, Rig, at
from census import census

from kvxfer.agent.config import Limits
from kvxfer.core import wire
from kvxfer.core.acks import Ack, AckReconciler
from kvxfer.core.channel import Inbound
from kvxfer.core.layout import Blocks
from kvxfer.core.leases import LeaseTable, Refusal
from kvxfer.core.reliable import Inbox
from kvxfer.core.remembered import Remembered
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint

LIMITS = Limits(remembered_ttl=20.0, early_ttl=5.0, early=64)
OUT_OF_RANGE = EngineError(backend="moriio", code=11, message="length out of range")


class World:
    """One producer and two consumers, and every way in which a transfer can go."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(lose=0.02, duplicate=0.02, delay=0.01)
        self.p = self.node("p")
        self.c = self.node("c")
        self.other = self.node("other")
        self.ids = Counter[str]()

    def node(self, name: str) -> Node:
        faults = {
            Fault(kind=FaultKind.REFUSE_VALUE, error=OUT_OF_RANGE): 0.05,
            Fault(kind=FaultKind.LATE, after=0.3): 0.1,
            Fault(kind=FaultKind.NEVER): 0.02,
        }
        plan = FaultPlan(chances={FaultPoint.POST: faults}, rng=self.rng)
        return self.rig.node(name, plan=plan, limits=LIMITS, retry_window=0.5, abort_lease=0.5)

    def free(self, node: Node) -> Blocks:
        pinned = node.agent._engine.consumer.pins._owner[0]
        free = [i for i in range(16) if not pinned[i]]
        return at(0, self.rng.choice(free)) if free else at(0)

    # ---- what can happen to one transfer ---------------------------------------------------

    def read(self, t: str) -> None:
        self.c.agent.pull(self.p.agent.hold(t, at(0, 5)), self.free(self.c))

    def read_by_two(self, t: str) -> None:
        offer = self.p.agent.hold(t, at(0, 5))
        for node in (self.c, self.other):
            node.agent.pull(offer, self.free(node))

    def read_in_parts(self, t: str) -> None:
        offer, blocks = self.p.agent.hold(t, at(0, 5)), self.free(self.c)
        self.c.agent.pull(offer, blocks, layers=["layer0"], last=False)
        self.c.agent.pull(offer, blocks, layers=["layer1"])

    def read_half(self, t: str) -> None:
        self.c.agent.pull(self.p.agent.hold(t, at(0, 5)), self.free(self.c), last=False)

    def read_nothing(self, t: str) -> None:
        self.c.agent.pull(self.p.agent.hold(t, at(0, 5)), at(0))

    def read_after_waiting(self, t: str) -> None:
        offer = self.p.agent.hold(t, at(0, 5))
        self.c.agent.renew([offer])
        self.rig.pass_time(0.1)
        self.c.agent.pull(offer, self.free(self.c))

    def wait_and_forget(self, t: str) -> None:
        self.c.agent.renew([self.p.agent.hold(t, at(0, 5))])

    def read_and_abort(self, t: str) -> None:
        handle = self.c.agent.pull(self.p.agent.hold(t, at(0, 5)), self.free(self.c))
        self.rig.pass_time(self.rng.random() * 0.05)
        handle.abort()

    def read_what_is_not_there(self, t: str) -> None:
        offer = attrs.evolve(self.p.agent.hold(t, at(0, 5)), groups=(at(0, 99),))
        self.c.agent.pull(offer, self.free(self.c))

    def read_an_older_epoch(self, t: str) -> None:
        offer = attrs.evolve(self.p.agent.hold(t, at(0, 5)), epoch=0)
        self.c.agent.pull(offer, self.free(self.c))

    def read_what_is_never_held(self, t: str) -> None:
        offer = attrs.evolve(self.p.agent.hold(f"{t}-a", at(0, 5)), transfer_id=f"{t}-b", epoch=9)
        self.c.agent.pull(offer, self.free(self.c))

    def decline(self, t: str) -> None:
        self.c.agent.decline(self.p.agent.hold(t, at(0, 5)))

    def decline_one_owner(self, t: str) -> None:
        offer = self.p.agent.hold(t, at(0, 5), owner="p")
        self.c.agent.decline(offer, owner="0", owners=2)
        if self.rng.random() < 0.5:
            self.c.agent.pull(offer, self.free(self.c), owner="1", owners=2)

    def decline_what_is_never_held(self, t: str) -> None:
        offer = attrs.evolve(self.p.agent.hold(f"{t}-a", at(0, 5)), transfer_id=f"{t}-b", epoch=9)
        self.c.agent.decline(offer)

    def hold_and_lose_the_offer(self, t: str) -> None:
        self.p.agent.hold(t, at(0, 5))

    def hold_and_abort(self, t: str) -> None:
        self.p.agent.hold(t, at(0, 5))
        self.p.agent.abort(t)

    def refuse(self, t: str) -> None:
        with pytest.raises(InvalidInputError):
            self.c.agent.pull(self.p.agent.hold(t, at(0, 5)), at(0, 99))
        self.p.agent.hold(f"{t}-x", at(0, 5), readers=[])

    def write(self, t: str) -> None:
        self.c.agent.accept(t, self.free(self.c), uncovered_local=1)
        self.p.agent.push(t, at(0, 7), to=self.c.agent.endpoint, layers=["layer0"])
        self.p.agent.push(t, at(0, 7), to=self.c.agent.endpoint, layers=["layer1"])
        self.p.agent.seal(t, b"token")

    def write_and_abort(self, t: str) -> None:
        handle = self.c.agent.accept(t, self.free(self.c))
        push = self.p.agent.push(t, at(0, 7), to=self.c.agent.endpoint)
        self.rig.pass_time(self.rng.random() * 0.05)
        self.rng.choice([handle, push]).abort()
        self.p.agent.seal(t)

    def accept_and_nobody_writes(self, t: str) -> None:
        self.c.agent.accept(t, self.free(self.c), deadline=0.5)

    def write_and_nobody_accepts(self, t: str) -> None:
        self.p.agent.push(t, at(0, 7), to=self.c.agent.endpoint)

    def write_to_nobody(self, t: str) -> None:
        self.p.agent.push(t, at(0, 7), to="10.0.0.9:9")

    def noise(self, t: str) -> None:
        ref = wire.Ref(t, self.p.agent.incarnation, 1)
        link = self.c.agent._engine.links.of(self.p.agent.incarnation)
        if link is None:
            return
        for body in (wire.Ask(t), wire.Open(1, [ref]), wire.Cancel(ref, "aborted", "")):
            link.mailbox.send(body)
        frame = wire.encode(f"stranger-{t}", wire.Decline(ref, {}), 1)
        self.p.agent._channel.inbox.append(Inbound(link.mailbox.route, frame))  # type: ignore[attr-defined]

    def run(self, count: int) -> None:
        verbs = [
            verb
            for name, verb in vars(World).items()
            if callable(verb) and name[0] != "_" and name not in ("node", "free", "run", "rest")
        ]
        for n in range(count):
            verb: Callable[[World, str], None] = verbs[n % len(verbs)]
            self.ids[verb.__name__] += 1
            verb(self, f"t{n}")
            self.rig.pass_time(self.rng.random() * 0.2)

    def rest(self) -> None:
        """Until every deadline, time to live and quarantine is over."""
        self.rig.pass_time(30.0)
        for node in self.rig.nodes:
            for entry in node.agent.snapshot().quarantine:
                node.agent.reclaim(entry.transfer_id)
        self.rig.pass_time(30.0)


def sizes(node: Node) -> dict[str, int]:
    """Every number of a snapshot that is the size of something."""
    snapshot = attrs.asdict(node.agent.snapshot(), recurse=False)
    return {name: value for name, value in snapshot.items() if isinstance(value, int)}


@pytest.mark.parametrize("seed", [1, 2])
def test_all_tables_are_back_to_their_start(seed: int) -> None:
    """Three hundred transfers of every outcome, then rest: nothing is left of any of them."""
    world = World(seed)
    world.run(48)  # everybody has met, everything has happened once
    world.rest()
    before = [census(node.agent) for node in world.rig.nodes]
    for node in world.rig.nodes:
        node.events.clear()
    world.run(300)
    assert min(world.ids.values()) > 10
    world.rest()
    for node, start in zip(world.rig.nodes, before, strict=True):
        numbers = sizes(node)
        assert {name: n for name, n in numbers.items() if n} == {}, node.name
        now = census(node.agent)
        # Which side dialled may have changed with a new connection; there are two peers.
        assert now.pop("Mailboxes._by_address") <= now["Mailboxes._by_route"] <= 2
        # Each link knows the connection before the present one.
        assert now.pop("Link._old_peers", 0) <= 2
        grown = {k: (start.get(k, 0), n) for k, n in now.items() if n > start.get(k, 0)}
        assert grown == {}, node.name
    kinds = Counter(type(e).__name__ for node in world.rig.nodes for e in node.events)
    for kind in ("Received", "Sent", "Declined", "Expired", "Failed", "Drained"):
        assert kinds[kind] > 5, kinds
    for node in world.rig.nodes:
        node.agent.close(0.0)


# ---- what is remembered, and for how long ------------------------------------------------------


def test_remembered_is_bounded_by_count_and_time() -> None:
    """Oldest out first, counted; the rest when its time is over."""
    table: Remembered[str, int] = Remembered(capacity=2, ttl=10.0)
    for n, key in enumerate("abc"):
        table.add(key, n, now=float(n))
    assert (list(table), table.evicted) == (["b", "c"], 1)
    table.add("b", 7, now=3.0)
    assert list(table) == ["c", "b"]
    assert (table.get("b"), table.get("a"), table.next_at()) == (7, None, 12.0)
    table.expire(12.0)
    assert list(table) == ["b"]
    table.expire(13.0)
    assert (len(table), table.next_at()) == (0, None)
    with pytest.raises(InvalidInputError, match="capacity 0"):
        Remembered(capacity=0, ttl=1.0)


def test_what_has_ended_is_forgotten_in_time() -> None:
    """Ended holds, ended expectations and seen messages age; nothing else has to happen for it."""
    acks = AckReconciler(terminal_ttl=10.0)
    acks.expect("t", sources={0}, deadline=5.0, now=0.0)
    acks.record(Ack(transfer_id="t", source=0), 1.0)
    assert (acks.remembered, acks.next_at()) == (1, 11.0)
    acks.poll(11.0)
    assert (acks.remembered, acks.next_at()) == (0, None)
    leases = LeaseTable(margin=1.0, remembered_ttl=10.0)
    leases.hold("t", epoch=1, lease=3.0, now=0.0)
    leases.end("t", Refusal(ErrorKind.STALE, "consumed"))
    assert isinstance(leases.open("t", epoch=1, now=5.0), Refusal)
    leases.expire(15.0)
    assert leases.remembered == 0
    inbox = Inbox(ttl=10.0)
    assert inbox.first_time("a", 1, 0.0)
    assert not inbox.first_time("a", 1, 9.0)
    inbox.expire(10.0)
    assert inbox.first_time("a", 1, 10.0)


def test_early_asks_expire_by_timer() -> None:
    """Report O25's kind: an ask that came early is dropped in time, with no further ask."""
    rig = Rig()
    p, c = rig.node("p", limits=LIMITS), rig.node("c", limits=LIMITS)
    handle = p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    rig.run(lambda: handle.done)
    assert c.agent.snapshot().early == 1
    rig.pass_time(5.1)
    assert c.agent.snapshot().early == 0
    for node in rig.nodes:
        node.agent.close(0.0)
