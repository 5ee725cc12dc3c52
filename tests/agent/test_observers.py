"""Observers: what they are told, in which order, and that nothing they do stops the agent."""

from __future__ import annotations

import json
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from agent_rig import Node, Rig, at
from test_posting import Bench, peer

from kvxfer import AgentConfig, KVLayout
from kvxfer.agent import Agent
from kvxfer.core.events import Drained, Event, Expired, Failed, Quarantined, Received, Sent
from kvxfer.core.observations import (
    BreakerClosed,
    BreakerOpened,
    ConnectFailed,
    Observation,
    Outcome,
    PeerSuspected,
    PostFailed,
    QuarantineLeft,
    TransferBegan,
    TransferEnded,
    TransferPosted,
    Verb,
)
from kvxfer.core.verdict import Action, EngineError, Op
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.policies.breaker import BreakerPolicy
from kvxfer.policies.retry import Budget, RetryPolicy
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan

FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): depth=60 requested=8 max=64"
)
BROKEN = EngineError(backend="moriio", code=13, message="local length error")
NEVER = Fault(kind=FaultKind.NEVER)


def watch(node: Node) -> list[Observation]:
    seen: list[Observation] = []
    node.agent.add_observer(seen.append)
    return seen


def of(seen: list[Observation], kind: type[Any]) -> list[Any]:
    return [x for x in seen if isinstance(x, kind)]


def names(seen: list[Observation]) -> list[str]:
    return [type(x).__name__ for x in seen]


def test_a_pull_from_both_sides(rig: Rig) -> None:
    """Begun, posted and ended on the reader's side, begun and ended on the holder's; the event
    comes before the word that the transfer ended, and the times are those of the clock."""
    p, c = rig.node("p"), rig.node("c")
    held, read = watch(p), watch(c)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    began = rig.clock.now()
    rig.run(lambda: bool(c.of(Received)) and bool(p.of(Sent)))
    assert names(read) == [
        "TransferBegan",
        "PeerUp",
        "TransferPosted",
        "Received",
        "TransferEnded",
    ]
    assert names(held) == ["TransferBegan", "PeerUp", "Sent", "TransferEnded"]
    (ended,) = of(read, TransferEnded)
    assert (ended.verb, ended.outcome, ended.kind) == (Verb.PULL, Outcome.DONE, None)
    assert ended.nbytes == handle.nbytes > 0
    assert 0 < ended.queued <= ended.seconds <= rig.clock.now() - began
    assert of(read, TransferPosted)[0].queued == ended.queued
    (over,) = of(held, TransferEnded)
    assert (over.verb, over.outcome, over.queued) == (Verb.HOLD, Outcome.DONE, None)


def test_a_push_from_both_sides(rig: Rig) -> None:
    """The same of WRITE: the bytes are counted on both sides, and only the pusher posts."""
    p, c = rig.node("p"), rig.node("c")
    pushed, accepted = watch(p), watch(c)
    c.agent.accept("t", at(0, 1))
    p.agent.push("t", at(0, 5), to=c.agent.endpoint)
    p.agent.seal("t")
    rig.run(lambda: bool(c.of(Received)) and bool(p.of(Sent)))
    push, accept = of(pushed, TransferEnded)[0], of(accepted, TransferEnded)[0]
    assert (push.verb, accept.verb) == (Verb.PUSH, Verb.ACCEPT)
    assert push.nbytes == accept.nbytes > 0
    assert push.queued is not None
    assert accept.queued is None
    assert not of(accepted, TransferPosted)


def test_refusals_and_failures_of_posts(rig: Rig) -> None:
    """Each refused post is told with its kind, its rule and what is done about it."""
    full = Fault(kind=FaultKind.REFUSE_VALUE, error=FULL)
    p, c = rig.node("p"), rig.node("c", posts=[full, full])
    seen = watch(c)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Received)))
    failed = of(seen, PostFailed)
    assert [(x.kind, x.again, x.op, x.transfer_id) for x in failed] == [
        (ErrorKind.BACKPRESSURE, True, Op.READ, "t")
    ] * 2
    assert all(x.action is Action.REPOST and x.delay > 0 and x.rule for x in failed)
    assert c.counters["posts.retried.backpressure"] == len(failed)


def test_a_post_that_gives_its_transfer_up(rig: Rig) -> None:
    """The last failure is told as not being tried again; the transfer ends with its kind."""
    bad = EngineError(backend="moriio", code=11, message="length out of range")
    p, c = rig.node("p"), rig.node("c", posts=[Fault(kind=FaultKind.REFUSE_VALUE, error=bad)])
    seen = watch(c)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Failed)))
    (failed,) = of(seen, PostFailed)
    (ended,) = of(seen, TransferEnded)
    assert not failed.again
    assert (ended.outcome, ended.kind) == (Outcome.FAILED, failed.kind)
    assert ended.message == str(c.of(Failed)[0].error)


def test_quarantine_from_its_beginning_to_its_end(rig: Rig) -> None:
    """Failed and not drained, into quarantine, out of it by reclaim with the time spent there; the
    health names it with its numbers and a next step all the while."""
    plan = FaultPlan(posts=[NEVER], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    p, c = rig.node("p", lease=60.0), rig.node("c", plan=plan)
    seen = watch(c)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Quarantined)))
    assert not of(seen, QuarantineLeft)
    (ended,) = of(seen, TransferEnded)
    assert (ended.outcome, ended.drained) == (Outcome.FAILED, False)
    rig.pass_time(2.0)
    health = c.agent.health()
    (problem,) = health.problems
    assert health.ready
    assert problem.name == "quarantine"
    assert problem.next_step
    assert problem.numbers == {
        "transfers": 1,
        "limit": 64,
        "blocks": 1,
        "oldest_seconds": pytest.approx(2.0, abs=0.1),
    }
    assert "1 transfers are in quarantine, of 64 that may be, with 1 blocks" in problem.message
    assert json.loads(json.dumps(health.to_dict()))["problems"][0]["name"] == "quarantine"
    told = json.loads(json.dumps(c.agent.snapshot().to_dict()))
    assert told["quarantine"][0]["transfer_id"] == "t"
    assert told["quarantine"][0]["blocks"] == 1
    c.agent.reclaim("t")
    rig.run(lambda: bool(c.of(Drained)))
    (left,) = of(seen, QuarantineLeft)
    assert (left.by, left.transfer_id, left.role) == ("reclaim", "t", Verb.PULL.role)
    assert left.seconds == pytest.approx(2.0, abs=0.1)
    assert c.counters["quarantine.left.reclaim"] == 1
    assert c.agent.health().problems == ()


def test_a_lease_that_ends(rig: Rig) -> None:
    """A hold that nobody reads ends as EXPIRED, and is told so."""
    p = rig.node("p")
    seen = watch(p)
    p.agent.hold("t", at(0, 5))
    rig.run(lambda: bool(p.of(Expired)))
    (ended,) = of(seen, TransferEnded)
    assert (ended.verb, ended.outcome) == (Verb.HOLD, Outcome.EXPIRED)
    assert ended.seconds == pytest.approx(3.5, abs=0.2)  # the lease and its margin


def test_a_breaker_opens_and_closes(rig: Rig) -> None:
    """Both are told, with the peer and the last fault."""
    dies = Fault(kind=FaultKind.FAIL_DRAINED, error=BROKEN)
    once = RetryPolicy(budget=Budget(rebuilds=0))
    p = rig.node("p")
    c = rig.node(
        "c", posts=[dies] * 2, retry=once, breaker=BreakerPolicy(faults=2, window=60.0, pause=1.0)
    )
    seen = watch(c)
    for i in range(2):
        handle = c.agent.pull(p.agent.hold(f"t{i}", at(0, 5)), at(0, 1))
        rig.run(lambda handle=handle: handle.done)  # type: ignore[misc]
    (opened,) = of(seen, BreakerOpened)
    assert (opened.peer, opened.kind) == (p.agent.incarnation, ErrorKind.CONNECTION)
    assert "local length error" in opened.reason
    rig.pass_time(1.2)
    c.agent.pull(p.agent.hold("probe", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Received, "probe")))
    assert of(seen, BreakerClosed) == [BreakerClosed(peer=p.agent.incarnation)]


def test_a_connection_that_drops(rig: Rig) -> None:
    """A peer is suspected before it is down, and the reason is told."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.connect([p.agent.endpoint])
    rig.run(lambda: bool(c.agent.snapshot().peers))
    seen = watch(c)
    (link,) = tuple(c.agent._engine.links)
    link.suspect(rig.clock.now())
    rig.run(lambda: bool(of(seen, PeerSuspected)))
    assert of(seen, PeerSuspected)[0].peer == p.agent.incarnation


def test_refused_before_it_began(rig: Rig) -> None:
    """What is refused on the progress thread ends without having begun."""
    p = rig.node("p")
    seen = watch(p)
    p.agent.hold("t", at(0, 5), readers=[])
    rig.run(lambda: bool(p.of(Failed)))
    assert names(seen) == ["Failed", "TransferEnded"]
    assert of(seen, TransferEnded)[0].kind is ErrorKind.INVALID


def test_an_observer_that_raises_stops_nothing(rig: Rig) -> None:
    """It is counted, and in ``health``; the transfer, the other observers and the listeners of the
    agent go on."""
    p, c = rig.node("p"), rig.node("c")

    def broken(observation: Observation) -> None:
        raise RuntimeError("a bug of the user's")

    c.agent.add_observer(broken)
    seen = watch(c)
    notified: list[int] = []
    c.agent._listeners["x"] = lambda: notified.append(1)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Received)))
    assert len(seen) == c.counters["observers.failed"] == 5
    assert len(notified) == len(of(seen, Event)) == 2
    health = c.agent.health()
    assert health.ready
    assert health.problems[0].name == "observer_failed"
    assert health.problems[0].numbers == {"failures": 5}


def test_removed_and_added_twice(rig: Rig) -> None:
    """One that is added twice is told twice; what ``add_observer`` returned ends one of them, as
    often as it is called."""
    p = rig.node("p")
    seen: list[Observation] = []
    first = p.agent.add_observer(seen.append)
    p.agent.add_observer(seen.append)
    p.agent.hold("a", at(0, 5))
    p.agent.poll()
    assert names(seen) == ["TransferBegan", "TransferBegan"]
    first()
    first()
    p.agent.hold("b", at(0, 6))
    p.agent.poll()
    assert len(seen) == 3


def test_not_callable(rig: Rig) -> None:
    """Refused on the caller's thread, before anything is bound."""
    with pytest.raises(InvalidInputError, match="must be callable with one Observation, int"):
        rig.node("p").agent.add_observer(3)  # type: ignore[arg-type]
    for arguments in ({"observers": [None]}, {"on_event": "x"}):
        with pytest.raises(InvalidInputError, match="must be callable"):
            Agent("loopback", channel=rig.network.channel(), clock=rig.clock, **arguments)  # type: ignore[arg-type]


def test_events_alone_for_on_event(rig: Rig) -> None:
    """``on_event`` is told of events and of nothing else, ``observers`` of everything."""
    events: list[Event] = []
    everything: list[Observation] = []
    agent = Agent(
        "loopback",
        channel=rig.network.channel(),
        clock=rig.clock,
        on_event=events.append,
        observers=[everything.append],
        config=rig.node("other").agent.config,
    )
    with agent:
        agent._ctx.emit(Sent(transfer_id="t"))
        agent._ctx.observe(PeerSuspected(peer="p", reason="r"))
    assert events == [Sent(transfer_id="t")]
    assert names(everything) == ["Sent", "PeerSuspected"]


def test_observations_pickle() -> None:
    """They may be handed to another process."""
    for value in (
        TransferBegan(verb=Verb.PULL, transfer_id="t", waited=0.1),
        QuarantineLeft(transfer_id="t", role=Verb.PULL.role, by="fence", seconds=1.0),
        BreakerOpened(peer="p", kind=ErrorKind.CONNECTION, reason="r"),
    ):
        assert pickle.loads(pickle.dumps(value)) == value


def test_never_two_at_a_time() -> None:
    """With a progress thread of its own an agent tells its observers on that thread, from
    ``close`` on the closing one, and one thing at a time."""
    threads: set[str] = set()
    inside = threading.Lock()

    def told(observation: Observation) -> None:
        assert inside.acquire(blocking=False), "two calls at a time"
        threads.add(threading.current_thread().name)
        inside.release()

    cache = np.zeros((16, 64), dtype=np.uint8)
    layout = KVLayout(
        num_blocks=16,
        block_stride=64,
        planes=1,
        plane_stride=1024,
        kernel_tokens=1,
        token_stride=64,
        heads=1,
        head_stride=64,
        head_nbytes=64,
        dtype="uint8",
    )
    with Agent("loopback", config=AgentConfig(name="w", keeper=None), observers=[told]) as agent:
        agent.register_kv_caches({"l": cache}, layout)
        agent.hold("a", at(0, 1))
        agent.hold("b", at(0, 2), lease=0.01)
        agent.abort("b")
        deadline = agent.clock.now() + 60
        while "kvxfer-w" not in threads and agent.clock.now() < deadline:
            threading.Event().wait(0.01)
    assert threads == {"kvxfer-w", threading.current_thread().name}
    assert agent.snapshot().counters.get("observers.failed", 0) == 0


def test_connects_that_fail(rig: Rig) -> None:
    """Each is told with its kind, and whether it is tried again; they are what the counters say."""
    refuse = Fault(kind=FaultKind.FAIL, error=BROKEN)
    p = rig.node("p")
    c = rig.node("c", plan=FaultPlan(connects=[refuse, refuse]))
    seen = watch(c)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Received) or c.of(Failed)))
    failed = of(seen, ConnectFailed)
    assert failed
    assert all(x.peer == p.agent.incarnation and x.message for x in failed)
    retried = sum(n for name, n in c.counters.items() if name.startswith("connect.retried."))
    assert sum(x.again for x in failed) == retried


def test_a_call_that_does_not_return(rig: Rig) -> None:
    """``Timeouts.post`` is over: told as a failure that is not tried again."""
    bench = Bench(rig)
    p = peer(rig, "p")
    bench.engine.stuck.add(p.transport.incarnation)
    seen: list[Observation] = []
    bench.c.agent.add_observer(seen.append)
    handle = bench.pull(p, "t", block=1)
    bench.until_inside(1)
    rig.run(lambda: handle.done)
    (failed,) = of(seen, PostFailed)
    assert (failed.kind, failed.again, failed.refused) == (ErrorKind.TIMEOUT, False, False)
    assert failed.rule == "kvxfer.timeouts.post"
    assert bench.c.counters["posts.failed.timeout"] == 1
