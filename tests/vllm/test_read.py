"""READ between two real vLLM engines in two processes, over shm, against a single engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Expected
from vllm_rig import (
    BLOCK_NBYTES,
    BLOCK_TOKENS,
    CROWD,
    CROWD_TOKENS,
    LENGTHS,
    PROMPTS,
    SAMPLES,
    EngineProcess,
    blocks_of,
    step_until,
)

pytestmark = pytest.mark.timeout(900)

Get = Callable[[str], EngineProcess]


def counted(engine: EngineProcess, name: str) -> int:
    return int(engine.call("state")["counters"].get(name, 0))


def pulled(engine: EngineProcess) -> int:
    """Bytes pulled so far, by the agent's own counter."""
    return counted(engine, "pull.bytes")


def test_tokens_equal_a_single_engines(engine: Get, expected: Expected) -> None:
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


@pytest.mark.parametrize(("how", "family"), [("zero", "spoilt"), ("block", "wrong")])
def test_spoilt_bytes_change_the_tokens(
    engine: Get, expected: Expected, how: str, family: str
) -> None:
    """Negative controls: zeroed bytes, and one block in another's place, with distinct prompts in
    flight. The tokens come from the pulled bytes, each from its own, not from a recompute."""
    prefill, decode = engine("prefill"), engine("decode")
    names = [name for name in PROMPTS if name.startswith(family)]
    prompts = [PROMPTS[name] for name in names]
    assert len(prompts) > 1
    params = prefill.prefill(prompts)
    with decode.spoilt(how):
        outputs = decode.generate(prompts, kv=params)
    for name, output in zip(names, outputs, strict=True):
        assert output["finish"] == "length"
        assert output["tokens"] != expected[name], name
    assert not any(prefill.settle()["tables"].values())


def test_a_local_prefix_hit_pulls_the_tail_only(engine: Get, expected: Expected) -> None:
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


def test_n_samples_pull_their_prompt_once(engine: Get, expected: Expected) -> None:
    """n = 3: one sample pulls, the others take its blocks from the prefix cache."""
    prefill, decode = engine("prefill"), engine("decode")
    prompt = PROMPTS["samples100"]
    before = pulled(decode)
    params = prefill.prefill([prompt])
    (output,) = decode.generate([prompt], kv=params, **SAMPLES)
    assert output["samples"] == expected.samples
    assert len({tuple(sample) for sample in expected.samples}) == 3, "they would not tell"
    assert pulled(decode) - before == blocks_of(100) * BLOCK_NBYTES
    for side in (prefill, decode):
        assert not any(side.settle()["tables"].values())


def test_preempted_requests_are_computed_again(engine: Get, expected: Expected) -> None:
    """More than fits: decode preempts what it has pulled, and computes it by itself later."""
    prefill, decode = engine("prefill"), engine("decode")
    free = prefill.settle()["free"], decode.settle()["free"]
    before = decode.call("state")["preemptions"]
    half = len(CROWD) // 2
    params = [*prefill.prefill(CROWD[:half])]
    ids = [
        decode.call("add", prompt=prompt, kv=kv, max_tokens=CROWD_TOKENS)
        for prompt, kv in zip(CROWD[:half], params, strict=True)
    ]
    decode.call("step")  # the pulls begin
    prefill.settle(free[0])
    params = prefill.prefill(CROWD[half:])
    ids += [
        decode.call("add", prompt=prompt, kv=kv, max_tokens=CROWD_TOKENS)
        for prompt, kv in zip(CROWD[half:], params, strict=True)
    ]
    outputs = decode.call("finish", ids=ids)
    assert [output["tokens"] for output in outputs] == expected.crowd
    assert decode.call("state")["preemptions"] > before
    for side, blocks in zip((prefill, decode), free, strict=True):
        state = side.settle(blocks)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]


def test_a_hold_is_renewed_while_decode_is_busy(engine: Get, expected: Expected) -> None:
    """What waits in decode's queue for two leases can still be pulled after them."""
    prefill, strict = engine("prefill"), engine("strict")
    prompt = PROMPTS["leased100"]
    lease, margin = 8.0, 0.5
    prefill.call("lease", seconds=lease)
    try:
        strict.call("occupy", seqs=0)
        (params,) = prefill.prefill([prompt])
        before = pulled(strict)
        request = strict.call("add", prompt=prompt, kv=params)
        strict.call("pace", seconds=2 * (lease + margin), pause=0.02)
        waiting = strict.call("state")
        assert waiting["waiting"] == 1
        assert waiting["counters"]["renewals.granted"] >= 3
        assert prefill.settle(seconds=0.0)["tables"]["holds"] == 1
    finally:
        prefill.call("lease", seconds=30.0)
        strict.call("occupy", seqs=32)
    (output,) = strict.call("finish", ids=[request])
    assert output["tokens"] == expected["leased100"]
    assert pulled(strict) - before == blocks_of(100) * BLOCK_NBYTES
    assert not any(prefill.settle()["tables"].values())


def test_aborts_after_the_load_and_after_the_prefill(engine: Get) -> None:
    """Aborted while it decodes: the blocks are free. Aborted at prefill once it is held: nothing
    happens, decode has the offer and may read."""
    prefill, decode = engine("prefill"), engine("decode")
    free = prefill.settle()["free"], decode.settle()["free"]
    prompt = PROMPTS["plain200"]
    request = prefill.call("add", prompt=prompt, kv={"do_remote_decode": True}, max_tokens=1)
    (output,) = prefill.call("finish", ids=[request])
    step_until(prefill, lambda: prefill.call("state")["tables"]["holds"])
    prefill.call("abort", request_id=request)
    assert prefill.settle(seconds=0.0)["tables"]["holds"] == 1
    received = decode.call("state")["counters"]["events.received"]
    request = decode.call("add", prompt=PROMPTS["plain200"], kv=output["kv"], max_tokens=200)
    step_until(decode, lambda: decode.call("state")["counters"]["events.received"] > received)
    decode.call("step", count=3)
    decode.call("abort", request_id=request)
    for side, blocks in zip((prefill, decode), free, strict=True):
        state = side.settle(blocks)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]


@pytest.mark.parametrize("steps", [0, 1])
def test_aborted_at_prefill_before_it_is_done(engine: Get, steps: int) -> None:
    """In the queue, or between two chunks: nothing is held and nothing offered."""
    prefill = engine("prefill")
    free = prefill.settle()["free"]
    request = prefill.call(
        "add", prompt=PROMPTS["gone200"], kv={"do_remote_decode": True}, max_tokens=1
    )
    prefill.call("step", count=steps)
    prefill.call("abort", request_id=request)
    state = prefill.settle(free)
    assert state["free"] == free
    assert not any(state["tables"].values()), state["tables"]


def test_sleep_and_wake(engine: Get, expected: Expected) -> None:
    """Going to sleep waits for a reader that is still to come; caches that were unregistered,
    moved and restored, on both sides, serve peers of before."""
    prefill, decode = engine("prefill"), engine("decode")
    decode.settle()
    assert len(set(decode.call("sleep"))) == 1
    (params,) = prefill.prefill([PROMPTS["slept64"]])
    prefill.send("sleep", move=True)
    (output,) = decode.generate([PROMPTS["slept64"]], kv=[params])
    assert output["tokens"] == expected["slept64"]
    assert len(set(prefill.take())) == 1
    prompt = PROMPTS["slept100"]
    params = prefill.prefill([prompt])
    bytes_before = pulled(decode)
    (output,) = decode.generate([prompt], kv=params)
    assert output["tokens"] == expected["slept100"]
    assert pulled(decode) - bytes_before == blocks_of(100) * BLOCK_NBYTES
    assert not any(prefill.settle()["tables"].values())


def test_a_lease_that_ended_in_the_queue(engine: Get, expected: Expected) -> None:
    """Decode makes no step while the lease runs out, so nobody renews it: prefill frees the blocks
    and says so; the load fails without a byte, and decode computes the prompt."""
    prefill, decode = engine("prefill"), engine("decode")
    prompt = PROMPTS["expired100"]
    free, free_here = prefill.settle()["free"], decode.settle()["free"]
    before, expired = pulled(decode), counted(prefill, "events.expired")
    prefill.call("lease", seconds=1.0)
    try:
        (params,) = prefill.prefill([prompt])
        request = decode.call("add", prompt=prompt, kv=params)
        assert prefill.settle(free, seconds=60.0)["free"] == free
    finally:
        prefill.call("lease", seconds=30.0)
    assert counted(prefill, "events.expired") == expired + 1
    (output,) = decode.call("finish", ids=[request])
    assert output["tokens"] == expected["expired100"]
    assert pulled(decode) == before
    state = decode.settle(free_here)
    assert state["free"] == free_here
    assert not any(state["tables"].values()), state["tables"]


def test_the_log_line(engine: Get, expected: Expected) -> None:
    """What vLLM logs of an interval says how many, how much, how long."""
    prefill, decode = engine("prefill"), engine("decode")
    decode.call("metrics"), prefill.call("metrics")
    prompt = PROMPTS["plain64"]
    (params,) = prefill.prefill([prompt[::-1]])
    decode.generate([prompt[::-1]], kv=[params])
    prefill.settle()
    line = decode.call("metrics")
    assert line["loads"] == 1
    assert line["MB loaded"] == round(2 * BLOCK_NBYTES / 1e6, 3)
    assert 0 < line["median load ms"] == line["slowest load ms"]
    assert prefill.call("metrics") == {"sent": 1}


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


def test_params_that_are_no_offer_are_computed_here(engine: Get, expected: Expected) -> None:
    """kv_transfer_params come from clients: nonsense in them neither crashes nor confuses."""
    decode = engine("decode")
    bad = {"do_remote_prefill": True, "kvxfer": {"tokens": -1, "offer": {"version": 99}}}
    outputs = decode.generate(
        [PROMPTS["plain37"]] * 2, kv=[bad, {"do_remote_prefill": True, "remote_host": "x"}]
    )
    assert [o["tokens"] for o in outputs] == [expected["plain37"]] * 2


def test_a_foreign_fingerprint_is_a_failed_load(engine: Get, expected: Expected) -> None:
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
    for side in (prefill, decode):
        assert not any(side.settle()["tables"].values())
