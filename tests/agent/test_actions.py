"""Each ``Action`` of a verdict is carried out, with its waits, bounds and history."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import attrs
import pytest
import tenacity
from agent_rig import TIMEOUTS, Node, Rig, at, layout

from kvxfer.agent import TransferHandle
from kvxfer.agent.config import AgentConfig
from kvxfer.backends.loopback import LoopbackConfig, LoopbackTransport
from kvxfer.core.attempt import Attempt
from kvxfer.core.events import Drained, Failed, Received
from kvxfer.core.verdict import Action, EngineError
from kvxfer.errors import ConfigError, ErrorKind
from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.policies.retry import Backoff, Budget, RetryPolicy
from kvxfer.policies.rule import Rule
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint
from kvxfer.testing.faulty import FaultyTransport


def said(message: str, code: int = 13) -> EngineError:
    return EngineError(backend="moriio", code=code, message=message)


def refuse(error: EngineError) -> Fault:
    return Fault(kind=FaultKind.REFUSE_VALUE, error=error)


SQ_FULL = refuse(said("SQ full (batch): ep=0 depth=60 requested=8 max=64"))
DEAD = Fault(kind=FaultKind.FAIL_DRAINED, error=said("Work Request Flushed Error"))
STALE = refuse(EngineError(backend="loopback", message="the peer deregistered the region"))
DOUBLING = RetryPolicy(wait=Backoff(first=0.001, factor=2.0, cap=0.05, jitter=0.0))


class Sizes(LoopbackTransport):
    """Remembers the pieces and bytes of every call."""

    def __init__(self, config: LoopbackConfig | None = None) -> None:
        super().__init__(config)
        self.calls: list[tuple[int, int]] = []

    def _post(self, attempt: Attempt) -> None:
        super()._post(attempt)
        self.calls.append((len(attempt.batch), attempt.batch.nbytes))


def reader(
    rig: Rig,
    posts: Sequence[Fault | None] = (),
    engine: LoopbackTransport | None = None,
    **options: object,
) -> Node:
    plan = options.pop("plan", None) or FaultPlan(posts=posts)
    transport = FaultyTransport(engine or LoopbackTransport(), plan, clock=rig.clock)  # type: ignore[arg-type]
    return rig.node("c", transport=transport, **options)


def pull(p: Node, c: Node, name: str = "t", source: int = 5, block: int = 1) -> TransferHandle:
    return c.agent.pull(p.agent.hold(name, at(0, source)), at(0, block))


def done(rig: Rig, handle: TransferHandle) -> None:
    rig.run(lambda: handle.done)
    assert handle.error is None


def struck(c: Node) -> list[float]:
    """When posts were refused, in seconds from the first."""
    times = [i.at for i in c.transport.log if i.point is FaultPoint.POST]  # type: ignore[attr-defined]
    return [round(t - times[0], 6) for t in times]


def warm(rig: Rig, p: Node, c: Node) -> None:
    """A transfer that succeeds, so that the link is up and the path prepared."""
    done(rig, pull(p, c, "warm", block=9))


# ---- REPOST ----------------------------------------------------------------------------------


def test_o01_repost_after_the_policys_waits(rig: Rig) -> None:
    """Report O01: full five times: posts 0, 1, 3, 7, 15 ms after the first, then success."""
    p, c = rig.node("p"), reader(rig, [SQ_FULL] * 5, retry=DOUBLING)
    done(rig, pull(p, c))
    assert struck(c) == [0.0, 0.001, 0.003, 0.007, 0.015]
    assert c.counters["posts.retried.backpressure"] == 5


def test_o01_no_sleep_past_the_deadline(rig: Rig) -> None:
    """Report O01: 10 ms: waits of 1, 2 and 4 ms; the next 8 would pass it: 4 posts, no more.
    The budget begins with the first post, whatever connecting and the grant took."""
    p = rig.node("p")
    c = reader(rig, [SQ_FULL] * 99, retry=DOUBLING, timeouts=attrs.evolve(TIMEOUTS, transfer=0.010))
    handle = pull(p, c)
    rig.run(lambda: handle.done)
    assert struck(c) == [0.0, 0.001, 0.003, 0.007]
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.TIMEOUT
    assert [e.kind for e in handle.error.history] == [ErrorKind.BACKPRESSURE] * 4
    again = pickle.loads(pickle.dumps(handle.error))
    assert (again.kind, again.history) == (handle.error.kind, handle.error.history)


def test_tenacity_objects_of_the_users(rig: Rig) -> None:
    """``AgentConfig.retry`` takes tenacity's own objects; the agent's decisions are theirs."""
    policy = RetryPolicy(stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_fixed(0.2))
    p, c = rig.node("p"), reader(rig, [SQ_FULL] * 99, retry=policy)
    handle = pull(p, c)
    rig.run(lambda: handle.done)
    assert struck(c) == pytest.approx([0.0, 0.2, 0.4], abs=1e-4)
    assert "the stop object ended it" in str(handle.error)
    with pytest.raises(ConfigError, match="retry must be a RetryPolicy, not 3"):
        AgentConfig(retry=3)  # type: ignore[arg-type]


# ---- SPLIT -----------------------------------------------------------------------------------


def test_o02_split_to_the_limit_that_is_named(rig: Rig) -> None:
    """Report O02: 300 pieces of at most 256: not retried as it was, and not cut finer than that."""
    engine = Sizes()
    too_many = refuse(said("SQ request exceeds capacity (batch): ep=0 requested=300 max=256"))
    p = rig.node("p", layers=1, num_blocks=300)
    c = reader(rig, [too_many], engine, layers=1, num_blocks=300)
    ids = list(range(0, 300, 2))
    handle = c.agent.pull(p.agent.hold("t", at(0, *ids)), at(0, *ids))
    done(rig, handle)
    sizes = [n for n, _ in engine.calls]
    assert len(sizes) == 2
    assert sum(sizes) == 300
    assert max(sizes) <= 256
    assert c.content(ids) == p.content(ids)
    assert c.counters["posts.split"] == 1


def test_split_to_the_bytes_that_are_named(rig: Rig) -> None:
    """A merged piece above the port's largest message: no call has more bytes than that."""
    engine = Sizes()
    text = "merged RDMA WR 0 length 128 exceeds local max_msg_sz 48; enable RDMA transfer chunking"
    p = rig.node("p", layers=1, num_blocks=64)
    c = reader(rig, [refuse(said(text, code=11))], engine, layers=1, num_blocks=64)
    done(rig, pull(p, c))
    assert [nbytes for _, nbytes in engine.calls] == [48, 16, 48, 16]
    assert c.content([1]) == p.content([5])


def test_split_in_halves_where_no_limit_is_named(rig: Rig) -> None:
    """Refused until it fits: halves, down to half a piece."""
    engine = Sizes()
    text = "single request size exceeds UINT32_MAX; split it before submitting"
    p = rig.node("p", layers=1, num_blocks=64)
    c = reader(rig, [refuse(said(text, code=11))] * 3, engine, layers=1, num_blocks=64)
    done(rig, pull(p, c))  # 2 pieces of 64: 1 + 1, then each in two
    assert engine.calls == [(1, 32)] * 4
    assert c.content([1]) == p.content([5])


def test_split_down_to_nothing_fails(rig: Rig) -> None:
    """An engine that refuses even a byte: a bounded number of posts, and an INVALID failure."""
    text = "single request size exceeds UINT32_MAX; split it before submitting"
    p = rig.node("p", layers=1, num_blocks=64)
    c = reader(rig, [refuse(said(text, code=11))] * 999, layers=1, num_blocks=64)
    handle = pull(p, c)
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.INVALID
    assert len(c.transport.log) < 100  # type: ignore[attr-defined]


# ---- WAIT ------------------------------------------------------------------------------------


def test_wait_posts_nothing(rig: Rig) -> None:
    """ "Still in progress" is no end: nothing is posted again; the deadline decides."""
    rules = ClassifierRegistry.from_plugins()
    rules.add(
        Rule(
            name="test.progress",
            pattern="still working",
            kind=ErrorKind.UNKNOWN,
            action=Action.WAIT,
            retryable=False,
        )
    )
    p = rig.node("p")
    c = reader(rig, [Fault(kind=FaultKind.FAIL, error=said("still working"), after=8.0)])
    c.agent._ctx.classifier = rules
    handle = pull(p, c)
    assert rig.run(lambda: handle.done) == pytest.approx(TIMEOUTS.transfer, abs=0.2)
    assert c.transport.counters["post"] == 1
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.TIMEOUT
    rig.run(lambda: bool(c.of(Drained)) or c.of(Failed)[0].drained)


# ---- REBUILD ---------------------------------------------------------------------------------


def test_rebuild_prepares_a_new_path_and_posts_again(rig: Rig) -> None:
    """The first time on the same connection; the pieces are posted again over the new path."""
    p, c = rig.node("p"), reader(rig, [None, DEAD])
    warm(rig, p, c)
    done(rig, pull(p, c))
    assert c.content([1]) == p.content([5])
    assert c.transport.counters["prepare"] == 2
    assert c.transport.counters["connect"] == 1
    assert c.counters["paths.rebuilt"] == 1


def test_rebuild_that_does_not_help_makes_the_connection_anew(rig: Rig) -> None:
    """Twice in a row: disconnect, hello, connect, prepare, on both sides; then it works."""
    p, c = rig.node("p"), reader(rig, [None, DEAD, DEAD])
    warm(rig, p, c)
    done(rig, pull(p, c))
    assert c.transport.counters["connect"] == 2
    assert c.counters["peers.reconnected"] == 1
    assert p.counters["peers.reconnected"] == 1
    assert len(p.of(Failed)) == len(c.of(Failed)) == 0
    # A success in between: the next failure begins with a new path again.
    c.transport.plan = FaultPlan(posts=[DEAD])  # type: ignore[attr-defined]
    done(rig, pull(p, c, "u", block=2))
    assert c.transport.counters["connect"] == 2


def test_both_directions_survive_a_new_connection(rig: Rig) -> None:
    """While our connection is made anew, the peer reads from us: both end well."""
    p = rig.node("p")
    c = reader(rig, [None, DEAD, DEAD, None, None])
    warm(rig, p, c)
    handles = [pull(p, c), pull(c, p, "back", block=3)]
    handles += [pull(c, p, f"back{i}", block=10 + i) for i in range(3)]
    rig.run(lambda: all(h.done for h in handles))
    assert [h.error for h in handles] == [None] * 5


def test_prepare_that_finds_the_connection_dead(rig: Rig) -> None:
    """A backend whose queue pair is dead says so in ``prepare``: disconnect, connect, prepare."""
    dead = Fault(kind=FaultKind.FAIL, error=said("Work Request Flushed Error"))
    plan = FaultPlan(posts=[None, DEAD], prepares=[None, dead])
    p, c = rig.node("p"), reader(rig, plan=plan)
    warm(rig, p, c)
    done(rig, pull(p, c))
    assert c.transport.counters["prepare"] == 3
    assert c.transport.counters["connect"] == 2
    assert c.content([1]) == p.content([5])


def test_rebuild_has_a_budget(rig: Rig) -> None:
    """A path that is never well: as many rebuilds as the budget has, then the engine's words."""
    p = rig.node("p")
    c = reader(rig, [DEAD] * 99, breaker=None, retry=RetryPolicy(budget=Budget(rebuilds=3)))
    handle = pull(p, c)
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.CONNECTION
    assert "3 rebuilds did not help" in str(handle.error)
    assert len(handle.error.history) == 4
    assert all(e.action is Action.REBUILD for e in handle.error.history)
    rig.pass_time(5.0)
    assert not any(c.tables.values())


def test_a_queue_that_never_empties_gets_a_new_connection(rig: Rig) -> None:
    """A leaked send queue refuses for ever: only a new connection has a new queue."""
    policy = RetryPolicy(budget=Budget(refusals=5, rebuilds=1))
    p, c = rig.node("p"), reader(rig, [None] + [SQ_FULL] * 6, retry=policy)
    warm(rig, p, c)
    done(rig, pull(p, c))
    assert c.transport.counters["connect"] == 2
    assert "breakers.faults" not in c.counters


def test_undrained_attempts_of_an_old_connection_are_fenced(rig: Rig) -> None:
    """What is in flight on the connection before is still somebody's: it drains or is fenced."""
    p = rig.node("p")
    c = reader(rig, [None, Fault(kind=FaultKind.NEVER), DEAD, DEAD])
    warm(rig, p, c)
    silent = pull(p, c, "silent", block=2)
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    other = pull(p, c, "other", block=3)
    rig.run(lambda: silent.done and other.done)
    assert other.error is None
    rig.pass_time(12.0)
    assert not any(c.tables.values()), c.tables
    assert not c.agent.snapshot().quarantine


# ---- REHANDSHAKE -----------------------------------------------------------------------------


def test_rehandshake_waits_for_the_peers_hello(rig: Rig) -> None:
    """The peer says hello again before anything is prepared or posted; then it goes on."""
    p, c = rig.node("p"), reader(rig, [None, STALE])
    warm(rig, p, c)
    hellos = p.counters["received.hello"]
    handle = pull(p, c)
    rig.run(lambda: c.transport.counters.get("post.refuse_value", 0) == 1)
    prepared = c.transport.counters["prepare"]
    rig.nodes.remove(p)  # it does not answer for a while
    rig.pass_time(0.5)
    assert c.transport.counters["prepare"] == prepared
    assert not handle.done
    rig.nodes.append(p)
    done(rig, handle)
    assert p.counters["received.hello"] > hellos
    assert c.counters["peers.greeted_again"] == 1
    assert c.transport.counters["prepare"] == prepared + 1


def test_rehandshake_without_an_answer_ends_in_time(rig: Rig) -> None:
    """Promise 7: a peer that does not say hello again is lost after ``Timeouts.connect``."""
    p, c = rig.node("p", lease=60.0), reader(rig, [None, STALE], lease=60.0)
    warm(rig, p, c)
    handle = pull(p, c)
    rig.run(lambda: c.transport.counters.get("post.refuse_value", 0) == 1)
    rig.nodes.remove(p)
    assert rig.run(lambda: handle.done) == pytest.approx(TIMEOUTS.connect, abs=0.1)
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.PEER_LOST
    rig.nodes.append(p)


def test_rehandshake_that_does_not_help_makes_the_connection_anew(rig: Rig) -> None:
    """Twice in a row: the connection is made anew on both sides."""
    p, c = rig.node("p"), reader(rig, [None, STALE, STALE])
    warm(rig, p, c)
    done(rig, pull(p, c))
    assert c.transport.counters["connect"] == 2


def test_registered_again_meanwhile(rig: Rig) -> None:
    """What the peer says in its new hello is what is used: its region is another one now."""
    p, c = rig.node("p"), reader(rig)
    warm(rig, p, c)
    rig.run(lambda: not p.tables["holds"])
    regions = dict(p.transport.inner._regions)  # type: ignore[attr-defined]
    fresh = {name: array + 1 for name, array in p.memory.items()}
    p.agent.register_kv_caches(fresh, layout(16))
    p.memory = fresh
    assert set(p.transport.inner._regions).isdisjoint(regions)  # type: ignore[attr-defined]
    done(rig, pull(p, c))
    assert c.content([1]) == p.content([5])


# ---- FAIL ------------------------------------------------------------------------------------


def test_fail_is_one_post(rig: Rig) -> None:
    """What fails again is not tried again, and the blocks come back at once."""
    p, c = rig.node("p"), reader(rig, [refuse(said("length out of range", code=11))])
    handle = pull(p, c)
    rig.run(lambda: handle.done)
    (failed,) = c.of(Failed)
    assert (failed.kind, failed.drained) == (ErrorKind.INVALID, True)
    assert c.transport.counters["post"] == 1


def test_o08_a_closed_connection_fails_what_was_posted(rig: Rig) -> None:
    """Report O08: ten calls, six completed, then the connection goes: four failed at once by our
    own ledger, and the transfer ends; ten are six and four."""
    engine = LoopbackTransport(LoopbackConfig(max_pieces=1))
    plan = [None] * 6 + [Fault(kind=FaultKind.LATE_REPORT)] * 4
    p = rig.node("p", layers=1, num_blocks=32)
    c = reader(
        rig,
        plan,
        engine,
        layers=1,
        num_blocks=32,
        retry=RetryPolicy(stop=tenacity.stop_after_attempt(1)),
    )
    ids = [0, 2, 4, 6, 8]
    handle = c.agent.pull(p.agent.hold("t", at(0, *ids)), at(0, *ids))
    rig.run(lambda: c.tables["in_flight_pieces"] == 4)
    link = c.agent._engine.links.of(p.agent.incarnation)
    assert link is not None
    link.close("a test")
    began = rig.clock.now()
    rig.run(lambda: handle.done)
    assert rig.clock.now() - began < 0.2
    assert not c.of(Received)
    assert c.counters["posts"] == 10
    rig.run(lambda: not any(c.tables.values()))


# ---- phases ----------------------------------------------------------------------------------


def test_phases_have_budgets_of_their_own(rig: Rig) -> None:
    """Connecting takes most of ``Timeouts.connect``, posting most of ``transfer``: both fit."""
    limits = Timeouts(connect=1.0, queue=3.0, post=1.0, transfer=1.0, ack=8.0, drain=1.0)
    plan = FaultPlan(
        posts=[Fault(kind=FaultKind.LATE, after=0.8)],
        connects=[Fault(kind=FaultKind.LATE, after=0.8)],
    )
    p, c = rig.node("p"), reader(rig, plan=plan, timeouts=limits)
    handle = pull(p, c)
    assert rig.run(lambda: handle.done) > 1.5
    assert handle.error is None


def test_connect_and_post_have_waits_of_their_own(rig: Rig) -> None:
    """``connect_wait`` and ``connect_budget`` are for connecting, ``wait`` and ``budget`` for
    posts."""
    policy = RetryPolicy(
        wait=tenacity.wait_fixed(0.001),
        connect_wait=tenacity.wait_fixed(0.3),
        budget=Budget(refusals=1),
        connect_budget=Budget(refusals=5),
    )
    refused = EngineError(
        backend="moriio",
        message="connect(10.0.0.1:2): Connection refused",
        exception=("builtins.RuntimeError",),
    )
    plan = FaultPlan(posts=[SQ_FULL], connects=[Fault(kind=FaultKind.FAIL, error=refused)] * 3)
    p, c = rig.node("p"), reader(rig, plan=plan, retry=policy)
    handle = pull(p, c)
    assert rig.run(lambda: handle.done) == pytest.approx(0.9, abs=0.15)
    assert handle.error is None
    times = [i.at for i in c.transport.log if i.point is FaultPoint.CONNECT]  # type: ignore[attr-defined]
    assert times[1] - times[0] == pytest.approx(0.3, abs=0.01)
