"""READ between two real vLLM engines in two processes, over shm, against a single engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm_rig import BLOCK_NBYTES, BLOCK_TOKENS, LENGTHS, PROMPTS, EngineProcess, blocks_of

pytestmark = pytest.mark.timeout(900)

Get = Callable[[str], EngineProcess]
Tokens = dict[str, list[int]]


def pulled(engine: EngineProcess) -> int:
    """Bytes pulled so far, by the agent's own counter."""
    return int(engine.call("state")["counters"].get("pull.bytes", 0))


def test_tokens_equal_a_single_engines(engine: Get, expected: Tokens) -> None:
    """Prefill here, decode there: equal tokens, exactly the planned bytes, and every block back."""
    prefill, decode = engine("prefill"), engine("decode")
    names = [f"plain{n}" for n in LENGTHS]
    prompts = [PROMPTS[name] for name in names]
    free, free_here, before = (
        prefill.settle()["free"],
        decode.settle()["free"],
        pulled(decode),
    )
    params = prefill.prefill(prompts)
    held = sum(blocks_of(len(p)) for p in prompts)
    assert prefill.call("state")["free"] == free - held, "the blocks are held for the reader"
    outputs = decode.generate(prompts, kv=params)
    assert [o["tokens"] for o in outputs] == [expected[name] for name in names]
    assert {o["finish"] for o in outputs} == {"length"}
    assert pulled(decode) - before == held * BLOCK_NBYTES
    after = prefill.settle(free)
    assert after["free"] == free, "the producer's blocks are free again"
    assert not any(after["tables"].values()), after["tables"]
    assert after["counters"]["events.sent"] >= len(names)
    at_decode = decode.settle(free_here)
    assert at_decode["free"] == free_here
    assert not any(at_decode["tables"].values()), at_decode["tables"]


def test_zeroed_bytes_change_the_tokens(engine: Get, expected: Tokens) -> None:
    """Negative control: the tokens come from the pulled bytes, not from a silent recompute."""
    prefill, decode = engine("prefill"), engine("decode")
    names = [f"spoilt{n}" for n in LENGTHS]
    prompts = [PROMPTS[name] for name in names]
    params = prefill.prefill(prompts)
    decode.call("spoil", on=True)
    try:
        outputs = decode.generate(prompts, kv=params)
    finally:
        decode.call("spoil", on=False)
    for name, output in zip(names, outputs, strict=True):
        assert output["finish"] == "length"
        assert output["tokens"] != expected[name], name
    prefill.settle()


def test_a_local_prefix_hit_pulls_the_tail_only(engine: Get, expected: Tokens) -> None:
    """Two prompts that share two blocks: of the second, decode reads only what it has not."""
    prefill, decode = engine("prefill"), engine("decode")
    for name, missing in (("first", 4), ("second", 2)):
        before = pulled(decode)
        params = prefill.prefill([PROMPTS[name]])
        (output,) = decode.generate([PROMPTS[name]], kv=params)
        assert output["tokens"] == expected[name]
        assert pulled(decode) - before == missing * BLOCK_NBYTES, name
    assert blocks_of(len(PROMPTS["second"])) - missing == 64 // BLOCK_TOKENS
    assert not any(prefill.settle()["tables"].values())


def test_aborted_before_scheduling_still_declines(engine: Get) -> None:
    """A request that dies in decode's queue releases the producer; no lease has to run out."""
    prefill, decode = engine("prefill"), engine("decode")
    prompt = PROMPTS["plain100"]
    free, before = prefill.settle()["free"], pulled(decode)
    declined = prefill.call("state")["counters"].get("events.declined", 0)
    (params,) = prefill.prefill([prompt])
    decode.call("add", request_id="9001", prompt=prompt, kv=params)
    decode.call("abort", request_id="9001")
    decode.settle(seconds=5.0)
    after = prefill.settle(free, seconds=10.0)
    assert after["free"] == free
    assert after["counters"]["events.declined"] == declined + 1
    assert pulled(decode) == before


def test_params_that_are_no_offer_are_computed_here(engine: Get, expected: Tokens) -> None:
    """kv_transfer_params come from clients: nonsense in them neither crashes nor confuses."""
    decode = engine("decode")
    bad = {"do_remote_prefill": True, "kvxfer": {"tokens": -1, "offer": {"version": 99}}}
    outputs = decode.generate(
        [PROMPTS["plain37"]] * 2, kv=[bad, {"do_remote_prefill": True, "remote_host": "x"}]
    )
    assert [o["tokens"] for o in outputs] == [expected["plain37"]] * 2


def test_a_foreign_fingerprint_is_a_failed_load(engine: Get, expected: Tokens) -> None:
    """An offer of another model is refused before a byte moves; the request is recomputed."""
    prefill, decode = engine("prefill"), engine("decode")
    prompt = PROMPTS["foreign100"]
    (params,) = prefill.prefill([prompt])
    before = pulled(decode)
    offer = params["kvxfer"]["offer"]
    foreign = {"tokens": 100, "offer": {**offer, "fingerprint": "another model"}}
    (output,) = decode.generate([prompt], kv=[{**params, "kvxfer": foreign}])
    assert output["tokens"] == expected["foreign100"]
    assert pulled(decode) == before
    assert not any(decode.settle()["tables"].values())
    decode.call("add", request_id="9002", prompt=prompt, kv=params)
    decode.call("abort", request_id="9002")
    decode.settle()
    assert not any(prefill.settle()["tables"].values())
