"""From a tensor's shape and strides to a ``KVLayout``: exactly one reading, or an error."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.core.layout._checks import is_count, is_name
from kvxfer.core.layout.kv import KVLayout, LayoutKind
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AXES", "KVSpec", "TensorFacts", "TokenOrder", "layout_of_strides", "tensor_facts"]

AXES = ("plane", "block", "kernel", "token", "head", "dim", "skip")
"""Names for ``KVSpec.axes``. ``skip`` is an axis of size 1 without meaning."""


class TokenOrder(enum.Enum):
    """Which of token and head comes first in the shape."""

    TOKEN_MAJOR = "token_major"  # noqa: S105 - no password
    """[..., token, head, dim], "NHD"."""
    HEAD_MAJOR = "head_major"
    """[..., head, token, dim], "HND"."""


_count = v.optional(is_count)


@attrs.frozen(kw_only=True)
class KVSpec:
    """What the engine knows about a cache tensor beyond its shape.

    The more is given, the fewer readings a shape has; a shape with two readings is refused.

    Attributes:
        tokens_per_block: tokens in one block as the request's block ids count them.
        heads: KV heads on this rank.
        head_size: elements of one head of one token, of K alone.
        planes: 2 for keys and values, 1 for latent and key-only caches; None for either.
        order: whether token or head comes first; needed where both axes are equally long.
        kernel_tokens: tokens in a kernel block, if those are smaller than blocks.
        num_blocks: blocks, as ids count them; tells a plane axis from two blocks.
        axes: names the axes of the shape outright (see ``AXES``); then nothing is guessed.
        opaque: the inside of a (block, head) page has no known order: move it whole.
        kind: what the cells hold; None takes KV for two planes and LATENT for one.
        dtype: name to use instead of the tensor's (an fp8 cache kept as uint8).
    """

    tokens_per_block: int = attrs.field(validator=is_count)
    heads: int | None = attrs.field(default=None, validator=_count)
    head_size: int | None = attrs.field(default=None, validator=_count)
    planes: int | None = attrs.field(default=None, validator=_count)
    order: TokenOrder | None = attrs.field(
        default=None, validator=v.optional(v.instance_of(TokenOrder))
    )
    kernel_tokens: int | None = attrs.field(default=None, validator=_count)
    num_blocks: int | None = attrs.field(default=None, validator=_count)
    axes: tuple[str, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )
    opaque: bool = attrs.field(default=False, validator=v.instance_of(bool))
    kind: LayoutKind | None = attrs.field(
        default=None, validator=v.optional(v.instance_of(LayoutKind))
    )
    dtype: str | None = attrs.field(default=None, validator=v.optional(is_name))

    def __attrs_post_init__(self) -> None:
        if self.kernel_tokens is not None and self.tokens_per_block % self.kernel_tokens:
            raise InvalidInputError(
                f"kernel_tokens={self.kernel_tokens} does not divide "
                f"tokens_per_block={self.tokens_per_block}"
            )
        if self.axes is not None:
            unknown = [axis for axis in self.axes if axis not in AXES]
            named = [axis for axis in self.axes if axis != "skip"]
            if unknown or len(set(named)) != len(named):
                raise InvalidInputError(
                    f"axes must be different names out of {AXES}, not {self.axes}"
                )


_TEMPLATES: tuple[tuple[str, ...], ...] = (
    ("plane", "block", "token", "head", "dim"),
    ("plane", "block", "head", "token", "dim"),
    ("block", "plane", "token", "head", "dim"),
    ("block", "plane", "head", "token", "dim"),
    ("block", "token", "head", "dim"),
    ("block", "head", "token", "dim"),
    ("plane", "block", "token", "dim"),
    ("block", "plane", "token", "dim"),
    ("block", "token", "dim"),
)
"""The shapes engines use today. Anything else needs ``KVSpec.axes``."""


@attrs.frozen(kw_only=True)
class TensorFacts:
    """What a tensor says about its memory; strides and offset in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    offset: int


def tensor_facts(tensor: Any, region_address: int | None) -> TensorFacts:
    """Shape, strides and place of a torch tensor or numpy array; torch is never imported.

    The offset counts from ``region_address``, or from the start of the tensor's storage (of the
    outermost array for numpy).

    Raises:
        InvalidInputError: neither kind of object, negative strides, or it begins before its region.
    """
    torch_tensor: Any = getattr(sys.modules.get("torch"), "Tensor", None)
    if isinstance(torch_tensor, type) and isinstance(tensor, torch_tensor):
        source: Any = tensor
        itemsize = int(source.element_size())
        shape = tuple(int(n) for n in source.shape)
        strides = tuple(int(s) * itemsize for s in source.stride())
        dtype = str(source.dtype).removeprefix("torch.")
        address = int(source.data_ptr())
        offset = int(source.storage_offset()) * itemsize
    elif hasattr(tensor, "__array_interface__") and hasattr(tensor, "strides"):
        itemsize = int(tensor.dtype.itemsize)
        shape, strides = tuple(tensor.shape), tuple(tensor.strides)
        dtype = str(tensor.dtype.name)
        address = int(tensor.__array_interface__["data"][0])
        base = tensor
        while hasattr(base.base, "strides"):
            base = base.base
        offset = address - int(base.__array_interface__["data"][0])
    else:
        raise InvalidInputError(
            f"a {type(tensor).__name__} is neither a torch tensor nor a numpy array",
            next_step="describe it with KVLayout.from_strides",
        )
    if region_address is not None:
        offset = address - region_address
    if offset < 0:
        raise InvalidInputError(f"the tensor begins {-offset} bytes before its region")
    if any(stride < 0 for stride in strides):
        raise InvalidInputError(f"the tensor has negative strides: {strides} bytes")
    return TensorFacts(shape=shape, strides=strides, itemsize=itemsize, dtype=dtype, offset=offset)


def layout_of_strides(
    shape: Sequence[int],
    strides: Sequence[int],
    spec: KVSpec | None,
    *,
    itemsize: int,
    dtype: str,
    offset: int,
) -> KVLayout:
    """See ``KVLayout.from_strides``."""
    shape, strides = tuple(shape), tuple(strides)
    text = f"shape {shape}, strides {strides} bytes, {dtype}"
    if len(shape) != len(strides):
        raise InvalidInputError(f"{len(shape)} sizes but {len(strides)} strides: {text}")
    for size, stride in zip(shape, strides, strict=True):
        if type(size) is not int or size < 1 or type(stride) is not int or stride < 0:
            raise InvalidInputError(
                f"sizes must be ints of at least 1 and strides of at least 0: {text}"
            )
    if spec is None:
        raise GeometryError(
            f"ambiguous without a spec: {text}", next_step="pass a KVSpec of this layer"
        )
    facts = TensorFacts(shape=shape, strides=strides, itemsize=itemsize, dtype=dtype, offset=offset)
    readings: dict[KVLayout, tuple[str, ...]] = {}
    problems: list[str] = []
    for axes in _TEMPLATES if spec.axes is None else (spec.axes,):
        if len(axes) != len(shape):
            problems.append(f"{len(axes)} axes are named, the shape has {len(shape)}")
            continue
        layout = _read(axes, facts, spec)
        if isinstance(layout, str):
            problems.append(f"as {', '.join(axes)}: {layout}")
        else:
            readings.setdefault(layout, axes)
    if len(readings) == 1:
        return next(iter(readings))
    if readings:
        ways = " or ".join(str(axes) for axes in readings.values())
        raise GeometryError(
            f"ambiguous: {text} reads as {ways} under {spec}",
            next_step="give heads, head_size, order, num_blocks or axes in the KVSpec",
        )
    if any("ambiguous" in problem for problem in problems):
        raise GeometryError(
            f"ambiguous: {text} may hold kernel blocks smaller than {spec.tokens_per_block} tokens",
            next_step="give heads and head_size in the KVSpec, or kernel_tokens, or axes",
        )
    detail = f" ({problems[0]})" if spec.axes is not None else ""
    raise GeometryError(
        f"unsupported shape: {text} fits no cache of {spec}{detail}",
        next_step="name the axes in KVSpec.axes",
    )


def _read(axes: tuple[str, ...], facts: TensorFacts, spec: KVSpec) -> KVLayout | str:
    """The layout under one naming of the axes, or why it does not fit."""
    size = dict(zip(axes, facts.shape, strict=True))
    stride = dict(zip(axes, facts.strides, strict=True))
    named = spec.axes is not None
    if "block" not in size or size.get("skip", 1) != 1:
        return "no block axis" if "block" not in size else "a skipped axis has several entries"
    head_first = "head" in size and "token" in size and axes.index("head") < axes.index("token")
    if not named and "head" in size and spec.order not in {None, _order(head_first)}:
        return "other token order"
    heads = size.get("head", 1)
    if spec.heads not in {None, heads}:
        return f"{heads} heads, not {spec.heads}"
    cell = _cell(size, stride, facts, spec, named=named)
    if isinstance(cell, str):
        return cell
    planes, plane_stride, nbytes = cell
    blocks = _blocks(size, stride, spec, named=named)
    if isinstance(blocks, str):
        return blocks
    cell_tokens, token_stride, kernel_tokens = 1, stride.get("token", 0), size.get("token", 1)
    if spec.opaque:
        if kernel_tokens > 1 and token_stride != nbytes * (planes if "plane" not in size else 1):
            return "an opaque page must hold the tokens of one head in one stretch"
        # Whatever the page holds, it is one cell.
        inner = nbytes * (1 if "plane" in size else planes)
        planes = size.get("plane", 1)
        nbytes, cell_tokens = inner * kernel_tokens, kernel_tokens
        kernel_tokens, token_stride = 1, 0
    kind = spec.kind
    if kind is None:
        kind = LayoutKind.KV if planes == 2 or cell[0] == 2 else LayoutKind.LATENT
    try:
        return KVLayout(
            num_blocks=blocks[0],
            block_stride=blocks[1],
            planes=planes,
            plane_stride=plane_stride if planes > 1 else 0,
            kernel_blocks=blocks[2],
            kernel_stride=blocks[3],
            kernel_tokens=kernel_tokens,
            token_stride=token_stride,
            heads=heads,
            head_stride=stride.get("head", 0),
            head_nbytes=nbytes,
            cell_tokens=cell_tokens,
            offset=facts.offset,
            dtype=spec.dtype or facts.dtype,
            kind=kind,
        )
    except GeometryError as error:
        return error.message


def _order(head_first: bool) -> TokenOrder:
    return TokenOrder.HEAD_MAJOR if head_first else TokenOrder.TOKEN_MAJOR


def _cell(
    size: dict[str, int], stride: dict[str, int], facts: TensorFacts, spec: KVSpec, *, named: bool
) -> tuple[int, int, int] | str:
    """``(planes, plane stride, bytes of one head of one token in one plane)``."""
    dim = size.get("dim", 1)
    if dim > 1 and stride["dim"] != facts.itemsize:
        return f"the last axis is not contiguous (stride {stride['dim']} bytes)"
    planes, plane_stride = size.get("plane", 1), stride.get("plane", 0)
    if "plane" in size and not named and planes != 2:
        return f"{planes} planes"
    if spec.head_size is not None and dim != spec.head_size:
        packed = planes == 1 and spec.planes in {None, 2} and dim == 2 * spec.head_size
        if not packed:
            return f"{dim} elements per head, not {spec.head_size}"
        # K and V of one token and head lie side by side.
        planes, dim = 2, spec.head_size
        plane_stride = dim * facts.itemsize
    if spec.planes not in {None, planes}:
        return f"{planes} planes, not {spec.planes}"
    return planes, plane_stride, dim * facts.itemsize


def _blocks(
    size: dict[str, int], stride: dict[str, int], spec: KVSpec, *, named: bool
) -> tuple[int, int, int, int] | str:
    """``(blocks, block stride, kernel blocks in one block, their stride)``."""
    tokens, kernels = size.get("token", 1), size.get("kernel", 1)
    blocks, block_stride, kernel_stride = size["block"], stride["block"], stride.get("kernel", 0)
    if "kernel" in size:
        if tokens * kernels != spec.tokens_per_block:
            return f"{kernels} x {tokens} tokens, not {spec.tokens_per_block}"
    elif tokens != spec.tokens_per_block:
        if spec.tokens_per_block % tokens or spec.kernel_tokens not in {None, tokens}:
            return f"{tokens} tokens, which do not make up {spec.tokens_per_block}"
        told = spec.kernel_tokens is not None or named
        if not told and (spec.heads is None or spec.head_size is None):
            return "ambiguous" if tokens > 1 else f"{tokens} tokens, not {spec.tokens_per_block}"
        kernels = spec.tokens_per_block // tokens
        if blocks % kernels:
            return f"{blocks} kernel blocks do not make up whole blocks of {kernels}"
        kernel_stride = block_stride
        blocks, block_stride = blocks // kernels, block_stride * kernels
    if spec.num_blocks not in {None, blocks}:
        return f"{blocks} blocks, not {spec.num_blocks}"
    return blocks, block_stride, kernels, kernel_stride
