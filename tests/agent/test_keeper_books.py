"""The keeper's pure parts: what it holds, whom it asks, whom it hears, and what it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core import wire
from kvxfer.core.channel import Channel, Inbound, Route
from kvxfer.keeper import messages as m
from kvxfer.keeper.core import Keeper
from kvxfer.keeper.holds import HoldBook
from kvxfer.keeper.peers import PeerTable
from kvxfer.keeper.watches import SEQ_STRIDE, WatchTable

T = wire.Ref("t", "me", 1, "ticket")


def book(ends_at: float = 10.0, lease: float = 3.0) -> HoldBook:
    holds = HoldBook()
    holds.hold("t", 1, "ticket", lease, ends_at)
    return holds


# ---- holds ------------------------------------------------------------------------------------


def test_grants_from_when_it_received() -> None:
    """A grant lasts a lease from now, or as long as the hold anyway."""
    holds = book()
    granting = holds.grant(T, reader="r", seq=1, now=2.0)
    assert granting is not None
    assert (granting.remaining, granting.new) == (8.0, True)
    granting = holds.grant(T, reader="r", seq=2, now=9.0)
    assert granting is not None
    assert (granting.remaining, granting.new) == (3.0, False)


@pytest.mark.parametrize(
    ("ref", "now"),
    [
        (wire.Ref("other", "me", 1, "ticket"), 2.0),
        (wire.Ref("t", "me", 2, "ticket"), 2.0),
        (wire.Ref("t", "me", 0, "ticket"), 2.0),
        (wire.Ref("t", "me", 1, "guessed"), 2.0),
        (wire.Ref("t", "me", 1, ""), 2.0),
        (T, 10.0),
        (T, 10.2),
    ],
)
def test_gives_no_answer_rather_than_a_refusal(ref: wire.Ref, now: float) -> None:
    """Unknown, of another epoch, without its ticket, or over: the agent alone judges that."""
    assert book().grant(ref, reader="r", seq=1, now=now) is None


def test_a_finished_reader_is_granted_nothing_until_again() -> None:
    """Whatever of a finished reader still arrives may be old."""
    holds = book()
    holds.finished("t", 1, "r")
    assert holds.grant(T, reader="r", seq=1, now=2.0) is None
    assert holds.grant(T, reader="other", seq=1, now=2.0) is not None
    holds.again("t", 1, "r")
    assert holds.grant(T, reader="r", seq=2, now=2.0) is not None


def test_closes_unless_it_granted_further() -> None:
    """The answer says until when it granted, and to whom: that is what the agent frees by."""
    holds = book(ends_at=3.0)
    holds.grant(T, reader="r", seq=7, now=2.0)
    still = holds.close("t", 1, 3.0)
    assert (still.closed, still.granted_until, still.readers) == (False, 5.0, {"r": 7})
    assert holds.grant(T, reader="r", seq=8, now=4.0) is not None
    closed = holds.close("t", 1, math.inf)
    assert (closed.closed, closed.granted_until, closed.readers) == (True, 7.0, {"r": 8})
    assert holds.grant(T, reader="r", seq=9, now=4.0) is None
    assert holds.close("t", 1, math.inf).granted_until == -math.inf


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grant", "close", "close all", "agent", "finish", "again"]),
            st.floats(0.0, 2.0),
            st.sampled_from(["r", "s"]),
        ),
        max_size=40,
    )
)
def test_what_was_granted_is_always_told(steps: list[tuple[str, float, str]]) -> None:
    """In any order: the answer that closes names the latest promise, and none follows it."""
    holds, now, agent_ends, promised, closed = book(3.0), 0.0, 3.0, -math.inf, False
    for seq, (what, later, reader) in enumerate(steps):
        now += later
        if what == "grant":
            granting = holds.grant(T, reader=reader, seq=seq, now=now)
            assert granting is None or not closed
            if granting is not None:
                promised = max(promised, now + granting.remaining)
        elif what == "agent" and not closed and now < agent_ends:
            agent_ends = max(agent_ends, now + 3.0)
            holds.hold("t", 1, "ticket", 3.0, agent_ends)
        elif what == "finish":
            holds.finished("t", 1, reader)
        elif what == "again":
            holds.again("t", 1, reader)
        elif what.startswith("close") and not closed:
            answer = holds.close("t", 1, agent_ends if what == "close" else math.inf)
            assert answer.granted_until >= promised or promised == -math.inf
            closed = answer.closed
            agent_ends = max(agent_ends, answer.granted_until)
            assert closed or agent_ends == answer.granted_until


# ---- watches ----------------------------------------------------------------------------------


def test_counts_from_when_it_asked() -> None:
    """A grant is counted from the request, whenever the answer comes."""
    table = WatchTable(retry=0.2)
    table.number_from(5 * SEQ_STRIDE)
    table.watch(T, bound=100.0, granted_until=-math.inf, now=0.0)
    assert table.due(0.1) == []
    (asking,) = table.due(0.2)
    assert 5 * SEQ_STRIDE < asking.seq < 6 * SEQ_STRIDE
    assert table.granted("me", asking.seq, T, 3.0, 2.9) == (3.2, 0.2)
    assert table.granted("me", asking.seq, T, 3.0, 2.9) is None  # a copy is no news


def test_renews_at_a_third_and_asks_again() -> None:
    """Two more tries fit before the agent would ask, which it does at half."""
    table = WatchTable(retry=0.2)
    table.watch(T, bound=100.0, granted_until=3.0, now=0.0)
    assert table.next_at() == 1.0
    assert [a.urgent for a in table.due(1.0) + table.due(1.2) + table.due(1.4)] == [
        False,
        False,
        True,
    ]


def test_answers_of_strangers_and_of_before_do_not_count() -> None:
    """Only from whom was asked, for what was asked, and for this watch of it."""
    table = WatchTable(retry=0.2)
    table.watch(T, bound=100.0, granted_until=-math.inf, now=0.0)
    (asking,) = table.due(0.2)
    assert table.granted("other", asking.seq, T, 3.0, 0.3) is None
    assert table.granted("me", asking.seq + 1, T, 3.0, 0.3) is None
    assert table.granted("me", asking.seq, wire.Ref("u", "me", 1), 3.0, 0.3) is None
    table.unwatch(T)
    table.watch(T, bound=100.0, granted_until=-math.inf, now=0.3)
    assert table.granted("me", asking.seq, T, 3.0, 0.4) is None


def test_a_watch_ends_by_itself() -> None:
    """The bound ends it, although nobody unwatches."""
    table = WatchTable(retry=0.2)
    table.watch(T, bound=1.0, granted_until=30.0, now=0.0)
    assert table.next_at() == 1.0
    assert table.due(1.0) == []
    assert len(table) == 0
    assert table.next_at() is None


def test_many_holds_of_one_peer_are_one_request() -> None:
    """What is due together goes out together."""
    table = WatchTable(retry=0.2, batch=100)
    refs = [wire.Ref(f"t{i}", "me", 1) for i in range(250)]
    for ref in refs:
        table.watch(ref, bound=100.0, granted_until=-math.inf, now=0.0)
    assert [len(asking.refs) for asking in table.due(0.2)] == [100, 100, 50]


def test_numbers_stay_below_the_agents_next() -> None:
    """Without a word of the agent there are no more numbers: then nothing is asked."""
    table = WatchTable(retry=1e-6)
    table.number_from(SEQ_STRIDE)
    table._used = SEQ_STRIDE - 2
    table.watch(T, bound=100.0, granted_until=-math.inf, now=0.0)
    (asking,) = table.due(1.0)
    assert asking.seq == 2 * SEQ_STRIDE - 1
    assert table.due(2.0) == []
    table.number_from(2 * SEQ_STRIDE)
    assert len(table.due(3.0)) == 1


# ---- peers ------------------------------------------------------------------------------------


def test_a_peer_is_asked_then_quiet_then_heard() -> None:
    """One question per interval while it is silent; quiet is said once."""
    table = PeerTable(interval=1.0, quiet_after=5.0)
    table.know("p", version=2, agent="a", keeper="k", key="", now=0.0)
    asked, quiet = 0, []
    for tick in range(200):
        now = tick / 20
        if now == 3.0:
            assert not table.heard("p", now)
        ask, gone = table.due(now)
        asked += len(ask)
        quiet += [now] * len(gone)
    assert quiet == [8.0]
    assert 8 <= asked <= 10
    assert table.heard("p", 10.0)


def test_a_peer_without_a_keeper_is_not_judged() -> None:
    """There is nobody to ask, and nobody to be quiet."""
    table = PeerTable(interval=1.0, quiet_after=5.0)
    table.know("p", version=2, agent="a", keeper="", key="", now=0.0)
    assert table.next_at() is None


# ---- all together -----------------------------------------------------------------------------


class Recorder(Channel):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Route, wire.Envelope]] = []

    @property
    def address(self) -> str:
        return "tcp://127.0.0.1:1"

    def dial(self, address: str) -> Route:
        return address

    def hang_up(self, route: Route) -> None: ...

    def send(self, route: Route, data: bytes) -> bool:
        self.sent.append((route, wire.decode(data)))
        return True

    def receive(self, budget: int = 256) -> list[Inbound]:
        return []

    def wait(self, timeout: float) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    @property
    def counters(self) -> dict[str, int]:
        return {}

    def grants(self) -> list[Any]:
        return [e.body for _, e in self.sent if isinstance(e.body, wire.Grant)]


def keeper(key: str = "") -> tuple[Keeper, Recorder]:
    channel = Recorder()
    setup = m.Setup("me", {}, None, 0.2, 1.0, 5.0, 300.0)
    made = Keeper(setup, channel, now=0.0)
    made.turn([], [[m.PeerIs("peer", 2, "tcp://a:1", "tcp://k:1", key)]], 0.0)
    made.turn([], [[m.Held("t", 1, "ticket", 3.0, 3.0)]], 0.0)
    while made.has_news:
        made.take_news()
    return made, channel


def asks(seq: int, *refs: wire.Ref, sender: str = "peer", peer: str = "") -> Inbound:
    return Inbound("route", wire.encode(sender, wire.Open(seq, list(refs))), peer)


def test_the_agent_hears_of_a_reader_before_it_is_granted() -> None:
    """The first grant of a reader waits until the news of it were handed over; renewals do not."""
    made, channel = keeper()
    made.turn([asks(1, T)], [], 1.0)
    assert channel.grants() == []
    news = m.decode_news(made.take_news())
    assert news.opened == [m.Opened("t", 1, "peer", 1)]
    made.agent_was_told()
    assert len(channel.grants()) == 1
    made.turn([asks(2, T)], [], 2.0)
    assert len(channel.grants()) == 2
    assert not made.has_news


def test_orders_come_before_what_they_are_about() -> None:
    """An order to close that was there is heard before a request that was there is granted."""
    made, channel = keeper()
    made.turn([asks(1, T)], [[m.Close("t", 1, 9, math.inf)]], 1.0)
    made.agent_was_told()
    assert channel.grants() == []
    assert m.decode_news(made.take_news()).closed == [m.Closed("t", 1, 9, True, -math.inf, {})]


def test_strangers_and_impostors_get_nothing() -> None:
    """Promises 9 and 13: only peers that the agent accepted, under the keys of their links."""
    made, channel = keeper(key="decode")
    made.turn([asks(1, T, sender="nobody", peer="decode")], [], 1.0)
    made.turn([asks(1, T, peer="other")], [], 1.0)
    made.turn([asks(1, T)], [], 1.0)
    made.turn([Inbound("route", b"garbage", "decode")], [], 1.0)
    made.agent_was_told()
    assert channel.grants() == []
    assert made.counters["messages.from_strangers"] == 3
    assert made.counters["messages.rejected"] == 1
    made.turn([asks(1, T, peer="decode")], [], 1.0)
    made.agent_was_told()
    assert len(channel.grants()) == 1


def test_it_does_not_speak_for_an_agent_that_is_silent_for_ever() -> None:
    """After ``patience`` without an order it neither grants nor answers heartbeats."""
    made, channel = keeper()
    made.turn([], [[m.Held("t", 1, "ticket", 3.0, 1000.0)]], 1.0)
    made.turn([asks(1, T)], [], 302.0)
    made.agent_was_told()
    assert channel.grants() == []
    made.turn([asks(2, T)], [[m.Sync(1, 0)]], 303.0)
    made.agent_was_told()
    assert len(channel.grants()) == 1


def test_of_renewals_only_the_latest_is_told() -> None:
    """However long the agent does not read: the news of a hold are one entry."""
    made, channel = keeper()
    theirs = wire.Ref("u", "peer", 1)
    made.turn([], [[m.Watch(theirs, 1000.0, -math.inf, 0)]], 0.0)
    for step in range(1, 50):
        made.turn([], [], float(step))
        for _, envelope in channel.sent:
            if isinstance(envelope.body, wire.Open):
                answer = wire.Grant(envelope.body.seq, [wire.Granted(theirs, 3.0)], [])
                made.turn([Inbound("route", wire.encode("peer", answer))], [], float(step))
        channel.sent.clear()
    found = []
    while made.has_news:
        found += m.decode_news(made.take_news()).renewed
    assert len(found) == 1
    assert found[0].until > 48.0


@given(st.binary(max_size=200))
def test_nothing_from_outside_ends_it(data: bytes) -> None:
    """Promise 9, at the keeper's own port."""
    made, _ = keeper()
    made.turn([Inbound("route", data)], [], 1.0)
