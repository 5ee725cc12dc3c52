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
from kvxfer.errors import ConfigError, ErrorKind, TransferError
from kvxfer.integrations.vllm import ConnectorConfig
from kvxfer.integrations.vllm.caches import attention_groups, refuse_host_buffer
from kvxfer.integrations.vllm.params import Push
from kvxfer.testing.clock import FakeClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's imports say of each other
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import RequestStatus

    from kvxfer.integrations.vllm.scheduler import SchedulerHalf

BLOCK = 16


def half(
    *, produces: bool, tp: int = 1, groups: int = 1, clock: FakeClock | None = None, **extra: Any
) -> SchedulerHalf:
    config = ConnectorConfig.from_extra(extra)
    made = SchedulerHalf(config, block_size=BLOCK, produces=produces, groups=groups, clock=clock)
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


@pytest.mark.parametrize(
    ("local", "tokens", "external", "pulled"),
    [
        ([100, 101, 102], 32, 32, (0, [100, 101])),
        ([7, 8, 102], 48, 16, (2, [102])),
        ([100, 101, 102], 16, 16, (0, [100])),
    ],
)
def test_66_blocks_pair_by_position(
    local: list[int], tokens: int, external: int, pulled: tuple[int, list[int]]
) -> None:
    """Behaviour 66: of three local blocks and two remote ones the first two; after a prefix hit
    the remote suffix; of one remote block one, however many are local: nothing is left to an
    allowance, because positions say what belongs together."""
    decode = half(produces=False)
    wanted = arrive(decode, 48, offered(tokens))
    decode.allocated(wanted, (local,), external)
    (pull,) = orders(decode, PullOrder)
    (blocks,), (remote,) = pull.blocks, pull.offer.groups
    assert (blocks.start, blocks.ids.tolist()) == pulled
    assert len(remote) == blocks.start + len(blocks)


def test_66_nothing_external_moves_nothing() -> None:
    """Behaviour 66: zero external tokens, no block of any group."""
    decode = half(produces=False)
    decode.allocated(arrive(decode, 32, offered(32)), ([4, 5],), 0)
    assert not [o for o in decode.step(NOTHING).orders if not isinstance(o, DeclineOrder)]


def test_69_of_a_window_only_what_it_sees_moves() -> None:
    """Behaviour 69: window 32, blocks of 16, so three at most: vLLM has its null block where the
    window has moved past. Those entries are offered by nobody and pulled by nobody, and are not
    among the blocks that a failed load reports."""
    prefill = half(produces=True, groups=2)
    wanted = request(80, {"do_remote_decode": True})
    _, params = prefill.finished(wanted, ([10, 11, 12, 13, 14], [0, 0, 22, 23, 24]))
    assert params is not None
    decode = half(produces=False, groups=2)
    decode.allocated(arrive(decode, 80, params), ([1, 2, 3, 4, 5], [0, 0, 7, 8, 9]), 80)
    step = decode.step(NOTHING)
    (pull,) = (o for o in step.orders if isinstance(o, PullOrder))
    for window in (pull.offer.groups[1], pull.blocks[1]):
        assert window.holes is not None
        assert window.holes.tolist() == [True, True, False, False, False]
    assert pull.offer.groups[1].ids.tolist()[2:] == [22, 23, 24]
    (load,) = step.loads.values()
    assert load.blocks == ((1, 2, 3, 4, 5), (7, 8, 9))


def groups_of(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])


def test_69_other_hybrids_are_refused() -> None:
    """Behaviour 69: recurrent state and chunked attention, alone or beside full attention."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=32
    )
    assert len(attention_groups(groups_of(full, window))) == 2
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
    )
    for other in (state, chunked):
        for specs in ((other,), (full, other)):
            with pytest.raises(ConfigError, match=type(other).__name__):
                attention_groups(groups_of(*specs))


def test_70_bytes_per_block_may_differ_tokens_may_not() -> None:
    """Behaviour 70: groups of 2112 and 9216 bytes per block are registered; of 16 and 32 tokens
    per block they are refused by name."""
    small = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=33, dtype=torch.float16)
    large = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=144, dtype=torch.float16)
    assert (small.page_size_bytes, large.page_size_bytes) == (2112, 9216)
    assert len(attention_groups(groups_of(small, large))) == 2
    longer = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=33, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"of 16 tokens.*of 32 tokens"):
        attention_groups(groups_of(small, longer))


@pytest.mark.parametrize(
    ("caches", "buffer", "refused"),
    [("cuda", "cpu", True), ("cuda", "cuda", False), ("cpu", "cpu", False)],
)
def test_staging_in_host_memory_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caches: str, buffer: str, refused: bool
) -> None:
    """What ``set_host_xfer_buffer_ops`` is for stops the engine at start; device memory moves where
    it lies, and host memory needs no staging."""
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type=caches))
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_buffer_device=buffer))
    if refused:
        with pytest.raises(ConfigError, match="set_host_xfer_buffer_ops"):
            refuse_host_buffer(config)
    else:
        refuse_host_buffer(config)


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


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    """The step tells the workers, which wait until the old blocks are read. Computed again, into
    other blocks, it is pushed from where it was: nothing twice."""
    prefill, wanted = pushing(40)
    prefill.step(scheduled(r=32))
    step = scheduled()
    step.preempted_req_ids = {"r", "another"}
    assert prefill.step(step).preempted == ("push-1",)
    wanted.num_computed_tokens = 0
    assert not prefill.step(scheduled(r=32)).chunks
    wanted.num_computed_tokens = 32
    (chunk,) = prefill.step(scheduled(r=8)).chunks
    (blocks,) = chunk.push.blocks
    assert (blocks.start, blocks.ids.tolist(), chunk.last) == (2, [12], True)


def test_a_preempted_push_that_could_not_be_read_in_time_is_over() -> None:
    """A worker gave it up: what is computed again is not pushed."""
    prefill, wanted = pushing(40)
    prefill.step(scheduled(r=32))
    error = TransferError("aborted", kind=ErrorKind.ABORTED)
    failed = Failed(transfer_id="push-1", role=Role.PRODUCER, kind=error.kind, error=error)
    prefill.apply([Report(rank=0, events=(failed,))])
    wanted.num_computed_tokens = 0
    assert not prefill.step(scheduled(r=40)).chunks
    assert prefill.finished(wanted, ([10, 11, 12],)) == (False, None)


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
    assert decode.aside == {transfer_id: ["block 4", "block 5"]}
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
