"""``KVLayout``: where every byte of one layer's KV cache lies, as strides over logical axes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.core.layout import _wire
from kvxfer.core.layout._checks import INT64_MAX, is_count, is_name, is_nonnegative
from kvxfer.errors import GeometryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.layout.tensors import KVSpec

__all__ = ["KVLayout", "LayoutKind"]


class LayoutKind(enum.Enum):
    """What the cells hold. Layouts of different kinds are never mapped onto each other."""

    KV = "kv"
    """Keys and values: plane 0 is K, plane 1 is V, wherever the planes lie."""
    LATENT = "latent"
    """One latent vector per token (MLA); the same on every tensor-parallel rank."""
    KEY_ONLY = "key_only"
    """Keys without values, such as a sparse-attention indexer."""
    SCALE = "scale"
    """Quantisation scales that belong to another cache."""
    STATE = "state"
    """A part of a recurrent state; used inside ``StateLayout``."""


MAX_TOKENS = 2**20
"""Most tokens in one block. Real engines stay below 2**14; positions times this stay in int64."""

_WIRE_FIELDS = {
    "num_blocks": int,
    "block_stride": int,
    "planes": int,
    "plane_stride": int,
    "kernel_blocks": int,
    "kernel_stride": int,
    "kernel_tokens": int,
    "token_stride": int,
    "heads": int,
    "head_stride": int,
    "head_nbytes": int,
    "cell_tokens": int,
    "offset": int,
    "dtype": str,
    "kind": str,
}


@attrs.frozen(kw_only=True)
class KVLayout:
    """Byte strides of one layer's cache over the axes plane, block, token and head.

    The byte ``x`` of head ``h`` of token ``t`` in plane ``p`` of block ``b`` lies, counted from the
    start of its region, at::

        offset + b*block_stride + p*plane_stride + (t // kernel_tokens)*kernel_stride
               + (t % kernel_tokens)*token_stride + h*head_stride + x        (x < head_nbytes)

    A block is what the request's block ids count (a *manager* block).  Where the engine's kernels
    use smaller blocks, ``kernel_blocks`` of them lie inside one block, ``kernel_stride`` apart.
    Strides of axes of count 1 mean nothing and are set to 0.

    ``cell_tokens`` above 1 says that the inside of one (block, head) page is opaque: that many
    tokens in an order that is not known, moved whole or not at all; ``t`` above then counts cells.

    Strides must be nested: sorted by stride, each axis clears the whole extent of those inside it.
    That holds for every cache made by slicing, permuting or padding, and proves that no two cells
    share a byte.

    Raises:
        InvalidInputError: a field has the wrong type or range.
        GeometryError: the strides overlap, or the layout reaches beyond 2**63 - 1.
    """

    num_blocks: int = attrs.field(validator=is_count)
    block_stride: int = attrs.field(validator=is_nonnegative)
    planes: int = attrs.field(default=1, validator=is_count)
    plane_stride: int = attrs.field(default=0, validator=is_nonnegative)
    kernel_blocks: int = attrs.field(default=1, validator=is_count)
    kernel_stride: int = attrs.field(default=0, validator=is_nonnegative)
    kernel_tokens: int = attrs.field(validator=is_count)
    token_stride: int = attrs.field(default=0, validator=is_nonnegative)
    heads: int = attrs.field(default=1, validator=is_count)
    head_stride: int = attrs.field(default=0, validator=is_nonnegative)
    head_nbytes: int = attrs.field(validator=is_count)
    cell_tokens: int = attrs.field(default=1, validator=is_count)
    offset: int = attrs.field(default=0, validator=is_nonnegative)
    dtype: str = attrs.field(validator=is_name)
    kind: LayoutKind = attrs.field(default=LayoutKind.KV, validator=v.instance_of(LayoutKind))

    geometry: tuple[Any, ...] = attrs.field(init=False, eq=False, repr=False)
    """Hashable key, equal for layers of equal geometry: everything but ``offset``."""
    cell_key: tuple[Any, ...] = attrs.field(init=False, eq=False, repr=False)
    """What two layouts must share to be mapped at all: kind, dtype, planes, bytes per cell."""
    span_nbytes: int = attrs.field(init=False, eq=False, repr=False)
    """Bytes from the first to one past the last that the layout may touch."""

    def __attrs_post_init__(self) -> None:
        put = object.__setattr__
        extent = self.head_nbytes
        inner = "head_nbytes"
        axes = sorted(
            (getattr(self, stride), getattr(self, counted), stride, counted)
            for counted, stride in _AXES
        )
        for stride, counted, stride_name, counted_name in axes:
            if counted == 1:
                put(self, stride_name, 0)
                continue
            if stride < extent:
                raise GeometryError(
                    f"{stride_name}={stride} overlaps the {extent} bytes inside it "
                    f"(up to {inner}): {counted_name}={counted} cells would share bytes"
                )
            extent += (counted - 1) * stride
            inner = stride_name
        if self.offset + extent > INT64_MAX:
            raise GeometryError(f"the layout ends at byte {self.offset + extent}, beyond 2**63-1")
        if self.tokens_per_block > MAX_TOKENS:
            raise GeometryError(f"{self.tokens_per_block} tokens per block, over {MAX_TOKENS}")
        put(self, "span_nbytes", extent)
        put(
            self,
            "cell_key",
            (self.kind.value, self.dtype, self.planes, self.head_nbytes, self.cell_tokens),
        )
        put(
            self,
            "geometry",
            (
                self.kind.value,
                self.dtype,
                self.num_blocks,
                self.block_stride,
                self.planes,
                self.plane_stride,
                self.kernel_blocks,
                self.kernel_stride,
                self.kernel_tokens,
                self.token_stride,
                self.heads,
                self.head_stride,
                self.head_nbytes,
                self.cell_tokens,
            ),
        )

    # Constructors ---------------------------------------------------------------------------

    @classmethod
    def from_tensor(
        cls, tensor: Any, spec: KVSpec | None = None, *, region_address: int | None = None
    ) -> KVLayout:
        """The layout of a torch tensor or numpy array, from its strides and storage offset.

        ``offset`` counts from the start of the tensor's storage (for a numpy array, of the
        outermost array it is a view of), or from ``region_address`` if that is given.

        Raises:
            GeometryError: the shape fits no cache of this spec, or fits several.
        """
        from kvxfer.core.layout.tensors import layout_of_strides, tensor_facts

        facts = tensor_facts(tensor, region_address)
        return layout_of_strides(
            facts.shape,
            facts.strides,
            spec,
            itemsize=facts.itemsize,
            dtype=facts.dtype,
            offset=facts.offset,
        )

    @classmethod
    def from_strides(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        spec: KVSpec | None = None,
        *,
        itemsize: int,
        dtype: str,
        offset: int = 0,
    ) -> KVLayout:
        """The layout of a tensor described by plain numbers; ``strides`` and ``offset`` in bytes.

        Raises:
            GeometryError: the shape fits no cache of this spec, or fits several.
        """
        from kvxfer.core.layout.tensors import layout_of_strides

        return layout_of_strides(
            shape, strides, spec, itemsize=itemsize, dtype=dtype, offset=offset
        )

    @classmethod
    def from_wire(cls, message: Any) -> KVLayout:
        """What ``to_wire`` made, from a peer that is not trusted.

        Raises:
            InvalidInputError: a key is missing, unknown, or of the wrong type or range.
            GeometryError: the numbers describe no valid layout.
        """
        fields = _wire.fields("layout", message, _WIRE_FIELDS)
        fields["kind"] = _wire.enum_member("layout.kind", LayoutKind, fields["kind"])
        return cls(**fields)

    def to_wire(self) -> dict[str, Any]:
        """A dict of ints and strings, for the handshake."""
        out: dict[str, Any] = {field: getattr(self, field) for field in _WIRE_FIELDS}
        out["kind"] = self.kind.value
        return out

    # Facts ----------------------------------------------------------------------------------

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one (manager) block."""
        return self.kernel_blocks * self.kernel_tokens * self.cell_tokens

    @property
    def cells_per_block(self) -> int:
        """Units of ``head_nbytes`` along the token axis of one block."""
        return self.kernel_blocks * self.kernel_tokens

    @property
    def block_nbytes(self) -> int:
        """Payload bytes of one block, all planes, without padding."""
        return self.planes * self.cells_per_block * self.heads * self.head_nbytes

    @property
    def token_nbytes(self) -> int:
        """Payload bytes of one cell of the token axis: all planes and heads."""
        return self.planes * self.heads * self.head_nbytes

    @property
    def end_offset(self) -> int:
        """One past the last byte of the region that the layout may touch."""
        return self.offset + self.span_nbytes

    def bands(self) -> tuple[tuple[int, int], ...]:
        """``(offset, nbytes)`` of the areas that the cache takes up: one per plane where the planes
        lie outside the blocks, one for planes inside the block, packed, latent, key-only caches.
        """
        plane_extent = self.span_nbytes - (self.planes - 1) * self.plane_stride
        if self.planes == 1 or self.plane_stride < plane_extent:
            return ((self.offset, self.span_nbytes),)
        return tuple(
            (self.offset + p * self.plane_stride, plane_extent) for p in range(self.planes)
        )

    def at_offset(self, offset: int) -> KVLayout:
        """The same geometry beginning at another byte of its region."""
        return attrs.evolve(self, offset=offset)

    def describe(self) -> str:
        """One line for error messages: counts and strides of every axis that has any."""
        parts = [f"{self.kind.value} {self.dtype}", f"{self.num_blocks} blocks"]
        parts[-1] += f" every {self.block_stride} B" if self.num_blocks > 1 else ""
        for label, counted, stride in (
            ("planes", self.planes, self.plane_stride),
            ("kernel blocks", self.kernel_blocks, self.kernel_stride),
            ("tokens" if self.cell_tokens == 1 else "cells", self.kernel_tokens, self.token_stride),
            ("heads", self.heads, self.head_stride),
        ):
            parts.append(f"{counted} {label}" + (f" every {stride} B" if counted > 1 else ""))
        if self.cell_tokens > 1:
            parts.append(f"{self.cell_tokens} tokens per opaque cell")
        parts.append(f"{self.head_nbytes} B per head")
        return "[" + ", ".join(parts) + "]"


_AXES = (
    ("num_blocks", "block_stride"),
    ("planes", "plane_stride"),
    ("kernel_blocks", "kernel_stride"),
    ("kernel_tokens", "token_stride"),
    ("heads", "head_stride"),
)
