"""The planner against the oracle, over random layouts of every class."""

from __future__ import annotations

import collections
import math

import layout_oracle as oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvxfer.core.layout import (
    Blocks,
    HeadSlice,
    KVLayout,
    LayerPair,
    Layers,
    LayoutKind,
    Sharding,
    Side,
    StateLayout,
    StatePart,
    TokenShare,
    plan_blocks,
    plan_layers,
)
from kvxfer.errors import InvalidInputError

CLASSES = ("equal", "head_slice", "gcd", "order_mix", "nested", "state", "share")
AXES = ("block", "plane", "kernel", "token", "head")
ITEMSIZE = 2


def layout_of(memory: oracle.Memory, **changes: int) -> KVLayout:
    block, plane, kernel, token, head = memory.strides
    values = {
        "num_blocks": memory.blocks,
        "block_stride": block,
        "planes": memory.planes,
        "plane_stride": plane,
        "kernel_blocks": memory.kernels,
        "kernel_stride": kernel,
        "kernel_tokens": memory.tokens,
        "token_stride": token,
        "heads": memory.heads,
        "head_stride": head,
        "head_nbytes": memory.nbytes,
        "offset": memory.offset,
        "dtype": "float16",
    }
    return KVLayout(**{**values, **changes})


@st.composite
def memories(draw, counts: dict[str, int], nbytes: int, order: tuple[str, ...] | None = None):
    """Any nesting of the axes, with or without padding between them."""
    order = order or tuple(draw(st.permutations(AXES)))
    extent, strides = nbytes, {}
    for axis in order:  # innermost first
        padding = draw(st.sampled_from((0, 0, 0, 1, 3))) * ITEMSIZE
        strides[axis] = extent + padding
        extent = strides[axis] * counts[axis]
    return oracle.Memory(
        blocks=counts["block"],
        planes=counts["plane"],
        kernels=counts["kernel"],
        tokens=counts["token"],
        heads=counts["head"],
        nbytes=nbytes,
        strides=tuple(strides[axis] for axis in AXES),
        offset=draw(st.sampled_from((0, 0, 6, 64))),
        slack=draw(st.sampled_from((0, 10))),
    )


TOKEN_MAJOR = ("head", "token", "kernel", "plane", "block")
HEAD_MAJOR = ("token", "head", "kernel", "plane", "block")


NESTED = (
    ((2, 2), (1, 4)),
    ((1, 4), (2, 2)),
    ((2, 2), (2, 2)),
    ((4, 1), (2, 2)),
    ((2, 2), (4, 1)),
    ((3, 2), (2, 3)),
    ((2, 2), (3, 2)),
    ((2, 3), (1, 4)),
    ((4, 2), (2, 4)),
    ((2, 4), (4, 2)),
)
"""(kernel blocks, tokens in each) of both sides: nesting, not nesting, and of unequal blocks."""


@st.composite
def cases(draw, kinds: tuple[str, ...] = CLASSES, nested=NESTED):
    """``(class, local, remote, local blocks, remote blocks, heads)``; reading local <- remote."""
    kind = draw(st.sampled_from(kinds))
    planes = draw(st.integers(1, 2))
    nbytes = draw(st.integers(2, 4)) * ITEMSIZE
    heads = [draw(st.integers(1, 3))] * 2
    tokens = [draw(st.sampled_from((1, 2, 4, 6)))] * 2
    kernels = [1, 1]
    orders: list[tuple[str, ...] | None] = [None, None]
    window: HeadSlice | None = None
    if kind == "equal":
        orders = [draw(st.sampled_from((TOKEN_MAJOR, HEAD_MAJOR)))] * 2
    elif kind == "head_slice":
        heads = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
        count = draw(st.integers(1, min(heads)))
        window = HeadSlice(
            draw(st.integers(0, heads[0] - count)), draw(st.integers(0, heads[1] - count)), count
        )
    elif kind == "gcd":
        tokens = list(draw(st.sampled_from(((2, 4), (4, 6), (6, 4), (3, 5), (2, 6), (6, 1)))))
    elif kind == "order_mix":
        orders = draw(st.permutations((TOKEN_MAJOR, HEAD_MAJOR)))
        heads, tokens = [draw(st.integers(2, 3))] * 2, [draw(st.sampled_from((2, 4)))] * 2
    elif kind == "nested":
        (kernels[0], tokens[0]), (kernels[1], tokens[1]) = draw(st.sampled_from(nested))
    elif kind == "state":
        tokens = [1, 1]
    else:
        tokens = list(draw(st.sampled_from(((2, 2), (2, 4), (4, 2), (3, 3)))))
    sides = []
    for side in (0, 1):
        counts = {
            "block": draw(st.integers(4, 6)),
            "plane": planes,
            "kernel": kernels[side],
            "token": tokens[side],
            "head": heads[side],
        }
        sides.append(draw(memories(counts, nbytes, orders[side])))
    local, remote = sides
    n_local = 1 if kind == "state" else draw(st.integers(1, 3))
    local_start = draw(st.integers(0, 2))
    begin = local_start * local.tokens_per_block
    end = begin + n_local * local.tokens_per_block
    shares: list[TokenShare | None] = [None, None]
    if kind == "share":  # tokens are dealt out to ranks, on one side or on both
        size = draw(st.sampled_from((2, 3)))
        turn = draw(st.sampled_from((1, 2, 4)))
        shares[1] = TokenShare(draw(st.integers(0, size - 1)), size, turn)
        if draw(st.booleans()):
            shares[0] = TokenShare(draw(st.integers(0, 1)), 2, draw(st.sampled_from((1, 2))))
            end = 2 * end + 2
        last = (end // (turn * size) + 1) * turn
        needed = -(-last // remote.tokens_per_block)
        short = draw(st.integers(0, 1))  # the source may end earlier
        remote_start, n_remote = 0, min(max(needed - short, 1), remote.blocks)
    elif kind == "state":
        remote_start, n_remote = local_start, 1
    else:
        lead = draw(st.integers(0, 1))  # the source may begin earlier ...
        remote_start = max(begin // remote.tokens_per_block - lead, 0)
        short = draw(st.integers(0, 1)) if kind == "gcd" else 0  # ... and end earlier
        stop = max(-(-end // remote.tokens_per_block) - short, begin // remote.tokens_per_block + 1)
        n_remote = min(stop - remote_start, remote.blocks)
    local_ids = draw(st.permutations(range(local.blocks)))[:n_local]
    remote_ids = draw(st.permutations(range(remote.blocks)))[:n_remote]
    return (
        kind,
        local,
        remote,
        (local_start, local_ids, shares[0]),
        (remote_start, remote_ids, shares[1]),
        window,
    )


def tokens_of(memory: oracle.Memory, start: int, ids: list[int], share: TokenShare | None):
    where = oracle.place(list(range(start, start + len(ids))), ids, memory.tokens_per_block)
    if share is None:
        return where
    turn, size, rank = share.interleave, share.size, share.rank
    return {((k // turn) * size + rank) * turn + k % turn: at for k, at in where.items()}


def fill(memory: oracle.Memory, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, memory.total, np.uint8)


def check(case, *, write: bool) -> None:
    _, local, remote, ours, theirs, window = case
    source_is_remote = not write
    src, dst = (remote, local) if source_is_remote else (local, remote)
    buffers = {"src": fill(src, 1), "dst": fill(dst, 2)}
    count = window.count if window else local.heads
    first, second = (window.local, window.remote) if window else (0, 0)
    pairs = [(first + i, second + i) for i in range(count)]
    if not source_is_remote:
        pairs = [(theirs_head, ours_head) for ours_head, theirs_head in pairs]
    our_tokens = tokens_of(local, *ours)
    their_tokens = tokens_of(remote, *theirs)
    dst_tokens, src_tokens = (
        (our_tokens, their_tokens) if source_is_remote else (their_tokens, our_tokens)
    )
    expected, marks = oracle.naive_copy(
        dst,
        buffers["dst"],
        src,
        buffers["src"],
        dst_tokens=dst_tokens,
        src_tokens=src_tokens,
        heads=pairs,
    )
    local_blocks = Blocks.at(ours[0], ours[1], share=ours[2])
    remote_blocks = Blocks.at(theirs[0], theirs[1], share=theirs[2])

    def run(local_layout: KVLayout, remote_layout: KVLayout):
        keywords = {"uncovered_local": 3} if source_is_remote else {"uncovered_remote": 6}
        return plan_blocks(
            local_layout,
            local_blocks,
            remote_layout,
            remote_blocks,
            heads=window,
            destination=Side.LOCAL if source_is_remote else Side.REMOTE,
            allow_gaps=True,
            **keywords,
        )

    def outcome(plan):
        return oracle.execute(
            *plan.lists(), buffers["dst"], buffers["src"], dst_is_local=source_is_remote
        )

    local_layout, remote_layout = layout_of(local), layout_of(remote)
    plan = run(local_layout, remote_layout)
    for form in (plan, plan.merged()):
        out, written = outcome(form)
        assert written.max(initial=0) <= 1, "a byte is written twice"
        np.testing.assert_array_equal(written, marks)
        np.testing.assert_array_equal(out, expected)
    assert plan.nbytes == int(marks.sum())
    # The report names exactly the tokens of the destination that the source does not hold.
    dest_ids = ours[1] if source_is_remote else theirs[1]
    cells = {at: token for token, at in dst_tokens.items()}
    reported = {
        cells[int(block), t]
        for block, begin, end in zip(
            plan.uncovered.ids, plan.uncovered.start, plan.uncovered.stop, strict=True
        )
        for t in range(int(begin), int(end))
    }
    missing = set(dst_tokens) - set(src_tokens)
    share = theirs[2] if source_is_remote else ours[2]
    if share is not None:  # another rank of the source holds the others
        missing = {t for t in missing if t // share.interleave % share.size == share.rank}
    assert reported == missing
    assert [int(dest_ids[i]) for i in plan.uncovered.index] == plan.uncovered.ids.tolist()
    # Every stride matters: one element more or less, where the axis is used, changes the outcome.
    used = {
        "planes": set(range(local.planes)),
        "heads": {h for pair in pairs for h in pair},
    }
    moved = [(dst_tokens[t], src_tokens[t]) for t in dst_tokens if t in src_tokens]
    for memory, layout, at in (
        (dst, local_layout if source_is_remote else remote_layout, [m[0] for m in moved]),
        (src, remote_layout if source_is_remote else local_layout, [m[1] for m in moved]),
    ):
        is_local = layout is local_layout
        indices = {
            "block_stride": {block for block, _ in at},
            "plane_stride": used["planes"] if at else set(),
            "kernel_stride": {t // memory.tokens for _, t in at},
            "token_stride": {t % memory.tokens for _, t in at},
            "head_stride": {p[0 if memory is dst else 1] for p in pairs} if at else set(),
        }
        for field, values in indices.items():
            if not any(values):
                continue  # only index 0 is used: the stride is not
            for change in (-ITEMSIZE, ITEMSIZE):
                try:
                    wrong = layout_of(memory, **{field: getattr(layout, field) + change})
                    mutant = outcome(
                        run(
                            wrong if is_local else local_layout,
                            remote_layout if is_local else wrong,
                        )
                    )
                except (InvalidInputError, IndexError):
                    continue
                assert not np.array_equal(mutant[0], expected), f"{field} {change:+} unnoticed"


def drive(strategy, write: bool, examples: int) -> collections.Counter[str]:
    seen: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(strategy)
    def examine(case) -> None:
        seen[case[0]] += 1
        check(case, write=write)

    examine()
    return seen


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_plan_does_what_logical_indexing_does(write: bool) -> None:
    """Executing a plan equals the naive copy, touches no byte outside, covers each byte once,
    reports the rest, and no stride can be off by one element; each class is at least 5%."""
    seen = drive(cases(), write, 50)
    for kind in CLASSES:  # hypothesis alone would let some classes crowd out others
        seen += drive(cases((kind,)), write, 30)
    total = sum(seen.values())
    assert total >= 260
    for kind in CLASSES:
        assert seen[kind] >= 0.05 * total, f"{kind}: {seen[kind]} of {total}"


@pytest.mark.parametrize("kind", CLASSES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_layouts_of_each_class(kind: str, data) -> None:
    """The same with other examples in every run; --hypothesis-show-statistics lists the classes."""
    event(f"class: {kind}")
    check(data.draw(cases((kind,))), write=data.draw(st.booleans()))


@pytest.mark.parametrize("nested", NESTED, ids=str)
def test_every_nesting_of_kernel_blocks(nested) -> None:
    """The same for each way in which kernel blocks of two sides lie in each other or do not."""
    drive(cases(("nested",), (nested,)), False, 15)


def test_the_oracle_imports_nothing_from_the_planner() -> None:
    """The oracle's namespace holds numpy and nothing of kvxfer."""
    names = {
        getattr(value, "__module__", None) or getattr(value, "__name__", "")
        for value in vars(oracle).values()
    }
    assert not [name for name in names if str(name).startswith("kvxfer")]


@st.composite
def states(draw):
    """Two ranks' states of several parts: sharded ones cut by unit, replicated ones whole."""
    layouts, memories_of = [[], []], [[], []]
    slices: list[HeadSlice | None] = []
    slots = [draw(st.integers(2, 4)), draw(st.integers(2, 4))]
    for number in range(draw(st.integers(1, 3))):
        sharded = draw(st.booleans())
        rows, nbytes = draw(st.integers(1, 3)), draw(st.integers(1, 3)) * ITEMSIZE
        units = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
        if sharded:
            count = draw(st.integers(1, min(units)))
            cut = HeadSlice(
                draw(st.integers(0, units[0] - count)),
                draw(st.integers(0, units[1] - count)),
                count,
            )
        else:
            units[1] = units[0]
            cut = HeadSlice(0, 0, units[0])
        slices.append(cut)
        for side in (0, 1):
            order = draw(st.sampled_from((("head", "plane"), ("plane", "head"))))
            counts = {
                "block": slots[side],
                "plane": rows,
                "kernel": 1,
                "token": 1,
                "head": units[side],
            }
            memory = draw(memories(counts, nbytes, (*order, "token", "kernel", "block")))
            layouts[side].append(
                StatePart(
                    name=f"part{number}",
                    slot_stride=memory.strides[0],
                    rows=rows,
                    row_stride=memory.strides[1],
                    units=units[side],
                    unit_stride=memory.strides[4],
                    unit_nbytes=nbytes,
                    dtype="float16",
                    sharding=Sharding.SHARDED if sharded else Sharding.REPLICATED,
                )
            )
            memories_of[side].append(memory)
    slot = [draw(st.integers(0, slots[0] - 1)), draw(st.integers(0, slots[1] - 1))]
    return layouts, memories_of, slices, slots, slot


@settings(max_examples=120, deadline=None, derandomize=True)
@given(states())
def test_state_moves_as_logical_indexing_says(case) -> None:
    """Every part of a recurrent state, sharded or replicated, lands byte for byte."""
    parts, memory, slices, slots, slot = case
    # Parts one behind another in one region each.
    starts = []
    for side in (0, 1):
        begin, laid = 0, []
        for mem in memory[side]:
            laid.append((begin + mem.offset, begin))
            begin += mem.total
        starts.append((laid, begin))
    import attrs

    layouts = [
        StateLayout(
            num_slots=slots[side],
            parts=[
                attrs.evolve(part, offset=at)
                for part, (at, _) in zip(parts[side], starts[side][0], strict=True)
            ],
        )
        for side in (0, 1)
    ]
    buffers = [
        np.random.default_rng(side).integers(0, 256, starts[side][1], np.uint8) for side in (0, 1)
    ]
    pair = LayerPair(name="ssm", pair=0, local=layouts[0], remote=layouts[1], units=tuple(slices))
    plan = plan_layers(Layers([pair]), [Blocks.at(7, [slot[0]])], [Blocks.at(3, [slot[1]])])
    expected, marks = buffers[0].copy(), np.zeros(starts[0][1], np.int64)
    for index, cut in enumerate(slices):
        ours, theirs = memory[0][index], memory[1][index]
        here = slice(starts[0][0][index][1], starts[0][0][index][1] + ours.total)
        there = slice(starts[1][0][index][1], starts[1][0][index][1] + theirs.total)
        expected[here], marks[here] = oracle.naive_copy(
            ours,
            buffers[0][here],
            theirs,
            buffers[1][there],
            dst_tokens={0: (slot[0], 0)},
            src_tokens={0: (slot[1], 0)},
            heads=[(cut.local + i, cut.remote + i) for i in range(cut.count)],
        )
    _, local, remote, size = plan.lists()
    out, written = oracle.execute(local, remote, size, buffers[0], buffers[1])
    np.testing.assert_array_equal(written, marks)
    np.testing.assert_array_equal(out, expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(((2, 2), (2, 3), (4, 2))),
)
def test_gaps_and_placeholders_pair_by_position(ours, theirs, sizes) -> None:
    """Lists with gaps and placeholders move exactly the tokens that both sides really hold."""

    def build(entries):
        seen: dict[int, bool] = {}
        for position, hole in entries:
            seen.setdefault(position, hole)
        positions = sorted(seen)
        ids = [99 if seen[p] else i for i, p in enumerate(positions)]
        return positions, ids

    def tokens(positions, ids, per_block):
        real = [(p, b) for p, b in zip(positions, ids, strict=True) if b != 99]
        return oracle.place([p for p, _ in real], [b for _, b in real], per_block)

    memory = [
        oracle.Memory(6, 1, 1, per_block, 1, 4, (4 * per_block, 0, 0, 4, 4), 0, 0)
        for per_block in sizes
    ]
    lists = [build(ours), build(theirs)]
    blocks = [Blocks.placed(*entry, placeholder=99) for entry in lists]
    buffers = [fill(memory[0], 3), fill(memory[1], 4)]
    expected, marks = oracle.naive_copy(
        memory[0],
        buffers[0],
        memory[1],
        buffers[1],
        dst_tokens=tokens(*lists[0], sizes[0]),
        src_tokens=tokens(*lists[1], sizes[1]),
        heads=[(0, 0)],
    )
    plan = plan_blocks(
        layout_of(memory[0]),
        blocks[0],
        layout_of(memory[1]),
        blocks[1],
        uncovered_local=6,
        allow_gaps=True,
    )
    out, written = oracle.execute(*plan.lists(), *buffers)
    np.testing.assert_array_equal(written, marks)
    np.testing.assert_array_equal(out, expected)
    missing = set(tokens(*lists[0], sizes[0])) - set(tokens(*lists[1], sizes[1]))
    assert plan.uncovered.tokens == len(missing)


def test_pieces_are_as_long_as_both_sides_allow() -> None:
    """A plan of two equal contiguous caches is one piece per plane and block, whatever the order
    inside: nothing is cut that runs on."""
    for order in (TOKEN_MAJOR, HEAD_MAJOR):
        counts = {"block": 4, "plane": 2, "kernel": 2, "token": 3, "head": 2}
        extent, strides = 4, {}
        for axis in order:
            strides[axis] = extent
            extent *= counts[axis]
        memory = oracle.Memory(4, 2, 2, 3, 2, 4, tuple(strides[a] for a in AXES), 0, 0)
        layout = layout_of(memory)
        plan = plan_blocks(layout, Blocks.at(0, [2, 0]), layout, Blocks.at(0, [1, 3]))
        assert plan.lists()[2] == [math.prod(counts.values()) // 4 * 4] * 2
    assert LayoutKind.KV is layout.kind
