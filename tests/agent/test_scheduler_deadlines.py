"""Promise 4 at the scheduler half: every transfer ends by its own deadline, reports or none."""

from __future__ import annotations

import pytest
from agent_rig import at

from kvxfer.agent import AgentConfig, SchedulerAgent
from kvxfer.agent.config import Limits
from kvxfer.agent.orders import AbortOrder, HoldOrder, Report, WorkerInfo
from kvxfer.core.events import (
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    Quarantined,
    Received,
    Role,
    Sent,
)
from kvxfer.core.offer import Endpoint
from kvxfer.errors import CapacityError, ErrorKind, TransferError
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.clock import FakeClock

TIMEOUTS = Timeouts(connect=1, queue=1, transfer=2, ack=3, drain=1)
SIZES = {"tp_size": 2, "pp_size": 1}


def scheduler(world: int = 2, **config: object) -> tuple[SchedulerAgent, FakeClock]:
    clock = FakeClock(100.0)
    workers = [
        WorkerInfo(
            endpoint=Endpoint(address=f"10.0.0.{r}:1", incarnation=f"i{r}", rank=r),
            sizes={**SIZES, "tp_size": world, "tp_rank": r},
            fingerprint="",
            timeouts=TIMEOUTS,
        )
        for r in range(world)
    ]
    agent = SchedulerAgent(
        workers,
        config=AgentConfig(lease=3.0, lease_margin=0.5, retry_window=0.5, **config),  # type: ignore[arg-type]
        report_grace=1.0,
        longest=60.0,
        clock=clock,
    )
    return agent, clock


def report(rank: int, *events: Event) -> Report:
    return Report(rank=rank, events=events)


def failed(role: Role, *, drained: bool) -> Failed:
    error = TransferError("late", kind=ErrorKind.TIMEOUT)
    return Failed(
        transfer_id="t", role=role, kind=error.kind, error=error, blocks=((1,),), drained=drained
    )


def begin(agent: SchedulerAgent, verb: str) -> Role:
    """Begin ``t`` in one of the four ways."""
    if verb == "hold":
        agent.hold("t", at(0, 1, 2), tag="mine")
    elif verb == "follow_push":
        agent.follow_push("t", tag="mine")
    elif verb == "accept":
        agent.accept("t", at(0, 1, 2), deadline=4.0, tag="mine")
    else:
        offer = agent.hold("t", at(0, 9))
        for rank in range(agent.world_size):
            agent.apply(report(rank, Sent(transfer_id="t")))
        agent.pull(offer, at(0, 1, 2), tag="mine")
    agent.take_orders()
    return Role.PRODUCER if verb in ("hold", "follow_push") else Role.CONSUMER


VERBS = {"hold": 5.0, "follow_push": 11.0, "accept": 5.0, "pull": 8.0}


@pytest.mark.parametrize("verb", VERBS)
def test_silence_of_all_ranks(verb: str) -> None:
    """No report ever comes: failed once, by the deadline, with the blocks and what is silent."""
    agent, clock = scheduler()
    role = begin(agent, verb)
    at_ = agent.next_at()
    assert at_ is not None
    assert at_ - clock.now() == pytest.approx(VERBS[verb] + (verb == "pull"), abs=1.01)
    clock.advance(at_ - clock.now() - 0.001)
    assert agent.poll() == []
    clock.advance(0.002)
    (event,) = agent.poll()
    assert isinstance(event, Failed)
    assert (event.role, event.kind, event.drained, event.tag) == (
        role,
        ErrorKind.TIMEOUT,
        False,
        "mine",
    )
    assert event.blocks == (() if verb == "follow_push" else ((1, 2),))
    assert "ranks [0, 1] have not said" in str(event.error)
    assert [type(o) for o in agent.take_orders()] == [AbortOrder]
    clock.advance(3.1)
    (quarantined,) = agent.poll()
    assert isinstance(quarantined, Quarantined)
    assert agent.quarantine == ("t",)
    assert agent.next_at() is None
    (drained,) = agent.reclaim("t")
    assert isinstance(drained, Drained)
    assert (drained.drained_by, len(agent), agent.quarantine) == ("reclaim", 0, ())


@pytest.mark.parametrize("late", ["success", "drained failure", "undrained failure", "ended"])
def test_rank_that_speaks_after_the_deadline(late: str) -> None:
    """Terminal stays terminal; its word is the proof that the blocks are free, and comes once."""
    agent, clock = scheduler()
    begin(agent, "accept")
    agent.apply(report(0, Received(transfer_id="t", nbytes=4)))
    clock.advance(6.0)
    (event,) = agent.poll()
    assert "ranks [1] have not said" in str(event.error)  # type: ignore[attr-defined]
    if late == "success":
        out = agent.apply(report(1, Received(transfer_id="t", nbytes=4)))
    elif late == "drained failure":
        out = agent.apply(report(1, failed(Role.CONSUMER, drained=True)))
    elif late == "undrained failure":
        assert agent.apply(report(1, failed(Role.CONSUMER, drained=False))) == []
        out = agent.apply(report(1, Drained(transfer_id="t", role=Role.CONSUMER, blocks=((1,),))))
    else:
        out = agent.worker_lost(1)
    assert [type(e) for e in out] == [Drained]
    assert set(out[0].blocks[0]) == {1, 2} or late != "success"  # type: ignore[attr-defined]
    assert len(agent) == 0
    assert agent.apply(report(1, Received(transfer_id="t", nbytes=4))) == []
    assert agent.next_at() is None


def test_renewed_hold_lives_while_its_workers_report() -> None:
    """A lease that readers renew is not cut here: workers that report end it themselves."""
    agent, clock = scheduler()
    begin(agent, "hold")
    agent.apply(report(0, Sent(transfer_id="t")))
    for _ in range(12):
        clock.advance(4.0)
        assert agent.apply(report(1)) == []
    clock.advance(5.1)
    (event,) = agent.poll()
    assert isinstance(event, Failed)


def test_hold_that_never_ends_is_given_up() -> None:
    """Reports come, but the one that matters was lost: there is an end to it all the same."""
    agent, clock = scheduler()
    begin(agent, "hold")
    out: list[Event] = []
    while not out and clock.now() < 300:
        clock.advance(2.0)
        out = [e for r in (0, 1) for e in agent.apply(report(r))]
    assert isinstance(out[0], Failed)
    assert clock.now() - 100.0 == pytest.approx(60.0, abs=2.1)


def test_worker_that_ended_ends_what_it_had() -> None:
    """Its memory went with it: failed and drained at once; the other ranks are waited for."""
    agent, _ = scheduler()
    begin(agent, "accept")
    assert agent.worker_lost(1) == []
    (event,) = agent.apply(report(0, Received(transfer_id="t", nbytes=4)))
    assert isinstance(event, Failed)
    assert (event.kind, event.drained) == (ErrorKind.PEER_LOST, True)
    assert len(agent) == 0


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ((Sent(transfer_id="t"), Sent(transfer_id="t")), Sent),
        ((Sent(transfer_id="t"), Declined(transfer_id="t")), Declined),
        ((Declined(transfer_id="t"), Expired(transfer_id="t")), Expired),
        ((Sent(transfer_id="t"), Expired(transfer_id="t", missing=(1,))), Expired),
        ((Expired(transfer_id="t"), failed(Role.PRODUCER, drained=True)), Failed),
        ((Sent(transfer_id="t"), failed(Role.PRODUCER, drained=True)), Failed),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("reverse", [False, True])
def test_outcomes_of_ranks_combine(
    events: tuple[Event, Event], outcome: type[Event], reverse: bool
) -> None:
    """The worst of the ranks is the transfer's, in whatever order they report; once."""
    agent, _ = scheduler()
    begin(agent, "hold")
    out: list[Event] = []
    for rank, event in enumerate(reversed(events) if reverse else events):
        out += agent.apply(report(rank, event))
        out += agent.apply(report(rank, event))
    assert [type(e) for e in out] == [outcome]
    assert out[0].tag == "mine"
    assert len(agent) == 0


def test_missing_ranks_are_put_together() -> None:
    """Expired names every reader that any producer rank missed."""
    agent, _ = scheduler()
    begin(agent, "hold")
    agent.apply(report(0, Expired(transfer_id="t", missing=(0, 1))))
    (event,) = agent.apply(report(1, Expired(transfer_id="t", missing=(3,))))
    assert event.missing == (0, 1, 3)  # type: ignore[attr-defined]


def test_quarantine_is_told_once_and_bounded() -> None:
    """Each rank tells; the transfer is quarantined once. A full quarantine refuses new ones."""
    agent, _ = scheduler(limits=Limits(quarantined=1))
    begin(agent, "accept")
    out: list[Event] = []
    for rank in (0, 1):
        word = Quarantined(transfer_id="t", role=Role.CONSUMER, blocks=((1,),), reason="silent")
        out += agent.apply(report(rank, failed(Role.CONSUMER, drained=False), word))
    assert sorted(type(e).__name__ for e in out) == ["Failed", "Quarantined"]
    with pytest.raises(CapacityError, match="1 transfers are in quarantine"):
        agent.accept("u", at(0, 3))
    for rank in (0, 1):
        drained = Drained(transfer_id="t", role=Role.CONSUMER, drained_by="proof")
        out = agent.apply(report(rank, drained))
    assert [type(e) for e in out] == [Drained]
    agent.accept("u", at(0, 3))


def test_reports_of_ranks_that_do_not_exist() -> None:
    """Promise 9: a report from nowhere completes nothing."""
    agent, _ = scheduler()
    begin(agent, "hold")
    agent.apply(report(7, Sent(transfer_id="t")))
    agent.apply(report(-1, Sent(transfer_id="t")))
    assert agent.apply(report(0, Sent(transfer_id="t"))) == []
    assert len(agent) == 1
    _ = HoldOrder
