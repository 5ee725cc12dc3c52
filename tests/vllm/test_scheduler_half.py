"""The scheduler half by itself: no engine is started. What may be asked twice is answered once."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.agent.orders import AbortOrder, DeclineOrder, PullOrder, Report, WorkerInfo
from kvxfer.core.events import Failed, Received, Role
from kvxfer.core.offer import Endpoint
from kvxfer.core.topology import Ranks
from kvxfer.errors import ErrorKind, TransferError
from kvxfer.integrations.vllm import ConnectorConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's imports say of each other
    from vllm.v1.request import RequestStatus

    from kvxfer.integrations.vllm.scheduler import SchedulerHalf

BLOCK = 16


def half(*, produces: bool, tp: int = 1) -> SchedulerHalf:
    made = SchedulerHalf(ConnectorConfig.from_extra({}), block_size=BLOCK, produces=produces)
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


def offered(tokens: int, tp: int = 1) -> dict[str, Any]:
    """What prefill's response says of a prompt of that many tokens."""
    blocks = list(range(-(-tokens // BLOCK)))
    wanted = request(tokens, {"do_remote_decode": True})
    _, params = half(produces=True, tp=tp).finished(wanted, blocks)
    assert params is not None
    return {**params, "do_remote_prefill": True}


def orders(decode: SchedulerHalf, kind: type[Any]) -> list[Any]:
    return [order for order in decode.step().orders if isinstance(order, kind)]


def test_o18_terminal_is_not_opened_again() -> None:
    """Report O18: a prompt of 33 tokens is loaded once. Asked again after it completed, with 0 or
    32 tokens computed, there is nothing to load; and no second pull is ordered."""
    decode = half(produces=False)
    wanted = request(33, offered(33))
    assert decode.matched(wanted, 0) == 33
    assert decode.matched(wanted, 0) == 33  # vLLM may ask several times
    decode.allocated(wanted, [4, 5, 6], 33)
    (pull,) = orders(decode, PullOrder)
    assert decode.matched(wanted, 0) == 0
    done = Received(transfer_id=pull.offer.transfer_id, nbytes=1)
    decode.apply([Report(rank=0, events=(done,))])
    assert decode.matched(wanted, 0) == 0
    assert decode.matched(wanted, 32) == 0
    decode.allocated(wanted, [4, 5, 6], 0)
    assert not decode.step().orders


def test_67_full_hit_and_who_asks() -> None:
    """Behaviour 67: a full local hit releases prefill and loads nothing; READ asks for what is not
    computed, 32 of 32; after it began or ended 0; prefill never asks."""
    decode = half(produces=False)
    hit = request(32, offered(32))
    assert decode.matched(hit, 32) == 0
    decode.allocated(hit, [4, 5], 0)
    assert len(orders(decode, DeclineOrder)) == 1
    fresh = request(32, offered(32))
    assert decode.matched(fresh, 0) == 32
    decode.allocated(fresh, [4, 5], 32)
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
    decode.finished(request(32, params), [])
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
    wanted = request(33, offered(33))
    decode.matched(wanted, 0)
    decode.allocated(wanted, [4, 5, 6], 33)
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
