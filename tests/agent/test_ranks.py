"""Several ranks: unequal tensor parallelism, the scheduler half, combined events."""

from __future__ import annotations

import pickle

import attrs
import numpy as np
import pytest
from agent_rig import Node, Rig, at

from kvxfer.agent import SchedulerAgent
from kvxfer.core.events import Declined, Drained, Failed, Received, Role, Sent
from kvxfer.core.topology import Ranks
from kvxfer.errors import ConfigError, ErrorKind, TransferError

HEADS = 4


def instance(rig: Rig, name: str, tp: int) -> tuple[SchedulerAgent, list[Node]]:
    """The ranks of one instance of a model with four KV heads, and its scheduler half."""
    nodes = [
        rig.node(
            f"{name}{rank}",
            heads=HEADS // tp,
            ranks=Ranks(tp_size=tp, tp_rank=rank, total_kv_heads=HEADS),
        )
        for rank in range(tp)
    ]
    infos = [pickle.loads(pickle.dumps(node.agent.info)) for node in nodes]
    return SchedulerAgent(reversed(infos)), nodes


def whole(nodes: list[Node], ids: list[int]) -> bytes:
    """The cache of all heads, put together from the ranks."""
    parts = [
        np.concatenate([node.memory[layer][:, ids] for node in nodes], axis=3)
        for layer in ("layer0", "layer1")
    ]
    return b"".join(part.tobytes() for part in parts)


def hand_down(scheduler: SchedulerAgent, nodes: list[Node]) -> None:
    orders = pickle.loads(pickle.dumps(scheduler.take_orders()))
    for node in nodes:
        node.agent.execute(orders)


class Combiner:
    """Feeds the ranks' events to a scheduler half and keeps what it says."""

    def __init__(self, scheduler: SchedulerAgent, nodes: list[Node]) -> None:
        self.scheduler, self.nodes = scheduler, nodes
        self.taken = [0] * len(nodes)
        self.events: list[object] = []

    def __call__(self) -> list[object]:
        from kvxfer.agent.orders import Report

        for rank, node in enumerate(self.nodes):
            new = node.events[self.taken[rank] :]
            self.taken[rank] += len(new)
            report = pickle.loads(pickle.dumps(Report(rank=rank, events=tuple(new))))
            self.events += self.scheduler.apply(report)
        return self.events


@pytest.mark.parametrize(
    ("producer_tp", "consumer_tp"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (1, 4)]
)
def test_read_between_any_tensor_parallelism(rig: Rig, producer_tp: int, consumer_tp: int) -> None:
    """Head slices land where they belong; every producer rank frees after its last reader."""
    prefill, ps = instance(rig, "p", producer_tp)
    decode, cs = instance(rig, "c", consumer_tp)
    offer = prefill.hold("t", at(0, 5, 9))
    hand_down(prefill, ps)
    decode.pull(offer, at(0, 1, 2))
    hand_down(decode, cs)
    sent, received = Combiner(prefill, ps), Combiner(decode, cs)
    rig.run(lambda: any(isinstance(e, Sent) for e in sent()))
    assert whole(cs, [1, 2]) == whole(ps, [5, 9])
    got = [e for e in received() if isinstance(e, Received)]
    assert len(got) == 1
    assert got[0].nbytes == len(whole(ps, [5, 9]))
    assert len(prefill) == len(decode) == 0
    rig.pass_time(1)
    assert not any(any(node.tables.values()) for node in rig.nodes)


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 2), (2, 1)])
def test_write_between_unequal_tensor_parallelism(
    rig: Rig, producer_tp: int, consumer_tp: int
) -> None:
    """A consumer rank is complete when every producer rank that writes to it has sealed."""
    _, ps = instance(rig, "p", producer_tp)
    decode, cs = instance(rig, "c", consumer_tp)
    decode.accept("w", at(0, 3))
    hand_down(decode, cs)
    for rank, node in enumerate(ps):
        share = consumer_tp // producer_tp or 1
        first = rank * consumer_tp // producer_tp
        targets = [c.agent.endpoint for c in cs[first : first + share]]
        node.agent.push("w", at(0, 8), to=targets)
        node.agent.seal("w", b"tok" if rank == 0 else b"")
    received = Combiner(decode, cs)
    rig.run(lambda: any(isinstance(e, Received) for e in received()))
    assert whole(cs, [3]) == whole(ps, [8])
    assert next(e for e in received.events if isinstance(e, Received)).payload == b"tok"


def test_decline_reaches_every_rank(rig: Rig) -> None:
    """Report O23: one decline stands for the whole fan-in, on each producer rank."""
    prefill, ps = instance(rig, "p", 4)
    decode, cs = instance(rig, "c", 2)
    offer = prefill.hold("t", at(0, 5))
    hand_down(prefill, ps)
    decode.decline(offer)
    cs[0].agent.execute(decode.take_orders())
    events = Combiner(prefill, ps)
    rig.run(lambda: any(isinstance(e, Declined) for e in events()))
    assert [e for e in events.events if isinstance(e, Declined)] == [Declined(transfer_id="t")]


def failed(*, drained: bool, blocks: tuple[tuple[int, ...], ...] = ((1, 2),)) -> Failed:
    return Failed(
        transfer_id="t",
        role=Role.CONSUMER,
        kind=ErrorKind.TIMEOUT,
        error=TransferError("late", kind=ErrorKind.TIMEOUT),
        blocks=blocks,
        drained=drained,
    )


def test_one_failed_rank_fails_the_transfer_and_drained_means_all(rig: Rig) -> None:
    """Promise 4: published when all ranks are terminal; Drained when all of them are drained."""
    from kvxfer.agent.orders import Report

    prefill, _ = instance(rig, "p", 2)
    decode, _ = instance(rig, "c", 2)
    decode.pull(prefill.hold("t", at(0, 5)), at(0, 1))
    assert decode.apply(Report(rank=0, events=(failed(drained=False),))) == []
    out = decode.apply(Report(rank=1, events=(Received(transfer_id="t", nbytes=4),)))
    assert [type(e) for e in out] == [Failed]
    assert not out[0].drained  # type: ignore[attr-defined]
    assert len(decode) == 1
    late = Drained(transfer_id="t", role=Role.CONSUMER, blocks=((1, 2),))
    assert decode.apply(Report(rank=0, events=(late,))) == [late]
    assert len(decode) == 0
    assert decode.apply(Report(rank=1, events=(Received(transfer_id="t", nbytes=4),))) == []
    assert decode.stale == 1


def test_scheduler_refuses_incomplete_or_disagreeing_workers(rig: Rig) -> None:
    """No field gets a guessed default: ranks must be complete and agree."""
    scheduler, nodes = instance(rig, "p", 2)
    with pytest.raises(ConfigError, match=r"ranks \[0\] are given: ranks 0..1 are needed"):
        scheduler.set_workers([nodes[0].agent.info])
    with pytest.raises(ConfigError, match="not known"):
        SchedulerAgent().hold("t", at(0, 1))


def test_order_that_cannot_be_carried_out_is_an_event(rig: Rig) -> None:
    """The step thread sees no exception out of ``execute``: a failed order is a value."""
    decode, (c,) = instance(rig, "c", 1)
    prefill, (p,) = instance(rig, "p", 1)
    decode.pull(prefill.hold("t", at(0, 5)), at(0, 99))
    hand_down(prefill, [p])
    c.agent.execute(decode.take_orders())
    combined = Combiner(decode, [c])
    rig.run(lambda: bool(combined()))
    assert combined.events[0].kind is ErrorKind.INVALID  # type: ignore[attr-defined]
    assert "99" in str(combined.events[0].error)  # type: ignore[attr-defined]
    assert combined.events[0].blocks == ((99,),)  # type: ignore[attr-defined]
    rig.run(lambda: bool(p.of(Declined)))  # and the producer does not hold for a whole lease


def test_a_refused_pull_of_one_rank_speaks_for_that_rank_only(rig: Rig) -> None:
    """Promises 3 and 12: the other rank reads on, and the producer does not say Sent."""
    source, producers = instance(rig, "p", 1)
    target, readers = instance(rig, "c", 2)
    offer = source.hold("t", at(0, 1, 2))
    hand_down(source, producers)
    target.pull(offer, at(0, 5, 6))
    (order,) = target.take_orders()
    readers[0].agent.execute([order])
    readers[1].agent.execute([attrs.evolve(order, blocks=(at(0, 5, 5),))])
    rig.run(lambda: bool(producers[0].of(Failed)))
    assert len(readers[0].of(Received)) == 1
    assert readers[1].of(Failed)[0].kind is ErrorKind.INVALID
    assert not producers[0].of(Declined)
    assert not producers[0].of(Sent)
    rig.pass_time(1)
    assert not any(producers[0].tables.values())
