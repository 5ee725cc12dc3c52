"""WRITE between two real vLLM engines: prefill pushes layer by layer, in the forward, over shm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Expected
from vllm_rig import BLOCK_NBYTES, LENGTHS, PROMPTS, EngineProcess, blocks_of, prompt, step_until

from kvxfer.integrations.vllm.params import Push

pytestmark = pytest.mark.timeout(900)

Get = Callable[[str], EngineProcess]


def counted(engine: EngineProcess, name: str) -> int:
    return int(engine.call("state")["counters"].get(name, 0))


def nothing_left(*engines: EngineProcess) -> None:
    for engine in engines:
        state = engine.settle()
        assert not any(state["tables"].values()), state["tables"]


def test_tokens_equal_a_single_engines(engine: Get, expected: Expected) -> None:
    """Equal tokens, exactly the planned bytes, one push per layer and chunk, every block back.

    The prompt of 200 tokens is computed in three chunks, those of 64 and 37 in one.
    """
    prefill, decode = engine("prefill"), engine("decode")
    free = prefill.settle()["free"], decode.settle()["free"]
    names = [f"pushed{n}" for n in LENGTHS]
    before = counted(prefill, "push.bytes"), counted(prefill, "events.sent")
    pulled = counted(decode, "pull.bytes")
    decode.call("metrics")
    outputs = prefill.push(decode, [PROMPTS[name] for name in names])
    assert [output["tokens"] for output in outputs] == [expected[name] for name in names]
    nbytes = sum(map(blocks_of, LENGTHS)) * BLOCK_NBYTES
    for side, blocks in zip((prefill, decode), free, strict=True):
        assert side.settle(blocks)["free"] == blocks
    nothing_left(prefill, decode)
    assert decode.call("metrics")["MB loaded"] == round(nbytes / 1e6, 3)
    assert counted(prefill, "events.sent") - before[1] == len(names)
    assert counted(prefill, "push.bytes") - before[0] == nbytes
    assert counted(decode, "pull.bytes") == pulled, "nothing was read"


@pytest.mark.parametrize("how", ["zero", "block"])
def test_spoilt_bytes_change_the_tokens(engine: Get, expected: Expected, how: str) -> None:
    """Negative controls, as for READ."""
    prefill, decode = engine("prefill"), engine("decode")
    names = [f"push_spoilt{n}" for n in LENGTHS if (n > 64) == (how == "block")]
    with decode.spoilt(how):
        outputs = prefill.push(decode, [PROMPTS[name] for name in names])
    for name, output in zip(names, outputs, strict=True):
        assert output["finish"] == "length"
        assert output["tokens"] != expected[name], name
    nothing_left(prefill, decode)


def test_a_local_prefix_hit_is_not_written(engine: Get, expected: Expected) -> None:
    """Of a prompt whose beginning decode has, only the tail is accepted and written, whatever is
    pushed: of one that it has in full, the last block, which vLLM never takes from its cache."""
    prefill, decode = engine("prefill"), engine("decode")
    for name, missing in (("push_first", 3), ("push_second", 3), ("push_first", 1)):
        before = counted(prefill, "push.bytes")
        (output,) = prefill.push(decode, [PROMPTS[name]])
        assert output["tokens"] == expected[name]
        nothing_left(prefill, decode)
        assert counted(prefill, "push.bytes") - before == missing * BLOCK_NBYTES, name


def test_a_push_that_decode_never_accepts_ends(engine: Get) -> None:
    """Decode's request was aborted in its queue: prefill's push ends, and its blocks are free."""
    prefill, decode = engine("prefill"), engine("decode")
    free = prefill.settle()["free"]
    push = Push.to_addresses("never-wanted", decode.call("state")["addresses"])
    prompt = PROMPTS["push_dead100"]
    request = decode.call("add", prompt=prompt, kv=push.for_decode())
    decode.call("abort", request_id=request)
    decode.settle(seconds=0.0)
    prefill.generate([prompt], [push.for_prefill()], max_tokens=1)
    assert prefill.settle(free)["free"] == free
    nothing_left(prefill, decode)


def test_aborted_between_two_chunks(engine: Get, expected: Expected) -> None:
    """Prefill's request goes after its first chunk: decode computes the prompt by itself."""
    prefill, decode = engine("prefill"), engine("decode")
    free = prefill.settle()["free"]
    push = Push.to_addresses("half-pushed", decode.call("state")["addresses"])
    prompt = PROMPTS["gone200"]
    waiting = decode.call("add", prompt=prompt, kv=push.for_decode())
    decode.call("step")
    request = prefill.call("add", prompt=prompt, kv=push.for_prefill(), max_tokens=1)
    prefill.call("step")
    # Once the first chunk has landed: before prefill has asked, decode could not be told that it
    # ended, and would wait for the deadline of its blocks.
    step_until(prefill, lambda: prefill.call("landed", transfer_id="half-pushed"), step=False)
    prefill.call("abort", request_id=request)
    assert prefill.settle(free)["free"] == free
    (output,) = decode.call("finish", ids=[waiting])
    assert output["tokens"] == expected["gone200"]
    nothing_left(prefill, decode)


def test_preempted_between_two_chunks(engine: Get, expected: Expected) -> None:
    """Prefill preempts a prompt that it has pushed a part of, and computes it again: the rest is
    pushed, nothing twice, and decode computes nothing of it.

    Sixteen requests of 80 tokens leave it just the blocks it needs. They begin one step after the
    other; from the next step on each takes one more block.
    """
    prefill, decode = engine("prefill"), engine("decode")
    free = prefill.settle()["free"], decode.settle()["free"]
    preemptions = prefill.call("state")["preemptions"]
    before = counted(prefill, "push.bytes")
    others = [
        prefill.call("add", prompt=prompt(80, 300 + i), max_tokens=30)
        for i in range((free[0] - 15) // 3)
    ]
    prefill.call("step", count=len(others))
    push = Push.to_addresses("preempted", decode.call("state")["addresses"])
    tokens = PROMPTS["preempted480"]
    waiting = decode.call("add", prompt=tokens, kv=push.for_decode())
    decode.call("step")
    request = prefill.call("add", prompt=tokens, kv=push.for_prefill(), max_tokens=1)
    prefill.call("step")
    step_until(prefill, lambda: prefill.call("landed", transfer_id="preempted"), step=False)
    while prefill.call("state")["preemptions"] == preemptions:
        prefill.call("step")
        step_until(prefill, lambda: prefill.call("landed", transfer_id="preempted"), step=False)
    assert 0 < prefill.call("pushed", transfer_id="preempted") < blocks_of(480)
    prefill.call("finish", ids=[*others, request])
    (output,) = decode.call("finish", ids=[waiting])
    assert output["tokens"] == expected["preempted480"]
    for side, blocks in zip((prefill, decode), free, strict=True):
        assert side.settle(blocks)["free"] == blocks
    nothing_left(prefill, decode)
    assert counted(prefill, "push.bytes") - before == blocks_of(480) * BLOCK_NBYTES
