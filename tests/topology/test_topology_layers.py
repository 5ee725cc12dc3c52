"""Layers between two ranks: mixed models, and bytes that end where the topology says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvxfer.core.layout import (
    Blocks,
    HeadSlice,
    KVLayout,
    LayerRef,
    LayoutKind,
    Sharding,
    StateLayout,
    StatePart,
    plan_layers,
)
from kvxfer.core.topology import Ranks, Role, layers_between, source_ranks, sources
from kvxfer.errors import GeometryError, InvalidInputError


def cache(heads: int, kind: LayoutKind = LayoutKind.KV, nbytes: int = 4, blocks: int = 8):
    return KVLayout(
        num_blocks=blocks,
        block_stride=4 * heads * nbytes,
        kernel_tokens=4,
        token_stride=heads * nbytes,
        heads=heads,
        head_stride=nbytes,
        head_nbytes=nbytes,
        dtype="float16",
        kind=kind,
    )


def state(units: int, sharding: Sharding = Sharding.SHARDED, total: int | None = None):
    return StateLayout(
        num_slots=3,
        parts=[
            StatePart(
                name="ssm",
                slot_stride=64,
                units=units,
                unit_stride=4,
                unit_nbytes=4,
                dtype="float32",
                sharding=sharding,
                total_units=total,
            ),
            StatePart(name="norm", offset=48, slot_stride=64, unit_nbytes=8, dtype="float32"),
        ],
    )


def rank_of(tp: int, rank: int = 0, heads: int = 8) -> Ranks:
    return Ranks(tp_size=tp, tp_rank=rank, total_kv_heads=heads)


def model(tp: int) -> list[LayerRef]:
    """A rank's layers of a model with 8 heads, an indexer, a draft layer of 4 heads and a state."""
    layouts = {
        "attention": (cache(max(8 // tp, 1)), None),
        "latent": (cache(1, LayoutKind.LATENT, 16), None),
        "indexer": (cache(1, LayoutKind.KEY_ONLY, 8), None),
        "scales": (cache(max(8 // tp, 1), LayoutKind.SCALE, 4), None),
        "draft": (cache(max(4 // tp, 1)), 4),
        "recurrent": (state(8 // tp), None),
    }
    return [
        LayerRef(name=name, group=0, region=i, layout=layout, total_heads=total)
        for i, (name, (layout, total)) in enumerate(layouts.items())
    ]


def test_each_layer_gets_its_own_slice() -> None:
    """Grouped, latent, key-only, scale, draft and state layers of one model are cut each by its
    own rule; what is a copy moves over one link only."""
    mine, peer = rank_of(1), rank_of(4, 2)
    layers = {pair.name: pair for pair in layers_between(model(1), model(4), mine, peer)}
    assert set(layers) == {"attention", "scales", "draft", "recurrent"}, "copies come from rank 0"
    assert layers["attention"].heads == layers["scales"].heads == HeadSlice(4, 0, 2)
    assert layers["draft"].heads == HeadSlice(2, 0, 1)
    assert layers["recurrent"].units == (HeadSlice(4, 0, 2), None)
    first = {pair.name for pair in layers_between(model(1), model(4), mine, peer.at(0))}
    assert first == {"attention", "latent", "indexer", "scales", "draft", "recurrent"}
    turned = layers_between(model(1), model(4), mine, peer, turn=2)
    assert {"latent", "indexer"} <= {pair.name for pair in turned}


def test_producers_see_the_same_slices_from_their_side() -> None:
    """A push plans the same heads as the pull of the same two ranks, with the sides swapped."""
    for turn in range(4):
        for p in range(4):
            pulled = layers_between(model(1), model(4), rank_of(1), rank_of(4, p), turn=turn)
            pushed = layers_between(
                model(4), model(1), rank_of(4, p), rank_of(1), role=Role.PRODUCER, turn=turn
            )
            assert {pair.name: pair.heads and pair.heads.swapped() for pair in pulled} == {
                pair.name: pair.heads for pair in pushed
            }
    everywhere = layers_between(model(1), model(4), rank_of(1), rank_of(4, 2), role=Role.PRODUCER)
    assert "latent" in {pair.name for pair in everywhere}, "every consumer needs its copy"


def test_declared_heads_must_match_the_ranks() -> None:
    """A layer that holds other heads than its rank should is refused: a wrong size must not become
    a wrong slice."""
    refs = {tp: [LayerRef(name="a", group=0, region=0, layout=cache(8 // tp))] for tp in (1, 2)}
    with pytest.raises(GeometryError, match="should hold 4 heads here and 4 at the peer"):
        layers_between(refs[1], refs[2], rank_of(2), rank_of(2))
    with pytest.raises(GeometryError, match="has 8 heads in all here and 4"):
        layers_between(
            refs[1],
            [LayerRef(name="a", group=0, region=0, layout=cache(4), total_heads=4)],
            rank_of(1),
            rank_of(1),
        )
    many = [LayerRef(name="a", group=0, region=0, layout=cache(2, LayoutKind.KEY_ONLY))]
    with pytest.raises(GeometryError, match="should hold 1 heads here"):
        layers_between(many, many, rank_of(2), rank_of(2))


def test_missing_layers_are_refused_unless_stages() -> None:
    """A layer that only one side holds is an error, except between pipeline stages."""
    ours = [LayerRef(name=n, group=0, region=0, layout=cache(8)) for n in ("a",)]
    theirs = [LayerRef(name=n, group=0, region=0, layout=cache(8)) for n in ("a", "b")]
    with pytest.raises(InvalidInputError, match="missing on the local side: b"):
        layers_between(ours, theirs, rank_of(1), rank_of(1))
    common = layers_between(ours, theirs, rank_of(1), rank_of(1), only_common=True)
    assert [pair.name for pair in common] == ["a"]


def test_fused_and_unequal_states() -> None:
    """Fused parts move whole between equal shares and are refused otherwise; unit totals must
    agree."""

    def refs(layout: StateLayout) -> list[LayerRef]:
        return [LayerRef(name="m", group=0, region=0, layout=layout)]

    fused = refs(state(1, Sharding.FUSED, total=2))
    (pair,) = layers_between(fused, fused, rank_of(4, 2), rank_of(2, 1))
    assert pair.units[0] == HeadSlice(0, 0, 1)
    with pytest.raises(GeometryError, match="unequal shares"):
        layers_between(fused, fused, rank_of(1), rank_of(2))
    with pytest.raises(GeometryError, match="other units over all ranks"):
        layers_between(refs(state(4)), refs(state(4)), rank_of(1), rank_of(2))
    with pytest.raises(GeometryError, match="recurrent states differ"):
        layers_between(refs(state(4)), fused, rank_of(2), rank_of(2))
    with pytest.raises(GeometryError, match="recurrent state on the other"):
        layers_between(
            refs(state(4)),
            [LayerRef(name="m", group=0, region=0, layout=cache(8))],
            rank_of(2),
            rank_of(2),
        )


@pytest.mark.parametrize(
    ("d_tp", "d_cp", "p_tp", "p_cp"),
    [(1, 1, 8, 8), (2, 2, 4, 4), (4, 4, 2, 2), (8, 8, 1, 1), (2, 2, 2, 2), (4, 2, 4, 4)],
)
@pytest.mark.parametrize("interleave", [1, 4, 8])
def test_context_parallel_ranks_exchange_every_token_once(
    d_tp: int, d_cp: int, p_tp: int, p_cp: int, interleave: int
) -> None:
    """Behaviour 71, in bytes: whatever the context-parallel sizes, every token of every decode rank
    is written once, with its own content."""
    total = 128
    content = np.random.default_rng(1).integers(1, 256, (total, 4), np.uint8)
    consumer = Ranks(tp_size=d_tp, dcp_size=d_cp, interleave=interleave, latent=True)
    producer = Ranks(tp_size=p_tp, dcp_size=p_cp, interleave=interleave, latent=True)

    def held(rank: Ranks) -> np.ndarray:
        token = np.arange(total)
        share = rank.share
        return (
            token
            if share is None
            else token[(token // share.interleave) % share.size == share.rank]
        )

    def blocks(rank: Ranks) -> Blocks:
        count = len(held(rank)) // 4
        return Blocks.at(0, np.random.default_rng(rank.tp_rank).permutation(40)[:count],
                         share=rank.share)  # fmt: skip

    def layer() -> list[LayerRef]:
        return [
            LayerRef(name="l", group=0, region=0, layout=cache(1, LayoutKind.LATENT, blocks=40))
        ]

    memory = {}
    for p in range(p_tp):
        rank = producer.at(p)
        memory[p] = np.zeros((40, 4, 4), np.uint8)
        memory[p][blocks(rank).ids] = content[held(rank)].reshape(-1, 4, 4)
    for d in range(d_tp):
        rank = consumer.at(d)
        out, written = np.zeros(40 * 16, np.uint8), np.zeros(40 * 16, np.int64)
        for p in source_ranks(rank, producer):
            layers = layers_between(layer(), layer(), rank, producer.at(p))
            plan = plan_layers(layers, [blocks(rank)], [blocks(producer.at(p))])
            source = memory[p].reshape(-1)
            for _, to, at, n in zip(*plan.lists(), strict=True):
                out[to : to + n] = source[at : at + n]
                written[to : to + n] += 1
        ids = blocks(rank).ids
        np.testing.assert_array_equal(
            out.reshape(40, 4, 4)[ids].reshape(-1, 4), content[held(rank)]
        )
        assert written.sum() == len(held(rank)) * 4
        assert written.max() == 1


def test_states_move_once_over_all_links() -> None:
    """Over every pair of TP sizes, each state unit and each replicated part of each decode rank is
    written exactly once."""
    for p_tp, d_tp in itertools.product((1, 2, 4, 8), repeat=2):
        for d in range(d_tp):
            seen: list[int] = []
            copies = 0
            mine = rank_of(d_tp, d)
            ours = [LayerRef(name="m", group=0, region=0, layout=state(8 // d_tp))]
            for link in sources(mine, rank_of(p_tp), state=True):
                theirs = [LayerRef(name="m", group=0, region=0, layout=state(8 // p_tp))]
                for pair in layers_between(ours, theirs, mine, rank_of(p_tp, link.rank)):
                    units, norm = pair.units
                    if units:
                        seen += range(units.local, units.local + units.count)
                    copies += norm is not None
            assert sorted(seen) == list(range(8 // d_tp))
            assert copies == 1
