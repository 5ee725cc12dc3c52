"""Credits in the agent: who waits for whom, how long, and that every credit comes back."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
from agent_rig import TIMEOUTS, Node, Rig, at

from kvxfer.agent import TransferHandle
from kvxfer.agent.config import AgentConfig
from kvxfer.backends.loopback import CopyIn, LoopbackConfig, LoopbackTransport
from kvxfer.core.attempt import Attempt
from kvxfer.core.events import Failed, Received
from kvxfer.core.memory import Descriptor, Region
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Path, Peer
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ConfigError, ErrorKind
from kvxfer.policies.admission import (
    AdmissionPolicy,
    AimdAdmission,
    CreditLimit,
    FixedAdmission,
    NoAdmission,
)
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport

SQ_FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): ep=0 depth=60 requested=8 max=64"
)
LONG = Timeouts(connect=12.0, queue=10.0, post=6.0, transfer=30.0, ack=30.0, drain=5.0)


class Engine(LoopbackTransport):
    """A loopback with a queue; what was posted, and the most that was in the queue of a peer."""

    def __init__(self, room: int | None) -> None:
        super().__init__(LoopbackConfig(copy_in=CopyIn.PROGRESS, credits=room))
        self.posts: list[int] = []
        self.deepest = 0

    def _post(self, attempt: Attempt) -> None:
        super()._post(attempt)
        self.posts.append(len(attempt.batch))
        self.deepest = max(self.deepest, attempt.path.peer.pieces_queued)  # type: ignore[attr-defined]


def reader(
    rig: Rig,
    name: str,
    room: int | None,
    *,
    faults: Sequence[Fault | None] = (),
    engine: Engine | None = None,
    num_blocks: int = 512,
    timeouts: Timeouts = TIMEOUTS,
    **config: object,
) -> tuple[Node, Engine]:
    engine = engine or Engine(room)
    transport = FaultyTransport(engine, FaultPlan(posts=faults), clock=rig.clock)
    options = {"layers": 1, "num_blocks": num_blocks, "timeouts": timeouts, **config}
    return rig.node(name, transport=transport, **options), engine


def scattered(count: int, first: int = 0) -> list[int]:
    """Blocks that do not touch: two pieces each (a K and a V plane)."""
    return list(range(first, first + 2 * count, 2))


def pull(p: Node, c: Node, name: str, count: int, first: int = 0) -> TransferHandle:
    """Pull ``2 * count`` pieces."""
    offer = p.agent.hold(name, at(0, *scattered(count)))
    return c.agent.pull(offer, at(0, *scattered(count, first)))


def settle(rig: Rig, node: Node) -> None:
    """Every table empty, every credit back."""
    rig.pass_time(4.0)
    assert not any(node.tables.values()), node.tables
    assert node.agent.snapshot().queues == ()
    assert len(node.agent._ctx.desk) == 0


# ---- overload --------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", [FixedAdmission(), NoAdmission()], ids=["on", "off"])
def test_overload(rig: Rig, admission: AdmissionPolicy) -> None:
    """A queue of 64, 512 requests of 128 pieces at once: all succeed. With admission nothing is
    refused; without it the engine refuses and the retries do it."""
    p = rig.node("p", layers=1, num_blocks=130, lease=60.0)
    c, engine = reader(
        rig, "c", 64, num_blocks=512 * 128, timeouts=LONG, admission=admission, lease=60.0
    )
    offers = [p.agent.hold(f"t{i}", at(0, *scattered(64))) for i in range(512)]
    handles = [
        c.agent.pull(offer, at(0, *scattered(64, 128 * i))) for i, offer in enumerate(offers)
    ]
    rig.run(lambda: all(h.done for h in handles))
    assert [h.error for h in handles if h.error is not None] == []
    assert len(c.of(Received)) == 512
    assert sum(engine.posts) == 512 * 128
    assert engine.deepest <= 64
    want = p.memory["layer0"][:, scattered(64)]
    for i in (0, 255, 511):
        assert np.array_equal(c.memory["layer0"][:, scattered(64, 128 * i)], want)
    refused = c.counters.get("posts.retried.backpressure", 0)
    assert (refused == 0) == (admission == FixedAdmission())
    settle(rig, c)


def test_no_limit_means_no_waiting(rig: Rig) -> None:
    """A backend without credits is given every call at once and uncut."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, engine = reader(rig, "c", None)
    handles = [pull(p, c, f"t{i}", 20, first=40 * i) for i in range(8)]
    rig.run(lambda: all(h.done for h in handles))
    assert engine.posts == [40] * 8
    assert "admission.waited" not in c.counters
    assert "admission.cut" not in c.counters


# ---- turns -----------------------------------------------------------------------------------


def test_more_than_the_whole_credits_is_cut(rig: Rig) -> None:
    """A part of 300 pieces through a queue of 256 goes as 256 and 44, both within the credits."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, engine = reader(rig, "c", 256, admission=FixedAdmission(share=1.0))
    handle = pull(p, c, "t", 150)
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert engine.posts == [256, 44]
    assert c.counters["admission.cut"] == 1
    assert c.content(scattered(150)) == p.content(scattered(150))


def test_a_big_transfer_starves_nobody(rig: Rig) -> None:
    """Of one peer: a small transfer that comes later is served in turn, long before the big one."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, engine = reader(rig, "c", 8)
    big = pull(p, c, "big", 200)
    rig.run(lambda: len(engine.posts) > 5)
    small = pull(p, c, "small", 1, first=410)
    rig.run(lambda: small.done)
    assert small.error is None
    assert not big.done
    rig.run(lambda: big.done)
    assert big.error is None
    settle(rig, c)


def test_a_full_queue_to_one_peer_holds_up_nobody_else(rig: Rig) -> None:
    """Promise 7: what waits for the credits of a silent peer leaves the others alone."""
    silent, well = (rig.node(n, layers=1, num_blocks=512) for n in ("silent", "well"))
    c, _ = reader(rig, "c", 4, faults=[Fault(kind=FaultKind.LATE_REPORT)] * 2)
    stuck = pull(silent, c, "stuck", 50)
    rig.run(lambda: c.tables["in_flight_pieces"] == 4)
    assert c.tables["waiting_for_credits"] == 1
    (state,) = c.agent.snapshot().queues
    assert (state.limit, state.in_flight, state.waiting, state.waiting_pieces) == (4, 4, 1, 96)
    other = pull(well, c, "other", 50, first=200)
    assert rig.run(lambda: other.done) < 0.5
    assert other.error is None
    assert not stuck.done


# ---- leaving ---------------------------------------------------------------------------------


def test_queue_time_out(rig: Rig) -> None:
    """``Timeouts.queue`` bounds the wait for credits; the error says what the queue was doing."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, _ = reader(
        rig,
        "c",
        4,
        faults=[Fault(kind=FaultKind.LATE_REPORT)] * 2,
        timeouts=attrs.evolve(TIMEOUTS, transfer=20.0),
    )
    first = pull(p, c, "first", 2)
    rig.run(lambda: c.tables["in_flight_pieces"] == 4)
    waits = pull(p, c, "waits", 2, first=10)
    rig.run(lambda: c.tables["waiting_for_credits"] == 1)
    assert rig.run(lambda: waits.done) == pytest.approx(TIMEOUTS.queue, abs=0.1)
    (failed,) = c.of(Failed)
    assert (failed.kind, failed.drained) == (ErrorKind.TIMEOUT, True)
    assert "Timeouts.queue is over; of 4 credits" in str(failed.error)
    assert c.counters["admission.timeout"] == 1
    assert c.tables["waiting_for_credits"] == 0
    c.transport.release()
    rig.run(lambda: first.done)
    assert first.error is None
    settle(rig, c)


def test_the_transfers_time_begins_with_its_first_post(rig: Rig) -> None:
    """Separate budgets: what was spent in the queue is not missing from ``Timeouts.transfer``."""
    p = rig.node("p", layers=1, num_blocks=512)
    late = Fault(kind=FaultKind.LATE_REPORT, after=2.5)
    c, _ = reader(
        rig, "c", 4, faults=[late] * 4, timeouts=attrs.evolve(TIMEOUTS, transfer=3.0, queue=2.9)
    )
    handles = [pull(p, c, f"t{i}", 2, first=10 * i) for i in range(2)]
    took = rig.run(lambda: all(h.done for h in handles))
    assert took > 3.0
    assert [h.error for h in handles] == [None, None]


def test_abort_while_waiting(rig: Rig) -> None:
    """Who is aborted leaves the line at once, and those behind it move up."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, _ = reader(rig, "c", 4, faults=[Fault(kind=FaultKind.LATE_REPORT)] * 2)
    first = pull(p, c, "first", 2)
    rig.run(lambda: c.tables["in_flight_pieces"] == 4)
    second, third = (pull(p, c, n, 2, first=10 * i) for i, n in ((1, "second"), (2, "third")))
    rig.run(lambda: c.tables["waiting_for_credits"] == 2)
    second.abort()
    rig.run(lambda: second.done)
    assert c.tables["waiting_for_credits"] == 1
    assert c.of(Failed, "second")[0].drained
    c.transport.release()
    rig.run(lambda: first.done and third.done)
    assert third.error is None
    settle(rig, c)


def test_too_many_in_line(rig: Rig) -> None:
    """Promise 8: the line is bounded; who does not fit fails at once with RESOURCE, drained."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, _ = reader(
        rig,
        "c",
        4,
        faults=[Fault(kind=FaultKind.LATE_REPORT)] * 2,
        admission=FixedAdmission(most_waiting=2),
    )
    first = pull(p, c, "first", 2)
    rig.run(lambda: c.tables["in_flight_pieces"] == 4)
    waiting = [pull(p, c, f"w{i}", 2, first=10 * i + 10) for i in range(2)]
    rig.run(lambda: c.tables["waiting_for_credits"] == 2)
    extra = pull(p, c, "extra", 2, first=40)
    assert rig.run(lambda: extra.done) < 0.1
    (failed,) = c.of(Failed)
    assert (failed.kind, failed.drained) == (ErrorKind.RESOURCE, True)
    assert c.counters["admission.refused"] == 1
    c.transport.release()
    rig.run(lambda: first.done and all(h.done for h in waiting))
    assert not any(h.error for h in waiting)


# ---- credits come back -----------------------------------------------------------------------


def test_credits_come_back_with_the_proof_and_not_before(rig: Rig) -> None:
    """A failed attempt that is not drained is still in the queue: its credits stay with it."""
    p = rig.node("p", layers=1, num_blocks=512)
    odd = EngineError(backend="moriio", code=13, message="no such text")
    c, _ = reader(rig, "c", 8, faults=[Fault(kind=FaultKind.PARTIAL, error=odd, after=1.0)])
    handle = pull(p, c, "t", 2)
    rig.run(lambda: handle.done)
    (state,) = c.agent.snapshot().queues
    assert state.in_flight == 4
    rig.pass_time(1.5)
    assert c.agent.snapshot().queues == ()
    settle(rig, c)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=FaultKind.REFUSE, error=SQ_FULL),
        Fault(kind=FaultKind.REFUSE_VALUE, error=SQ_FULL),
        Fault(kind=FaultKind.DUPLICATE),
        Fault(kind=FaultKind.LATE, after=0.2),
        Fault(kind=FaultKind.PARTIAL, error=SQ_FULL, after=0.1),
        Fault(kind=FaultKind.NEVER),
        Fault(kind=FaultKind.PEER_GONE),
    ],
    ids=lambda fault: fault.kind.value,
)
def test_no_credit_leaks(rig: Rig, fault: Fault) -> None:
    """However a post ends, its credits come back exactly once."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, _ = reader(rig, "c", 8, faults=[None, fault, None, fault])
    handles = [pull(p, c, f"t{i}", 6, first=20 * i) for i in range(4)]
    rig.run(lambda: all(h.done for h in handles))
    rig.pass_time(8.0)
    settle(rig, c)


def test_reclaimed_blocks_give_their_credits_back(rig: Rig) -> None:
    """What the user takes back without proof does not hold up the queue for ever."""
    p = rig.node("p", layers=1, num_blocks=512)
    engine = Engine(8)
    plan = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    transport = FaultyTransport(engine, plan, clock=rig.clock)
    c = rig.node("c", layers=1, num_blocks=512, transport=transport)
    handle = pull(p, c, "t", 2)
    rig.run(lambda: bool(c.agent.snapshot().quarantine))
    assert handle.done
    (state,) = c.agent.snapshot().queues
    assert state.in_flight == 4
    c.agent.reclaim("t")
    rig.pass_time(0.1)
    assert c.agent.snapshot().queues == ()


# ---- adaptive --------------------------------------------------------------------------------


def test_adaptive_limit_falls_on_backpressure_and_recovers(rig: Rig) -> None:
    """AIMD: one overload halves the limit once, success brings it back; all transfers succeed."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, _ = reader(
        rig,
        "c",
        None,
        faults=[Fault(kind=FaultKind.REFUSE, error=SQ_FULL)],
        admission=AimdAdmission(least=4, most=64, increase=8),
    )
    handle = pull(p, c, "t", 40)
    rig.run(lambda: c.counters.get("admission.limit_lowered", 0) == 1)
    (queue,) = c.agent._ctx.desk._queues.values()
    assert queue.credit.limit == 32
    rig.run(lambda: handle.done)
    handles = [pull(p, c, f"u{i}", 40, first=80 * (i + 1)) for i in range(4)]
    rig.run(lambda: all(h.done for h in handles))
    assert queue.credit.limit == 64
    assert not any(h.error for h in [handle, *handles])
    assert c.counters["admission.limit_lowered"] == 1


class _Cutter(AdmissionPolicy):
    """A user's own policy."""

    most_waiting = 10

    def begin(self, capability: int | None) -> CreditLimit:
        return CreditLimit(6, 3)


def test_a_policy_of_the_users(rig: Rig) -> None:
    """Anything that is an ``AdmissionPolicy`` fits; what is none is refused with the value."""
    p = rig.node("p", layers=1, num_blocks=512)
    c, engine = reader(rig, "c", 100, admission=_Cutter())
    handle = pull(p, c, "t", 5)
    rig.run(lambda: handle.done)
    assert engine.posts == [3, 3, 3, 1]
    with pytest.raises(ConfigError, match="admission must be an AdmissionPolicy, not 64"):
        AgentConfig(admission=64)  # type: ignore[arg-type]


# ---- several queues --------------------------------------------------------------------------


class _TwoQueues(Engine):
    """Every pair has a queue of its own, like device pairs of a NIC engine."""

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        answer = super()._prepare(peer, pairs)
        path, _ = answer.poll()
        if path is not None:
            path.queues = tuple(f"pair{i}" for i in range(len(pairs)))
        return answer


def test_a_part_over_several_queues(rig: Rig) -> None:
    """A queue is what the path says: pieces are counted where they go, by calls of one queue."""
    p = rig.node("p", num_blocks=64)
    engine = _TwoQueues(None)
    c = rig.node(
        "c",
        num_blocks=64,
        transport=FaultyTransport(engine, clock=rig.clock),
        admission=FixedAdmission(credits=4),
    )
    handle = pull(p, c, "t", 6)
    seen: dict[str, int] = {}

    def look() -> bool:
        for state in c.agent.snapshot().queues:
            seen[state.name] = max(seen.get(state.name, 0), state.in_flight)
        return handle.done

    rig.run(look)
    assert handle.error is None
    assert c.content(scattered(6)) == p.content(scattered(6))
    assert seen == {"pair0": 4, "pair1": 4}
    assert engine.posts == [2] * 12
