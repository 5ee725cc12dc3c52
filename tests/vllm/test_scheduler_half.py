"""The scheduler half by itself: no engine is started. What may be asked twice is answered once."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.agent.orders import (
    AbortOrder,
    DeclineOrder,
    PullOrder,
    RenewOrder,
    Report,
    WorkerInfo,
)
from kvxfer.core.events import Drained, Failed, Quarantined, Received, Role, Sent
from kvxfer.core.offer import Endpoint
from kvxfer.core.topology import Ranks
from kvxfer.errors import ErrorKind, TransferError
from kvxfer.integrations.vllm import ConnectorConfig
from kvxfer.integrations.vllm.params import Push
from kvxfer.testing.clock import FakeClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's imports say of each other
    from vllm.v1.request import RequestStatus

    from kvxfer.integrations.vllm.scheduler import SchedulerHalf

BLOCK = 16


def half(
    *, produces: bool, tp: int = 1, clock: FakeClock | None = None, **extra: Any
) -> SchedulerHalf:
    config = ConnectorConfig.from_extra(extra)
    made = SchedulerHalf(config, block_size=BLOCK, produces=produces, clock=clock)
    made.agent.set_workers(
        WorkerInfo(
            endpoint=Endpoint(address=f"tcp://10.0.0.1:{7000 + r}", incarnation=f"i{r}", rank=r),
            sizes=ranks_to_wire(Ranks(tp_size=tp, tp_rank=r, total_kv_heads=8)),
            fingerprint="",
        )
        for r in range(tp)
    )
    return made


def request(tokens: int, params: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(
        request_id="cmpl-1",
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        kv_transfer_params=params,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )


NOTHING = SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={})
"""A step in which vLLM has scheduled nothing."""


def arrive(decode: SchedulerHalf, tokens: int, params: dict[str, Any]) -> Any:
    """A request in decode's queue."""
    wanted = request(tokens, params)
    decode.arrived(wanted)
    return wanted


def offered(tokens: int, tp: int = 1, **extra: Any) -> dict[str, Any]:
    """What prefill's response says of a prompt of that many tokens."""
    blocks = list(range(-(-tokens // BLOCK)))
    wanted = request(tokens, {"do_remote_decode": True})
    _, params = half(produces=True, tp=tp, **extra).finished(wanted, (blocks,))
    assert params is not None
    return {**params, "do_remote_prefill": True}


def orders(decode: SchedulerHalf, kind: type[Any]) -> list[Any]:
    return [order for order in decode.step(NOTHING).orders if isinstance(order, kind)]


def test_o18_terminal_is_not_opened_again() -> None:
    """Report O18: a prompt of 33 tokens is loaded once. Asked again after it completed, with 0 or
    32 tokens computed, there is nothing to load; and no second pull is ordered."""
    decode = half(produces=False)
    wanted = arrive(decode, 33, offered(33))
    assert decode.matched(wanted, 0) == 33
    assert decode.matched(wanted, 0) == 33  # vLLM may ask several times
    decode.allocated(wanted, ([4, 5, 6],), 33)
    (pull,) = orders(decode, PullOrder)
    assert decode.matched(wanted, 0) == 0
    done = Received(transfer_id=pull.offer.transfer_id, nbytes=1)
    decode.apply([Report(rank=0, events=(done,))])
    assert decode.matched(wanted, 0) == 0
    assert decode.matched(wanted, 32) == 0
    decode.allocated(wanted, ([4, 5, 6],), 0)
    assert not decode.step(NOTHING).orders


def test_67_full_hit_and_who_asks() -> None:
    """Behaviour 67: a full local hit releases prefill and loads nothing; READ asks for what is not
    computed, 32 of 32; after it began or ended 0; prefill never asks."""
    decode = half(produces=False)
    hit = arrive(decode, 32, offered(32))
    assert decode.matched(hit, 32) == 0
    decode.allocated(hit, ([4, 5],), 0)
    assert len(orders(decode, DeclineOrder)) == 1
    fresh = arrive(decode, 32, offered(32))
    assert decode.matched(fresh, 0) == 32
    decode.allocated(fresh, ([4, 5],), 32)
    assert len(orders(decode, PullOrder)) == 1
    assert decode.matched(fresh, 0) == 0
    prefill = half(produces=True)
    assert prefill.matched(request(32, {"do_remote_decode": True}), 0) == 0
    assert prefill.matched(request(32), 0) == 0


@pytest.mark.parametrize("addressed", [True, False])
def test_70_finished_before_it_had_blocks(addressed: bool) -> None:
    """Behaviour 70: a request that decode gives up before it has blocks releases every prefill
    rank of TP 2 if it knows them, and nobody otherwise."""
    decode = half(produces=False)
    params = offered(32, tp=2) if addressed else {"do_remote_prefill": True}
    decode.finished(arrive(decode, 32, params), ([],))
    declines = orders(decode, DeclineOrder)
    assert len(declines) == addressed
    for decline in declines:
        assert [e.address for e in decline.offer.endpoints] == [
            "tcp://10.0.0.1:7000",
            "tcp://10.0.0.1:7001",
        ]


def test_67_failed_load_is_not_begun_again() -> None:
    """Behaviour 67: after the load failed it is over as well: the request is computed here."""
    decode = half(produces=False)
    wanted = arrive(decode, 33, offered(33))
    decode.matched(wanted, 0)
    decode.allocated(wanted, ([4, 5, 6],), 33)
    (pull,) = orders(decode, PullOrder)
    error = TransferError("late", kind=ErrorKind.TIMEOUT)
    failed = Failed(
        transfer_id=pull.offer.transfer_id,
        role=Role.CONSUMER,
        kind=error.kind,
        error=error,
        blocks=((4, 5, 6),),
    )
    decode.apply([Report(rank=0, events=(failed,))])
    assert decode.matched(wanted, 0) == 0
    assert not orders(decode, AbortOrder)


def test_n_samples_load_their_prompt_once() -> None:
    """Three samples of one prompt: one pulls; the others wait for it, to find its blocks in the
    prefix cache. None of them takes the offer a second time, also once it is over."""
    decode = half(produces=False)
    params = offered(40)
    first, second, third = samples = [request(40, params) for _ in range(3)]
    for i, sample in enumerate(samples):
        sample.request_id = f"{i}_cmpl"
        decode.arrived(sample)
    assert decode.matched(first, 0) == 40
    decode.allocated(first, ([4, 5, 6],), 40)
    assert decode.matched(second, 0) is None
    (pull,) = orders(decode, PullOrder)
    done = Received(transfer_id=pull.offer.transfer_id, nbytes=1)
    decode.apply([Report(rank=0, events=(done,))])
    assert decode.matched(second, 0) is None, "its blocks are not in the prefix cache yet"
    decode.allocated(first, ([4, 5, 6],), 0)
    assert decode.matched(second, 32) == 0
    decode.allocated(second, ([4, 5, 9],), 0)
    decode.finished(third, ([],))
    assert not decode.step(NOTHING).orders


def test_the_last_sample_to_go_declines() -> None:
    """Samples that die in the queue decline together: as long as one waits, it may still pull."""
    decode = half(produces=False)
    params = offered(40)
    samples = [request(40, params) for _ in range(2)]
    for i, sample in enumerate(samples):
        sample.request_id = f"{i}_cmpl"
        decode.arrived(sample)
    decode.finished(samples[0], ([],))
    assert not orders(decode, DeclineOrder)
    decode.finished(samples[1], ([],))
    assert len(orders(decode, DeclineOrder)) == 1


def test_holds_are_renewed_while_a_request_waits() -> None:
    """Lease 9 s, in the queue for 20 s: renewed at once and then every 3 s until its turn."""
    clock = FakeClock(100.0)
    decode = half(produces=False, clock=clock)
    waiting = arrive(decode, 32, offered(32, lease=9))
    times = []
    for second in range(20):
        if orders(decode, RenewOrder):
            times.append(second)
        clock.advance(1.0)
    assert times == [0, 3, 6, 9, 12, 15, 18]
    decode.allocated(waiting, ([4, 5],), 32)
    clock.advance(30.0)
    assert not orders(decode, RenewOrder)


def scheduled(**tokens: int) -> Any:
    """A step of vLLM's that computes that many tokens; requests hold blocks 10, 11 and so on."""
    state = SimpleNamespace(get_block_ids=lambda _: (list(range(10, 20)),))
    return SimpleNamespace(
        preempted_req_ids=None, num_scheduled_tokens=tokens, kv_connector_block_state=state
    )


def pushing(tokens: int) -> tuple[SchedulerHalf, Any]:
    """A prefill side, and a request of it whose KV is to be pushed; nothing is computed."""
    prefill = half(produces=True, write=True)
    params = Push.to_addresses("push-1", ["tcp://10.0.0.2:7000"]).for_prefill()
    wanted = request(tokens, params)
    wanted.request_id, wanted.num_computed_tokens = "r", 0
    prefill.arrived(wanted)
    return prefill, wanted


def test_68_a_chunked_prompt_is_pushed_as_it_is_computed() -> None:
    """Behaviour 68: whole blocks only, by token progress, and the partial one with the last chunk:
    40 tokens in chunks of 10, 22 and 8, blocks of 16."""
    prefill, wanted = pushing(40)
    pushed = []
    for tokens in (10, 22, 8):
        step = prefill.step(scheduled(r=tokens))
        wanted.num_computed_tokens += tokens
        for chunk in step.chunks:
            (blocks,) = chunk.push.blocks
            pushed.append((blocks.start, blocks.ids.tolist(), chunk.last))
    assert pushed == [(0, [10, 11], False), (2, [12], True)]


def test_blocks_are_kept_until_the_push_has_ended() -> None:
    """A finished request's blocks are read from until then, however it finished; one whose push
    has ended keeps nothing."""
    for status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED):
        prefill, wanted = pushing(32)
        assert len(prefill.step(scheduled(r=32)).chunks) == 1
        wanted.num_computed_tokens, wanted.status = 32, status
        assert prefill.finished(wanted, ([10, 11],)) == (True, None)
        assert prefill.step(NOTHING).holds == {"push-1": "r"}
    prefill, wanted = pushing(32)
    prefill.step(scheduled(r=32))
    prefill.apply([Report(rank=0, events=(Sent(transfer_id="push-1"),))])
    wanted.num_computed_tokens = 32
    assert prefill.finished(wanted, ([10, 11],)) == (False, None)


def test_a_preempted_push_is_given_up_before_its_blocks_are_overwritten() -> None:
    """The step tells the workers, which wait for it; what is computed again is not pushed."""
    prefill, wanted = pushing(40)
    prefill.step(scheduled(r=32))
    step = scheduled()
    step.preempted_req_ids = {"r"}
    assert prefill.step(step).preempted == ("push-1",)
    wanted.num_computed_tokens = 0
    assert not prefill.step(scheduled(r=40)).chunks


def test_quarantined_blocks_stay_out_of_use_until_drained() -> None:
    """Where no fence can be had, the request fails without its blocks: vLLM cannot hand them to
    anybody. With the proof they come back, once."""
    decode = half(produces=False)
    wanted = arrive(decode, 32, offered(32))
    decode.allocated(wanted, ([4, 5],), 32)
    (pull,) = orders(decode, PullOrder)
    returned: list[str] = []
    decode.kv_cache_manager = SimpleNamespace(
        pop_blocks_for_free=lambda request: ["block 4", "block 5"] if request is wanted else [],
        block_pool=SimpleNamespace(free_blocks=returned.extend),
    )
    transfer_id = pull.offer.transfer_id
    error = TransferError("late", kind=ErrorKind.TIMEOUT)
    failed = Failed(
        transfer_id=transfer_id,
        role=Role.CONSUMER,
        kind=error.kind,
        error=error,
        blocks=((4, 5),),
        drained=False,
    )
    out = Quarantined(transfer_id=transfer_id, role=Role.CONSUMER, reason="no fence")
    decode.apply([Report(rank=0, events=(failed, out))])
    assert decode._aside == {transfer_id: ["block 4", "block 5"]}
    assert not returned
    drained = Drained(transfer_id=transfer_id, role=Role.CONSUMER, drained_by="proof")
    decode.apply([Report(rank=0, events=(drained,))])
    assert returned == ["block 5", "block 4"]
    decode.apply([Report(rank=0, events=(drained,))])
    assert len(returned) == 2


@pytest.mark.parametrize("write", [False, True])
def test_params_of_a_push_from_anywhere(write: bool) -> None:
    """A push that was not allowed, or makes no sense, is neither begun nor turned into a hold."""
    prefill = half(produces=True, write=write)
    bad = {"do_remote_decode": True, "kvxfer": {"push": {"transfer_id": "x", "to": []}}}
    wanted = request(32, bad)
    prefill.arrived(wanted)
    assert not prefill.step(scheduled(**{"cmpl-1": 32})).chunks
    assert prefill.finished(wanted, ([4, 5],)) == (False, None)
