"""A producer that dies: recompute or an error, as vLLM is configured, within bounded time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Expected
from vllm_rig import BLOCK_NBYTES, LENGTHS, PROMPTS, EngineProcess, prompt, step_until

pytestmark = pytest.mark.timeout(900)

Get = Callable[[str], EngineProcess]
SECONDS = 90.0
"""Connect, queue and drain time-outs of the rig together, and room for a loaded machine."""


def counted(engine: EngineProcess, name: str) -> int:
    return int(engine.call("state")["counters"].get(name, 0))


def test_killed_producer(engine: Get, expected: Expected) -> None:
    """kill -9 after the offer: one engine recomputes with equal tokens, the other says error.

    Nothing stays under way on either; the producer that is started anew serves both again.
    """
    prefill, recompute = engine("prefill"), engine("decode")
    names = ["killed100", "killed200"]
    prompts = [PROMPTS[name] for name in names]
    strict = engine("strict")
    for_recompute, for_strict = prefill.prefill(prompts), prefill.prefill(prompts)
    free = recompute.settle()["free"], strict.settle()["free"]
    prefill.kill()

    outputs = recompute.generate(prompts, kv=for_recompute)
    assert [o["tokens"] for o in outputs] == [expected[name] for name in names]
    assert outputs[0]["seconds"] < SECONDS

    outputs = strict.generate(prompts, kv=for_strict)
    assert {o["finish"] for o in outputs} == {"error"}
    assert outputs[0]["seconds"] < SECONDS

    for decode, blocks in zip((recompute, strict), free, strict=True):
        state = decode.settle(blocks, ignored=("unconfirmed",))
        assert state["free"] == blocks
        # Releases are repeated towards a dead address until the lease ends.
        assert state["tables"].pop("unconfirmed") <= len(names)
        assert not any(state["tables"].values()), state["tables"]

    again = engine("prefill")
    prompt = PROMPTS[f"plain{LENGTHS[0]}"]
    (params,) = again.prefill([prompt])
    (output,) = strict.generate([prompt], kv=[params])
    assert output["tokens"] == expected[f"plain{LENGTHS[0]}"]


@pytest.mark.parametrize("recompute", [True, False])
def test_killed_in_the_middle_of_a_transfer(
    engine: Get, expected: Expected, recompute: bool
) -> None:
    """kill -9 while a read is in the engine's hands: nothing is told to vLLM before it is known
    that no byte lands any more; then equal tokens, or an error, as the policy says."""
    prefill, strict = engine("prefill"), engine("strict")
    prompt = PROMPTS["hung100"]
    free = strict.settle()["free"]
    (params,) = prefill.prefill([prompt])
    strict.call("recompute", on=recompute)
    strict.call("inject", hold=1)
    try:
        request = strict.call("add", prompt=prompt, kv=params)
        step_until(strict, lambda: strict.call("injected")["held"])
        prefill.kill()
        step_until(strict, lambda: strict.call("state")["tables"]["draining"])
        state = strict.call("state")
        assert state["waiting"] + state["running"] == 1, "vLLM has been told nothing"
        assert state["free"] == free - 4
        strict.call("release")
        (output,) = strict.call("finish", ids=[request])
    finally:
        strict.call("inject")
        strict.call("release")
        strict.call("recompute", on=False)
    if recompute:
        assert output["tokens"] == expected["hung100"]
    else:
        assert output["finish"] == "error"
    state = strict.settle(free, ignored=("unconfirmed",))
    assert state["free"] == free
    assert not any(size for name, size in state["tables"].items() if name != "unconfirmed")


@pytest.mark.parametrize("aborted", [False, True])
def test_what_nobody_can_fence_makes_the_engine_unhealthy(
    engine: Get, expected: Expected, aborted: bool
) -> None:
    """A read that failed and may still land, and no fence to be had: the request fails, its blocks
    are handed to nobody, the log and the metrics say so, and other requests are served. They come
    back with the proof, and what had landed late met nobody's data."""
    prefill, strict = engine("crowded"), engine("strict")
    free = strict.settle()["free"]
    before = set(strict.call("allocated"))
    (params,) = prefill.prefill([PROMPTS["quarantine100"]])
    strict.call("metrics")
    strict.call("inject", hold=1, unfenced=True)
    try:
        request = strict.call("add", prompt=PROMPTS["quarantine100"], kv=params)
        step_until(strict, lambda: strict.call("injected")["held"])
        aside = set(strict.call("allocated")) - before
        assert len(aside) == 4
        if aborted:
            strict.call("abort", request_id=request)
        else:
            prefill.kill()
            (output,) = strict.call("finish", ids=[request])
            assert output["finish"] == "error"
        step_until(strict, lambda: strict.call("state")["tables"]["scheduler aside"])
        assert strict.call("state")["free"] == free - 4
        assert strict.call("metrics")["quarantined"] == 1
        assert "unhealthy: 4 blocks" in strict.log.read_text(errors="replace")
        again = engine("crowded")
        names = [f"quarantine{n}" for n in (37, 64, 200)]
        prompts = [PROMPTS[name] for name in names]
        outputs = strict.generate(prompts, kv=again.prefill(prompts))
        assert [output["tokens"] for output in outputs] == [expected[name] for name in names]
        # Every block that there is, one after the other: those four are not among them.
        crowd = [prompt(480, 900 + i) for i in range(40)]
        used = strict.call("most_used", requests=[{"prompt": p, "max_tokens": 4} for p in crowd])
        assert len(used) > free - 4 - 2 * 16, "nearly all"
        assert not aside & set(used)
        assert aside <= set(strict.call("allocated")), "still nobody's"
        drained = counted(strict, "events.drained")
        strict.call("release")
        step_until(strict, lambda: counted(strict, "events.drained") > drained, step=False)
        # An engine that has nothing to do makes no step: they come back with the next one.
        strict.generate([PROMPTS["quarantine37"]])
        state = strict.settle(free, ignored=("unconfirmed",))
        assert state["free"] == free
        assert not any(size for name, size in state["tables"].items() if name != "unconfirmed")
        assert strict.call("metrics")["freed"] == 1
    finally:
        strict.call("inject")
        strict.call("release")


def test_aborted_while_bytes_may_land(engine: Get) -> None:
    """The engine still has the read: the blocks are nobody's before that is over."""
    prefill, strict = engine("crowded"), engine("strict")
    free, at_prefill = strict.settle()["free"], prefill.settle()["free"]
    (params,) = prefill.prefill([PROMPTS["stopped100"]])
    aborted = counted(strict, "pull.failed.aborted")
    strict.call("inject", hold=1, unfenced=True)
    try:
        request = strict.call("add", prompt=PROMPTS["stopped100"], kv=params)
        step_until(strict, lambda: strict.call("injected")["held"])
        strict.call("abort", request_id=request)
        step_until(strict, lambda: counted(strict, "pull.failed.aborted") > aborted)
        strict.call("step", count=3)
        assert strict.call("state")["free"] == free - 4
    finally:
        strict.call("inject")
        strict.call("release")
    for side, blocks in ((strict, free), (prefill, at_prefill)):
        state = side.settle(blocks, seconds=60.0)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]


def test_decode_that_is_killed_and_started_again(engine: Get, expected: Expected) -> None:
    """kill -9 at decode with a hold unread: prefill frees it when the lease ends, and serves the
    decode engine that takes its place."""
    prefill, decode = engine("prefill"), engine("decode")
    free = prefill.settle()["free"]
    prefill.call("lease", seconds=5.0)
    try:
        (params,) = prefill.prefill([PROMPTS["reborn100"]])
        decode.call("add", prompt=PROMPTS["reborn100"], kv=params)
        decode.kill()
        assert prefill.settle(free, seconds=60.0)["free"] == free
    finally:
        prefill.call("lease", seconds=30.0)
    again = engine("decode")
    (params,) = prefill.prefill([PROMPTS["reborn100"]])
    (output,) = again.generate([PROMPTS["reborn100"]], kv=[params])
    assert output["tokens"] == expected["reborn100"]
    assert counted(again, "pull.bytes") == 4 * BLOCK_NBYTES
    for side in (prefill, again):
        state = side.settle()
        assert not any(state["tables"].values()), state["tables"]


def test_aborted_while_it_waits_for_the_producer(engine: Get) -> None:
    """A stopped producer and an abort: the blocks come back, and nothing waits for the producer.

    The producer, running again, frees what it held, by the release or by its lease.
    """
    prefill, decode = engine("prefill"), engine("decode")
    prompt = PROMPTS["stopped100"]
    free, free_here = prefill.settle()["free"], decode.settle()["free"]
    bytes_before = decode.call("state")["bytes"]
    (params,) = prefill.prefill([prompt])
    prefill.stop()
    try:
        decode.call("add", request_id="9003", prompt=prompt, kv=params)
        begun = decode.settle(seconds=0.0)
        assert begun["tables"]["scheduler loads"] == 1
        assert begun["free"] == free_here - 4
        decode.call("abort", request_id="9003")
        state = decode.settle(free_here, ignored=("unconfirmed",))
    finally:
        prefill.go_on()
    assert state["free"] == free_here
    # Its keeper grants for a stopped producer, and shm needs no more of it: the bytes may be first.
    received = state["bytes"] > bytes_before
    assert state["counters"].get("pull.failed.aborted", 0) == (0 if received else 1), state
    assert prefill.settle(free, seconds=40.0)["free"] == free
