"""What an engine's own connector tests pin: offsets, pairing, pages, packed rows, recurrent state.

The numbers are behaviours 30 to 37, 42 to 45, 51, 60, 66, 68, 69, 73 and 75 to 78.
"""

from __future__ import annotations

import itertools

import layout_oracle as oracle
import numpy as np
import pytest

from kvxfer.core.layout import (
    Blocks,
    GroupKind,
    GroupSpec,
    HeadSlice,
    KVLayout,
    KVSpec,
    LayerPair,
    LayerRef,
    Layers,
    LayoutKind,
    Sharding,
    Side,
    StateLayout,
    StatePart,
    TokenOrder,
    block_groups,
    match_layers,
    plan_blocks,
    plan_layers,
    prompt_is_computed,
    uncovered_ranges,
    zero_ranges,
)
from kvxfer.core.topology import Ranks, head_slice, layers_between, sources
from kvxfer.errors import GeometryError, InvalidInputError

LOCAL, REMOTE = Blocks.at(0, [1, 3]), Blocks.at(0, [4, 5])


def cache(shape: tuple[int, ...], spec: KVSpec) -> KVLayout:
    strides, step = [], 2
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return KVLayout.from_strides(shape, strides, spec, itemsize=2, dtype="bfloat16")


def spec(tokens: int = 4, **more: object) -> KVSpec:
    return KVSpec(tokens_per_block=tokens, **{"heads": 2, "head_size": 3, **more})


def moved(local: KVLayout, remote: KVLayout) -> tuple[list[int], list[int], list[int]]:
    return plan_blocks(local, LOCAL, remote, REMOTE).lists()


PLANES = ([48, 144, 432, 528], [192, 240, 960, 1008], [48] * 4)
IN_BLOCK = ([96, 288], [384, 480], [96] * 2)


@pytest.mark.parametrize(
    ("shape", "remote", "given", "expected"),
    [
        pytest.param((2, 8, 4, 2, 3), (2, 16, 4, 2, 3), {}, PLANES, id="30"),
        pytest.param((8, 2, 4, 2, 3), (16, 2, 4, 2, 3), {}, IN_BLOCK, id="31"),
        pytest.param((2, 8, 2, 4, 3), (2, 16, 2, 4, 3), {}, PLANES, id="32-planes"),
        pytest.param((8, 2, 2, 4, 3), (16, 2, 2, 4, 3), {}, IN_BLOCK, id="32-in-block"),
        pytest.param(
            (2, 16, 2, 2, 3),
            (2, 32, 2, 2, 3),
            {"order": TokenOrder.TOKEN_MAJOR},
            PLANES,
            id="33-planes",
        ),
        pytest.param(
            (16, 2, 2, 2, 3),
            (32, 2, 2, 2, 3),
            {"order": TokenOrder.HEAD_MAJOR},
            None,
            id="33-in-block-head-major",
        ),
    ],
)
def test_offsets_of_four_token_blocks(shape, remote, given, expected) -> None:
    """Behaviours 30 to 33: planes and in-block, heads and tokens swapped, kernel blocks."""
    if expected is None:
        # Two kernel blocks in one manager block, each with its own K and V: one piece all the same.
        expected = IN_BLOCK
    assert moved(cache(shape, spec(**given)), cache(remote, spec(**given))) == expected


def test_33_kernel_blocks_with_planes_inside() -> None:
    """Behaviour 33: (16, 2, 2, 2, 3) with blocks of 4 tokens is one piece per manager block."""
    for order in TokenOrder:
        layout = cache((16, 2, 2, 2, 3), spec(order=order))
        assert (layout.num_blocks, layout.kernel_blocks, layout.kernel_tokens) == (8, 2, 2)
        assert moved(layout, cache((32, 2, 2, 2, 3), spec(order=order))) == IN_BLOCK


def test_34_token_axis_from_the_spec() -> None:
    """Behaviour 34: block 16, 8 heads, kernel 2: the token axis is where the spec puts it."""
    given = {"tokens": 16, "heads": 8}
    assert moved(
        cache((2, 32, 8, 2, 3), spec(**given)), cache((2, 64, 8, 2, 3), spec(**given))
    ) == ([768, 2304, 3840, 5376], [3072, 3840, 9216, 9984], [768] * 4)
    assert moved(
        cache((32, 2, 8, 2, 3), spec(**given)), cache((64, 2, 8, 2, 3), spec(**given))
    ) == ([1536, 4608], [6144, 7680], [1536] * 2)


def test_35_key_only() -> None:
    """Behaviour 35: (8, 1, 4, 3) is one slab of 24 bytes per block."""
    key_only = spec(heads=1, planes=1, kind=LayoutKind.KEY_ONLY)
    assert moved(cache((8, 1, 4, 3), key_only), cache((16, 1, 4, 3), key_only)) == (
        [24, 72],
        [96, 120],
        [24] * 2,
    )


def test_36_ambiguous_and_unsupported_shapes() -> None:
    """Behaviour 36: kernel blocks without heads in the spec are ambiguous; some shapes fit none."""
    for shape in ((2, 16, 2, 2, 3), (16, 2, 2, 2, 3)):
        with pytest.raises(GeometryError, match="ambiguous"):
            cache(shape, KVSpec(tokens_per_block=4))
    with pytest.raises(GeometryError, match="unsupported shape"):
        cache((8, 3, 5, 7), spec())
    with pytest.raises(GeometryError, match="ambiguous without a spec"):
        KVLayout.from_strides((8, 4), (8, 2), itemsize=2, dtype="bfloat16")


def test_37_three_layouts_give_three_plans() -> None:
    """Behaviour 37: dense layers share a plan, the other layouts have their own."""
    key_only = spec(heads=1, planes=1)
    shapes = {
        "dense0": ((2, 8, 4, 2, 3), spec()),
        "dense1": ((2, 8, 4, 2, 3), spec()),
        "interleaved": ((8, 2, 4, 2, 3), spec()),
        "indexer": ((8, 4, 3), key_only),
    }
    refs = [
        LayerRef(name=name, group=0, region=i, layout=cache(*of))
        for i, (name, of) in enumerate(shapes.items())
    ]
    plan = plan_layers(match_layers(refs, refs), [LOCAL], [REMOTE])
    assert [group.names for group in plan.groups] == [
        ("dense0", "dense1"),
        ("interleaved",),
        ("indexer",),
    ]
    assert len({group.plan for group in plan.groups}) == 3


def one_byte(tokens: int = 4, blocks: int = 8) -> KVLayout:
    return KVLayout(
        num_blocks=blocks,
        block_stride=tokens,
        kernel_tokens=tokens,
        token_stride=1,
        head_nbytes=1,
        dtype="uint8",
    )


def test_42_pairing_from_the_head() -> None:
    """Behaviour 42: 4 against 2 is an error, 1 against 2 one piece, none an empty plan."""
    head = {"align": "head"}
    with pytest.raises(InvalidInputError, match="2 local blocks lie beyond"):
        plan_blocks(
            one_byte(), Blocks.unplaced([0, 1, 2, 3]), one_byte(), Blocks.unplaced([4, 5]), **head
        )
    plan = plan_blocks(
        one_byte(), Blocks.unplaced([1]), one_byte(), Blocks.unplaced([4, 5]), **head
    )
    assert plan.lists() == ([4], [16], [4])
    plan = plan_blocks(one_byte(), Blocks.unplaced([]), one_byte(), Blocks.unplaced([4, 5]), **head)
    assert plan.lists() == ([], [], [])


def test_42_ids_out_of_range() -> None:
    """Behaviour 42: local id -1 and remote id 8 of 8 are errors that name side, id and range."""
    with pytest.raises(InvalidInputError, match=r"local block id -1 lies outside 0\.\.7"):
        plan_blocks(one_byte(), Blocks.at(0, [-1]), one_byte(), Blocks.at(0, [1]))
    with pytest.raises(InvalidInputError, match=r"remote block id 8 lies outside 0\.\.7"):
        plan_blocks(one_byte(), Blocks.at(0, [1]), one_byte(), Blocks.at(0, [8]))


def test_43_bands_of_each_layout() -> None:
    """Behaviour 43: two bands of 384, one of 768, one of 192; a layer's own number of blocks."""
    assert cache((2, 8, 4, 2, 3), spec()).bands() == ((0, 384), (384, 384))
    assert cache((8, 2, 4, 2, 3), spec()).bands() == ((0, 768),)
    assert cache((8, 4, 3), spec(heads=1, planes=1)).bands() == ((0, 192),)
    assert cache((4, 2, 4, 2, 3), spec()).bands() == ((0, 4 * 96),)


# 44, 45: recurrent state --------------------------------------------------------------------


def tensors(slots: int = 6) -> dict[str, np.ndarray]:
    conv = np.lib.stride_tricks.as_strided(
        np.zeros(slots * 200, np.float16), (slots, 12, 2), (400, 4, 2)
    )
    ssm = np.lib.stride_tricks.as_strided(
        np.zeros(slots * 64, np.float16), (slots, 8, 4), (128, 8, 2)
    )
    return {"conv": conv, "ssm": ssm}


SHARDED = {"conv": Sharding.SHARDED, "ssm": Sharding.SHARDED}


def test_44_state_slots() -> None:
    """Behaviour 44: slot strides of 200 and 64 elements; ssm slots hold 64 bytes."""
    state = StateLayout.from_tensors(tensors(), sharding=SHARDED)
    conv, ssm = state.parts
    assert (conv.slot_stride, ssm.slot_stride, ssm.slot_nbytes) == (400, 128, 64)
    assert 6 * conv.slot_stride == 2400
    assert 6 * ssm.slot_stride == 768


def test_44_bad_states() -> None:
    """Behaviour 44: slot counts that differ, no caches, slots out of range, unequal lists."""
    with pytest.raises(GeometryError, match="different numbers of slots"):
        StateLayout.from_tensors(
            {"conv": tensors(6)["conv"], "ssm": tensors(5)["ssm"]}, sharding=SHARDED
        )
    with pytest.raises(GeometryError, match="at least one tensor"):
        StateLayout.from_tensors({}, sharding={})
    with pytest.raises(GeometryError, match="holds no slots"):
        StateLayout.from_tensors({"conv": np.zeros((0, 4), np.float16)}, sharding=SHARDED)
    layers = Layers([LayerPair(name="ssm", pair=0, local=whole_state(), remote=whole_state())])
    for ours, theirs, text in (
        ([6], [0], r"local block id 6 lies outside 0\.\.5"),
        ([0], [-1], r"remote block id -1 lies outside 0\.\.5"),
        ([0], [1, 2], "exactly one slot"),
        ([1], [], "exactly one slot"),
        ([0, 1], [1, 2], "exactly one slot"),
    ):
        with pytest.raises(InvalidInputError, match=text):
            plan_layers(layers, [Blocks.at(0, ours)], [Blocks.at(0, theirs)])


def whole_state(slots: int = 6) -> StateLayout:
    return StateLayout(
        num_slots=slots,
        parts=[StatePart(name="all", slot_stride=100, unit_nbytes=100, dtype="uint8")],
    )


def test_44_unequal_tp_of_states_is_mapped() -> None:
    """Behaviour 44, last clause: states of unequal TP are cut by unit instead of refused."""

    def of(units: int) -> StateLayout:
        return StateLayout(
            num_slots=4,
            parts=[
                StatePart(
                    name="ssm",
                    slot_stride=units * 16,
                    units=units,
                    unit_stride=16,
                    unit_nbytes=16,
                    dtype="float32",
                    sharding=Sharding.SHARDED,
                )
            ],
        )

    found = layers_between(
        [LayerRef(name="m", group=0, region=0, layout=of(8))],
        [LayerRef(name="m", group=0, region=0, layout=of(4))],
        Ranks(tp_size=1, total_kv_heads=8),
        Ranks(tp_size=2, tp_rank=1, total_kv_heads=8),
    )
    plan = plan_layers(found, [Blocks.at(0, [2])], [Blocks.at(0, [3])])
    assert plan.lists() == ([0], [2 * 128 + 64], [3 * 64], [64])


PARTS = [
    StatePart(name="conv", offset=0, slot_stride=0, unit_nbytes=24, dtype="uint8"),
    StatePart(name="ssm", offset=24, slot_stride=0, unit_nbytes=32, dtype="uint8"),
]


def test_45_padded_byte_pages() -> None:
    """Behaviour 45: pages of 128 bytes with 24 of conv and 32 of ssm, which starts at 24."""
    state = StateLayout.from_pages(np.zeros((5, 128), np.uint8), PARTS)
    assert [(p.offset, p.slot_stride, p.slot_nbytes) for p in state.parts] == [
        (0, 128, 24),
        (24, 128, 32),
    ]
    layers = Layers([LayerPair(name="m", pair=0, local=state, remote=state)])
    plan = plan_layers(layers, [Blocks.at(0, [3])], [Blocks.at(0, [1])])
    assert list(zip(*plan.lists()[1:], strict=True)) == [(384, 128, 24), (408, 152, 32)]
    assert len(plan.merged()) == 1, "conv and ssm touch: one piece of 56 bytes"


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        (np.zeros((5, 256), np.uint8)[:, :128], "contiguous"),
        (np.zeros((5, 64), np.uint16), "must be bytes"),
        (np.zeros((5, 40), np.uint8), "page of 40"),
        (np.zeros((5, 4, 32), np.uint8), "must be bytes of shape"),
    ],
)
def test_45_other_pages_are_refused(pages: np.ndarray, text: str) -> None:
    """Behaviour 45: pages with gaps, of two-byte elements, or too small are errors."""
    with pytest.raises(GeometryError, match=text):
        StateLayout.from_pages(pages, PARTS)


# 51: every mix of layouts over TP -----------------------------------------------------------

ORDERS = {
    "planes": ("head", "token", "block", "plane"),
    "in block": ("head", "token", "plane", "block"),
    "head major": ("token", "head", "plane", "block"),
}


def memory(order: str, heads: int, blocks: int = 3, tokens: int = 4, nbytes: int = 8):
    counts = {"block": blocks, "plane": 2, "token": tokens, "head": heads}
    strides, extent = {"kernel": 0}, nbytes
    for axis in ORDERS[order]:
        strides[axis] = extent
        extent *= counts[axis]
    names = ("block", "plane", "kernel", "token", "head")
    return oracle.Memory(
        blocks, 2, 1, tokens, heads, nbytes, tuple(strides[n] for n in names), 0, 0
    )


def layout_of(mem: oracle.Memory) -> KVLayout:
    block, plane, _, token, head = mem.strides
    return KVLayout(
        num_blocks=mem.blocks,
        block_stride=block,
        planes=mem.planes,
        plane_stride=plane,
        kernel_tokens=mem.tokens,
        token_stride=token,
        heads=mem.heads,
        head_stride=head,
        head_nbytes=mem.nbytes,
        dtype="float16",
    )


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("mix", list(itertools.product(ORDERS, ORDERS)), ids=" to ".join)
def test_51_every_mix_of_layouts_is_byte_exact(mix, p_tp: int, d_tp: int) -> None:
    """Behaviour 51: 4 heads, ids 0, 2 to 2, 1, pushed between three layouts; the block that no id
    names stays zero."""
    everything = np.random.default_rng(7).integers(1, 256, (2, 8, 4, 8), np.uint8)
    for d_rank in range(d_tp):
        consumer = Ranks(tp_size=d_tp, tp_rank=d_rank, total_kv_heads=4)
        theirs = memory(mix[1], 4 // d_tp)
        dst = np.zeros(theirs.total, np.uint8)
        for link in sources(consumer, Ranks(tp_size=p_tp, total_kv_heads=4)):
            ours = memory(mix[0], 4 // p_tp)
            src = np.zeros(ours.total, np.uint8)
            first = link.rank * 4 // p_tp
            for position, block in enumerate((0, 2)):
                part = everything[:, position * 4 : position * 4 + 4, first : first + 4 // p_tp]
                ours.view(src)[block, :, 0] = part
            plan = plan_blocks(
                layout_of(ours),
                Blocks.at(0, [0, 2]),
                layout_of(theirs),
                Blocks.at(0, [2, 1]),
                heads=link.heads.swapped(),
                destination=Side.REMOTE,
            )
            dst, _ = oracle.execute(*plan.lists(), dst, src, dst_is_local=False)
        view, first = theirs.view(dst), d_rank * 4 // d_tp
        for position, block in enumerate((2, 1)):
            np.testing.assert_array_equal(
                view[block, :, 0],
                everything[:, position * 4 : position * 4 + 4, first : first + 4 // d_tp],
            )
        assert not view[0].any()


def test_51_token_major_slices_are_one_run_per_token() -> None:
    """Behaviour 51: 2 of 4 heads, 4 tokens of 8 bytes per head: four runs of 16."""
    ours, theirs = layout_of(memory("planes", 4)), layout_of(memory("planes", 2))
    plan = plan_blocks(ours, Blocks.at(0, [0]), theirs, Blocks.at(0, [0]), heads=HeadSlice(2, 0, 2))
    first_plane = [n for n in plan.lists()[0] if n < ours.plane_stride]
    assert first_plane == [16, 48, 80, 112]
    assert set(plan.lists()[2]) == {16}


# 60, 66, 68, 69: lists ----------------------------------------------------------------------


def test_60_flat_and_grouped_lists() -> None:
    """Behaviour 60: [7,8] is one group, [[7],[9]] two, [[],[9]] two with an empty one."""

    def ids(message):
        return [blocks.ids.tolist() for blocks in block_groups(message)]

    assert ids([7, 8]) == [[7, 8]]
    assert ids([[7], [9]]) == [[7], [9]]
    assert ids([[], [9]]) == [[], [9]]
    with pytest.raises(InvalidInputError, match="mixed"):
        block_groups([[7], 9])


@pytest.mark.parametrize("slots", [[], [1, 2]])
def test_60_state_takes_exactly_one_slot(slots: list[int]) -> None:
    """Behaviour 60: 0 or 2 slots of recurrent state are an error; placeholders do not count."""
    layers = Layers(
        [
            LayerPair(name="full", pair=0, local=one_byte(), remote=one_byte(), group=0),
            LayerPair(name="ssm", pair=0, local=whole_state(), remote=whole_state(), group=1),
        ]
    )
    full = Blocks.at(0, [1])
    with pytest.raises(InvalidInputError, match="exactly one slot"):
        plan_layers(layers, [full, Blocks.at(0, slots)], [full, Blocks.at(0, slots)])
    padded = Blocks.at(0, [0, 0, 3], placeholder=0)
    plan = plan_layers(layers, [full, padded], [full, Blocks.at(0, [5])])
    assert plan.groups[1].plan.lists() == ([300], [500], [100])


def test_66_tail_pairing_with_an_allowance() -> None:
    """Behaviour 66: a decode tail of up to the allowance is let through, a longer one is not."""

    def pairs(local, remote, allowed):
        plan = plan_blocks(
            one_byte(1, 200),
            Blocks.unplaced(local),
            one_byte(1, 200),
            Blocks.unplaced(remote),
            align="tail",
            uncovered_local=allowed,
        )
        return list(zip(*plan.lists()[:2], strict=True))

    assert pairs([100, 101, 102], [10, 11], 1) == [(100, 10), (101, 11)]
    assert pairs([102], [10, 11, 12], 1) == [(102, 12)]
    assert pairs([100, 101, 102], [10], 2) == [(100, 10)]
    with pytest.raises(InvalidInputError, match="uncovered_local=1"):
        pairs([100, 101, 102], [10], 1)


def test_66_no_external_tokens_keep_the_state() -> None:
    """Behaviour 66: with nothing to load, the attention part is empty and the state part stays."""
    layers = Layers(
        [
            LayerPair(name="full", pair=0, local=one_byte(), remote=one_byte(), group=0),
            LayerPair(name="ssm", pair=0, local=whole_state(), remote=whole_state(), group=1),
        ]
    )
    plan = plan_layers(
        layers, [Blocks.at(2, []), Blocks.at(0, [1])], [Blocks.at(0, [4, 5]), Blocks.at(0, [2])]
    )
    assert [group.names for group in plan.groups] == [("ssm.all",)]


@pytest.mark.parametrize(
    ("tokens_per_block", "prompt", "blocks"), [(4, 8, 2), (4, 9, 3), (16, 32, 2), (16, 40, 3)]
)
def test_68_only_the_prompts_blocks_move(tokens_per_block, prompt, blocks) -> None:
    """Behaviour 68: blocks allocated ahead of the prompt stay where they are."""
    group = GroupSpec(kind="full", tokens_per_block=tokens_per_block)
    assert len(group.needed(Blocks.at(0, range(9)), prompt)) == blocks
    assert len(group.needed(Blocks.at(1, range(9)), prompt)) == blocks - 1


def test_68_groups_of_unequal_block_sizes_and_windows() -> None:
    """Behaviour 68: 40 tokens are 3 and 2 blocks of 16 and 32; a sliding group is not clamped."""
    held = Blocks.at(0, range(6))
    sizes = [GroupSpec(kind="full", tokens_per_block=n).needed(held, 40) for n in (16, 32)]
    assert [len(blocks) for blocks in sizes] == [3, 2]
    sliding = GroupSpec(kind="swa", tokens_per_block=16, window_tokens=32)
    assert sliding.needed(held[3:], 40) == held[3:]


def test_68_chunked_prefill_waits_for_tokens_not_blocks() -> None:
    """Behaviour 68: 8 of 10 tokens computed with 11 blocks held is not yet complete."""
    assert not prompt_is_computed(8, 10)
    assert prompt_is_computed(10, 10)


def test_69_a_sliding_window_needs_its_last_blocks() -> None:
    """Behaviour 69: window 32, block 16: budget 3; [20..24] keeps [22, 23, 24], positions and
    all."""
    group = GroupSpec(kind=GroupKind.SLIDING_WINDOW, tokens_per_block=16, window_tokens=32)
    assert group.window_blocks == 3
    kept = group.needed(Blocks.at(0, [20, 21, 22, 23, 24]), 80)
    assert kept == Blocks.at(2, [22, 23, 24])


@pytest.mark.parametrize("kind", ["chunked_local", "cross", "encoder_only", ""])
def test_69_other_hybrid_kinds_are_refused(kind: str) -> None:
    """Behaviour 69: a kind of group that is not known is refused at registration."""
    with pytest.raises(InvalidInputError, match="cannot be moved"):
        GroupSpec(kind=kind)


@pytest.mark.parametrize("destination", Side)
def test_69_windows_move_in_both_directions(destination: Side) -> None:
    """Behaviour 69: positions make a windowed group plain; READ and WRITE both map it."""
    window = Blocks.at(0, [0, 0, 22, 23, 24], placeholder=0)
    other = Blocks.at(2, [5, 6, 7])
    plan = plan_blocks(one_byte(1, 30), window, one_byte(1, 30), other, destination=destination)
    assert plan.lists()[:2] == ([22, 23, 24], [5, 6, 7])


# 73 to 77: pages and rows -------------------------------------------------------------------


@pytest.mark.parametrize("p_tp", [2, 4])
def test_73_one_run_split_over_source_ranks(p_tp: int) -> None:
    """Behaviour 73: 8 blocks of 1024 bytes are read in parts of 512 or 256 at the same step."""
    consumer = Ranks(tp_size=1, total_kv_heads=4)

    def head_major(heads: int) -> KVLayout:
        return KVLayout(
            num_blocks=8,
            block_stride=heads * 256,
            kernel_tokens=16,
            token_stride=16,
            heads=heads,
            head_stride=256,
            head_nbytes=16,
            dtype="bfloat16",
        )

    for link in sources(consumer, Ranks(tp_size=p_tp, total_kv_heads=4)):
        plan = plan_blocks(
            head_major(4),
            Blocks.at(0, range(8)),
            head_major(4 // p_tp),
            Blocks.at(0, range(8)),
            heads=link.heads,
        )
        part = 1024 // p_tp
        assert plan.lists()[0] == [1024 * b + part * link.rank for b in range(8)]
        assert plan.lists()[2] == [part] * 8


def test_73_attention_whole_and_state_split() -> None:
    """Behaviour 73: replicated attention of 200 bytes comes whole from one source, the state of
    400 in halves at +0 and +200 from two."""
    attention = {
        side: KVLayout(
            num_blocks=2,
            block_stride=1000,
            kernel_tokens=1,
            head_nbytes=200,
            dtype="uint8",
            kind=LayoutKind.LATENT,
        )
        for side in ("d", "p")
    }

    def state(units: int) -> StateLayout:
        return StateLayout(
            num_slots=2,
            parts=[
                StatePart(
                    name="s",
                    slot_stride=1000,
                    units=units,
                    unit_stride=100,
                    unit_nbytes=100,
                    dtype="uint8",
                    sharding=Sharding.SHARDED,
                )
            ],
        )

    consumer, producer = Ranks(tp_size=1, latent=True), Ranks(tp_size=2, latent=True)
    found = []
    for link in sources(consumer, producer, state=True):
        layers = layers_between(
            [
                LayerRef(name="a", group=0, region=0, layout=attention["d"]),
                LayerRef(name="s", group=1, region=1, layout=state(4)),
            ],
            [
                LayerRef(name="a", group=0, region=0, layout=attention["p"]),
                LayerRef(name="s", group=1, region=1, layout=state(2)),
            ],
            consumer,
            producer.at(link.rank),
        )
        plan = plan_layers(
            layers,
            [Blocks.at(0, [0]), Blocks.at(0, [0])],
            [Blocks.at(0, [0]), Blocks.at(0, [0])],
        )
        found.append(list(zip(*plan.lists(), strict=True)))
    assert found == [[(0, 0, 0, 200), (1, 0, 0, 200)], [(0, 200, 0, 200)]]


def test_73_head_slices_with_unequal_blocks_are_mapped() -> None:
    """Behaviour 73, last clause: a head slice and a block ratio at once are planned."""
    ours, theirs = memory("head major", 2, tokens=8), memory("planes", 4, blocks=6, tokens=4)
    src = np.random.default_rng(1).integers(0, 256, theirs.total, np.uint8)
    dst = np.zeros(ours.total, np.uint8)
    plan = plan_blocks(
        layout_of(ours),
        Blocks.at(0, [1]),
        layout_of(theirs),
        Blocks.at(0, [5, 2]),
        heads=HeadSlice(0, 2, 2),
    )
    expected, _ = oracle.naive_copy(
        ours,
        dst,
        theirs,
        src,
        dst_tokens=oracle.place([0], [1], 8),
        src_tokens=oracle.place([0, 1], [5, 2], 4),
        heads=[(0, 2), (1, 3)],
    )
    np.testing.assert_array_equal(oracle.execute(*plan.lists(), dst, src)[0], expected)


def row(offset: int, nbytes: int, step: int, blocks: int = 4, tokens: int = 16) -> KVLayout:
    return KVLayout(
        num_blocks=blocks,
        block_stride=step,
        kernel_tokens=tokens,
        token_stride=nbytes // tokens,
        head_nbytes=nbytes // tokens,
        dtype="uint8",
        kind=LayoutKind.LATENT,
        offset=offset,
    )


def refs(layers: dict[str, KVLayout]) -> list[LayerRef]:
    return [LayerRef(name=n, group=0, region=0, layout=at) for n, at in layers.items()]


@pytest.mark.parametrize("layers", [1, 2])
def test_75_whole_rows_of_packed_layers(layers: int) -> None:
    """Behaviour 75: 1 or 2 layers of 128 bytes per block merge into 4 whole-row pieces."""
    step = 128 * layers
    ours = refs({f"l{i}": row(128 * i, 128, step) for i in range(layers)})
    ids = [Blocks.at(0, [3, 1, 2, 0])]
    plan = plan_layers(match_layers(ours, ours), ids, ids).merged().cut(max_piece_nbytes=step)
    assert len(plan) == 4
    assert sorted(plan.lists()[1]) == [0, step, 2 * step, 3 * step]
    other = [Blocks.at(0, [0, 2, 1, 3])]
    crossed = plan_layers(match_layers(ours, ours), ids, other).merged()
    assert crossed.lists()[3] == [step] * 4, "rows that do not follow each other stay apart"


def test_75_one_layer_out_of_the_peers_rows() -> None:
    """Behaviour 75: one layer at +64 in 192-byte rows: base + 64, 128 bytes, step 192."""
    layers = match_layers(refs({"b": row(0, 128, 128)}), refs({"b": row(64, 128, 192)}))
    ids = [Blocks.at(0, [0, 1, 2, 3])]
    _, local, remote, size = plan_layers(layers, ids, ids).lists()
    assert remote == [64, 256, 448, 640]
    assert local == [0, 128, 256, 384]
    assert size == [128] * 4


def test_75_rows_packed_in_another_order_are_matched_by_name() -> None:
    """Behaviour 75: the order of layers inside a row is the peer's own business."""
    ours = refs({"a": row(0, 128, 192), "b": row(128, 64, 192)})
    theirs = refs({"b": row(0, 64, 192), "a": row(64, 128, 192)})
    ids = [Blocks.at(0, [1])]
    plan = plan_layers(match_layers(ours, theirs), ids, ids)
    assert list(zip(*plan.lists()[1:], strict=True)) == [(192, 256, 128), (320, 192, 64)]


@pytest.mark.parametrize("p_blocks", [4, 6])
@pytest.mark.parametrize("d_blocks", [4, 6])
def test_76_pipeline_stages_pair_rows_by_layer_name(p_blocks: int, d_blocks: int) -> None:
    """Behaviour 76: rows of 192 here and 256 there; each side has its own step and capacity."""
    ours = refs({"l0": row(0, 128, 192, d_blocks), "l1": row(128, 64, 192, d_blocks)})
    theirs = refs(
        {
            "l2": row(0, 64, 256, p_blocks),
            "l0": row(64, 128, 256, p_blocks),
            "l1": row(192, 64, 256, p_blocks),
        }
    )
    layers = match_layers(ours, theirs, only_common=True)
    assert [layer.name for layer in layers] == ["l0", "l1"]
    last = [Blocks.at(0, [d_blocks - 1])], [Blocks.at(0, [p_blocks - 1])]
    plan = plan_layers(layers, *last)
    d, p = (d_blocks - 1) * 192, (p_blocks - 1) * 256
    assert list(zip(*plan.lists()[1:], strict=True)) == [(d, p + 64, 128), (d + 128, p + 192, 64)]
    assert len(plan.merged()) == 1
    with pytest.raises(InvalidInputError, match=f"outside 0..{p_blocks - 1}"):
        plan_layers(layers, last[0], [Blocks.at(0, [p_blocks])])
    with pytest.raises(InvalidInputError, match="l2"):
        match_layers(ours, theirs)


@pytest.mark.parametrize("tokens", [8, 32])
def test_76_other_block_sizes_are_mapped(tokens: int) -> None:
    """Behaviour 76: a peer block size of 8 or 32 against 16 maps by tokens instead of failing."""
    ours = row(0, 128, 192)
    theirs = row(64, 8 * tokens, 16 * tokens, blocks=9, tokens=tokens)
    ids = [2, 5, 0, 1, 8, 7, 3, 4][: 64 // tokens]
    plan = plan_blocks(ours, Blocks.at(0, range(4)), theirs, Blocks.at(0, ids))
    assert plan.nbytes == 4 * 128
    unit = min(tokens, 16)
    assert plan.cut(max_piece_nbytes=8 * unit).lists() == (
        [192 * (t // 16) + 8 * (t % 16) for t in range(0, 64, unit)],
        [64 + 16 * tokens * ids[t // tokens] + 8 * (t % tokens) for t in range(0, 64, unit)],
        [8 * unit] * (64 // unit),
    )


def test_77_each_layer_has_its_own_capacity() -> None:
    """Behaviour 77: layers of 2 and 3 blocks; spare bytes at the end of a row move nothing."""
    small, large = row(0, 16, 16, 2), row(0, 16, 24, 3)
    plan = plan_blocks(small, Blocks.at(0, [0, 1]), small, Blocks.at(0, [0, 1]))
    assert plan.lists()[0] == [0, 16]
    plan = plan_blocks(large, Blocks.at(0, [0, 1, 2]), large, Blocks.at(0, [0, 1, 2]))
    assert plan.lists() == ([0, 24, 48], [0, 24, 48], [16, 16, 16])
    with pytest.raises(InvalidInputError, match=r"id 2 lies outside 0\.\.1"):
        plan_blocks(small, Blocks.at(0, [2]), small, Blocks.at(0, [0]))


# 78: unequal blocks with kernel blocks inside -----------------------------------------------

PER_TOKEN = 12


def paged(tokens: int, kernel: int, blocks: int, padding: int) -> tuple[KVLayout, oracle.Memory]:
    kernels = tokens // kernel
    kernel_step = kernel * PER_TOKEN + padding
    step = kernels * kernel_step + 2 * padding
    strides = (step, 0, kernel_step, PER_TOKEN, 0)
    mem = oracle.Memory(blocks, 1, kernels, kernel, 1, PER_TOKEN, strides, 0, 0)
    return (
        KVLayout(
            num_blocks=blocks,
            block_stride=step,
            kernel_blocks=kernels,
            kernel_stride=kernel_step,
            kernel_tokens=kernel,
            token_stride=PER_TOKEN,
            head_nbytes=PER_TOKEN,
            dtype="float16",
            kind=LayoutKind.LATENT,
        ),
        mem,
    )


SMALL = range(2, 50)
LARGE = (2, 63, 64, 65, 767, 768, 769, 2305, 5759, 5760, 5761, 6529)


@pytest.mark.parametrize("padding", [0, 4], ids=["tight", "padded"])
@pytest.mark.parametrize(
    ("sizes", "prompts"),
    [
        ((12, 4, 8, 4), SMALL),
        ((36, 4, 8, 4), SMALL),
        ((24, 4, 4, 4), SMALL),
        ((16, 4, 24, 4), SMALL),
        ((36, 4, 20, 4), SMALL),
        ((24, 8, 8, 4), SMALL),
        ((5760, 64, 768, 64), LARGE),
        ((257, 257, 256, 256), (2, 256, 257, 300, 600)),
    ],
    ids=str,
)
def test_78_unequal_blocks_for_many_prompt_lengths(sizes, prompts, padding: int) -> None:
    """Behaviour 78: writes stay inside the request's own blocks, are token-aligned and complete;
    what is left over is reported and can be zeroed. Ratios that do not divide are mapped too."""
    d_tokens, d_kernel, p_tokens, p_kernel = sizes
    for prompt in prompts:
        n_local, n_remote = -(-prompt // d_tokens), -(-(prompt - 1) // p_tokens)
        local, mem = paged(d_tokens, d_kernel, 2 * n_local + 2, padding)
        remote, other = paged(p_tokens, p_kernel, 2 * n_remote + 3, padding)
        ids, peer_ids = [2 * i + 1 for i in range(n_local)], [2 * i + 2 for i in range(n_remote)]
        # The last block may lie beyond what prefill computed as a whole.
        plan = plan_blocks(
            local, Blocks.at(0, ids), remote, Blocks.at(0, peer_ids), uncovered_local=1
        )
        dst = np.full(mem.total, 0xAA, np.uint8)
        src = np.random.default_rng(prompt).integers(0, 255, other.total, np.uint8)
        tokens = min(n_local * d_tokens, n_remote * p_tokens)
        assert plan.nbytes == tokens * PER_TOKEN
        assert tokens >= prompt - 1
        assert plan.uncovered.tokens == n_local * d_tokens - tokens
        out, written = oracle.execute(*plan.lists(), dst, src)
        zeroed = zero_ranges(out, *uncovered_ranges(local, plan.uncovered))
        assert zeroed == plan.uncovered.tokens * PER_TOKEN
        view = mem.view(out).reshape(mem.blocks, -1, PER_TOKEN)
        there = other.view(src).reshape(other.blocks, -1, PER_TOKEN)
        wanted = np.zeros((n_local * d_tokens, PER_TOKEN), np.uint8)
        wanted[:tokens] = there[peer_ids].reshape(-1, PER_TOKEN)[:tokens]
        np.testing.assert_array_equal(view[ids].reshape(-1, PER_TOKEN), wanted)
        assert written.max() == 1
        untouched = np.ones(mem.total, bool)
        mem.view(untouched.view(np.uint8))[ids] = 0
        assert (out[untouched] == 0xAA).all()


@pytest.mark.parametrize("prompt", [63, 769, 5761])
def test_78_unequal_blocks_and_unequal_tp(prompt: int) -> None:
    """Behaviour 78: blocks of 5760 against 768 tokens, kernel 64, TP 8 to 1: each of eight ranks
    brings its head, and every byte of the request's blocks is written once or reported."""
    heads, nbytes = 8, 2

    def cache_of(tokens: int, held: int, blocks: int) -> tuple[KVLayout, oracle.Memory]:
        strides = (tokens * held * nbytes, 0, 64 * held * nbytes, held * nbytes, nbytes)
        mem = oracle.Memory(blocks, 1, tokens // 64, 64, held, nbytes, strides, 0, 0)
        made = KVLayout(
            num_blocks=blocks,
            block_stride=strides[0],
            kernel_blocks=tokens // 64,
            kernel_stride=strides[2],
            kernel_tokens=64,
            token_stride=strides[3],
            heads=held,
            head_stride=nbytes,
            head_nbytes=nbytes,
            dtype="float16",
        )
        return made, mem

    n_local, n_remote = -(-prompt // 5760), -(-(prompt - 1) // 768)
    ids, peer_ids = [2 * i + 1 for i in range(n_local)], [i + 2 for i in range(n_remote)]
    local, mine = cache_of(5760, heads, 2 * n_local + 1)
    remote, theirs = cache_of(768, 1, n_remote + 3)
    dst, written = np.full(mine.total, 0xAA, np.uint8), np.zeros(mine.total, np.int64)
    wanted = dst.copy()
    tokens = min(n_local * 5760, n_remote * 768)
    for link in sources(Ranks(tp_size=1, total_kv_heads=8), Ranks(tp_size=8, total_kv_heads=8)):
        src = np.random.default_rng(link.rank).integers(0, 255, theirs.total, np.uint8)
        plan = plan_blocks(
            local,
            Blocks.at(0, ids),
            remote,
            Blocks.at(0, peer_ids),
            heads=link.heads,
            uncovered_local=1,
        )
        assert plan.uncovered.tokens == n_local * 5760 - tokens
        dst, marks = oracle.execute(*plan.lists(), dst, src)
        written += marks
        there = theirs.view(src)[peer_ids].reshape(-1, nbytes)[:tokens]
        view = mine.view(wanted)[ids].reshape(-1, heads, nbytes)
        view[:tokens, link.heads.local] = there
        mine.view(wanted)[ids] = view.reshape(n_local, 1, 90, 64, heads, nbytes)
    np.testing.assert_array_equal(dst, wanted)
    assert written.sum() == tokens * heads * nbytes
    assert written.max() == 1


def test_78_half_the_bytes_per_token_are_refused() -> None:
    """Behaviour 78: a page of half the bytes per token is another cache."""
    with pytest.raises(GeometryError, match="12 and 6"):
        plan_blocks(
            paged(12, 4, 4, 0)[0],
            Blocks.at(0, [0]),
            KVLayout(
                num_blocks=4,
                block_stride=48,
                kernel_tokens=8,
                token_stride=6,
                head_nbytes=6,
                dtype="float16",
                kind=LayoutKind.LATENT,
            ),
            Blocks.at(0, [0]),
        )


def test_63_peer_with_another_head_count() -> None:
    """Behaviour 63: a peer with other heads, and more local than remote blocks, are errors."""
    with pytest.raises(GeometryError, match="the models differ"):
        head_slice(Ranks(tp_size=2, total_kv_heads=8), Ranks(tp_size=2, total_kv_heads=4))
    with pytest.raises(GeometryError, match="2 local and 4 remote heads"):
        plan_blocks(
            layout_of(memory("planes", 2)),
            Blocks.at(0, [0]),
            layout_of(memory("planes", 4)),
            Blocks.at(0, [0]),
        )
