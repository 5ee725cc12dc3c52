"""Reports O01 to O08 at the agent: refusals, retries, silence, storms, orphaned work.

The rules are tested in ``tests/policies/test_rules.py``, retries in ``test_retry.py``, admission
and the circuit breaker in tests of their own there.
"""

from __future__ import annotations

import itertools

import attrs
import pytest
from agent_rig import TIMEOUTS, Node, at
from tenacity.stop import stop_after_attempt

from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.backends.loopback import LoopbackConfig, LoopbackTransport
from kvxfer.core import wire
from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.events import Drained, Failed, Received, Sent
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind
from kvxfer.policies.retry import RetryPolicy
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport
from reports.report_rig import HELD, SQ_FULL, ReportRig, end, refused

FULL = Fault(kind=FaultKind.REFUSE, error=SQ_FULL)
FULL_VALUE = Fault(kind=FaultKind.REFUSE_VALUE, error=SQ_FULL)


class Doubling:
    """1 ms, doubling, at most 50 ms, nothing random."""

    def __call__(self, state: object) -> float:
        return min(0.05, 0.001 * 2 ** (state.attempt_number - 1))  # type: ignore[attr-defined]


def tries(count: int) -> RetryPolicy:
    return RetryPolicy(stop=stop_after_attempt(count), wait=Doubling())  # type: ignore[arg-type]


def piecewise(rig: ReportRig, name: str, posts: list[Fault | None], **options: object) -> Node:
    """A node whose every piece is a post of its own."""
    inner = LoopbackTransport(LoopbackConfig(max_pieces=1))
    transport = FaultyTransport(inner, FaultPlan(posts=posts), clock=rig.clock)
    return rig.node(name, transport=transport, **options)


def posts_of(node: Node) -> list[float]:
    """Notes when ``post`` is called on this node's transport."""
    times: list[float] = []
    post = node.transport.post

    def timed(*args: object, **kwargs: object) -> Attempt:
        times.append(node.rig.clock.now())
        return post(*args, **kwargs)  # type: ignore[arg-type]

    node.transport.post = timed  # type: ignore[method-assign]
    return times


# ---- O01: the send queue is full -------------------------------------------------------------


@pytest.mark.parametrize("fault", [FULL, FULL_VALUE], ids=["raised", "returned"])
def test_o01_full_five_times(rig: ReportRig, fault: Fault) -> None:
    """Report O01: full five times, then success: 6 posts after 1, 2, 4, 8, 16 ms, 31 ms in all;
    5 retries, no failure. The call itself returns at once, pending."""
    p, c = rig.node("p"), rig.node("c", posts=[fault] * 5)
    c.agent._ctx.retry = RetryPolicy(wait=Doubling())  # type: ignore[arg-type]
    times = posts_of(c)
    before = rig.clock.now()
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    assert (handle.state, rig.clock.now()) == (TransferState.PENDING, before)
    rig.run(lambda: handle.done)
    assert handle.state is TransferState.DONE
    waits = [1000 * (b - a) for a, b in itertools.pairwise(times)]
    assert waits == pytest.approx([1, 2, 4, 8, 16], abs=0.01)
    assert 1000 * (times[-1] - times[0]) == pytest.approx(31, abs=0.01)
    assert c.counters["posts.retried.backpressure"] == 5
    assert not any(name.startswith("posts.failed") for name in c.counters)
    assert c.content([1]) == p.content([5])


def test_o01_full_for_ever(rig: ReportRig) -> None:
    """Report O01: full for ever and 10 ms left: waits of 1, 2, 4 ms only, since the next 8 would
    pass the deadline: 4 posts, failed within 10 ms, nothing half-posted."""
    timeouts = attrs.evolve(TIMEOUTS, transfer=0.010)
    p, c = rig.node("p"), rig.node("c", posts=[FULL] * 99, timeouts=timeouts)
    c.agent._ctx.retry = RetryPolicy(wait=Doubling())  # type: ignore[arg-type]
    handle = c.agent.pull(p.agent.hold("warm", at(0, 5)), at(0))
    c.agent.connect([p.agent.endpoint])
    rig.run(lambda: handle.done)
    rig.settle(0.1)
    offer = p.agent.hold("t", at(0, 5))
    c.agent.renew([offer])  # so that no round trip uses up the 10 ms
    rig.settle(0.1)
    before = c.content([1])
    times = posts_of(c)
    rig.begin()
    handle = c.agent.pull(offer, at(0, 1))
    assert handle.state is TransferState.PENDING
    rig.until(0.0)
    rig.run(lambda: handle.done)
    assert rig.now <= 0.0101
    waits = [1000 * (b - a) for a, b in itertools.pairwise(times)]
    assert waits == pytest.approx([1, 2, 4], abs=0.01)
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.TIMEOUT
    assert "SQ full" in str(handle.error)
    assert handle.drained
    assert c.content([1]) == before
    rig.settle(0.1)
    assert not any(c.tables.values())


# ---- O02: one code, several meanings ---------------------------------------------------------


def test_o02_larger_than_the_queue_is_split(rig: ReportRig) -> None:
    """Report O02: 300 requested of at most 256: not retried as it is, but split; all arrives."""
    text = "SQ request exceeds capacity (batch): ep=0 requested=300 max=256"
    too_large = Fault(
        kind=FaultKind.REFUSE, error=EngineError(backend="moriio", code=13, message=text)
    )
    p = rig.node("p", layers=1, num_blocks=300)
    c = rig.node("c", layers=1, num_blocks=300, posts=[too_large])
    sizes: list[int] = []
    post = c.transport.post

    def sized(op: object, path: object, batch: object, **kwargs: object) -> Attempt:
        sizes.append(len(batch))  # type: ignore[arg-type]
        return post(op, path, batch, **kwargs)  # type: ignore[arg-type]

    c.transport.post = sized  # type: ignore[method-assign]
    ids = list(range(0, 300, 2))
    handle = c.agent.pull(p.agent.hold("t", at(0, *ids)), at(0, *reversed(ids)))
    rig.run(lambda: handle.done)
    assert handle.state is TransferState.DONE
    assert sizes[0] == 300
    assert sum(sizes[1:]) == 300
    assert max(sizes[1:]) <= 256
    assert c.content(ids[::-1]) == p.content(ids)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("EP is degraded, rejecting new submissions", ErrorKind.CONNECTION),
        ("transport retry counter exceeded", ErrorKind.PEER_LOST),
    ],
)
def test_o02_dead_endpoint_is_rebuilt(rig: ReportRig, text: str, kind: ErrorKind) -> None:
    """Report O02: the same code with these texts: the connection is rebuilt, a bounded number of
    times, and then the transfer fails as what it is."""
    dead = refused(EngineError(backend="moriio", code=13, message=text))
    p, c = rig.node("p"), rig.node("c", posts=[dead])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: handle.done)
    assert handle.state is TransferState.DONE
    assert c.counters["paths.rebuilt"] == 1
    c.transport.plan = FaultPlan(posts=[dead] * 99)
    again = c.agent.pull(p.agent.hold("u", at(0, 5)), at(0, 2))
    rig.run(lambda: again.done)
    assert again.error is not None
    assert again.error.kind is kind
    assert len(again.error.history) <= 10


def test_o02_unclassified_is_not_retried(rig: ReportRig) -> None:
    """Report O02: code 13 without a text, and code 99: never silently retryable, and counted."""
    for n, error in enumerate(
        (
            EngineError(backend="moriio", code=13, message=""),
            EngineError(backend="moriio", code=99, message="any"),
        )
    ):
        p, c = rig.node(f"p{n}"), rig.node(f"c{n}", posts=[refused(error)])
        handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
        rig.run(lambda handle=handle: handle.done)
        assert handle.error is not None
        assert handle.error.kind is ErrorKind.UNKNOWN
        assert c.transport.counters["post"] == 1
        assert c.counters["posts.failed.unknown"] == 1


# ---- O03: a retry blocks nobody --------------------------------------------------------------


def test_o03_retry_makes_room_for_the_others(rig: ReportRig) -> None:
    """Report O03: four queued, the first asks for another try: it is put aside, the others go
    through first, and all four end in less than a second."""
    p, c = rig.node("p"), rig.node("c", posts=[FULL])
    begun: list[TransferHandle] = []
    order: list[str] = []
    for n in range(4):
        handle = c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, n))
        handle.add_done_callback(lambda n=n: order.append(f"t{n}"))
        begun.append(handle)
    took = rig.run(lambda: all(h.done for h in begun))
    assert took < 1.0
    assert all(h.state is TransferState.DONE for h in begun)
    assert order[-1] == next(e.transfer_id for e in reversed(c.of(Received))), (
        "what had to wait comes last"
    )
    assert c.counters["posts.retried.backpressure"] == 1
    assert c.transport.counters["post"] == 5


def test_o03_everything_fails_for_ever(rig: ReportRig) -> None:
    """Report O03: every post fails for ever, three tries each: all four failed, 12 posts."""
    p, c = rig.node("p"), rig.node("c", posts=[FULL] * 99)
    c.agent._ctx.retry = tries(3)
    handles = [c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, n)) for n in range(4)]
    rig.run(lambda: all(h.done for h in handles))
    assert [h.state for h in handles] == [TransferState.FAILED] * 4
    assert c.transport.counters["post"] == 12
    rig.settle(0.1)
    assert not any(c.tables.values())


# ---- O04: nothing is reported ----------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["told", "message lost"])
def test_o04_in_progress_for_ever(rig: ReportRig, told: bool) -> None:
    """Report O04: the engine says "in progress" for ever. The sender fails at 2.0 s and tells; the
    receiver fails then, or by its own deadline of 3.0 s, with blocks [5,6] not reusable until the
    sender has proved that nothing lands any more."""
    sender = attrs.evolve(TIMEOUTS, transfer=2.0, drain=2.0)
    p = rig.node("p", posts=[Fault(kind=FaultKind.NEVER)], timeouts=sender)
    c = rig.node("c", timeouts=attrs.evolve(TIMEOUTS, drain=20.0))
    c.agent.connect([p.agent.endpoint])
    rig.settle(0.1)
    rig.begin()
    lost = (wire.PushFailed, wire.Cancel)
    rig.lose = lambda carried: not told and isinstance(carried.body, lost)
    received = c.agent.accept("w", at(0, 5, 6), deadline=3.0)
    sent = p.agent.push("w", at(0, 7, 8), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.until(1.99)
    assert not sent.done
    rig.until(2.01)
    assert sent.error is not None
    assert sent.error.kind is ErrorKind.TIMEOUT
    rig.until(2.1)
    assert received.done == told
    rig.until(2.99)
    assert received.done == told
    rig.until(3.01)
    (failed,) = c.of(Failed)
    assert failed.blocks == ((5, 6),)
    assert failed.kind is ErrorKind.TIMEOUT
    assert not failed.drained
    assert c.tables["pinned_blocks"] == 2
    rig.until(3.9)
    assert not c.of(Drained)
    rig.lose = lambda carried: False
    rig.run(lambda: bool(c.of(Drained)))
    assert p.of(Drained)[0].drained_by == "fence"
    assert c.tables["pinned_blocks"] == 0
    mids = {x.mid for x in rig.carried if isinstance(x.body, wire.PushFailed)}
    assert len(mids) == 2, "one message that it failed, one that it is drained"


# ---- O05: the first failure stays ------------------------------------------------------------


@pytest.mark.parametrize("order", ["SFS", "FSS", "SSF"])
def test_o05_first_terminal_state_wins(rig: ReportRig, order: str) -> None:
    """Report O05: three parts end ok, error 13 "x", ok, in any order: failed with code 13 and "x"
    together, told once; a late success does not overwrite it."""
    error = EngineError(backend="moriio", code=13, message="x")
    p, c = rig.node("p", layers=3), rig.node("c", layers=3, posts=[HELD] * 3)
    told: list[tuple[object, object]] = []
    handle = None
    offer = p.agent.hold("t", at(0, 5))
    for n in range(3):
        handle = c.agent.pull(offer, at(0, 1), layers=[f"layer{n}"], last=n == 2)
    assert handle is not None
    handle.add_done_callback(lambda: told.append((handle.state, handle.error)))
    rig.run(lambda: len(c.transport.held) == 3)
    for attempt, state in zip(list(c.transport.held), order, strict=True):
        end(c, attempt, error if state == "F" else None)
        rig.settle(0.1)
    assert handle.done
    rig.settle(1.0)
    assert [(s, e.kind) for s, e in told] == [(TransferState.FAILED, ErrorKind.UNKNOWN)]  # type: ignore[attr-defined]
    (failed,) = c.of(Failed)
    assert failed.error.engine == error
    assert not c.of(Received)


# ---- O06: notifications and tables -----------------------------------------------------------


def test_o06_refused_notification_does_not_fail_the_data(rig: ReportRig) -> None:
    """Report O06: the write succeeded, the notification does not get out: the data's status stays
    success, and the notification is sent again on the control channel."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    losses: list[object] = []

    def lose(carried: object) -> bool:
        seal = isinstance(carried.body, wire.Seal)  # type: ignore[attr-defined]
        if seal and len(losses) < 3:
            losses.append(carried)
            return True
        return False

    rig.lose = lose
    push = p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: push.done)
    assert push.state is TransferState.DONE
    assert len(losses) == 3
    assert p.transport.counters["post"] == 1, "the data is not sent again"
    assert len(p.of(Sent)) == len(c.of(Received)) == 1


def test_o06_failed_entries_leave_every_table(rig: ReportRig) -> None:
    """Report O06: 512 transfers, 100 of them fail: 412 succeed, and no table holds any of the 512.
    An id stays mapped until its ack or its expiry."""
    bad = set(range(3, 503, 5))
    assert len(bad) == 100
    posts = [refused() if n in bad else None for n in range(512)]
    p = rig.node("p", num_blocks=512, layers=1, lease=30.0, retry_window=0)
    c = rig.node("c", num_blocks=512, layers=1, posts=posts)
    handles = [c.agent.pull(p.agent.hold(f"t{n}", at(0, n)), at(0, n)) for n in range(512)]
    rig.run(lambda: all(handle.done for handle in handles))
    assert len(c.of(Received)) == 412
    assert len(c.of(Failed)) == 100
    assert all(failed.drained for failed in c.of(Failed))
    tables = c.tables
    del tables["unconfirmed"]
    assert not any(tables.values())
    rig.settle(1.0)
    assert not any(c.tables.values())
    assert not any(p.tables.values())


# ---- O08: work that a closed connection leaves behind ----------------------------------------


def test_o08_closed_connection_fails_what_was_posted(rig: ReportRig) -> None:
    """Report O08: 10 pieces posted, 6 completed, the connection is closed: 4 failed at once by our
    own ledger, 10 = 6 + 4, and the transfer is terminal."""
    p = rig.node("p", layers=1)
    c = piecewise(rig, "c", [None] * 6 + [HELD] * 4, layers=1)
    attempts: list[Attempt] = []
    post = c.transport.post

    def kept(*args: object, **kwargs: object) -> Attempt:
        attempts.append(post(*args, **kwargs))  # type: ignore[arg-type]
        return attempts[-1]

    c.transport.post = kept  # type: ignore[method-assign]
    ids = [0, 2, 4, 6, 8]
    handle = c.agent.pull(p.agent.hold("t", at(0, *ids)), at(0, *ids))
    rig.run(lambda: len(c.transport.held) == 4)
    rig.settle(0.1)
    assert not handle.done
    closed = rig.clock.now()
    p.agent.close(0.0)
    rig.nodes.remove(p)
    rig.run(lambda: handle.done)
    assert rig.clock.now() - closed < 0.5
    states = [attempt.state for attempt in attempts]
    assert states.count(AttemptState.DONE) == 6
    assert states.count(AttemptState.FAILED) == 4
    assert len(attempts) == 10
    assert handle.error is not None
    assert c.tables["in_flight_pieces"] == 0 or bool(c.of(Failed))
    rig.settle(10.0)
    assert not any(c.tables.values())
