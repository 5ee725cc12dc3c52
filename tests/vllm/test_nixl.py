"""READ between two real vLLM engines over the real NIXL (UCX, tcp)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Expected
from vllm_rig import BLOCK_NBYTES, LENGTHS, PROMPTS, EngineProcess, blocks_of

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("how", ["", "zero", "block"])
@pytest.mark.parametrize("write", [False, True], ids=["READ", "WRITE"])
def test_tokens_equal_a_single_engines(
    engine: Callable[[str], EngineProcess], expected: Expected, write: bool, how: str
) -> None:
    """Equal tokens and the planned bytes; other tokens where the bytes are spoilt."""
    prefill, decode = engine("prefill_nixl"), engine("decode_nixl")
    family = "nixl_push_" if write else "nixl_"
    names = [f"{family}{how}{n}" for n in LENGTHS if how != "block" or n > 64]
    prompts = [PROMPTS[name] for name in names]
    free = prefill.settle()["free"]
    moving = prefill if write else decode
    (before,) = moving.call("state")["bytes"]
    params = None if write else prefill.prefill(prompts)
    with decode.spoilt(how):
        outputs = prefill.push(decode, prompts) if write else decode.generate(prompts, kv=params)
    for name, output in zip(names, outputs, strict=True):
        assert output["finish"] == "length"
        assert (output["tokens"] == expected[name]) == (not how), name
    state = prefill.settle(free)
    assert state["free"] == free
    assert not any(state["tables"].values()), state["tables"]
    nbytes = sum(blocks_of(len(p)) for p in prompts) * BLOCK_NBYTES
    assert moving.call("state")["bytes"] == [before + nbytes]
