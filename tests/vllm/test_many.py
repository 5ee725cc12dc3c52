"""200 requests, 32 at a time, over a transport that refuses and a channel that loses messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Expected, Fleet
from vllm_rig import BLOCK_NBYTES, EngineProcess, blocks_of, prompt

pytestmark = pytest.mark.timeout(900)

REQUESTS, CONCURRENCY = 200, 32
MANY = [prompt(33 + 7 * (i % 11), 1000 + i) for i in range(REQUESTS)]
FAULTS = {"refuse": 0.1, "late": 0.05, "lose": 0.05}
SECONDS = 400.0
"""What takes half a minute on a machine that has nothing else to do."""


def serve(prefill: EngineProcess, decode: EngineProcess) -> dict[str, dict[str, Any]]:
    """A closed loop: whenever a request is done, the next one is sent to prefill."""
    names = iter(range(REQUESTS))
    done: dict[str, dict[str, Any]] = {}
    for_prefill: list[dict[str, Any]] = []
    for_decode: list[dict[str, Any]] = []
    under_way = 0
    end = time.monotonic() + SECONDS
    while len(done) < REQUESTS:
        assert time.monotonic() < end, (len(done), prefill.call("state"), decode.call("state"))
        while under_way < CONCURRENCY and (index := next(names, None)) is not None:
            kv = {"do_remote_decode": True}
            request = {"request_id": f"r{index}", "prompt": MANY[index], "kv": kv, "max_tokens": 1}
            for_prefill.append(request)
            under_way += 1
        prefill.send("pump", requests=for_prefill, seconds=0.2)
        decode.send("pump", requests=for_decode, seconds=0.2)
        for_prefill, for_decode = [], []
        for request_id, output in prefill.take().items():
            index = int(request_id[1:])
            for_decode.append({"request_id": request_id, "prompt": MANY[index], "kv": output["kv"]})
        finished = decode.take()
        done |= finished
        under_way -= len(finished)
    return done


def test_200_requests_with_faults(
    engine: Callable[[str], EngineProcess],
    fleet: Fleet,
    expected: Expected,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every answer equals a single engine's, every byte was pulled, every block comes back; the
    faults were there."""
    fleet.start("single", "crowded", "strict")
    single = fleet.get("single")
    alone = single.generate(MANY)
    single.close()
    prefill, decode = engine("crowded"), engine("strict")
    free = prefill.settle()["free"], decode.settle()["free"]
    before = decode.call("state")["counters"].get("pull.bytes", 0)
    decode.call("recompute", on=True)
    for side in (prefill, decode):
        side.call("inject", **FAULTS)
    try:
        done = serve(prefill, decode)
    finally:
        injected = {side.log.stem: side.call("injected") for side in (prefill, decode)}
        for side in (prefill, decode):
            side.call("inject")
        decode.call("recompute", on=False)
    wrong = [i for i in range(REQUESTS) if done[f"r{i}"]["tokens"] != alone[i]["tokens"]]
    assert not wrong
    for side, blocks in zip((prefill, decode), free, strict=True):
        state = side.settle(blocks, seconds=60.0)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]
    counters = decode.call("state")["counters"]
    planned = sum(blocks_of(len(tokens)) for tokens in MANY) * BLOCK_NBYTES
    with capsys.disabled():
        print(f"\n{REQUESTS} requests, {CONCURRENCY} at a time, injected: {injected}")
    at_prefill, at_decode = injected.values()
    assert at_decode["refused"] > 0
    assert at_decode["late"] > 0
    assert at_decode["lost"] > 0
    assert at_prefill["lost"] > 0
    assert counters["pull.bytes"] - before == planned, "some were computed again"
