"""Public reports of this kind of system, as small inputs with their right answers."""

from __future__ import annotations

import layout_oracle as oracle
import numpy as np
import pytest

from kvxfer.core.layout import (
    Blocks,
    Borders,
    GroupKind,
    GroupSpec,
    HeadSlice,
    KVLayout,
    KVSpec,
    LayerPair,
    LayerRef,
    Layers,
    LayerTally,
    LayoutKind,
    Plan,
    PlanCache,
    TokenOrder,
    block_groups,
    match_layers,
    plan_blocks,
    plan_layers,
    uncovered_ranges,
    zero_ranges,
)
from kvxfer.core.topology import PeerTable, Ranks, Role, head_slice
from kvxfer.errors import GeometryError, InvalidInputError

BF16 = 2


def layout(
    shape: tuple[int, ...],
    spec: KVSpec,
    *,
    itemsize: int = BF16,
    dtype: str = "bfloat16",
    strides: tuple[int, ...] | None = None,
) -> KVLayout:
    """A layout from a shape, contiguous unless strides (in elements) are given."""
    if strides is None:
        strides, step = (), 1
        for n in reversed(shape):
            strides = (step, *strides)
            step *= n
    return KVLayout.from_strides(
        shape, [s * itemsize for s in strides], spec, itemsize=itemsize, dtype=dtype
    )


def pieces(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    return plan.lists()


# O37, O38 -----------------------------------------------------------------------------------

SPEC37 = KVSpec(tokens_per_block=8, heads=4, head_size=16, planes=2)
INDEXER37 = KVSpec(tokens_per_block=8, heads=1, head_size=576, kind=LayoutKind.KEY_ONLY)
O37 = {
    "planes outermost": (
        lambda n: layout((2, n, 8, 4, 16), SPEC37),
        [0, 2048, 5120, 6144, 8192, 11264],
        [9216, 3072, 4096, 19456, 13312, 14336],
        1024,
    ),
    "planes in block": (
        lambda n: layout((n, 2, 8, 4, 16), SPEC37),
        [0, 4096, 10240],
        [18432, 6144, 8192],
        2048,
    ),
    "key only": (
        lambda n: layout((n, 8, 576), INDEXER37, itemsize=1, dtype="float8_e4m3fn"),
        [0, 9216, 23040],
        [41472, 13824, 18432],
        4608,
    ),
}


@pytest.mark.parametrize("name", O37)
def test_o37_each_layer_by_its_own_geometry(name: str) -> None:
    """Report O37: three cache layouts at once, with the peer's own number of blocks."""
    make, local, remote, size = O37[name]
    plan = plan_blocks(make(6), Blocks.at(0, [0, 2, 5]), make(10), Blocks.at(0, [9, 3, 4]))
    assert pieces(plan) == (local, remote, [size] * len(local))


def test_o37_all_three_layouts_in_one_request() -> None:
    """Report O37: mixed layers are planned per layer, matched by name."""
    local = [
        LayerRef(name=name, group=0, region=i, layout=make(6))
        for i, (name, (make, *_)) in enumerate(O37.items())
    ]
    remote = [
        LayerRef(name=name, group=0, region=2 - i, layout=make(10))
        for i, (name, (make, *_)) in enumerate(O37.items())
    ]
    layers = match_layers(local, remote[::-1])
    assert layers.regions == ((0, 2), (1, 1), (2, 0))
    plan = plan_layers(layers, [Blocks.at(0, [0, 2, 5])], [Blocks.at(0, [9, 3, 4])])
    for (pair, part), (_, ours, theirs, size) in zip(plan.plans(), O37.values(), strict=True):
        assert part.lists() == (ours, theirs, [size] * len(ours)), pair


def test_o38_plan_cache_key_and_completion_by_scheduled_layers() -> None:
    """Report O38: a plan is cached by geometry and ids, and completion counts scheduled layers."""
    a, c = O37["planes outermost"][0], O37["key only"][0]
    layers = match_layers(
        [
            LayerRef(name=name, group=0, region=i, layout=make(6))
            for i, (name, make) in enumerate((("a", a), ("b", a), ("c", c)))
        ],
        [
            LayerRef(name=name, group=0, region=i, layout=make(10))
            for i, (name, make) in enumerate((("a", a), ("b", a), ("c", c)))
        ],
    )
    cache = PlanCache()
    lists = ([Blocks.at(0, [0, 2, 5])], [Blocks.at(0, [9, 3, 4])])
    plans = dict(plan_layers(layers, *lists, cache=cache).plans())
    assert plans[0] is plans[1]
    assert plans[0] != plans[2]
    assert (cache.misses, cache.hits) == (2, 0)
    again = plan_layers(layers, *lists, cache=cache)
    assert (cache.misses, cache.hits) == (2, 2)
    assert again == plan_layers(layers, *lists)
    plan_layers(layers, [Blocks.at(0, [0, 2, 4])], lists[1], cache=cache)
    assert cache.misses == 4, "other ids are another plan"

    tally = LayerTally()
    assert [tally.schedule(name) for name in "aabc"] == [True, False, True, True]
    assert not tally.seal()
    assert tally.expected_layers == 3
    assert [tally.done("a"), tally.done("c")] == [False, False]
    assert [tally.done("b"), tally.done("b"), tally.done("a")] == [True, False, False]
    with pytest.raises(InvalidInputError, match="after the seal"):
        tally.schedule("d")


# O39 to O41 ---------------------------------------------------------------------------------

PACKED = KVSpec(tokens_per_block=8, heads=4, head_size=16)


def test_o39_packed_keys_and_values_are_one_band() -> None:
    """Report O39: K and V in the last dimension are found from the head size, not split off."""
    packed = layout((6, 4, 8, 32), PACKED)
    assert len(packed.bands()) == 1
    assert packed.block_nbytes == 2048
    plan = plan_blocks(packed, Blocks.at(0, [1, 3]), packed, Blocks.at(0, [1, 3]))
    assert pieces(plan) == ([2048, 6144], [2048, 6144], [2048, 2048])
    for head in range(4):
        plan = plan_blocks(
            packed,
            Blocks.at(0, [0]),
            packed,
            Blocks.at(0, [0]),
            heads=HeadSlice(head, head, 1),
        )
        assert pieces(plan) == ([head * 512], [head * 512], [512])


def test_o39_unknown_shapes_are_refused() -> None:
    """Report O39: a shape that fits no reading is an error, never a guess."""
    with pytest.raises(GeometryError, match="unsupported shape"):
        layout((6, 3, 5, 7), PACKED)


def test_o39_packed_and_separate_planes_map_onto_each_other() -> None:
    """Report O39: where K and V lie is a matter of strides, so the two forms exchange exactly."""
    packed = layout((6, 4, 8, 32), PACKED)
    planes = layout((2, 6, 8, 4, 16), KVSpec(tokens_per_block=8, heads=4, head_size=16))
    plan = plan_blocks(packed, Blocks.at(0, [1]), planes, Blocks.at(0, [2]))
    view = np.arange(6 * 4 * 8 * 32, dtype=np.uint16).reshape(6, 4, 8, 32)
    other = view[::-1].reshape(2, 6, 8, 4, 16).copy()
    out, _ = oracle.execute(
        *pieces(plan), view.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    )
    got = out.view(np.uint16).reshape(6, 4, 8, 2, 16)[1]
    np.testing.assert_array_equal(got.transpose(2, 1, 0, 3), other[:, 2])


SPEC40 = KVSpec(tokens_per_block=8, heads=2, head_size=16)


def test_o40_offsets_come_from_strides() -> None:
    """Report O40: one shape, two stride sets: K and V far apart, or one behind the other."""
    shape = (4, 2, 8, 2, 16)
    far = layout(shape, SPEC40, dtype="float16", strides=(256, 65536, 32, 16, 1))
    assert far.block_stride == 512
    assert far.plane_stride == 131072
    assert len(far.bands()) == 2
    plan = plan_blocks(far, Blocks.at(0, [3]), far, Blocks.at(0, [3]))
    assert pieces(plan) == ([1536, 132608], [1536, 132608], [512, 512])
    near = layout(shape, SPEC40, dtype="float16", strides=(512, 256, 32, 16, 1))
    assert len(near.bands()) == 1
    plan = plan_blocks(near, Blocks.at(0, [3]), near, Blocks.at(0, [3]))
    assert pieces(plan) == ([3072], [3072], [1024])


def plane_of_heads(blocks: int, tokens: int, heads: int, dim: int, order: TokenOrder) -> KVLayout:
    inner = (tokens, heads) if order is TokenOrder.TOKEN_MAJOR else (heads, tokens)
    spec = KVSpec(tokens_per_block=tokens, heads=heads, head_size=dim, planes=1, order=order)
    return layout((blocks, *inner, dim), spec)


def test_o41_head_slices_in_either_token_order() -> None:
    """Report O41: 8 heads, P TP2 to D TP4: one long run head-major, 16 short ones token-major."""
    producer = Ranks(tp_size=2, tp_rank=1, total_kv_heads=8)
    consumer = Ranks(tp_size=4, tp_rank=3, total_kv_heads=8)
    heads = head_slice(producer, consumer, role=Role.PRODUCER)
    assert heads == HeadSlice(2, 0, 2)
    expected = {
        TokenOrder.HEAD_MAJOR: ([12288], [12288], [4096]),
        TokenOrder.TOKEN_MAJOR: (
            [8448 + 512 * t for t in range(16)],
            [12288 + 256 * t for t in range(16)],
            [256] * 16,
        ),
    }
    for order, wanted in expected.items():
        plan = plan_blocks(
            plane_of_heads(2, 16, 4, 64, order),
            Blocks.at(0, [1]),
            plane_of_heads(4, 16, 2, 64, order),
            Blocks.at(0, [3]),
            heads=heads,
        )
        assert pieces(plan) == wanted
    assert expected[TokenOrder.TOKEN_MAJOR][0][-1] == expected[TokenOrder.TOKEN_MAJOR][1][-1]


def test_o41_mixed_token_orders_are_mapped_head_by_head() -> None:
    """Report O41: a token-major and a head-major side exchange token by token, in place."""
    plan = plan_blocks(
        plane_of_heads(2, 16, 4, 64, TokenOrder.HEAD_MAJOR),
        Blocks.at(0, [1]),
        plane_of_heads(4, 16, 2, 64, TokenOrder.TOKEN_MAJOR),
        Blocks.at(0, [3]),
        heads=HeadSlice(2, 0, 2),
    )
    moved = dict(zip(*pieces(plan)[:2], strict=True))
    assert moved == {
        8192 + (2 + h) * 2048 + t * 128: 12288 + t * 256 + h * 128
        for h in range(2)
        for t in range(16)
    }


# O42, O43 -----------------------------------------------------------------------------------


def test_o42_unequal_block_sizes_token_major() -> None:
    """Report O42: P block k of 16 tokens goes to D block k // 8 of 128, at (k % 8) * 4096."""
    p = plane_of_heads(20, 16, 2, 64, TokenOrder.TOKEN_MAJOR)
    d = plane_of_heads(4, 128, 2, 64, TokenOrder.TOKEN_MAJOR)
    plan = plan_blocks(d, Blocks.at(0, [2, 3]), p, Blocks.at(0, range(11)))
    assert pieces(plan) == (
        [(2 + k // 8) * 32768 + (k % 8) * 4096 for k in range(11)],
        [k * 4096 for k in range(11)],
        [4096] * 11,
    )


def test_o42_unequal_block_sizes_head_major() -> None:
    """Report O42: head-major, each P block gives two runs of 2048; k=3, head 1 lands at 22528."""
    p = plane_of_heads(20, 16, 2, 64, TokenOrder.HEAD_MAJOR)
    d = plane_of_heads(4, 128, 2, 64, TokenOrder.HEAD_MAJOR)
    plan = plan_blocks(d, Blocks.at(0, [0]), p, Blocks.at(0, range(8)))
    assert pieces(plan)[2] == [2048] * 16
    assert dict(zip(*pieces(plan)[:2][::-1], strict=True))[3 * 4096 + 2048] == 22528


def test_o42_the_uncovered_rest_is_reported_and_zeroed_separately() -> None:
    """Report O42: 5 P blocks fill 20480 of D block 0's 32768 bytes; the rest is "not transferred"
    and stays as it was until somebody zeroes it."""
    p = plane_of_heads(20, 16, 2, 64, TokenOrder.TOKEN_MAJOR)
    d = plane_of_heads(4, 128, 2, 64, TokenOrder.TOKEN_MAJOR)
    plan = plan_blocks(d, Blocks.at(0, [0]), p, Blocks.at(0, range(5)))
    assert plan.nbytes == 20480
    rest = plan.uncovered
    assert (rest.ids.tolist(), rest.start.tolist(), rest.stop.tolist()) == ([0], [80], [128])
    assert rest.tokens == 48
    assert not len(rest.whole_ids)
    ranges = uncovered_ranges(d, rest)
    assert [r.tolist() for r in ranges] == [[20480], [12288]]
    memory = bytearray(b"\xaa" * 4 * 32768)
    assert zero_ranges(memory, *ranges) == 12288
    assert memory == b"\xaa" * 20480 + bytes(12288) + b"\xaa" * 3 * 32768


def mla(tokens: int, nbytes: int, blocks: int = 8) -> KVLayout:
    return KVLayout(
        num_blocks=blocks,
        block_stride=tokens * nbytes,
        kernel_tokens=tokens,
        token_stride=nbytes,
        head_nbytes=nbytes,
        dtype="uint8",
        kind=LayoutKind.LATENT,
    )


def test_o43_block_sizes_that_differ_are_planned_in_units_of_the_gcd() -> None:
    """Report O43: 12 against 8 tokens of 576 bytes is planned in 4-token units."""
    plan = plan_blocks(mla(12, 576), Blocks.at(0, [1, 3]), mla(8, 576), Blocks.at(0, [2, 0, 5]))
    unit = 4 * 576
    assert plan.nbytes == 6 * unit
    assert all(n % unit == 0 for column in pieces(plan) for n in column)
    single = plan.cut(max_piece_nbytes=unit)
    here = [12 * 576 * b + unit * i for b in (1, 3) for i in range(3)]
    there = [8 * 576 * b + unit * i for b in (2, 0, 5) for i in range(2)]
    assert pieces(single) == (here, there, [unit] * 6)


def test_o43_other_bytes_per_token_are_refused_before_any_state_is_kept() -> None:
    """Report O43: 576 against 288 bytes per token names both, and no peer state remains."""
    with pytest.raises(GeometryError, match="576 and 288"):
        match_layers(
            [LayerRef(name="l", group=0, region=0, layout=mla(12, 576))],
            [LayerRef(name="l", group=0, region=0, layout=mla(8, 288))],
        )
    peers = PeerTable(Ranks(tp_size=4, total_kv_heads=8))
    with pytest.raises(InvalidInputError, match="multiples"):
        peers.add("engine", Ranks(tp_size=6, total_kv_heads=6))
    assert len(peers) == 0


# O44 to O46 ---------------------------------------------------------------------------------


def hybrid() -> Layers:
    def plane(nbytes: int, blocks: int) -> KVLayout:
        return KVLayout(
            num_blocks=blocks,
            block_stride=nbytes,
            kernel_tokens=8,
            token_stride=nbytes // 8,
            head_nbytes=nbytes // 8,
            dtype="bfloat16",
        )

    return Layers(
        [
            LayerPair(name="full", pair=0, local=plane(4096, 8), remote=plane(4096, 8), group=0),
            LayerPair(name="sliding", pair=1, local=plane(1024, 8), remote=plane(1024, 8), group=1),
        ]
    )


def test_o44_one_id_list_per_group() -> None:
    """Report O44: group 0 with blocks of 4096 bytes, group 1 with 1024, each in its own region."""
    lists = [Blocks.at(0, [0, 1, 2]), Blocks.at(0, [7])]
    plan = plan_layers(hybrid(), lists, lists)
    assert list(zip(*plan.lists(), strict=True)) == [
        (0, 0, 0, 4096),
        (0, 4096, 4096, 4096),
        (0, 8192, 8192, 4096),
        (1, 7168, 7168, 1024),
    ]


def test_o44_swapped_group_lists_are_refused() -> None:
    """Report O44: an id beyond its group's blocks is an error that names value and range."""
    layers = Layers(
        [
            LayerPair(
                name=layer.name,
                pair=layer.pair,
                local=KVLayout(
                    **{
                        **{f: getattr(layer.local, f) for f in _numbers(layer.local)},
                        "num_blocks": 3 if layer.group == 0 else 8,
                    }
                ),
                remote=layer.remote,
                group=layer.group,
            )
            for layer in hybrid()
        ]
    )
    good = [Blocks.at(0, [0, 1, 2]), Blocks.at(0, [7])]
    plan_layers(layers, good, good)
    with pytest.raises(InvalidInputError, match=r"local block id 7 lies outside 0\.\.2"):
        plan_layers(layers, good[::-1], good[::-1])


def _numbers(value: KVLayout) -> list[str]:
    return [field for field in value.to_wire() if field != "kind"]


def test_o45_unknown_kinds_are_refused_when_registered() -> None:
    """Report O45: a state kind that nobody can move is an error, not a silent skip."""
    assert GroupSpec(kind="mamba").kind is GroupKind.STATE
    assert GroupSpec(kind="swa", window_tokens=32, tokens_per_block=16).window_blocks == 3
    with pytest.raises(InvalidInputError, match="'foo' cannot be moved"):
        GroupSpec(kind="foo")


def test_o45_both_sides_agree_on_the_expected_pieces() -> None:
    """Report O45: kv 3 and swa 2 pieces make 5 expected; after 3 the transfer is pending."""
    lists = [Blocks.at(0, [0, 1, 2]), Blocks.at(0, [6, 7])]
    plan = plan_layers(hybrid(), lists, lists)
    tally = LayerTally()
    for group in plan.groups:
        tally.schedule(group.names[0], len(group))
    tally.seal()
    assert tally.expected_pieces == len(plan) == 5
    assert not tally.done("full")
    assert tally.pending_pieces == 2
    assert tally.done("sliding")


def test_o46_pieces_are_cut_at_region_borders_of_both_sides() -> None:
    """Report O46: local regions of 4096, remote ones of 6000; 3000 to 5000, 4000 bytes."""
    plan = Plan(np.array([3000]), np.array([5000]), np.array([4000]))
    parts = plan.cut(borders=Borders(local=4096, remote=6000))
    assert list(zip(*parts.lists(), strict=True)) == [
        (3000, 5000, 1000),
        (4000, 6000, 96),
        (4096, 6096, 2904),
    ]
    listed = plan.cut(borders=Borders(local=[0, 4096, 8192], remote=[0, 6000]))
    assert listed == parts
    each = plan.split(max_pieces=1, borders=Borders(local=4096, remote=6000))
    assert [len(part) for part in each] == [1, 1, 1], "a caller can post, and fail, one by one"


# O47 to O49 ---------------------------------------------------------------------------------


def flat(blocks: int = 128, tokens: int = 32) -> KVLayout:
    """One byte per token: offsets are then blocks times tokens."""
    return mla(tokens, 1, blocks)


def paired(plan: Plan, tokens: int = 32) -> list[tuple[int, int]]:
    return [(a // tokens, b // tokens) for a, b in zip(*plan.lists()[:2], strict=True)]


def test_o47_a_prefix_hit_pairs_with_the_tail() -> None:
    """Report O47: L [40,41] against R [7,8,9,10] pairs (40,9), (41,10)."""
    plan = plan_blocks(
        flat(), Blocks.unplaced([40, 41]), flat(), Blocks.unplaced([7, 8, 9, 10]), align="tail"
    )
    assert paired(plan) == [(40, 9), (41, 10)]


def test_o47_an_empty_local_list_moves_nothing() -> None:
    """Report O47: L [] against R [7,8] plans no pieces: only a release is due."""
    plan = plan_blocks(flat(), Blocks.unplaced([]), flat(), Blocks.unplaced([7, 8]), align="tail")
    assert (len(plan), plan.nbytes, len(plan.uncovered)) == (0, 0, 0)


def test_o47_a_longer_local_list_needs_an_allowance() -> None:
    """Report O47: L [1,2,3] against R [7,8] is an error, or with one uncovered id (1,7), (2,8)."""
    lists = (flat(), Blocks.unplaced([1, 2, 3]), flat(), Blocks.unplaced([7, 8]))
    with pytest.raises(InvalidInputError, match="uncovered_local=0"):
        plan_blocks(*lists, align="tail")
    plan = plan_blocks(*lists, align="tail", uncovered_local=1)
    assert paired(plan) == [(1, 7), (2, 8)]
    assert plan.uncovered.whole_ids.tolist() == [3]


def test_o48_pairing_follows_positions_not_counts() -> None:
    """Report O48: remote 0..7, local 6, 7, 8: (60,106), (61,107), and 62 is not transferred."""
    local, remote = Blocks.at(6, [60, 61, 62]), Blocks.at(0, range(100, 108))
    plan = plan_blocks(flat(), local, flat(), remote, uncovered_local=1)
    assert paired(plan) == [(60, 106), (61, 107)]
    assert plan.uncovered.whole_ids.tolist() == [62]
    by_count = plan_blocks(
        flat(),
        Blocks.unplaced([60, 61, 62]),
        flat(),
        Blocks.unplaced(range(105, 108)),
        align="tail",
    )
    assert paired(by_count) == [(60, 105), (61, 106), (62, 107)], "what must not happen above"


def test_o48_the_report_of_2049_tokens() -> None:
    """Report O48: 2048 + 1 tokens of blocks of 64, decode caches 31: positions keep them apart."""
    remote = Blocks.at(0, range(32))
    local = Blocks.at(31, [90, 91])
    plan = plan_blocks(flat(tokens=64), local, flat(tokens=64), remote, uncovered_local=1)
    assert paired(plan, 64) == [(90, 31)]


def test_o49_two_groups_of_which_one_is_empty() -> None:
    """Report O49: [[], [9]] writes group 1 only, and an empty list is no error."""
    lists = [Blocks.at(0, []), Blocks.at(0, [6])]
    plan = plan_layers(hybrid(), lists, lists)
    assert [group.names for group in plan.groups] == [("sliding",)]
    nothing = block_groups([])
    assert len(plan_layers(hybrid(), [*nothing, *nothing], [*nothing, *nothing])) == 0
