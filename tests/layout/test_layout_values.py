"""The values: blocks, layouts on the wire, plans, caches, fingerprints; and bad input."""

from __future__ import annotations

import copy
import pickle
import time

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.core.layout import (
    Align,
    Blocks,
    Borders,
    DescriptorTable,
    Fingerprint,
    HeadSlice,
    KVLayout,
    LayerPair,
    LayerRef,
    Layers,
    LayersPlan,
    LayoutKind,
    PairedPlan,
    Plan,
    PlanCache,
    Sharding,
    Side,
    StateLayout,
    StatePart,
    TokenShare,
    geometry_digest,
    match_layers,
    plan_blocks,
    plan_layers,
    zero_ranges,
)
from kvxfer.errors import GeometryError, InvalidInputError


def flat(blocks: int = 16, nbytes: int = 8, **more) -> KVLayout:
    return KVLayout(
        num_blocks=blocks,
        block_stride=nbytes,
        kernel_tokens=nbytes,
        token_stride=1,
        head_nbytes=1,
        dtype="uint8",
        **more,
    )


STATE = StateLayout(
    num_slots=4,
    parts=[
        StatePart(
            name="conv",
            slot_stride=64,
            rows=3,
            row_stride=16,
            units=4,
            unit_stride=4,
            unit_nbytes=4,
            dtype="float16",
            sharding=Sharding.SHARDED,
        ),
        StatePart(name="norm", offset=48, slot_stride=64, unit_nbytes=16, dtype="float32"),
    ],
)
KV = KVLayout(
    num_blocks=5,
    block_stride=512,
    planes=2,
    plane_stride=256,
    kernel_blocks=2,
    kernel_stride=128,
    kernel_tokens=4,
    token_stride=32,
    heads=2,
    head_stride=16,
    head_nbytes=16,
    offset=1024,
    dtype="bfloat16",
)


# Blocks -------------------------------------------------------------------------------------


def test_blocks_are_values() -> None:
    """Blocks compare, hash and pickle by ids, positions, placeholders and share."""
    forms = [
        Blocks.at(3, [4, 5]),
        Blocks.at(2, [4, 5]),
        Blocks.unplaced([4, 5]),
        Blocks.placed([1, 7], [4, 5]),
        Blocks.at(3, [4, 5], placeholder=5),
        Blocks.at(3, [4, 5], share=TokenShare(1, 2)),
        Blocks.at(3, []),
    ]
    assert len(set(forms)) == len(forms)
    for blocks in forms:
        assert pickle.loads(pickle.dumps(blocks)) == blocks
        assert copy.deepcopy(blocks) == blocks
        assert len(blocks) == len(blocks.ids)
    assert Blocks.placed([3, 4], [4, 5]) == Blocks.at(3, [4, 5])
    assert Blocks.at(3, [4, 5]).positions.tolist() == [3, 4]
    assert Blocks.unplaced([1]).positions is None
    assert Blocks.at(0, [1]) != "other"


def test_blocks_are_immutable() -> None:
    """Neither the caller's array nor the exposed one can change a value after the fact."""
    ids = np.array([1, 2, 3])
    blocks = Blocks.at(0, ids)
    ids[0] = 9
    assert blocks.ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        blocks.ids[0] = 9


def test_slices_keep_positions() -> None:
    """A slice of blocks keeps each block's position, placeholders included."""
    blocks = Blocks.at(3, [4, 5, 0, 7], placeholder=0)
    assert blocks[1:] == Blocks.at(4, [5, 0, 7], placeholder=0)
    assert blocks[3:].holes is None
    assert Blocks.placed([1, 4, 9], [7, 8, 9])[1:] == Blocks.placed([4, 9], [8, 9])
    assert Blocks.unplaced([1, 2])[:1] == Blocks.unplaced([1])
    assert len(blocks[4:]) == len(blocks[9:]) == 0
    with pytest.raises(InvalidInputError, match="step 1"):
        blocks[::2]


def test_manager_and_kernel_ids() -> None:
    """Ids of manager blocks become ids of the kernel blocks inside them, and back."""
    forms = [
        Blocks.at(3, [4, 1]),
        Blocks.placed([1, 7], [4, 1]),
        Blocks.unplaced([4, 1]),
        Blocks.at(0, [1], share=TokenShare(1, 2)),
    ]
    for blocks in forms:
        assert blocks.split(3).join(3) == blocks
        assert blocks.split(1) == blocks == blocks.join(1)
    assert Blocks.at(3, [4, 1]).split(2) == Blocks.at(6, [8, 9, 2, 3])
    holes = Blocks.at(0, [0, 5], placeholder=0).split(2)
    assert (holes.real_ids.tolist(), holes.holes.tolist()) == ([10, 11], [True, True, False, False])
    # A side described in kernel blocks pairs with one described in manager blocks.
    manager, kernel = flat(8, 16), flat(32, 4)
    plan = plan_blocks(kernel, Blocks.at(0, [5, 2]).split(4), manager, Blocks.at(0, [1, 7]))
    whole = plan_blocks(manager, Blocks.at(0, [5, 2]), manager, Blocks.at(0, [1, 7]))
    assert set(zip(*plan.merged().lists(), strict=True)) == set(zip(*whole.lists(), strict=True))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Blocks.at(0, [1]).split(0), "ratio must lie in"),
        (lambda: Blocks.at(0, [2**62]).split(4), "cannot be split by 4"),
        (lambda: Blocks.at(0, [-1]).split(2), "cannot be split by 2"),
        (lambda: Blocks.at(0, [2, 3, 5]).join(2), "ids are not made of whole runs of 2"),
        (lambda: Blocks.at(0, [3, 4]).join(2), "begin at a multiple"),
        (lambda: Blocks.at(0, [2, 2]).join(2), "ids are not made"),
        (lambda: Blocks.at(1, [2, 3]).join(2), "start 1 is no multiple"),
        (lambda: Blocks.placed([0, 3], [2, 3]).join(2), "positions are not made"),
        (lambda: Blocks.at(0, [2, 3], placeholder=3).join(2), "placeholders"),
        (lambda: Blocks.at(0, [2]).join(True), "ratio must lie in"),
    ],
)
def test_what_is_no_whole_block_is_refused(make, text: str) -> None:
    """Splitting and joining never round: what does not divide is an error."""
    with pytest.raises(InvalidInputError, match=text):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Blocks.at(0, [1, 2**63]), r"ids\[1\] is 9223372036854775808, beyond 64-bit"),
        (lambda: Blocks.at(0, [2**70]), "beyond 64-bit"),
        (lambda: Blocks.at(0, [1, 2.5]), r"ids\[1\] is 2.5: it must be an integer"),
        (lambda: Blocks.at(0, ["1"]), "must be an integer"),
        (lambda: Blocks.at(0, [None]), "must be an integer"),
        (lambda: Blocks.at(0, [True, False]), "must be an integer"),
        (lambda: Blocks.at(0, [[1], [2]]), "one flat list"),
        (lambda: Blocks.at(0, [[1], [2, 3]]), "must be a list of integers"),
        (lambda: Blocks.at(0, np.array([2**63], np.uint64)), "beyond 64-bit"),
        (lambda: Blocks.at(-1, [1]), "start must be an int"),
        (lambda: Blocks.at(2**63, [1]), "start must be an int"),
        (lambda: Blocks.at(True, [1]), "start must be an int"),
        (lambda: Blocks.placed([1], [1, 2]), "1 positions for 2 ids"),
        (lambda: Blocks.placed([1, 1], [1, 2]), "rise strictly: 1 is followed by 1 at index 1"),
        (lambda: Blocks.placed([3, 1], [1, 2]), "rise strictly"),
        (lambda: Blocks.placed([-1, 1], [1, 2]), "positions must lie in"),
        (lambda: Blocks.placed([1, 2**62], [1, 2]), "positions must lie in"),
        (lambda: TokenShare(2, 2), r"rank must lie in 0\.\.1"),
        (lambda: TokenShare(0, 2**20), "at most"),
    ],
)
def test_bad_blocks_are_refused(make, text: str) -> None:
    """Ids and positions that are no 64-bit integers, or out of order, are named and refused."""
    with pytest.raises(InvalidInputError, match=text):
        make()


def test_small_integer_arrays_are_accepted() -> None:
    """Any integer dtype will do for ids: engines hand over int32 tensors and plain lists."""
    for dtype in (np.int32, np.uint8, np.uint64, np.int64):
        assert Blocks.at(0, np.array([1, 2], dtype)) == Blocks.at(0, (1, 2)) == Blocks.at(0, [1, 2])
    assert Blocks.at(0, range(3)).ids.dtype == np.int64


# Bad input to the planner -------------------------------------------------------------------


@pytest.mark.parametrize("destination", Side)
@pytest.mark.parametrize(
    ("ids", "bad"), [([16], 16), ([-1], -1), ([0, 5, 99, 3], 99), ([2**62], 2**62)]
)
def test_ids_out_of_range_are_refused_on_either_side(destination, ids, bad) -> None:
    """Ids out of range are named with side and range, on the written and on the read side."""
    good, wrong = Blocks.at(0, range(len(ids))), Blocks.at(0, ids)
    for side, lists in (("local", (wrong, good)), ("remote", (good, wrong))):
        with pytest.raises(InvalidInputError, match=rf"{side} block id {bad} lies outside 0\.\.15"):
            plan_blocks(flat(), lists[0], flat(), lists[1], destination=destination)


@pytest.mark.parametrize("blocks", [16, 2**40])
def test_a_destination_block_twice_is_refused(blocks: int) -> None:
    """Duplicates in the destination are refused and named; the source may repeat a block."""
    layout = flat(blocks)
    once, twice = Blocks.at(0, [1, 2, 3]), Blocks.at(0, [4, 7, 4])
    with pytest.raises(InvalidInputError, match="local block id 4 occurs twice"):
        plan_blocks(layout, twice, layout, once)
    with pytest.raises(InvalidInputError, match="remote block id 4 occurs twice"):
        plan_blocks(layout, once, layout, twice, destination=Side.REMOTE)
    assert len(plan_blocks(layout, once, layout, twice)) == 3
    assert len(plan_blocks(layout, twice, layout, once, destination=Side.REMOTE)) == 3


def test_placeholders_may_repeat_but_real_ids_may_not() -> None:
    """The placeholder id is outside range and duplicate checks."""
    holes = Blocks.at(0, [-1, -1, 5, 6], placeholder=-1)
    plan = plan_blocks(flat(), holes, flat(), Blocks.at(0, [1, 2, 3, 4]))
    assert plan.lists()[0] == [40, 48]
    assert not len(plan.uncovered)
    with pytest.raises(InvalidInputError, match="occurs twice"):
        plan_blocks(
            flat(), Blocks.at(0, [-1, 5, 5], placeholder=-1), flat(), Blocks.at(0, [1, 2, 3])
        )


def test_a_placeholder_facing_a_real_block_is_a_gap() -> None:
    """A block that would silently receive nothing before others do is refused, unless allowed."""
    source = Blocks.at(0, [0, 2, 3], placeholder=0)
    with pytest.raises(InvalidInputError, match=r"local block 7 \(index 0\) would receive nothing"):
        plan_blocks(flat(), Blocks.at(0, [7, 8, 9]), flat(), source)
    plan = plan_blocks(flat(), Blocks.at(0, [7, 8, 9]), flat(), source, allow_gaps=True)
    assert plan.uncovered.whole_ids.tolist() == [7]


@pytest.mark.parametrize("tokens", [8, 4], ids=["equal blocks", "unequal blocks"])
def test_a_missing_prefix_can_be_allowed(tokens: int) -> None:
    """With allow_gaps, the blocks that have a partner move to it, and the others are reported."""
    per = 8 // tokens
    source = Blocks.at(per, [b for i in (4, 5) for b in range(i * per, i * per + per)])
    other = flat(16 * per, tokens)
    plan = plan_blocks(flat(), Blocks.at(0, [1, 2, 3]), other, source, allow_gaps=True)
    assert plan.merged().lists() == ([16], [32], [16])
    assert plan.uncovered.whole_ids.tolist() == [1]
    mirrored = plan_blocks(
        other, source, flat(), Blocks.at(0, [1, 2, 3]), allow_gaps=True, destination=Side.REMOTE
    )
    assert mirrored.merged().lists() == ([32], [16], [16])
    assert mirrored.uncovered == plan.uncovered


def test_a_missing_prefix_is_a_gap() -> None:
    """Local blocks before the source's first one are refused, though the tail is allowed."""
    with pytest.raises(InvalidInputError, match="would receive nothing though later ones do"):
        plan_blocks(flat(), Blocks.at(0, [1, 2]), flat(), Blocks.at(1, [3]), uncovered_local=5)


@pytest.mark.parametrize(
    ("local", "remote", "align", "text"),
    [
        (Blocks.unplaced([1]), Blocks.unplaced([1, 2]), None, 'align="head" or "tail"'),
        (Blocks.at(0, [1]), Blocks.unplaced([1]), None, "the remote list has no positions"),
        (Blocks.unplaced([1]), Blocks.at(0, [1]), None, "the local list has no positions"),
        (Blocks.unplaced([1]), Blocks.unplaced([1]), "middle", 'must be "head", "tail" or None'),
        (Blocks.placed([1, 5], [1, 2]), Blocks.unplaced([1, 2]), Align.HEAD, "has gaps"),
    ],
)
def test_lists_without_positions_need_an_assumption(local, remote, align, text) -> None:
    """Unequal lists without positions are an error unless the caller states the assumption."""
    with pytest.raises(InvalidInputError, match=text):
        plan_blocks(flat(), local, flat(), remote, align=align)


def test_unplaced_lists_of_unequal_block_sizes() -> None:
    """Equally many blocks of unequal size do not pair by index, and never from the tail."""
    big, small = flat(8, 16), flat(16, 8)
    lists = (big, Blocks.unplaced([1, 2]), small, Blocks.unplaced([1, 2]))
    with pytest.raises(InvalidInputError, match="unequal block sizes"):
        plan_blocks(*lists)
    with pytest.raises(InvalidInputError, match="ends need not coincide"):
        plan_blocks(*lists, align="tail")
    plan = plan_blocks(*lists, align="head", uncovered_local=1)
    assert plan.nbytes == 16
    assert plan.uncovered.whole_ids.tolist() == [2]


def test_equally_long_unplaced_lists_pair_by_index() -> None:
    """Two unplaced lists of one length and block size need no assumption."""
    plan = plan_blocks(flat(), Blocks.unplaced([1, 2]), flat(), Blocks.unplaced([3, 4]))
    assert plan.lists()[:2] == ([8, 16], [24, 32])


def test_write_mirrors_read() -> None:
    """For WRITE the destination is remote: its surplus needs the allowance, ours is not sent."""
    local, remote = Blocks.at(0, [1, 2, 3]), Blocks.at(2, [7, 8])
    keywords = {"destination": Side.REMOTE}
    with pytest.raises(InvalidInputError, match="uncovered_remote=0"):
        plan_blocks(flat(), local, flat(), remote, **keywords)
    plan = plan_blocks(flat(), local, flat(), remote, uncovered_remote=1, **keywords)
    assert plan.lists()[:2] == ([24], [56])
    assert plan.uncovered.ids.tolist() == [8]
    with pytest.raises(InvalidInputError, match="only the destination's list"):
        plan_blocks(flat(), local, flat(), remote, uncovered_local=1, **keywords)
    tail = plan_blocks(
        flat(), Blocks.unplaced([1, 2, 3]), flat(), Blocks.unplaced([7]), align="tail", **keywords
    )
    assert tail.lists()[:2] == ([24], [56])
    with pytest.raises(InvalidInputError, match="at least 0, not -1"):
        plan_blocks(flat(), local, flat(), remote, uncovered_local=-1)


def test_sizes_of_2_to_the_63_are_refused() -> None:
    """Numbers that int64 cannot hold are refused where they come in, before arithmetic wraps."""
    for field in ("num_blocks", "block_stride", "head_nbytes", "offset"):
        with pytest.raises(InvalidInputError, match=f"{field} must lie in"):
            KVLayout(**{**_fields(KV), field: 2**63})
    with pytest.raises(GeometryError, match=r"beyond 2\*\*63-1"):
        KVLayout(**{**_fields(KV), "num_blocks": 2**50, "block_stride": 2**40})
    with pytest.raises(GeometryError, match=r"beyond 2\*\*63-1"):
        KVLayout(**{**_fields(KV), "offset": 2**63 - 10})
    with pytest.raises(GeometryError, match="tokens per block"):
        flat(1, 2**21)


def test_plans_that_would_exhaust_memory_are_refused() -> None:
    """Geometry that turns few ids into millions of pieces is refused before it is allocated."""
    heads, tokens = 2**12, 2**16
    major = {"heads": heads, "kernel_tokens": tokens, "num_blocks": 64, "head_nbytes": 1,
             "dtype": "uint8", "block_stride": heads * tokens}  # fmt: skip
    token_major = KVLayout(token_stride=heads, head_stride=1, **major)
    head_major = KVLayout(token_stride=1, head_stride=tokens, **major)
    with pytest.raises(InvalidInputError, match="268435456 pieces"):
        plan_blocks(token_major, Blocks.at(0, [1]), head_major, Blocks.at(0, [1]))
    fine = KVLayout(
        num_blocks=2**12, block_stride=2**21, kernel_blocks=2**19, kernel_stride=4,
        kernel_tokens=2, token_stride=1, head_nbytes=1, dtype="uint8",
    )  # fmt: skip
    coarse = flat(2**12, 2**19)
    with pytest.raises(InvalidInputError, match="cuts, over"):
        plan_blocks(
            coarse, Blocks.at(0, range(1024)), fine, Blocks.at(0, range(1024)), allow_gaps=True
        )


@pytest.mark.parametrize("destination", list(Side))
def test_what_a_peer_says_of_its_blocks_costs_what_ours_hold(destination: Side) -> None:
    """Blocks of a million tokens in kernel blocks of two, as a peer may claim: only where they meet
    our few tokens are they cut.  Cut everywhere, each took a second."""
    ours = flat(64, 16)
    theirs = KVLayout(
        num_blocks=2**10, block_stride=2**22, kernel_blocks=2**19, kernel_stride=4,
        kernel_tokens=2, token_stride=1, head_nbytes=1, dtype="uint8",
    )  # fmt: skip
    ids = range(1000)
    began = time.process_time()
    for at in (0, 2**16 - 2, 2**19):  # in tokens of 16: the second lies across two of theirs
        plan = plan_blocks(
            ours, Blocks.at(at, [5, 3, 9, 7]), theirs, Blocks.at(0, ids),
            destination=destination, allow_gaps=True, uncovered_remote=(
                len(ids) if destination is Side.REMOTE else 0
            ),
        )  # fmt: skip
        assert plan.nbytes == 64
        tokens = at * 16 + np.arange(64)
        expected = tokens // 2**20 * 2**22 + tokens % 2**20 // 2 * 4 + tokens % 2
        reached = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(plan.remote, plan.size, strict=True)]
        )
        assert np.array_equal(reached, expected)
    assert time.process_time() - began < 2.0


def test_layers_that_a_peer_interleaves_are_not_written_out_without_bound() -> None:
    """A peer's layouts decide how finely ours fall apart and whether layers can be told apart:
    beyond a bound the pieces stay factored, or, where they must be compared, are refused."""
    wide = {"kernel_tokens": 2**12, "heads": 64, "head_nbytes": 1, "dtype": "uint8"}
    near = KVLayout(num_blocks=4, block_stride=2**18, token_stride=64, head_stride=1, **wide)
    theirs = []
    for i in range(80):  # the row of a token holds all layers, and a gap between any two heads
        far = KVLayout(num_blocks=4, block_stride=2**12 * 80 * 128, token_stride=80 * 128,
                       head_stride=2, offset=i * 128, **wide)  # fmt: skip
        theirs.append(LayerRef(name=f"{i}", group=0, region=0, layout=far))
    ours = [LayerRef(name=f"{i}", group=0, region=i, layout=near) for i in range(80)]
    layers = match_layers(ours, theirs)
    blocks = [Blocks.at(0, [2])]
    began = time.process_time()
    plan = plan_layers(layers, blocks, blocks)
    assert len(plan) == 80 * 2**18
    assert isinstance(plan.merged(), LayersPlan)
    with pytest.raises(InvalidInputError, match="20971520 pieces of all layers written out, over"):
        _ = plan.local
    with pytest.raises(InvalidInputError, match="pieces of all layers written out, over 16777216"):
        plan_layers(
            match_layers(ours, [*theirs[:-1], attrs.evolve(theirs[0], name="79")]),
            blocks,
            blocks,
            destination=Side.REMOTE,
        )
    assert time.process_time() - began < 2.0


def test_pairing_that_would_take_too_many_cuts_is_refused() -> None:
    """Tokens that are dealt out one by one make one cut each, also those of a list that is not
    ours: refused before they are made, with the number and the limit."""
    share = TokenShare(0, 2, 1)
    theirs = flat(2**12, 2**20)
    with pytest.raises(InvalidInputError, match="cuts, over 4194304"):
        plan_blocks(
            flat(64, 16), Blocks.at(0, [1], share=share), theirs, Blocks.at(0, range(9)),
            destination=Side.REMOTE, allow_gaps=True, uncovered_remote=9,
        )  # fmt: skip


def test_gaps_in_positions_are_not_cut() -> None:
    """What no list holds costs nothing, however the tokens are dealt out."""
    share = TokenShare(0, 2, 1)
    plan = plan_blocks(
        flat(64, 16), Blocks.at(0, [1, 2], share=share), flat(64, 32),
        Blocks.placed([0, 2**30], [4, 5]), destination=Side.REMOTE, allow_gaps=True,
        uncovered_remote=1,
    )  # fmt: skip
    assert plan.nbytes == 16


def test_unlike_caches_are_refused_with_both_geometries() -> None:
    """Kind, dtype, planes and bytes per token must agree; the error describes both sides."""
    for change in (
        {"dtype": "float16"},
        {"kind": LayoutKind.KEY_ONLY},
        {"planes": 1},
        {"head_nbytes": 8},
        {"cell_tokens": 2},
    ):
        other = KVLayout(**{**_fields(KV), **change})
        with pytest.raises(GeometryError) as caught:
            plan_blocks(KV, Blocks.at(0, [0]), other, Blocks.at(0, [0]))
        assert KV.describe() in str(caught.value)
        assert other.describe() in str(caught.value)


def test_head_slices_are_checked() -> None:
    """A slice beyond either side's heads is refused."""
    for heads in (HeadSlice(1, 0, 2), HeadSlice(0, 1, 2), HeadSlice(0, 0, 3)):
        with pytest.raises(GeometryError, match="reaches beyond 2 local and 2 remote heads"):
            plan_blocks(KV, Blocks.at(0, [0]), KV, Blocks.at(0, [0]), heads=heads)
    with pytest.raises(InvalidInputError, match="count"):
        HeadSlice(0, 0, 0)
    assert HeadSlice(1, 2, 3).swapped() == HeadSlice(2, 1, 3)


# The wire -----------------------------------------------------------------------------------


def _fields(layout: KVLayout) -> dict:
    return {**layout.to_wire(), "kind": layout.kind}


@pytest.mark.parametrize("layout", [KV, STATE, flat()], ids=["kv", "state", "flat"])
def test_layouts_survive_the_wire_and_pickle(layout) -> None:
    """to_wire gives builtins, from_wire the equal value; layouts hash and pickle."""
    import json

    message = json.loads(json.dumps(layout.to_wire()))
    again = type(layout).from_wire(message)
    assert again == layout
    assert again.geometry == layout.geometry
    assert hash(again) == hash(layout)
    assert pickle.loads(pickle.dumps(layout)) == layout
    moved = layout.at_offset(4096)
    assert moved.geometry == layout.geometry
    assert moved != layout
    ref = LayerRef(name="l", group=1, region=2, layout=layout, total_heads=8)
    assert LayerRef.from_wire(json.loads(json.dumps(ref.to_wire()))) == ref


HOSTILE = (
    None, [], "x", 0, -1, 2**63, 2**200, 1.5, float("nan"), True, "a" * 10_000, b"x", {}, [1],
    {"a": 1}, "kv", -(2**63),
)  # fmt: skip


@pytest.mark.parametrize("layout", [KV, STATE], ids=["kv", "state"])
def test_hostile_messages_are_refused(layout) -> None:
    """Every field replaced by every kind of rubbish, removed, or added to: InvalidInputError or a
    valid value, nothing else."""

    texts: list[str] = []

    def refused(message) -> bool:
        try:
            return not isinstance(type(layout).from_wire(message), type(layout))
        except InvalidInputError as error:
            texts.append(str(error))
            return True

    for rubbish in HOSTILE:
        assert refused(rubbish)
    good = layout.to_wire()
    assert refused({**good, "extra": 1})
    for key in good:
        assert refused({k: v for k, v in good.items() if k != key})
        for rubbish in HOSTILE:
            value = {**good, key: rubbish}
            if not refused(value):
                kind = type(good[key])
                assert type(rubbish) is kind
    if isinstance(layout, StateLayout):
        for rubbish in HOSTILE:
            assert refused({**good, "parts": [rubbish]})
            for key in good["parts"][0]:
                part = {**good["parts"][0], key: rubbish}
                if not refused({**good, "parts": [part]}):
                    assert type(rubbish) is type(good["parts"][0][key])
        assert refused({**good, "parts": good["parts"][:1] * 2})
        assert refused({**good, "parts": good["parts"] * 100})
    assert max(map(len, texts)) < 2000, "an error must not echo what a peer sent at length"


def test_the_error_names_the_field() -> None:
    """A bool where an int belongs, an unknown kind, a missing and an unknown key are named."""
    good = KV.to_wire()
    for change, text in (
        ({"heads": True}, "layout.heads must be int, not bool"),
        ({"kind": "nope"}, "layout.kind is 'nope'"),
        ({"zzz": 1}, "unknown keys: 'zzz'"),
        ({"dtype": ""}, "dtype must be a string"),
        ({"planes": 0}, "planes must lie in 1"),
    ):
        with pytest.raises(InvalidInputError, match=text):
            KVLayout.from_wire({**good, **change})
    del good["heads"]
    with pytest.raises(InvalidInputError, match="layout lacks heads"):
        KVLayout.from_wire(good)


def test_strides_of_single_entries_mean_nothing() -> None:
    """An axis of count 1 has no stride: layouts that differ only there are equal."""
    one = KVLayout(**{**_fields(KV), "planes": 1, "plane_stride": 7})
    assert one == KVLayout(**{**_fields(KV), "planes": 1, "plane_stride": 0})


def test_span_and_end() -> None:
    """span_nbytes is the distance from the first to one past the last byte; the offset adds up."""
    assert KV.span_nbytes == 4 * 512 + 256 + 128 + 3 * 32 + 16 + 16
    assert KV.end_offset == 1024 + KV.span_nbytes
    assert KV.token_nbytes == 2 * 2 * 16
    assert KV.block_nbytes == 8 * KV.token_nbytes
    assert STATE.end_offset == STATE.span_nbytes == 3 * 64 + 48 + 16
    assert STATE.block_nbytes == 48 + 16
    assert (STATE.num_blocks, STATE.tokens_per_block) == (4, 1)


# Plans --------------------------------------------------------------------------------------

PIECES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4)), min_size=0, max_size=12
)


def byte_map(local, remote, size, pair=None):
    """(pair, local byte) -> remote byte: what a plan means, however it is cut."""
    pair = [0] * len(local) if pair is None else pair
    out = {}
    for p, to, from_, n in zip(pair, local, remote, size, strict=True):
        for i in range(n):
            assert (p, to + i) not in out
            out[p, to + i] = from_ + i
    return out


@st.composite
def plans(draw):
    """Pieces that never write a byte twice, with plenty of neighbours on both sides."""
    local, remote, size = [], [], []
    at = 0
    base = draw(st.integers(0, 40))
    for _ in range(draw(st.integers(1, 14))):
        n = draw(st.integers(1, 6))
        if draw(st.booleans()):
            at += draw(st.integers(0, 5))
            base = draw(st.integers(0, 80))
        elif draw(st.booleans()):
            at += draw(st.integers(1, 5))
        local.append(at)
        remote.append(base)
        size.append(n)
        at += n
        base += n
    order = draw(st.permutations(range(len(local))))
    pair = [draw(st.integers(0, 2)) for _ in local]
    return (
        np.array([local[i] for i in order]),
        np.array([remote[i] for i in order]),
        np.array([size[i] for i in order]),
        np.array([pair[i] for i in order], np.int32),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(plans())
def test_merging_is_byte_exact_and_complete(case) -> None:
    """Merged pieces mean the same bytes, and no two of them could still be joined."""
    local, remote, size, pair = case
    merged = Plan(local, remote, size).merged()
    before, after = byte_map(local, remote, size), byte_map(*merged.lists())
    assert before == after
    ends = {(a + n, b + n) for a, b, n in zip(*merged.lists(), strict=True)}
    assert not ends & set(zip(*merged.lists()[:2], strict=True))
    both = PairedPlan(pair, local, remote, size).merged()
    p, a, b, n = both.lists()
    assert byte_map(local, remote, size, pair) == byte_map(a, b, n, p)
    ends = {(q, x + m, y + m) for q, x, y, m in zip(p, a, b, n, strict=True)}
    assert not ends & set(zip(p, a, b, strict=True))
    assert both.merged() == both


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    plans(),
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(1, 9), st.lists(st.integers(0, 60), max_size=6)),
    st.one_of(st.none(), st.integers(1, 9), st.lists(st.integers(0, 90), max_size=6)),
)
def test_splitting_is_byte_exact_and_keeps_limits(case, most, nbytes, ours, theirs) -> None:
    """Parts mean the same bytes in order, hold every limit, and no piece crosses a border."""
    local, remote, size, pair = case
    borders = Borders(local=ours, remote=theirs)
    parts = Plan(local, remote, size).split(max_pieces=most, max_nbytes=nbytes, borders=borders)
    columns = [[n for part in parts for n in part.lists()[i]] for i in range(3)]
    assert byte_map(*columns) == byte_map(local, remote, size)
    order = [a for a in columns[0] if a in set(local.tolist())]
    assert order == local.tolist(), "the order of pieces is kept"
    for part in parts:
        assert most is None or len(part) <= most
        assert nbytes is None or part.nbytes <= nbytes
    for offsets, border in ((columns[0], ours), (columns[1], theirs)):
        cuts = border if isinstance(border, list) else range(0, 200, border or 1000)
        for at, n in zip(offsets, columns[2], strict=True):
            assert not any(at < cut < at + n for cut in cuts)
    again = PairedPlan(pair, local, remote, size).split(
        max_pieces=most, max_nbytes=nbytes, borders=borders
    )
    assert [part.lists()[1:] for part in again] == [part.lists() for part in parts]
    got = [p for part in again for p in part.lists()[0]]
    assert byte_map(*columns, got) == byte_map(local, remote, size, pair)


@pytest.mark.parametrize(
    "call",
    [
        lambda plan: plan.split(max_pieces=0),
        lambda plan: plan.split(max_nbytes=0),
        lambda plan: plan.cut(max_piece_nbytes=-1),
        lambda plan: plan.cut(borders=Borders(local=0)),
        lambda plan: plan.descriptors(2**63, 0),
        lambda plan: Plan(plan.local, plan.remote[:1], 4),
    ],
)
def test_bad_limits_are_refused(call) -> None:
    """Limits below 1, borders of step 0, and addresses beyond int64 are refused."""
    plan = plan_blocks(flat(), Blocks.at(0, [1, 2]), flat(), Blocks.at(0, [3, 4]))
    with pytest.raises(InvalidInputError):
        call(plan)


def test_plans_are_values() -> None:
    """Plans compare and pickle, their vectors are int64 and read-only, their lists are cached."""
    plan = plan_blocks(
        flat(), Blocks.at(0, [1, 2, 9]), flat(), Blocks.at(0, [3, 4]), uncovered_local=1
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.lists() is plan.lists()
    for vector in (plan.local, plan.remote, plan.size):
        assert vector.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            vector[0] = 1
    assert plan.merged().uncovered == plan.uncovered
    assert plan != plan_blocks(flat(), Blocks.at(0, [1, 2]), flat(), Blocks.at(0, [3, 4]))
    assert plan.shifted(0, 0) is plan
    assert plan.shifted(5, 7).lists()[:2] == ([13, 21], [31, 39])
    assert "2 pieces, 16 bytes, 8 tokens uncovered" in repr(plan)


def test_descriptors_are_rows_of_address_length_device() -> None:
    """NIXL takes uint64[n, 3]: absolute address, length, device."""
    plan = plan_blocks(flat(), Blocks.at(0, [1, 5]), flat(), Blocks.at(0, [3, 4]))
    ours, theirs = plan.descriptors(1000, 2**62, local_device=3, remote_device=4)
    assert ours.dtype == theirs.dtype == np.uint64
    assert ours.tolist() == [[1008, 8, 3], [1040, 8, 3]]
    assert theirs.tolist() == [[2**62 + 24, 8, 4], [2**62 + 32, 8, 4]]


# Layers -------------------------------------------------------------------------------------


def two_regions() -> Layers:
    ours = [
        LayerRef(name=f"l{i}", group=0, region=i % 2, layout=flat(offset=128 * (i // 2)))
        for i in range(4)
    ]
    theirs = [
        LayerRef(name=f"l{i}", group=0, region=0, layout=flat(offset=128 * i)) for i in (3, 1, 0, 2)
    ]
    return match_layers(ours, theirs)


def test_layers_share_one_plan_and_differ_by_offset() -> None:
    """Four layers of equal geometry are one group, emitted by base offsets."""
    layers = two_regions()
    assert layers.regions == ((0, 0), (1, 0))
    plan = plan_layers(layers, [Blocks.at(0, [2, 3])], [Blocks.at(0, [4, 9])])
    assert len(plan.groups) == 1
    assert len(plan) == 8
    assert list(zip(*plan.lists(), strict=True)) == [
        (0, 16, 32, 8), (0, 24, 72, 8),
        (1, 16, 160, 8), (1, 24, 200, 8),
        (0, 144, 288, 8), (0, 152, 328, 8),
        (1, 144, 416, 8), (1, 152, 456, 8),
    ]  # fmt: skip
    assert plan.nbytes == 64
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.pair.dtype == np.int32
    assert [(pair, part.lists()[0]) for pair, part in plan.by_pair()] == [
        (0, [16, 24, 144, 152]),
        (1, [16, 24, 144, 152]),
    ]
    addresses = plan.descriptors([1000, 2000], [5000, 5000])
    assert addresses[0][:3, 0].tolist() == [1016, 1024, 2016]
    assert addresses[1][0].tolist() == [5032, 8, 0]
    assert pickle.loads(pickle.dumps(layers)).regions == layers.regions


def test_what_layers_must_share_to_share_a_plan() -> None:
    """Layers share a plan only if both geometries, the heads and both groups are equal."""

    def of(**change) -> LayerPair:
        values = {"name": "l", "pair": 0, "local": KV.at_offset(0), "remote": KV.at_offset(0)}
        return LayerPair(**{**values, **change})

    other = KVLayout(**{**_fields(KV), "num_blocks": 9, "offset": 0})
    layers = [
        of(),
        of(remote=other.at_offset(4096)),
        of(local=other.at_offset(8192), remote=KV.at_offset(8192)),
        of(heads=HeadSlice(0, 0, 1), remote=KV.at_offset(12288)),
        of(heads=HeadSlice(0, 1, 1), remote=KV.at_offset(16384)),
        of(group=1, remote_group=0, remote=KV.at_offset(20480)),
        of(group=0, remote_group=1, remote=KV.at_offset(24576)),
    ]
    lists = [Blocks.at(0, [3]), Blocks.at(0, [1])], [Blocks.at(0, [4]), Blocks.at(0, [2])]
    plan = plan_layers(Layers(layers), *lists, destination=Side.REMOTE)
    assert len(plan.groups) == len(layers)
    for pair, group in zip(layers, plan.groups, strict=True):
        alone = plan_blocks(
            pair.local,
            lists[0][pair.group],
            pair.remote,
            lists[1][pair.remote_group],
            heads=pair.heads,
        )
        ((_, shared),) = group.plans()
        assert shared == alone


def test_layers_are_matched_by_name_or_number_never_by_order() -> None:
    """Names decide; a number is its digits; missing and repeated names are errors."""
    a = LayerRef(name=7, group=0, region=0, layout=flat())
    assert a.name == "7"
    assert match_layers([a], [a])[0].name == "7"
    with pytest.raises(InvalidInputError, match="'7' occurs twice"):
        match_layers([a, a], [a])
    b = LayerRef(name="8", group=0, region=0, layout=flat(offset=512))
    with pytest.raises(InvalidInputError, match="missing on the remote side: 8"):
        match_layers([a, b], [a])
    with pytest.raises(InvalidInputError, match="missing on the local side: 8"):
        match_layers([a], [a, b])
    assert [layer.name for layer in match_layers([a, b], [a], only_common=True)] == ["7"]
    for bad in (-1, True, "", "x" * 1000, None):
        with pytest.raises(InvalidInputError, match="name must be a string"):
            LayerRef(name=bad, group=0, region=0, layout=flat())


def test_a_layer_that_does_not_fit_is_named_with_both_geometries() -> None:
    """The refusal comes when layers are matched, names the layer and describes both sides."""
    with pytest.raises(GeometryError, match="layer 'l'") as caught:
        match_layers(
            [LayerRef(name="l", group=0, region=0, layout=flat())],
            [LayerRef(name="l", group=0, region=0, layout=KV)],
        )
    assert flat().describe() in str(caught.value)
    assert KV.describe() in str(caught.value)
    with pytest.raises(GeometryError, match="recurrent state on the other"):
        match_layers(
            [LayerRef(name="l", group=0, region=0, layout=flat())],
            [LayerRef(name="l", group=0, region=0, layout=STATE)],
        )


def test_layers_check_ids_of_both_sides_in_every_group() -> None:
    """Ranges follow each group's own layers on each side, duplicates the written side."""
    layers = Layers(
        [
            LayerPair(name="a", pair=0, local=flat(4), remote=flat(6), group=0),
            LayerPair(name="b", pair=1, local=flat(5), remote=flat(3), group=1, remote_group=2),
        ]
    )
    good = [0, 1]
    for side, group, ids, text in (
        (0, 0, [0, 4], r"local block id 4 lies outside 0\.\.3"),
        (0, 1, [5, 0], r"local block id 5 lies outside 0\.\.4"),
        (1, 0, [6, 0], r"remote block id 6 lies outside 0\.\.5"),
        (1, 2, [0, 3], r"remote block id 3 lies outside 0\.\.2"),
        (0, 1, [2, 2], "local block id 2 occurs twice"),
    ):
        lists = [[Blocks.at(0, good) for _ in range(3)] for _ in range(2)]
        plan_layers(layers, *lists)
        lists[side][group] = Blocks.at(0, ids)
        with pytest.raises(InvalidInputError, match=text):
            plan_layers(layers, *lists)
        if len(set(ids)) == 1:
            plan_layers(layers, *lists, destination=Side.REMOTE)


def test_too_many_layers_are_refused() -> None:
    """A peer cannot make us compare layers without end: their number is bounded."""
    rows = [LayerRef(name=i, group=0, region=0, layout=flat(offset=i)) for i in range(2049)]
    assert len(match_layers(rows[:-1], rows[:-1])) == 2048
    with pytest.raises(InvalidInputError, match="2049 layers, over 2048"):
        match_layers(rows, rows)


def test_groups_need_their_lists() -> None:
    """A layer's group without a list, and ids where Blocks belong, are errors."""
    layers = two_regions()
    with pytest.raises(InvalidInputError, match="belongs to local group 0, but there are 0"):
        plan_layers(layers, [], [])
    with pytest.raises(InvalidInputError, match="one Blocks per group"):
        plan_layers(layers, [[1]], [Blocks.at(0, [1])])
    with pytest.raises(InvalidInputError, match="one Blocks per group"):
        plan_layers(layers, Blocks.at(0, [1]), [Blocks.at(0, [1])])


def test_layers_must_lie_inside_their_regions() -> None:
    """What a peer says of its layers is held against the regions that it registered."""
    layers = two_regions()
    layers.require_inside([256, 256], [512])
    with pytest.raises(
        GeometryError, match="'l2' ends at byte 256 of local region 0, which has 255"
    ):
        layers.require_inside([255, 256], [512])
    with pytest.raises(GeometryError, match="'l3' ends at byte 512 of remote region 0"):
        layers.require_inside([256, 256], [511])
    with pytest.raises(GeometryError, match="local region 1, which has 0"):
        layers.require_inside([256], [512])
    with pytest.raises(InvalidInputError, match="'x' has pair 1 of 1 pairs"):
        Layers([LayerPair(name="x", pair=1, local=flat(), remote=flat())], [(0, 0)])


def test_uncovered_is_reported_by_group() -> None:
    """A request's plan says for each group what of the destination it does not write."""
    plan = plan_layers(
        two_regions(), [Blocks.at(0, [2, 3, 7])], [Blocks.at(0, [4, 9])], uncovered_local=1
    )
    assert {group: rest.ids.tolist() for group, rest in plan.uncovered.items()} == {0: [7]}


def overlaid(first: int = 0, second: int = 0) -> Layers:
    """Two groups over one memory, as hybrid models have them."""
    ours = [
        LayerRef(name="a", group=0, region=0, layout=flat(offset=first)),
        LayerRef(name="b", group=1, region=0, layout=flat(offset=second)),
    ]
    theirs = [
        LayerRef(name="a", group=0, region=0, layout=flat()),
        LayerRef(name="b", group=1, region=1, layout=flat()),
    ]
    return match_layers(ours, theirs)


def test_groups_over_one_memory_must_hold_different_blocks() -> None:
    """Where two groups share memory, equal ids would write the same bytes: refused, both named."""
    layers = overlaid()
    assert layers.overlaid_local == (0, 1)
    assert layers.overlaid_remote == ()
    remote = [Blocks.at(0, [1, 2]), Blocks.at(0, [3])]
    plan_layers(layers, [Blocks.at(0, [4, 5]), Blocks.at(0, [6])], remote)
    with pytest.raises(InvalidInputError, match=r"would be written twice.*at 40.*overlap"):
        plan_layers(layers, [Blocks.at(0, [4, 5]), Blocks.at(0, [5])], remote)
    # As a source, the shared memory may be read twice.
    plan_layers(
        layers,
        [Blocks.at(0, [4, 5]), Blocks.at(0, [5])],
        remote,
        destination=Side.REMOTE,
    )


def test_partial_overlap_is_found() -> None:
    """Bytes decide, not ids: memory shifted by half a block overlaps at other ids."""
    layers = overlaid(second=4)
    remote = [Blocks.at(0, [1]), Blocks.at(0, [3])]
    with pytest.raises(InvalidInputError, match="written twice"):
        plan_layers(layers, [Blocks.at(0, [4]), Blocks.at(0, [4])], remote)
    plan_layers(layers, [Blocks.at(0, [4]), Blocks.at(0, [5])], remote)


def test_interleaved_rows_are_known_to_be_apart() -> None:
    """Layers that share rows of one length, each in its own part, cost no comparison."""
    rows = [
        KVLayout(
            num_blocks=4, block_stride=24, kernel_tokens=1, head_nbytes=8, dtype="uint8", offset=at
        )
        for at in (0, 8, 16)
    ]
    refs = [LayerRef(name=i, group=0, region=0, layout=row) for i, row in enumerate(rows)]
    assert match_layers(refs, refs).overlaid_local == ()
    planes = [
        KVLayout(**{**_fields(row), "planes": 2, "plane_stride": 96, "offset": row.offset + shift})
        for row, shift in zip(rows, (0, 0, 4), strict=True)
    ]
    refs = [LayerRef(name=i, group=0, region=0, layout=row) for i, row in enumerate(planes)]
    assert match_layers(refs[:2], refs[:2]).overlaid_local == ()
    assert match_layers(refs, refs).overlaid_local == (0,), "the third reaches into the next row"
    crooked = [
        KVLayout(**{**_fields(row), "planes": 2, "plane_stride": 84, "offset": row.offset})
        for row in rows[:2]
    ]
    refs = [LayerRef(name=i, group=0, region=0, layout=row) for i, row in enumerate(crooked)]
    assert match_layers(refs, refs).overlaid_local == (0,), "the second planes are shifted"
    with pytest.raises(InvalidInputError, match="written twice"):
        plan_layers(match_layers(refs, refs), [Blocks.at(0, [0, 3])], [Blocks.at(0, [0, 3])])


def test_two_names_for_one_cache_move_once() -> None:
    """Layers that share their KV cache on both sides are planned once."""
    refs = [LayerRef(name=n, group=0, region=0, layout=flat()) for n in ("a", "b")]
    plan = plan_layers(match_layers(refs, refs), [Blocks.at(0, [1])], [Blocks.at(0, [2])])
    assert len(plan) == 1


def test_one_memory_against_two_is_two_layers() -> None:
    """Two names for one memory here, not there: reading would write it twice, writing is fine."""
    ours = [LayerRef(name=n, group=0, region=0, layout=flat()) for n in ("a", "b")]
    theirs = [
        LayerRef(name=n, group=0, region=0, layout=flat(offset=at))
        for n, at in (("a", 0), ("b", 256))
    ]
    layers = match_layers(ours, theirs)
    lists = [Blocks.at(0, [1])], [Blocks.at(0, [2])]
    with pytest.raises(InvalidInputError, match="written twice"):
        plan_layers(layers, *lists)
    plan = plan_layers(layers, *lists, destination=Side.REMOTE)
    assert plan.lists()[1:3] == ([8, 8], [16, 272])


def test_group_numbers_may_differ_between_the_sides() -> None:
    """Each side's group index picks from its own lists."""
    layers = match_layers(
        [LayerRef(name="a", group=1, region=0, layout=flat())],
        [LayerRef(name="a", group=0, region=0, layout=flat())],
    )
    plan = plan_layers(layers, [Blocks.at(0, []), Blocks.at(0, [3])], [Blocks.at(0, [4])])
    assert plan.lists() == ([0], [24], [32], [8])


def test_unfit_state_slices_are_refused() -> None:
    """A replicated or fused part cannot be cut; slices must match the parts."""
    pair = {"name": "s", "pair": 0, "local": STATE, "remote": STATE}
    for sharding in (Sharding.REPLICATED, Sharding.FUSED):
        part = StatePart(
            name="norm", slot_stride=64, units=2, unit_stride=8, unit_nbytes=8, dtype="float32",
            sharding=sharding,
        )  # fmt: skip
        state = StateLayout(num_slots=4, parts=[part])
        cut = LayerPair(name="s", pair=0, local=state, remote=state, units=(HeadSlice(0, 1, 1),))
        with pytest.raises(GeometryError, match=f"'norm' of layer 's' is {sharding.value}"):
            Layers([cut])
    with pytest.raises(InvalidInputError, match="2 parts but 1 unit slices"):
        Layers([LayerPair(**pair, units=(HeadSlice(0, 0, 4),))])
    shorter = StateLayout(num_slots=4, parts=STATE.parts[:1])
    with pytest.raises(GeometryError, match="recurrent states differ"):
        Layers([LayerPair(**{**pair, "remote": shorter})])


# The cache ----------------------------------------------------------------------------------


def test_the_plan_cache_is_bounded_by_plans_and_pieces() -> None:
    """Least recently used plans go first; both bounds hold; evictions are counted."""
    cache = PlanCache(max_plans=2, max_pieces=10)
    plans_of = [
        plan_blocks(flat(), Blocks.at(0, range(n)), flat(), Blocks.at(0, range(n)))
        for n in (4, 4, 4, 7, 11)
    ]
    for key in (0, 1):
        cache.put(key, plans_of[key])
    assert cache.get(0) is plans_of[0]
    cache.put(2, plans_of[2])
    assert cache.get(1) is None
    assert (len(cache), cache.pieces, cache.evicted) == (2, 8, 1)
    cache.put(3, plans_of[3])
    assert (len(cache), cache.pieces) == (1, 7)
    cache.put(4, plans_of[4])
    assert cache.get(4) is None, "a plan beyond the bound is not kept"
    cache.put(3, plans_of[0])
    assert cache.snapshot() == {"plans": 1, "pieces": 4, "hits": 1, "misses": 2, "evicted": 3}
    cache.clear()
    assert (len(cache), cache.pieces) == (0, 0)
    with pytest.raises(InvalidInputError, match="at least 1"):
        PlanCache(max_plans=0)


def test_the_plan_cache_counts_long_lists_of_which_little_moves() -> None:
    """A peer's list of many blocks, of which one pairs, is not kept as if it were one piece: its
    ids and the report of what it leaves uncovered take the memory."""
    layers = match_layers(
        [LayerRef(name="a", group=0, region=0, layout=flat(4))],
        [LayerRef(name="a", group=0, region=0, layout=flat(2**12))],
    )
    cache = PlanCache(max_pieces=10_000)
    for first in range(5):
        plan = plan_layers(
            layers,
            [Blocks.at(0, [1])],
            [Blocks.placed(range(0, 2_000, 2), range(first, first + 1_000))],
            destination=Side.REMOTE,
            uncovered_remote=1_000,
            cache=cache,
        )
        assert (len(plan), len(plan.uncovered[0])) == (1, 999)
    assert (len(cache), cache.pieces, cache.evicted) == (4, 4 * (500 + 2 * 999), 1)


def test_the_plan_cache_key_holds_everything_a_plan_depends_on() -> None:
    """Other ids, positions, placeholders, rule, direction or geometry never hit."""
    cache = PlanCache()
    layers = two_regions()
    base = {"local": Blocks.at(0, [2, 3]), "remote": Blocks.at(0, [4, 9]), "layers": layers}
    variants = [
        {},
        {"local": Blocks.at(0, [3, 2])},
        {"remote": Blocks.at(0, [4, 8])},
        {"local": Blocks.at(1, [2]), "remote": Blocks.at(1, [4, 9])},
        {"local": Blocks.at(0, [2, 3], placeholder=3)},
        {"uncovered_local": 1},
        {"allow_gaps": True},
        {"destination": Side.REMOTE},
        {"align": "head"},
        {"layers": Layers([LayerPair(name="x", pair=0, local=flat(17), remote=flat(16))])},
    ]
    for number, variant in enumerate(variants):
        values = {**base, **variant}
        lists = [values.pop("local")], [values.pop("remote")]
        plan = plan_layers(values.pop("layers"), *lists, cache=cache, **values)
        assert (cache.misses, cache.hits) == (number + 1, 0)
        assert plan == plan_layers(
            {**base, **variant}["layers"],
            *lists,
            **{k: v for k, v in variant.items() if k not in {"local", "remote", "layers"}},
        )


# Descriptor tables --------------------------------------------------------------------------


def heads_of(order: str, blocks: int, heads: int = 4, at: int = 0) -> KVLayout:
    token, head = (heads * 8, 8) if order == "token" else (8, 32)
    return KVLayout(
        num_blocks=blocks, block_stride=64 * heads, planes=2, plane_stride=32 * heads,
        kernel_tokens=4, token_stride=token, heads=heads, head_stride=head, head_nbytes=8,
        dtype="float16", offset=at,
    )  # fmt: skip


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("heads", [None, HeadSlice(1, 2, 2)], ids=["whole", "slice"])
def test_indices_name_the_rows_that_a_plan_describes(order: str, heads) -> None:
    """A descriptor table's rows at a request's indices are the rows of the request's plan."""
    ours = [
        LayerRef(name=n, group=g, region=r, layout=layout)
        for n, g, r, layout in (
            ("a", 0, 0, heads_of(order, 5)),
            ("b", 0, 1, heads_of(order, 5, at=64)),
            ("c", 1, 1, heads_of("token", 3, at=4096)),
        )
    ]
    theirs = [
        LayerRef(name=n, group=g, region=0, layout=layout)
        for n, g, layout in (
            ("c", 1, heads_of("head", 9)),
            ("b", 0, heads_of("head", 6, at=8192)),
            ("a", 0, heads_of("head", 6, at=16384)),
        )
    ]
    layers = match_layers(ours, theirs, heads=heads)
    lists = (
        [Blocks.at(0, [4, 0]), Blocks.at(2, [1, 2])],
        [Blocks.at(0, [5, 3]), Blocks.at(1, [7, 8, 0])],
    )
    table = DescriptorTable(layers)
    at = [10_000, 20_000], [2**40, 2**41]
    here, there = table.local_rows(at[0], device=1), table.remote_rows(at[1], device=2)
    local, remote = table.indices(*lists)
    assert local.dtype == remote.dtype == np.int32
    wanted = plan_layers(layers, *lists).descriptors(*at)
    np.testing.assert_array_equal(here[local][:, :2], wanted[0][:, :2])
    np.testing.assert_array_equal(there[remote][:, :2], wanted[1][:, :2])
    assert set(here[:, 2].tolist()) == {1}
    assert set(there[:, 2].tolist()) == {2}
    none = [Blocks.at(0, []), Blocks.at(0, [])]
    assert [len(part) for part in table.indices(none, none)] == [0, 0]
    with pytest.raises(InvalidInputError, match="local block id 5 lies outside"):
        table.indices([Blocks.at(0, [5]), none[1]], [Blocks.at(0, [0]), none[1]])
    shared = Blocks.at(0, [1], share=TokenShare(0, 2))
    with pytest.raises(GeometryError, match="different shares"):
        table.indices([Blocks.at(0, [1]), none[1]], [shared, none[1]])


def test_descriptor_tables_refuse_what_has_no_fixed_pieces() -> None:
    """Unequal block sizes have no fixed pieces; a table of too many rows is refused."""
    pair = {"name": "l", "pair": 0}
    with pytest.raises(GeometryError, match="do not pair whole"):
        DescriptorTable(Layers([LayerPair(**pair, local=flat(4, 8), remote=flat(4, 16))]))
    with pytest.raises(InvalidInputError, match="local rows"):
        DescriptorTable(Layers([LayerPair(**pair, local=flat(2**30), remote=flat(4))]))


# Fingerprints -------------------------------------------------------------------------------

PRINT = Fingerprint(
    model="m@1", dtype="bfloat16", kv_dtype="fp8", attention_backends=("FLASH", "MLA")
)


def test_fingerprints_compare_model_dtype_and_quantisation() -> None:
    """Equal geometry of another model is refused at handshake; every difference is named."""
    import attrs

    PRINT.require(Fingerprint.from_wire(PRINT.to_wire()))
    for field, value in (
        ("model", "m@2"),
        ("dtype", "float16"),
        ("kv_dtype", "bfloat16"),
        ("kv_quantization", "per-token"),
        ("attention_backends", ("OTHER",)),
    ):
        other = attrs.evolve(PRINT, **{field: value})
        assert other.digest != PRINT.digest
        with pytest.raises(GeometryError, match=f"{field} .* here and"):
            PRINT.require(other)


def test_75_attention_backends_count_without_order() -> None:
    """Behaviour 75: another set of backends is another hash; their order is none."""
    import attrs

    again = attrs.evolve(PRINT, attention_backends=["MLA", "FLASH", "MLA"])
    assert again.digest == PRINT.digest
    assert attrs.evolve(PRINT, attention_backends=["MLA"]).digest != PRINT.digest


def test_o41_token_order_is_part_of_the_geometry_digest() -> None:
    """Report O41: sides of different token order have different digests, whatever the shape."""
    token = KVLayout(
        num_blocks=4, block_stride=128, kernel_tokens=4, token_stride=32, heads=4, head_stride=8,
        head_nbytes=8, dtype="float16",
    )  # fmt: skip
    head = KVLayout(**{**_fields(token), "token_stride": 8, "head_stride": 32})
    digests = {
        geometry_digest([LayerRef(name="l", group=0, region=0, layout=layout)])
        for layout in (token, head)
    }
    assert len(digests) == 2
    refs = [LayerRef(name=i, group=0, region=0, layout=token) for i in range(2)]
    assert geometry_digest(refs) == geometry_digest(refs[::-1])


@pytest.mark.parametrize("rubbish", [None, {}, {"model": 1}, 5, []])
def test_hostile_fingerprints_are_refused(rubbish) -> None:
    """Rubbish in place of a fingerprint is an InvalidInputError."""
    with pytest.raises(InvalidInputError):
        Fingerprint.from_wire(rubbish)
    good = PRINT.to_wire()
    for key in good:
        if rubbish != good[key]:
            with pytest.raises(InvalidInputError):
                Fingerprint.from_wire(
                    {**good, key: rubbish if key != "attention_backends" else [1]}
                )
    with pytest.raises(InvalidInputError, match="not the string"):
        Fingerprint(model="m", dtype="d", kv_dtype="k", attention_backends="FLASH")


def test_zeroing_stays_inside_the_buffer() -> None:
    """Ranges beyond the memory, and read-only memory, are refused."""
    one = np.array([4]), np.array([4])
    assert zero_ranges(bytearray(8), *one) == 4
    with pytest.raises(InvalidInputError, match="outside the buffer of 7 bytes"):
        zero_ranges(bytearray(7), *one)
    with pytest.raises(InvalidInputError, match="writable"):
        zero_ranges(bytes(8), *one)
