"""The layout module alone: no agent, no transport, no network.

A prefill cache with K and V in two halves, on two tensor-parallel ranks, is copied into a decode
cache that is head-major, has other block sizes, and lives on one rank.  A connector would hand the
same offsets to its engine.

Run: python examples/layout_alone.py
"""

from __future__ import annotations

import numpy as np

from kvxfer.core.layout import (
    Blocks,
    KVLayout,
    KVSpec,
    LayerRef,
    TokenOrder,
    plan_layers,
    uncovered_ranges,
    zero_ranges,
)
from kvxfer.core.topology import Ranks, layers_between, sources

HEADS, DIM, TOKENS = 4, 16, 40

decode = Ranks(tp_size=1, total_kv_heads=HEADS)
prefill = Ranks(tp_size=2, total_kv_heads=HEADS)


def main() -> None:
    rng = np.random.default_rng(0)
    # Two prefill ranks, blocks of 8 tokens: [plane, block, token, head, dim].
    prefill_caches = [
        rng.standard_normal((2, 10, 8, HEADS // 2, DIM)).astype(np.float16) for _ in range(2)
    ]
    # One decode rank, blocks of 32 tokens: [block, plane, head, token, dim].
    cache = np.full((4, 2, HEADS, 32, DIM), np.nan, np.float16)

    mine = LayerRef(
        name="layer.0",
        group=0,
        region=0,
        layout=KVLayout.from_tensor(
            cache,
            KVSpec(tokens_per_block=32, heads=HEADS, head_size=DIM, order=TokenOrder.HEAD_MAJOR),
        ),
    )
    prefill_ids, decode_ids = [7, 2, 9, 0, 4], [3, 1]
    memory = cache.reshape(-1).view(np.uint8)
    for link in sources(decode, prefill):
        source = prefill_caches[link.rank]
        theirs = LayerRef(
            name="layer.0",
            group=0,
            region=0,
            layout=KVLayout.from_tensor(
                source, KVSpec(tokens_per_block=8, heads=HEADS // 2, head_size=DIM)
            ),
        )
        plan = plan_layers(
            layers_between([mine], [theirs], decode, prefill.at(link.rank)),
            [Blocks.at(0, decode_ids)],
            [Blocks.at(0, prefill_ids)],
        )
        print(f"from rank {link.rank}: heads {link.heads}, {plan}")
        theirs_memory = source.reshape(-1).view(np.uint8)
        _, local, remote, size = plan.lists()
        for to, at, n in zip(local, remote, size, strict=True):
            memory[to : to + n] = theirs_memory[at : at + n]

    rest = plan.uncovered[0]
    zeroed = zero_ranges(memory, *uncovered_ranges(mine.layout, rest))
    print(f"{rest.tokens} tokens of block {rest.ids.tolist()} were not covered; zeroed {zeroed} B")

    # What decode now reads, token by token, is what prefill wrote.
    whole = np.concatenate(prefill_caches, axis=3)[:, prefill_ids].reshape(2, TOKENS, HEADS, DIM)
    got = cache[decode_ids].transpose(1, 0, 3, 2, 4).reshape(2, 64, HEADS, DIM)
    np.testing.assert_array_equal(got[:, :TOKENS], whole)
    assert not got[:, TOKENS:].any()
    print("every byte is where it belongs")


if __name__ == "__main__":
    main()
