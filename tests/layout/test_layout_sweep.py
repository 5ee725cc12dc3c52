"""The sweep: unequal TP, heads, token orders and block sizes together, byte for byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvxfer.core.layout import Blocks, KVLayout, LayerRef, LayoutKind, plan_layers
from kvxfer.core.topology import Ranks, layers_between, shard_heads, sources

TP = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8, 16)
TOKENS = {(16, 16): 32, (16, 128): 256, (24, 40): 120}
"""Tokens of the request, by (P, D) block sizes: whole blocks on both sides."""
NBYTES = 2


def cache(blocks: int, tokens: int, heads: int, order: str, kind: LayoutKind) -> KVLayout:
    inner = (heads * NBYTES, NBYTES) if order == "token" else (NBYTES, tokens * NBYTES)
    return KVLayout(
        num_blocks=blocks,
        block_stride=tokens * heads * NBYTES,
        kernel_tokens=tokens,
        token_stride=inner[0],
        heads=heads,
        head_stride=inner[1],
        head_nbytes=NBYTES,
        dtype="float16",
        kind=kind,
    )


def content(everything: np.ndarray, ids: list[int], blocks: int, tokens: int, order: str):
    """A rank's memory with the request's tokens in the blocks ``ids``: uint8, flat."""
    out = np.zeros((blocks, tokens, *everything.shape[1:]), np.uint8)
    out[ids] = everything.reshape(len(ids), tokens, *everything.shape[1:])
    return out.reshape(-1) if order == "token" else out.transpose(0, 2, 1, 3).reshape(-1)


@pytest.mark.parametrize("sizes", list(TOKENS), ids=str)
@pytest.mark.parametrize("orders", list(itertools.product(("token", "head"), repeat=2)), ids=str)
@pytest.mark.parametrize("latent", [False, True], ids=["grouped", "latent"])
def test_every_decode_head_is_written_exactly_once(latent: bool, orders, sizes) -> None:
    """TP {1,2,4,8} squared x KV heads {1,2,4,8,16} x {latent, grouped} x {token-, head-major}
    squared x block sizes {16/16, 16/128, 24/40}: every byte of every decode head is written once,
    with the right content."""
    p_tokens, d_tokens = sizes
    total = TOKENS[sizes]
    p_ids = list(range(total // p_tokens, 0, -1))
    d_ids = list(range(total // d_tokens, 0, -1))
    p_blocks, d_blocks = max(p_ids) + 1, max(d_ids) + 1
    kind = LayoutKind.LATENT if latent else LayoutKind.KV
    for heads in HEADS:
        held = 1 if latent else heads
        everything = np.random.default_rng(heads).integers(1, 256, (total, held, NBYTES), np.uint8)
        for p_tp, d_tp in itertools.product(TP, TP):
            producers = {}
            for p in range(p_tp):
                first, count = (0, 1) if latent else shard_heads(heads, p_tp, p)
                part = everything[:, first : first + count]
                producers[p] = content(part, p_ids, p_blocks, p_tokens, orders[0])
            n_p = 1 if latent else shard_heads(heads, p_tp, 0)[1]
            n_d = 1 if latent else shard_heads(heads, d_tp, 0)[1]
            theirs = [
                LayerRef(
                    name="l",
                    group=0,
                    region=0,
                    layout=cache(p_blocks, p_tokens, n_p, orders[0], kind),
                )
            ]
            ours = [
                LayerRef(
                    name="l",
                    group=0,
                    region=0,
                    layout=cache(d_blocks, d_tokens, n_d, orders[1], kind),
                )
            ]
            peer = Ranks(tp_size=p_tp, total_kv_heads=heads, latent=latent)
            for d in range(d_tp):
                mine = Ranks(tp_size=d_tp, tp_rank=d, total_kv_heads=heads, latent=latent)
                memory = np.zeros(ours[0].layout.span_nbytes, np.uint8)
                written = np.zeros(len(memory), np.int64)
                for link in sources(mine, peer, turn=heads):
                    plan = plan_layers(
                        layers_between(ours, theirs, mine, peer.at(link.rank), turn=heads),
                        [Blocks.at(0, d_ids)],
                        [Blocks.at(0, p_ids)],
                    )
                    step = np.arange(plan.nbytes) - np.repeat(
                        np.cumsum(plan.size) - plan.size, plan.size
                    )
                    to = np.repeat(plan.local, plan.size) + step
                    memory[to] = producers[link.rank][np.repeat(plan.remote, plan.size) + step]
                    np.add.at(written, to, 1)
                first, count = (0, 1) if latent else shard_heads(heads, d_tp, d)
                wanted = content(
                    everything[:, first : first + count], d_ids, d_blocks, d_tokens, orders[1]
                )
                where = content(
                    np.ones((total, count, NBYTES), np.uint8), d_ids, d_blocks, d_tokens, orders[1]
                )
                np.testing.assert_array_equal(written, where)
                np.testing.assert_array_equal(memory, wanted)
