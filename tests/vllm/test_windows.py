"""A model with full attention and a sliding window: two groups of KV caches (SupportsHMA)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Fleet
from vllm_rig import LENGTHS, EngineProcess, connector, make_model, prompt

pytestmark = pytest.mark.timeout(900)

WINDOW = 64
BLOCK_AND_LAYER_NBYTES = 2 * 32 * 2 * 32 * 4
"""KV heads, tokens, K and V, head size, float32."""


@pytest.fixture(scope="module")
def engines(fleet: Fleet, folder: Path) -> Iterator[dict[str, EngineProcess]]:
    model = make_model(
        folder / "windows",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=WINDOW,
    )
    kinds = {
        "single": None,
        "prefill": connector("kv_producer", write=True),
        "decode": connector("kv_consumer", policy="fail", write=True, share_caches=True),
    }
    made = {name: EngineProcess(fleet.nursery, model, kind) for name, kind in kinds.items()}
    try:
        yield {name: engine.ready() for name, engine in made.items()}
    finally:
        for engine in made.values():
            engine.close()


@pytest.mark.parametrize("write", [False, True], ids=["READ", "WRITE"])
def test_tokens_equal_a_single_engines(engines: dict[str, EngineProcess], write: bool) -> None:
    """Both groups arrive. Of the window's layer only the blocks move that its window still sees:
    the placeholders behind it take part in nothing."""
    single, prefill, decode = (engines[name] for name in ("single", "prefill", "decode"))
    assert decode.call("state")["groups"] == 2
    prompts = [prompt(n, 70 + write) for n in LENGTHS]
    expected = [output["tokens"] for output in single.generate(prompts)]
    free = prefill.settle()["free"], decode.settle()["free"]
    decode.call("metrics")
    if write:
        outputs = prefill.push(decode, prompts)
    else:
        outputs = decode.generate(prompts, kv=prefill.prefill(prompts))
    assert [output["finish"] for output in outputs] == ["length"] * len(prompts)
    assert [output["tokens"] for output in outputs] == expected
    for side, blocks in zip((prefill, decode), free, strict=True):
        state = side.settle(blocks)
        assert state["free"] == blocks
        assert not any(state["tables"].values()), state["tables"]
    whole = sum(-(-n // 32) for n in LENGTHS) * 2 * BLOCK_AND_LAYER_NBYTES
    assert 0 < decode.call("metrics")["MB loaded"] < whole / 1e6
