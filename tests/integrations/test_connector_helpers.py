"""What connectors share: who loads what, what is pushed when, and what became of it. No engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvxfer.agent import SchedulerAgent
from kvxfer.agent.config import Limits
from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.agent.orders import AbortOrder, AcceptOrder, DeclineOrder, PullOrder, WorkerInfo
from kvxfer.core.events import Drained, Expired, Failed, Quarantined, Received, Role, Sent
from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Endpoint
from kvxfer.core.topology import Ranks
from kvxfer.errors import ErrorKind, InvalidInputError, TransferError
from kvxfer.integrations.loads import Loads
from kvxfer.integrations.outcomes import Outcomes
from kvxfer.integrations.pushes import Pushes
from kvxfer.integrations.router_ids import push_of_request_id
from kvxfer.integrations.sources import Push, Remote
from kvxfer.testing.clock import FakeClock


def scheduler_agent(clock: FakeClock) -> SchedulerAgent:
    info = WorkerInfo(
        endpoint=Endpoint(address="tcp://10.0.0.1:7000", incarnation="i", rank=0),
        sizes=ranks_to_wire(Ranks(tp_size=1, tp_rank=0, total_kv_heads=8)),
        fingerprint="",
    )
    return SchedulerAgent([info], clock=clock)


def made(caching: bool = True) -> tuple[Loads[str], SchedulerAgent]:
    clock = FakeClock(100.0)
    agent = scheduler_agent(clock)
    loads: Loads[str] = Loads(agent, groups=2, accept_timeout=9.0, caching=caching, clock=clock)
    return loads, agent


def remote(name: str = "t") -> Remote:
    offer = scheduler_agent(FakeClock(1.0)).hold(name, [Blocks.at(0, [1, 2])] * 2)
    return Remote(offer, 32)


BLOCKS = [Blocks.at(0, [5, 6])] * 2


def kinds(agent: SchedulerAgent) -> list[type]:
    return [type(order) for order in agent.take_orders()]


@pytest.mark.parametrize("caching", [True, False])
def test_one_of_several_requests_loads(caching: bool) -> None:
    """The first whose turn comes; with a prefix cache the others wait until its blocks are in it,
    without one they have nothing to wait for. Nobody loads it again after it has ended."""
    loads, agent = made(caching)
    source = remote()
    for name in ("a", "b"):
        loads.wait(name, source)
    assert not loads.behind("a")
    assert loads.take("a") == source
    loads.begin("a", "request a", source, BLOCKS)
    assert loads.behind("b") == caching
    assert loads.source("b") is None
    assert loads.user("t") == "request a"
    loads.settle("t")
    assert loads.behind("b") == caching, "until a comes for its blocks"
    assert loads.take("a") is None
    assert not loads.behind("b")
    assert loads.take("b") is None
    assert kinds(agent) == [PullOrder]


def test_the_last_one_to_leave_declines_or_aborts() -> None:
    """In the queue the last one tells the producer; while it loads, its own end aborts it."""
    loads, agent = made()
    source = remote()
    for name in ("a", "b"):
        loads.wait(name, source)
    loads.leave("a")
    assert DeclineOrder not in kinds(agent)
    loads.leave("b")
    loads.leave("b")
    assert kinds(agent) == [DeclineOrder]
    loads.wait("c", remote("u"))
    taken = loads.take("c")
    assert taken is not None
    loads.begin("c", "request c", taken, BLOCKS)
    loads.leave("c")
    assert kinds(agent) == [PullOrder, AbortOrder]
    assert loads.user("u") == "request c", "until nothing can land"


def test_a_push_for_nobody_is_accepted_into_nothing() -> None:
    """So that it ends at its producer; a request that takes one accepts into its blocks."""
    loads, agent = made()
    loads.wait("a", Push("p"))
    loads.leave("a")
    (order,) = agent.take_orders()
    assert isinstance(order, AcceptOrder)
    assert [len(group) for group in order.blocks] == [0, 0]
    assert loads.user("p") is None
    loads.wait("b", Push("q"))
    push = loads.take("b")
    assert push is not None
    loads.begin("b", "request b", push, BLOCKS)
    (order,) = agent.take_orders()
    assert isinstance(order, AcceptOrder)
    assert (order.blocks, order.deadline) == (tuple(BLOCKS), 9.0)


def pushing() -> tuple[Pushes[str], SchedulerAgent]:
    agent = scheduler_agent(FakeClock(1.0))
    pushes: Pushes[str] = Pushes(agent, block_size=16, placeholder=0)
    pushes.add("r", "request", Push.to_addresses("p", ["tcp://a:1"]))
    return pushes, agent


def chunk(pushes: Pushes[str], there: int) -> tuple[int, list[int], bool] | None:
    upto = pushes.due("r", prompt=40, there=there)
    if not upto:
        return None
    made = pushes.advance("r", upto, [list(range(10, 20))], last=there >= 40)
    (blocks,) = made.push.blocks
    return blocks.start, blocks.ids.tolist(), made.last


def test_a_prompt_is_pushed_by_whole_blocks_and_once() -> None:
    """40 tokens, blocks of 16; computed again from the beginning it goes on where it was."""
    pushes, _ = pushing()
    assert chunk(pushes, 10) is None
    assert pushes.reading(["r", "s"]) == ()
    assert chunk(pushes, 35) == (0, [10, 11], False)
    assert pushes.reading(["r", "s"]) == ("p",)
    assert chunk(pushes, 16) is None
    assert chunk(pushes, 40) == (2, [12], True)
    assert chunk(pushes, 41) is None


def test_blocks_wait_for_a_push_that_has_begun() -> None:
    """A sealed one ends by itself, another is aborted; one that has not begun needs nothing."""
    pushes, agent = pushing()
    assert pushes.leave("r") is None
    for there, orders in ((40, []), (20, [AbortOrder])):
        pushes, agent = pushing()
        chunk(pushes, there)
        assert pushes.leave("r") == "p"
        assert kinds(agent) == orders
    pushes, agent = pushing()
    chunk(pushes, 20)
    pushes.ended("p")
    assert chunk(pushes, 40) is None, "its end is final"
    assert pushes.leave("r") is None


def failed(role: Role, *, drained: bool) -> Failed:
    error = TransferError("no", kind=ErrorKind.TIMEOUT)
    return Failed(transfer_id="t", role=role, kind=error.kind, error=error, drained=drained)


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        ([Received(transfer_id="t", nbytes=7)], [(7, True)]),
        ([failed(Role.CONSUMER, drained=True)], [(None, True)]),
        ([failed(Role.CONSUMER, drained=False)], []),
        (
            [failed(Role.CONSUMER, drained=False), Drained(transfer_id="t", role=Role.CONSUMER)],
            [(None, True)],
        ),
        (
            [
                failed(Role.CONSUMER, drained=False),
                Quarantined(transfer_id="t", role=Role.CONSUMER, reason="no fence"),
                Drained(transfer_id="t", role=Role.CONSUMER),
            ],
            [(None, False)],
        ),
    ],
)
def test_a_load_ends_once_and_not_before_it_is_safe(
    events: list[Any], ends: list[tuple[int | None, bool]]
) -> None:
    """With bytes, drained without, or given up; whatever follows is not told again."""
    clock = FakeClock(1.0)
    outcomes: Outcomes[str] = Outcomes(Limits(), clock)
    outcomes.begin({}, {"t": "load"})
    clock.advance(2.0)
    sent, found = outcomes.of(events)
    assert not sent
    assert [(end.nbytes, end.drained) for end in found] == ends
    assert all(end.load == "load" and end.seconds == 2.0 for end in found)


@pytest.mark.parametrize(
    "event",
    [
        Sent(transfer_id="t"),
        Expired(transfer_id="t"),
        failed(Role.PRODUCER, drained=True),
    ],
)
def test_held_blocks_are_told_once_in_whatever_order(event: Any) -> None:
    """The request may end before its transfer, or after."""
    outcomes: Outcomes[str] = Outcomes(Limits(), FakeClock(1.0))
    outcomes.begin({"t": "r"}, {})
    assert outcomes.of([event, event])[0] == {"r"}
    outcomes = Outcomes(Limits(), FakeClock(1.0))
    assert outcomes.of([event])[0] == set()
    outcomes.begin({"t": "r"}, {})
    assert outcomes.of([])[0] == {"r"}
    assert outcomes.of([])[0] == set()


def test_sources_travel_as_json() -> None:
    """Both come back as they were; a push without its addresses too."""
    source = remote()
    assert Remote.from_dict(json.loads(json.dumps(source.to_dict()))) == source
    push = Push.to_addresses("abc", ["tcp://a:1", "tcp://a:2"])
    assert Push.from_dict(json.loads(json.dumps(push.to_dict(addresses=True)))) == push
    assert Push.from_dict(push.to_dict(addresses=False)) == Push("abc")
    for bad in (None, [], {"tokens": 1}):
        with pytest.raises(InvalidInputError, match="no offer"):
            Remote.from_dict(bad)


def test_peers_in_request_ids() -> None:
    """A router's id names both peers, whatever an engine puts around it; other ids name nobody."""
    unique = "0123456789abcdef0123456789abcdef"
    core = f"___prefill_addr_10.0.0.1:41000___decode_addr_10.0.0.2:42000_{unique}"
    for request_id in (core, f"cmpl-{core}-0", f"cmpl-{core}-0-8fc7b66a"):
        assert push_of_request_id(request_id, ranks=2, kind=Push) == Push.to_addresses(
            unique, ["tcp://10.0.0.2:42000", "tcp://10.0.0.2:42001"]
        )
    for request_id in ("cmpl-1", core.replace("42000", "x"), core.replace("42000", "65536"), ""):
        assert push_of_request_id(request_id, kind=Push) is None
