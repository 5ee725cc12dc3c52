"""Unequal tensor-parallel sizes, both ways: ranks move the heads that they share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Expected
from vllm_rig import BLOCK_NBYTES, PROMPTS, EngineProcess, blocks_of

pytestmark = pytest.mark.timeout(900)

Get = Callable[[str], EngineProcess]


@pytest.mark.parametrize(
    ("producer", "consumer", "ranks"),
    [("prefill", "decode_tp2", 2), ("prefill_tp2", "decode", 1)],
    ids=["1->2", "2->1"],
)
def test_tokens_equal_a_single_engines(
    engine: Get, expected: Expected, producer: str, consumer: str, ranks: int
) -> None:
    """READ and WRITE: equal tokens, every byte once, each decode rank its own heads, and the
    producer is free when all reading ranks are done."""
    prefill, decode = engine(producer), engine(consumer)
    names = [f"ranks{ranks}_{n}" for n in (64, 200)]
    prompts = [PROMPTS[name] for name in names]
    wanted = [expected[name] for name in names]
    nbytes = sum(blocks_of(len(p)) for p in prompts) * BLOCK_NBYTES
    free = prefill.settle()["free"], decode.settle()["free"]
    before = decode.call("state")["bytes"]
    outputs = decode.generate(prompts, kv=prefill.prefill(prompts))
    assert [output["tokens"] for output in outputs] == wanted
    pulled = [b - a for a, b in zip(before, decode.call("state")["bytes"], strict=True)]
    assert pulled == [nbytes // ranks] * ranks
    for side, blocks in zip((prefill, decode), free, strict=True):
        state = side.settle(blocks, seconds=60.0)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]

    names = [f"push_ranks{ranks}_{n}" for n in (64, 200)]
    outputs = prefill.push(decode, [PROMPTS[name] for name in names])
    assert [output["tokens"] for output in outputs] == [expected[name] for name in names]
    for side, blocks in zip((prefill, decode), free, strict=True):
        state = side.settle(blocks, seconds=60.0)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]
    assert decode.call("state")["bytes"] == [a + b for a, b in zip(before, pulled, strict=True)]
