"""Unequal tensor-parallel sizes, both ways: ranks move the heads that they share."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from conftest import Expected
from vllm_rig import BLOCK_NBYTES, PROMPTS, EngineProcess, blocks_of

pytestmark = pytest.mark.timeout(900)

Get = Callable[[str], EngineProcess]
LENGTHS = (64, 200)


@attrs.frozen
class Way:
    """Which engines, and on how many ranks the consumer runs."""

    producer: str
    consumer: str
    ranks: int


BOTH_WAYS = pytest.mark.parametrize(
    "way",
    [Way("prefill", "decode_tp2", 2), Way("prefill_tp2", "decode", 1)],
    ids=["1->2", "2->1"],
)


def all_free(*sides: tuple[EngineProcess, int]) -> None:
    for side, blocks in sides:
        state = side.settle(blocks, seconds=60.0)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]


@BOTH_WAYS
@pytest.mark.parametrize("write", [False, True], ids=["READ", "WRITE"])
def test_tokens_equal_a_single_engines(
    engine: Get, expected: Expected, way: Way, write: bool
) -> None:
    """Equal tokens, every byte once, each rank its own heads on both sides, and the producer is
    free when all reading ranks are done."""
    prefill, decode = engine(way.producer), engine(way.consumer)
    names = [f"{'push_' if write else ''}ranks{way.ranks}_{n}" for n in LENGTHS]
    prompts = [PROMPTS[name] for name in names]
    nbytes = sum(blocks_of(len(p)) for p in prompts) * BLOCK_NBYTES
    free = prefill.settle()["free"], decode.settle()["free"]
    moving, other = (prefill, decode) if write else (decode, prefill)
    before, idle = moving.call("state")["bytes"], other.call("state")["bytes"]
    if write:
        outputs = prefill.push(decode, prompts)
    else:
        outputs = decode.generate(prompts, kv=prefill.prefill(prompts))
    assert [output["tokens"] for output in outputs] == [expected[name] for name in names]
    all_free((prefill, free[0]), (decode, free[1]))
    moved = [b - a for a, b in zip(before, moving.call("state")["bytes"], strict=True)]
    assert moved == [nbytes // len(before)] * len(before)
    assert other.call("state")["bytes"] == idle, "the other side moved nothing"


@BOTH_WAYS
@pytest.mark.parametrize("how", ["zero", "block"])
def test_spoilt_bytes_change_the_tokens(
    engine: Get, expected: Expected, way: Way, how: str
) -> None:
    """Negative controls, with distinct prompts in flight."""
    prefill, decode = engine(way.producer), engine(way.consumer)
    free = prefill.settle()["free"], decode.settle()["free"]
    # What is no longer than two blocks may be told right by its second one alone.
    names = [f"{how}_ranks{way.ranks}_{n}" for n in (100, 200)]
    prompts = [PROMPTS[name] for name in names]
    params = prefill.prefill(prompts)
    with decode.spoilt(how):
        outputs = decode.generate(prompts, kv=params)
    for name, output in zip(names, outputs, strict=True):
        assert output["finish"] == "length"
        assert output["tokens"] != expected[name], name
    all_free((prefill, free[0]), (decode, free[1]))
