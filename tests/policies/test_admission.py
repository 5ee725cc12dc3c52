"""Credits: limits, turns, and that nothing is lost or starves."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import CapacityError, ConfigError
from kvxfer.policies.admission import (
    AdmissionPolicy,
    AimdAdmission,
    CreditLimit,
    FixedAdmission,
    NoAdmission,
)
from kvxfer.policies.credit_queue import CreditQueue, Grant, Ticket
from kvxfer.policies.turns import Turns


def ticket(
    pieces: int, transfer: object = "t", peer: object = "p", patience: float = 10.0
) -> Ticket[object]:
    return Ticket(None, peer=peer, transfer=transfer, pieces=pieces, patience=patience)


def queue(limit: int | None, share: float = 0.5, **options: int) -> CreditQueue[object]:
    return CreditQueue("q", FixedAdmission(credits=limit, share=share).begin(None), **options)


def granted(q: CreditQueue[object], now: float = 0.0) -> list[Grant[object]]:
    found = []
    while (grant := q.grant(now)) is not None:
        found.append(grant)
    return found


# ---- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "engine", "limit", "largest"),
    [
        (None, None, None, None),
        (None, 64, 64, 32),
        (16, 64, 16, 8),
        (640, 64, 64, 32),
        (1, 9, 1, 1),
    ],
)
def test_fixed_goes_by_the_smaller_limit(
    own: int | None, engine: int | None, limit: int | None, largest: int | None
) -> None:
    """The engine's limit is never exceeded; without any limit nothing is held back."""
    credit = FixedAdmission(credits=own).begin(engine)
    assert (credit.limit, credit.largest) == (limit, largest)


def test_no_admission_only_cuts() -> None:
    """Nothing is held back, but a call larger than the queue would never get in."""
    credit = NoAdmission().begin(64)
    assert (credit.limit, credit.largest) == (None, 64)
    assert NoAdmission().begin(None).largest is None


def test_aimd_falls_by_half_and_rises_by_steps() -> None:
    """Once per overload down, once per full queue up; never beyond its bounds."""
    credit = AimdAdmission(least=8, most=64, increase=4).begin(None)
    assert credit.limit == 64
    old = credit.epoch
    credit.refused(old)
    assert credit.limit == 32
    credit.refused(old)  # of the same overload
    assert credit.limit == 32
    for _ in range(9):
        credit.refused(credit.epoch)
    assert credit.limit == 8
    credit.succeeded(7)
    assert credit.limit == 8
    credit.succeeded(1)
    assert credit.limit == 12
    for _ in range(100):
        credit.succeeded(64)
    assert credit.limit == 64


@given(
    least=st.integers(1, 50),
    most=st.integers(1, 500) | st.none(),
    start=st.integers(1, 1000) | st.none(),
    engine=st.integers(1, 600) | st.none(),
    news=st.lists(st.integers(-1, 700)),
)
def test_aimd_stays_within_its_bounds(
    least: int, most: int | None, start: int | None, engine: int | None, news: list[int]
) -> None:
    """Whatever happens, the limit is at least 1 and at most what user and engine allow."""
    if most is not None and most < least:
        with pytest.raises(ConfigError, match=rf"most is {most}, below least"):
            AimdAdmission(least=least, most=most, start=start)
        return
    credit = AimdAdmission(least=least, most=most, start=start).begin(engine)
    ceiling = min(n for n in (most, engine, 65535) if n is not None)
    for piece in news:
        if piece < 0:
            credit.refused(credit.epoch)
        else:
            credit.succeeded(piece)
        assert credit.limit is not None
        assert credit.largest is not None
        assert min(least, ceiling) <= credit.limit <= ceiling
        assert 1 <= credit.largest <= credit.limit


@pytest.mark.parametrize("policy", [FixedAdmission, AimdAdmission, NoAdmission])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8"])
def test_bad_settings_name_the_field(policy: type[AdmissionPolicy], value: object) -> None:
    """The error names class, field and value."""
    with pytest.raises(ConfigError, match=rf"{policy.__name__}\.most_waiting must be an integer"):
        policy(most_waiting=value)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("policy", "field", "value"),
    [(FixedAdmission, "share", 0), (FixedAdmission, "share", 1.1), (AimdAdmission, "decrease", 1)],
)
def test_fractions_are_checked(policy: type[Any], field: str, value: float) -> None:
    """A share of nothing, or a decrease that does not decrease, is refused."""
    with pytest.raises(ConfigError, match=rf"{policy.__name__}\.{field} must be above 0"):
        policy(**{field: value})


# ---- turns -----------------------------------------------------------------------------------


def test_turns_are_fair_in_cost() -> None:
    """Keys with dear and with cheap calls get about the same in sum."""
    turns: Turns[str] = Turns()
    costs = {"dear": 8, "cheap": 1}
    for key in costs:
        turns.enter(key)
    spent: collections.Counter[str] = collections.Counter()
    for _ in range(900):
        key = turns.first(costs.__getitem__, 8)
        assert key is not None
        turns.spend(key, costs[key])
        spent[key] += costs[key]
    assert spent["dear"] == pytest.approx(spent["cheap"], abs=16)


def test_newcomers_do_not_overtake() -> None:
    """A stream of new keys cannot starve one that waits for its second turn."""
    turns: Turns[int] = Turns()
    turns.enter(0)
    served = []
    for i in range(1, 50):
        turns.enter(i)
        key = turns.first(lambda _: 1, 1)
        assert key is not None
        served.append(key)
        turns.spend(key, 1)
        if key:
            turns.leave(key)
    positions = [i for i, key in enumerate(served) if key == 0]
    # One more waits after each of its turns, and it waits for no more than those.
    assert positions[:6] == [0, 2, 4, 7, 10, 14]


# ---- the queue -------------------------------------------------------------------------------


def test_more_than_the_credits_is_cut() -> None:
    """A call that needs more than a queue's whole credits goes part by part."""
    q = queue(8, share=1.0)
    q.ask(ticket(20), 0.0)
    first = granted(q)
    assert [g.pieces for g in first] == [8]
    assert (q.in_flight, q.waiting_pieces, len(q)) == (8, 12, 1)
    q.give_back(first[0])
    second = granted(q)
    q.give_back(second[0])
    third = granted(q)
    assert [g.pieces for g in second + third] == [8, 4]
    q.give_back(third[0])
    assert q.idle


def test_without_a_limit_all_goes_at_once() -> None:
    """An engine without credits is given everything, uncut, in the order of the turns."""
    q = queue(None)
    for i in range(5):
        q.ask(ticket(10**6, transfer=i), 0.0)
    assert [g.pieces for g in granted(q)] == [10**6] * 5


def test_a_big_transfer_does_not_starve_a_small_one() -> None:
    """10000 pieces ask first; a transfer of 4 pieces is served within two calls of the big one."""
    q = queue(64)
    q.ask(ticket(10_000, "big"), 0.0)
    flying = collections.deque(granted(q))
    q.ask(ticket(4, "small"), 0.0)
    before = 0
    while True:
        q.give_back(flying.popleft())
        new = granted(q)
        flying.extend(new)
        if any(g.ticket.transfer == "small" for g in new):
            break
        before += sum(g.pieces for g in new)
    assert before <= 2 * 32


def test_a_paused_peer_does_not_starve_others() -> None:
    """A peer that cannot post keeps its tickets, and others get the shared queue."""
    q = queue(8)
    q.ask(ticket(4, peer="stuck"), 0.0)
    q.pause("stuck")
    q.ask(ticket(4, peer="well"), 0.0)
    q.ask(ticket(4, "later", peer="stuck"), 0.0)
    assert [g.ticket.peer for g in granted(q)] == ["well"]
    q.resume("stuck")
    assert [g.ticket.peer for g in granted(q)] == ["stuck"]


def test_peers_share_a_queue_evenly() -> None:
    """A peer with a hundred transfers gets no more than one with a single transfer."""
    q = queue(16)
    for i in range(100):
        q.ask(ticket(8, transfer=i, peer="many"), 0.0)
    for _ in range(10):
        q.ask(ticket(8, transfer="one", peer="few"), 0.0)
    order = []
    while len(order) < 20:
        for g in granted(q):
            order.append(g.ticket.peer)
            q.give_back(g)
    assert order[:20].count("few") == 10


def test_nothing_small_overtakes_whose_turn_it_is() -> None:
    """A call that needs much waits for room; small ones behind it do not eat that room up."""
    q = queue(8, share=1.0)
    q.ask(ticket(5, "a"), 0.0)
    (a,) = granted(q)
    q.ask(ticket(8, "b"), 0.0)
    q.ask(ticket(1, "c"), 0.0)
    assert granted(q) == []
    q.give_back(a)
    assert [g.ticket.transfer for g in granted(q)] == ["b"]


def test_the_line_is_bounded() -> None:
    """Promise 8: what exceeds the table is refused with its size."""
    q = queue(1, most_waiting=2)
    q.ask(ticket(5), 0.0)
    q.ask(ticket(5), 0.0)
    with pytest.raises(CapacityError, match="2 calls wait for the credits of q"):
        q.ask(ticket(5), 0.0)


def test_patience_is_the_transfers() -> None:
    """A transfer that gets something goes on waiting; one that gets nothing leaves in time."""
    q = queue(4)
    block = ticket(2, "other")
    q.ask(block, 0.0)
    (held,) = granted(q)
    served, starved = ticket(4, "served", patience=3.0), ticket(4, "starved", patience=3.0)
    q.ask(served, 0.0)
    (some,) = granted(q, 2.0)
    q.ask(starved, 1.0)
    assert q.next_at() == 3.0
    assert q.expired(3.0) == []
    assert q.expired(4.0) == [starved]
    assert q.expired(5.0) == [served]
    assert len(q) == 0
    q.give_back(held)
    q.give_back(some)
    assert q.idle


class Waiting(RuleBasedStateMachine):
    """Any order of asking, leaving, granting, giving back, pausing, refusals and time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.credit: CreditLimit = AimdAdmission(least=2, most=20, increase=3).begin(None)
        self.q: CreditQueue[object] = CreditQueue("q", self.credit, most_waiting=30)
        self.flying: list[Grant[object]] = []
        self.waiting: dict[Ticket[object], int] = {}
        self.paused: set[object] = set()

    @rule(pieces=st.integers(1, 60), transfer=st.integers(0, 3), peer=st.integers(0, 2))
    def ask(self, pieces: int, transfer: int, peer: int) -> None:
        new = ticket(pieces, transfer, peer, patience=5.0)
        if len(self.waiting) >= 30:
            with pytest.raises(CapacityError):
                self.q.ask(new, self.now)
            return
        self.q.ask(new, self.now)
        self.waiting[new] = pieces

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(list(self.waiting)))
        assert self.q.leave(who)
        assert not self.q.leave(who)
        del self.waiting[who]

    @rule()
    def grant(self) -> None:
        limit = self.credit.limit
        grant = self.q.grant(self.now)
        assert limit is not None
        if grant is None:
            able = [t for t in self.waiting if t.peer not in self.paused]
            assert not able or self.q.in_flight + limit // 2 + 1 > limit
            return
        assert grant.ticket.peer not in self.paused
        assert self.q.in_flight <= limit
        self.flying.append(grant)
        self.waiting[grant.ticket] -= grant.pieces
        if not self.waiting[grant.ticket]:
            del self.waiting[grant.ticket]

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), ended=st.sampled_from(["done", "refused", "failed"]))
    def give_back(self, data: st.DataObject, ended: str) -> None:
        grant = data.draw(st.sampled_from(self.flying))
        self.flying.remove(grant)
        if ended == "done":
            self.credit.succeeded(grant.pieces)
        elif ended == "refused":
            self.credit.refused(grant.epoch)
        self.q.give_back(grant)

    @rule(peer=st.integers(0, 2))
    def pause(self, peer: int) -> None:
        self.paused.add(peer)
        self.q.pause(peer)

    @rule(peer=st.integers(0, 2))
    def resume(self, peer: int) -> None:
        self.paused.discard(peer)
        self.q.resume(peer)

    @rule(seconds=st.floats(0.0, 3.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for gone in self.q.expired(self.now):
            assert self.now >= gone.asked_at + 5.0
            del self.waiting[gone]
        assert all(self.now <= t.asked_at + 5.0 or self.served(t) for t in self.waiting)

    def served(self, waiting: Ticket[object]) -> bool:
        flow = self.q._peers[waiting.peer].flows[waiting.transfer]
        return self.now <= flow.served_at + 5.0 + 1e-9

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.q.in_flight == sum(g.pieces for g in self.flying)
        assert self.q.waiting_pieces == sum(self.waiting.values())
        assert len(self.q) == len(self.waiting)
        assert all(t.pieces == n for t, n in self.waiting.items())

    def teardown(self) -> None:
        """Everybody who waits is served once there is room; then the queue is empty."""
        for peer in range(3):
            self.q.resume(peer)
        for _ in range(10_000):
            new = granted(self.q, self.now)
            self.flying += new
            if not self.flying:
                break
            for grant in self.flying:
                self.q.give_back(grant)
            self.flying = []
        assert self.q.idle
        assert not self.q._peers
        assert not len(self.q._turns)
        assert self.q.next_at() is None


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(2, 64),
    flows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(1, 200), min_size=1)),
        min_size=1,
        max_size=12,
    ),
    newcomer=st.tuples(st.integers(0, 3), st.integers(1, 64)),
)
def test_fairness_bound(
    limit: int, flows: list[tuple[int, int, list[int]]], newcomer: tuple[int, int]
) -> None:
    """Whoever begins to wait is served once each other peer, and each other transfer of its own
    peer, has spent at most two of the largest calls (and what its peer's turns add to that)."""
    q = queue(limit)
    largest = q.credit.largest
    assert largest is not None
    for peer, transfer, calls in flows:
        for pieces in calls:
            q.ask(ticket(pieces, transfer, peer), 0.0)
    peer, pieces = newcomer
    mine = ticket(pieces, "newcomer", peer)
    q.ask(mine, 0.0)
    spent: collections.Counter[object] = collections.Counter()
    own: collections.Counter[object] = collections.Counter()
    while True:
        grant = q.grant(0.0)
        assert grant is not None  # all is given back at once: there is always room
        q.give_back(grant)
        if grant.ticket is mine:
            break
        spent[grant.ticket.peer] += grant.pieces
        if grant.ticket.peer == peer:
            own[grant.ticket.transfer] += grant.pieces
    siblings = len({t for p, t, _ in flows if p == peer})
    assert all(n <= 2 * largest for n in own.values())
    # While its own peer serves its siblings, every other peer gets as much.
    assert all(n <= 2 * largest * (siblings + 2) for p, n in spent.items() if p != peer)
