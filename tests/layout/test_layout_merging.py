"""Joining pieces of many layers: as few as if all were written out, without writing them out."""

from __future__ import annotations

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvxfer.core.layout import Blocks, KVLayout, LayerRef, match_layers, plan_layers
from kvxfer.core.layout.paired import LayersPlan, PairedPlan

TOKENS, HEADS, DIM = 2, 2, 4
CELL = HEADS * DIM


def layers_in_one_storage(
    blocks: int, kind: str, widths: list[int], *, padding: int = 0, heads: int = HEADS
) -> list[LayerRef]:
    """K and V of layers of the given widths (1 or 2 times ``DIM`` bytes per head), in one storage.

    ``stacked``: layer after layer, two halves each.  ``blocks``: layer after layer, K and V in each
    block.  ``planes``: the K of all layers, then the V of all.  ``rows``: a row per block holds K
    and V of all layers.  ``mixed rows``: a row holds the K of all layers, then the V of all.
    """
    cells = [TOKENS * heads * DIM * width for width in widths]
    row = 2 * sum(cells) + padding
    out = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        before = sum(cells[:number])
        if kind == "stacked":
            at, plane, block = 2 * before * blocks + padding * number, cell * blocks, cell
        elif kind == "blocks":
            at, plane, block = 2 * before * blocks + padding * number, cell, 2 * cell
        elif kind == "planes":
            at, plane, block = before * blocks, sum(cells) * blocks + padding, cell
        elif kind == "rows":
            at, plane, block = 2 * before, cell, row
        else:
            at, plane, block = before, sum(cells), row
        layout = KVLayout(
            num_blocks=blocks,
            block_stride=block,
            planes=2,
            plane_stride=plane,
            kernel_tokens=TOKENS,
            token_stride=heads * DIM * width,
            heads=heads,
            head_stride=DIM * width,
            head_nbytes=DIM * width,
            offset=at,
            dtype="int8",
        )
        out.append(LayerRef(name=f"l{number}", group=0, region=0, layout=layout))
    return out


KINDS = ("stacked", "blocks", "planes", "rows", "mixed rows")


def written_out(plan: LayersPlan) -> PairedPlan:
    return PairedPlan(*(np.array(v) for v in (plan.pair, plan.local, plan.remote, plan.size)))


def bytes_of(plan: PairedPlan) -> list[tuple[int, int, int]]:
    return sorted(
        (pair, local + i, remote + i)
        for pair, local, remote, size in zip(*plan.lists(), strict=True)
        for i in range(size)
    )


@settings(deadline=None)
@given(st.data())
def test_merging_layers_finds_everything_that_touches(data: st.DataObject) -> None:
    """The factored way ends with as many pieces as the written-out one, and with the same bytes."""
    blocks = data.draw(st.integers(2, 6))
    widths = data.draw(
        st.one_of(
            st.integers(1, 4).map(lambda n: [1] * n),
            st.lists(st.sampled_from((1, 2)), min_size=1, max_size=4),
        )
    )
    kinds = data.draw(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
    if data.draw(st.booleans()):
        kinds = (kinds[0], kinds[0])
    paddings = data.draw(st.tuples(st.sampled_from((0, 0, 4)), st.sampled_from((0, 0, 4))))
    ours, theirs = (
        layers_in_one_storage(blocks, kind, widths, padding=padding)
        for kind, padding in zip(kinds, paddings, strict=True)
    )
    count = data.draw(st.integers(1, blocks))
    ids = [
        data.draw(st.one_of(st.permutations(range(blocks)), st.just(list(range(blocks)))))[:count]
        for _ in range(2)
    ]
    plan = plan_layers(match_layers(ours, theirs), [Blocks.at(0, ids[0])], [Blocks.at(0, ids[1])])
    merged, flat = plan.merged(), written_out(plan).merged()
    event(f"{'factored' if isinstance(merged, LayersPlan) else 'written out'}")
    event(f"pieces saved: {len(flat) < len(plan)}")
    assert len(merged) == len(flat)
    assert bytes_of(merged) == bytes_of(plan) == bytes_of(flat)


def request(kind: str, *, heads: tuple[int, int] = (HEADS, HEADS), layers: int = 5) -> LayersPlan:
    """300 random blocks of layers that lie as ``kind`` says on both sides."""
    from kvxfer.core.layout import HeadSlice

    ours, theirs = (layers_in_one_storage(1000, kind, [1] * layers, heads=count) for count in heads)
    rng = np.random.default_rng(7)
    # Not the first or last one: at the ends of a storage, neighbouring layers touch.
    ids = [[Blocks.at(0, 1 + rng.permutation(998)[:300])] for _ in range(2)]
    moved = HeadSlice(count=min(heads), local=0, remote=heads[1] - min(heads))
    return plan_layers(match_layers(ours, theirs, heads=moved), *ids)


def test_layers_in_one_storage_stay_factored() -> None:
    """One plan of 300 blocks serves 5 layers, however they share their storage."""
    for kind in ("stacked", "blocks", "planes"):
        merged = request(kind).merged()
        assert isinstance(merged, LayersPlan), kind
        assert merged._vectors is None, "nothing was written out"
        (group,) = merged.groups
        assert len(group.pair) == 5


def test_layers_of_one_row_become_one_piece_per_block() -> None:
    """Cross-layer, block-first caches move whole rows."""
    for kind in ("rows", "mixed rows"):
        plan = request(kind)
        merged = plan.merged()
        assert isinstance(merged, LayersPlan)
        (group,) = merged.groups
        assert len(group.pair) == 1
        assert group.names == ("l0..l4",)
        assert len(merged) <= 300
        assert merged.nbytes == plan.nbytes
        assert set(merged.size.tolist()) >= {10 * TOKENS * CELL}


def test_head_slices_of_one_row_stay_factored() -> None:
    """Unequal TP over rows: layers interleave on both sides, and their places prove them apart."""
    for kind in ("rows", "mixed rows"):
        merged = request(kind, heads=(2, 4)).merged()
        assert isinstance(merged, LayersPlan), kind
        assert merged._vectors is None
        assert len(merged.groups[0].pair) == 5
        assert len(merged) == 300 * 2 * TOKENS * 5


def test_merging_is_kept_with_the_plan() -> None:
    """A plan that comes from the cache brings its merged form and what was derived of it along."""
    plan = request("stacked").groups[0].plan
    assert plan.merged() is plan.merged()
    calls: list[int] = []

    def length(of: object) -> int:
        calls.append(1)
        return len(of)  # type: ignore[arg-type]

    assert plan.keep(length) == plan.keep(length) == len(plan)
    assert len(calls) == 1
