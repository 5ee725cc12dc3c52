"""Reading layouts out of tensors: strides, storage offsets, dtypes, ambiguity."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvxfer.core.layout import (
    Blocks,
    KVLayout,
    KVSpec,
    LayoutKind,
    Sharding,
    StateLayout,
    TokenOrder,
    plan_blocks,
)
from kvxfer.errors import GeometryError, InvalidInputError

SPEC = KVSpec(tokens_per_block=8, heads=4, head_size=16)


def address_of(layout: KVLayout, block: int, plane: int, token: int, head: int) -> int:
    return (
        layout.offset
        + block * layout.block_stride
        + plane * layout.plane_stride
        + token // layout.kernel_tokens * layout.kernel_stride
        + token % layout.kernel_tokens * layout.token_stride
        + head * layout.head_stride
    )


SHAPES = {
    "planes outermost": ((2, 6, 8, 4, 16), ("plane", "block", "token", "head", "dim")),
    "planes in block": ((6, 2, 8, 4, 16), ("block", "plane", "token", "head", "dim")),
    "head major": ((2, 6, 4, 8, 16), ("plane", "block", "head", "token", "dim")),
    "packed": ((6, 4, 8, 32), ("block", "head", "token", "dim")),
    "packed token major": ((6, 8, 4, 32), ("block", "token", "head", "dim")),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_cell_is_where_the_array_says(name: str) -> None:
    """The address of every (block, plane, token, head) equals the array's own indexing."""
    shape, axes = SHAPES[name]
    array = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)
    layout = KVLayout.from_tensor(array, SPEC)
    assert layout.kind is LayoutKind.KV
    flat = array.reshape(-1)
    for block, plane, token, head in np.ndindex(6, 2, 8, 4):
        index = {"block": block, "plane": plane, "token": token, "head": head, "dim": 0}
        if "plane" not in axes:
            index["dim"] = 16 * plane
        at = address_of(layout, block, plane, token, head)
        assert flat[at // 4] == array[tuple(index[axis] for axis in axes)]


def test_permuted_views_are_read_by_stride() -> None:
    """A token-major view of head-major memory has head-major strides."""
    memory = np.zeros((6, 2, 4, 8, 16), np.float16)
    view = memory.transpose(0, 1, 3, 2, 4)
    layout = KVLayout.from_tensor(view, SPEC)
    assert (layout.token_stride, layout.head_stride) == (32, 256)
    assert layout == KVLayout.from_tensor(memory, SPEC)


def test_storage_offset_counts_from_the_outermost_array() -> None:
    """Layers that are slices of one array have its offsets; a region may begin elsewhere."""
    storage = np.zeros((3, 6, 2, 8, 4, 16), np.float16)
    layout = KVLayout.from_tensor(storage[2], SPEC)
    assert layout.offset == 2 * storage[0].nbytes
    base = storage.__array_interface__["data"][0]
    assert KVLayout.from_tensor(storage[2], SPEC, region_address=base + 64).offset == (
        2 * storage[0].nbytes - 64
    )
    with pytest.raises(InvalidInputError, match="64 bytes before its region"):
        KVLayout.from_tensor(storage[0], SPEC, region_address=base + 64)


def test_cross_layer_block_first_storage() -> None:
    """[block, layer, plane, token, head, dim]: each layer is a strided slice of one storage."""
    storage = np.zeros((6, 3, 2, 8, 4, 16), np.float16)
    layouts = [KVLayout.from_tensor(storage[:, layer], SPEC) for layer in range(3)]
    page = storage[0, 0].nbytes
    assert [layout.offset for layout in layouts] == [0, page, 2 * page]
    assert {layout.block_stride for layout in layouts} == {3 * page}
    assert len({layout.geometry for layout in layouts}) == 1
    assert len(set(layouts)) == 3


def test_padded_and_interleaved_pages() -> None:
    """A page followed by padding, or by another layer's page, shows in the block stride only."""
    pages = np.zeros((6, 2 * 8 * 4 * 16 + 24), np.float16)
    view = pages[:, : 2 * 8 * 4 * 16].reshape(6, 2, 8, 4, 16)
    assert view.base is not None
    layout = KVLayout.from_tensor(view, SPEC)
    assert layout.block_stride == pages.strides[0]
    assert layout.block_nbytes == pages.strides[0] - 48


def test_separate_scale_cache() -> None:
    """Scales beside an fp8 cache: one float per token and head, named axes."""
    scales = np.zeros((6, 8, 4), np.float32)
    layout = KVLayout.from_tensor(
        scales,
        KVSpec(tokens_per_block=8, heads=4, axes=("block", "token", "head"), kind=LayoutKind.SCALE),
    )
    assert (layout.head_nbytes, layout.kind) == (4, LayoutKind.SCALE)
    plan = plan_blocks(layout, Blocks.at(0, [1]), layout, Blocks.at(0, [5]))
    assert plan.lists() == ([128], [640], [128])


def test_opaque_pages_move_whole() -> None:
    """Where the inside of a page has no known order, heads are the smallest part that moves."""
    array = np.zeros((64, 2, 32, 64), np.float32)
    spec = KVSpec(tokens_per_block=32, heads=2, head_size=32, opaque=True)
    layout = KVLayout.from_tensor(array, spec)
    assert (layout.tokens_per_block, layout.cell_tokens) == (32, 32)
    assert layout.head_nbytes == 32 * 64 * 4
    assert layout.kind is LayoutKind.KV
    plan = plan_blocks(layout, Blocks.at(0, [3]), layout, Blocks.at(0, [5]))
    assert len(plan) == 1
    half = KVLayout.from_tensor(
        np.zeros((64, 2, 16, 64), np.float32),
        KVSpec(tokens_per_block=16, heads=2, head_size=32, opaque=True),
    )
    with pytest.raises(GeometryError, match="tokens per cell 32 and 16"):
        plan_blocks(layout, Blocks.at(0, [0]), half, Blocks.at(0, [0, 1]))
    with pytest.raises(GeometryError, match="unsupported shape"):
        KVLayout.from_tensor(np.zeros((64, 32, 2, 64), np.float32), spec)


def test_compressed_caches_count_tokens_per_cell() -> None:
    """A cache that keeps one entry for four tokens pairs by tokens and moves by entries."""
    layout = KVLayout(
        num_blocks=4,
        block_stride=160,
        kernel_tokens=16,
        token_stride=10,
        head_nbytes=10,
        cell_tokens=4,
        dtype="uint8",
        kind=LayoutKind.KEY_ONLY,
    )
    assert layout.tokens_per_block == 64
    smaller = KVLayout(**{**_fields(layout), "kernel_tokens": 8, "block_stride": 80})
    plan = plan_blocks(layout, Blocks.at(1, [2]), smaller, Blocks.at(2, [1, 3]))
    assert plan.lists() == ([320, 400], [80, 240], [80, 80])


def _fields(layout: KVLayout) -> dict:
    return {**layout.to_wire(), "kind": layout.kind}


def test_kernel_axis_by_name() -> None:
    """[block, kernel, plane, head, token, dim]: kernel blocks with their own K and V, named."""
    array = np.zeros((4, 2, 2, 3, 8, 16), np.float16)
    spec = KVSpec(
        tokens_per_block=16,
        heads=3,
        head_size=16,
        axes=("block", "kernel", "plane", "head", "token", "dim"),
    )
    layout = KVLayout.from_tensor(array, spec)
    assert (layout.kernel_blocks, layout.kernel_tokens) == (2, 8)
    assert layout.kernel_stride == array.strides[1]


@pytest.mark.parametrize(
    ("shape", "spec", "text"),
    [
        ((2, 2, 8, 4, 16), SPEC, "ambiguous.*plane.*block.*or"),
        ((6, 2, 4, 4, 16), KVSpec(tokens_per_block=4, heads=4, head_size=16), "ambiguous"),
        ((6, 2, 8, 4, 16), None, "ambiguous without a spec"),
        ((6, 2, 7, 4, 16), SPEC, "unsupported shape"),
        ((6, 3, 8, 4, 16), SPEC, "unsupported shape"),
        ((6, 2, 8, 4, 32), SPEC, "unsupported shape"),
        ((6, 8), SPEC, "unsupported shape"),
    ],
)
def test_ambiguous_and_unknown_shapes_are_refused(shape, spec, text) -> None:
    """A shape with two readings, or none, is an error that says what would settle it."""
    with pytest.raises(GeometryError, match=text) as caught:
        KVLayout.from_tensor(np.zeros(shape, np.float16), spec)
    assert caught.value.next_step


def test_the_spec_settles_ambiguity() -> None:
    """num_blocks tells planes from two blocks; order tells tokens from heads; axes name all."""
    two = np.zeros((2, 2, 8, 4, 16), np.float16)
    for axes in (("plane", "block"), ("block", "plane")):
        layout = KVLayout.from_tensor(
            two,
            KVSpec(tokens_per_block=8, heads=4, head_size=16, axes=(*axes, "token", "head", "dim")),
        )
        assert (layout.plane_stride > layout.block_stride) is (axes[0] == "plane")
    three = np.zeros((2, 3, 8, 4, 16), np.float16)
    assert KVLayout.from_tensor(three, SPEC).num_blocks == 3
    square = np.zeros((6, 2, 4, 4, 16), np.float16)
    strides = {
        order: KVLayout.from_tensor(
            square, KVSpec(tokens_per_block=4, heads=4, head_size=16, order=order)
        ).token_stride
        for order in TokenOrder
    }
    assert strides == {TokenOrder.TOKEN_MAJOR: 128, TokenOrder.HEAD_MAJOR: 32}


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"tokens_per_block": 0}, "tokens_per_block"),
        ({"tokens_per_block": 8, "kernel_tokens": 3}, "kernel_tokens=3 does not divide"),
        ({"tokens_per_block": 8, "axes": ("block", "page")}, "axes must be different names"),
        ({"tokens_per_block": 8, "axes": ("block", "block")}, "axes must be different names"),
    ],
)
def test_specs_are_checked(keywords, text) -> None:
    """A spec that contradicts itself is refused where it is made."""
    with pytest.raises(InvalidInputError, match=text):
        KVSpec(**keywords)


def test_other_objects_and_negative_strides_are_refused() -> None:
    """Lists, and arrays that run backwards, have no layout."""
    with pytest.raises(InvalidInputError, match="neither a torch tensor nor a numpy array"):
        KVLayout.from_tensor([[1]], SPEC)
    backwards = np.zeros((6, 2, 8, 4, 16), np.float16)[::-1]
    with pytest.raises(InvalidInputError, match="negative strides"):
        KVLayout.from_tensor(backwards, SPEC)


def test_overlapping_strides_are_refused() -> None:
    """A broadcast or overlapping view would write bytes twice."""
    base = np.zeros((2, 8, 4, 16), np.float16)
    with pytest.raises(GeometryError, match="unsupported shape"):
        KVLayout.from_tensor(np.broadcast_to(base, (6, *base.shape)), SPEC)
    with pytest.raises(GeometryError, match=r"token_stride=2 overlaps the 4 bytes"):
        KVLayout(
            num_blocks=2,
            block_stride=64,
            kernel_tokens=4,
            token_stride=2,
            head_nbytes=4,
            dtype="float16",
        )


def test_layout_needs_no_torch_and_no_transport() -> None:
    """Layout and topology stand alone: numpy and attrs, nothing else of the package, no torch."""
    code = (
        "import sys, kvxfer.core.layout, kvxfer.core.topology\n"
        "ours = sorted(m for m in sys.modules if m.startswith('kvxfer.'))\n"
        "assert all(m in ('kvxfer.core', 'kvxfer.errors', 'kvxfer.core.topology')"
        " or m.startswith('kvxfer.core.layout') for m in ours), ours\n"
        "banned = {'torch', 'zmq', 'tenacity', 'msgspec', 'entrypoints', 'rich'}\n"
        "assert not banned & set(sys.modules), banned & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# torch --------------------------------------------------------------------------------------

try:
    import torch
except ImportError:  # the suite also runs where torch is not installed
    torch = None


if torch is not None:

    @pytest.mark.parametrize(
        ("dtype", "name", "itemsize"),
        [
            (torch.bfloat16, "bfloat16", 2),
            (torch.float16, "float16", 2),
            (torch.float8_e4m3fn, "float8_e4m3fn", 1),
            (torch.float8_e5m2, "float8_e5m2", 1),
            (torch.uint8, "uint8", 1),
            (torch.float32, "float32", 4),
        ],
    )
    def test_torch_tensors_of_any_dtype(dtype, name: str, itemsize: int) -> None:
        """bf16 and fp8 have no numpy form: strides, offset and item size come from torch itself."""
        storage = torch.zeros(3, 6, 2, 8, 4, 16, dtype=dtype)
        layout = KVLayout.from_tensor(storage[1], SPEC)
        assert layout.dtype == name
        assert layout.head_nbytes == 16 * itemsize
        assert layout.offset == storage[0].numel() * itemsize
        assert layout.block_stride == 2 * 8 * 4 * 16 * itemsize
        view = storage[:, :, :, :, 2:3].permute(1, 0, 2, 3, 4, 5)[:, 2]
        sliced = KVLayout.from_tensor(view, KVSpec(tokens_per_block=8, heads=1, head_size=16))
        assert sliced.offset == 2 * layout.offset + 2 * 16 * itemsize

    def test_torch_and_numpy_agree() -> None:
        """The same memory seen through both gives the same layout."""
        tensor = torch.zeros(6, 2, 8, 4, 16, dtype=torch.float16)
        assert KVLayout.from_tensor(tensor, SPEC) == KVLayout.from_tensor(tensor.numpy(), SPEC)

    def test_torch_states() -> None:
        """State parts of different dtypes, one tensor each."""
        state = StateLayout.from_tensors(
            {
                "conv": torch.zeros(5, 24, 3, dtype=torch.bfloat16),
                "ssm": torch.zeros(5, 8, 16, 4, dtype=torch.float32),
            },
            sharding={"conv": Sharding.SHARDED, "ssm": Sharding.SHARDED},
        )
        conv, ssm = state.parts
        assert (conv.units, conv.unit_nbytes, conv.dtype) == (24, 6, "bfloat16")
        assert (ssm.units, ssm.unit_nbytes, ssm.dtype) == (8, 256, "float32")


def test_state_unit_axis() -> None:
    """A convolution state kept as [slot, width, channel] is cut along its channels, row by row."""
    state = StateLayout.from_tensors(
        {"conv": np.zeros((5, 3, 24), np.float16)},
        sharding={"conv": Sharding.SHARDED},
        unit_axis={"conv": 2},
    )
    (conv,) = state.parts
    assert (conv.rows, conv.row_stride, conv.units, conv.unit_stride) == (3, 48, 24, 2)
    with pytest.raises(InvalidInputError, match="unit_axis 3"):
        StateLayout.from_tensors(
            {"conv": np.zeros((5, 3, 24), np.float16)},
            sharding={"conv": Sharding.SHARDED},
            unit_axis={"conv": 3},
        )
    with pytest.raises(InvalidInputError, match="sharding lacks part 'conv'"):
        StateLayout.from_tensors({"conv": np.zeros((5, 3, 24), np.float16)}, sharding={})
    with pytest.raises(GeometryError, match="not contiguous inside a unit"):
        StateLayout.from_tensors(
            {"conv": np.zeros((5, 3, 24), np.float16)[:, :, ::2]},
            sharding={"conv": Sharding.REPLICATED},
        )


def test_state_rows_in_several_axes() -> None:
    """Axes before the unit axis count as one run of rows if they are one, else are refused."""
    parts = {"conv": np.zeros((5, 2, 3, 24), np.float16)}
    keywords = {"sharding": {"conv": Sharding.SHARDED}, "unit_axis": {"conv": 3}}
    (conv,) = StateLayout.from_tensors(parts, **keywords).parts
    assert (conv.rows, conv.row_stride) == (6, 48)
    gaps = {"conv": np.zeros((5, 2, 4, 24), np.float16)[:, :, :3]}
    with pytest.raises(GeometryError, match="several row axes"):
        StateLayout.from_tensors(gaps, **keywords)
    with pytest.raises(GeometryError, match="holds no slots"):
        StateLayout.from_tensors({"conv": np.zeros(5, np.float16)}, sharding=keywords["sharding"])
