"""Memory: spans the user owns, regions a transport registered, descriptors a peer can address."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Descriptor", "MemoryKind", "Region", "Span", "span_of", "storage_span"]


class MemoryKind(enum.Enum):
    """Where the bytes live."""

    DRAM = "dram"
    VRAM = "vram"


def _views(value: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(value)


def _from_1(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
        raise InvalidInputError(
            f"{attribute.name} is {value!r}: it must be an integer within 1..2**63-1"
        )


@attrs.frozen(kw_only=True)
class Span:
    """A stretch of memory that somebody owns: not registered with anything yet.

    ``owner`` keeps the memory alive for as long as the span exists; it takes no part in
    comparisons.  ``device`` is the device ordinal for VRAM and -1 for DRAM.

    ``views`` is a hint for engines whose calls count offsets from where a registration begins:
    ``(offset, nbytes)`` of stretches that factored batches will address from a base of their own,
    such as the layers that share one storage.  It takes no part in comparisons either.
    """

    address: int = attrs.field(validator=_from_1)
    nbytes: int = attrs.field(validator=_from_1)
    kind: MemoryKind = attrs.field(default=MemoryKind.DRAM, validator=v.instance_of(MemoryKind))
    device: int = -1
    owner: object = attrs.field(default=None, eq=False, repr=False)
    views: tuple[tuple[int, int], ...] = attrs.field(
        default=(), converter=_views, eq=False, repr=False
    )

    @views.validator
    def _lie_inside(self, _: object, views: tuple[tuple[int, int], ...]) -> None:
        for offset, nbytes in views:
            if offset < 0 or nbytes < 1 or offset > self.nbytes - nbytes:
                raise InvalidInputError(
                    f"views holds ({offset}, {nbytes}): it must lie within {self.nbytes} bytes"
                )

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes

    def covers(self, other: Span) -> bool:
        """Whether ``other`` lies inside this span, in the same memory."""
        return (
            self.kind is other.kind
            and self.device == other.device
            and self.address <= other.address
            and other.end <= self.end
        )


@attrs.frozen(kw_only=True)
class Descriptor:
    """A region in the form in which a peer can address it. Safe to send; ``data`` is opaque."""

    transport: str
    incarnation: str
    region_id: int = attrs.field(validator=v.ge(0))
    nbytes: int = attrs.field(validator=v.gt(0))
    kind: MemoryKind = MemoryKind.DRAM
    device: int = -1
    data: bytes = b""


@attrs.frozen(kw_only=True, eq=False)
class Region:
    """A span registered with one transport, until ``Transport.deregister``. Compared by identity.

    ``handle`` is the backend's own; nobody else looks at it.
    """

    span: Span
    descriptor: Descriptor
    handle: Any = attrs.field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return self.span.nbytes


def span_of(buffer: Any) -> Span:
    """The span that ``buffer`` occupies.

    Accepts a ``Span``, a torch tensor, a numpy array, anything with a writable or read-only
    buffer (``bytearray``, ``mmap``, ``memoryview``), or ``(address, nbytes)``.  Of a tensor or
    array with gaps, the whole extent from first to last byte is taken.

    Raises:
        InvalidInputError: the object is of no such kind, is empty, or has negative strides.
    """
    if isinstance(buffer, Span):
        return buffer
    if _is_torch_tensor(buffer):
        return _torch_span(buffer)
    if hasattr(buffer, "__array_interface__"):
        return _array_span(buffer)
    if isinstance(buffer, tuple) and len(buffer) == 2 and all(type(x) is int for x in buffer):
        address, nbytes = buffer
        if address <= 0 or nbytes <= 0:
            raise InvalidInputError(
                f"(address, nbytes) = ({address:#x}, {nbytes}) must both be positive"
            )
        return Span(address=address, nbytes=nbytes)
    return _buffer_span(buffer)


def storage_span(buffer: Any) -> Span:
    """The whole storage behind ``buffer``: what gets registered, once per storage.

    For a torch tensor that is its untyped storage; for a numpy array the outermost array it is
    a view of; for anything else the same as ``span_of``.
    """
    if _is_torch_tensor(buffer):
        storage = buffer.untyped_storage()
        return _torch_device_span(buffer, storage.data_ptr(), storage.nbytes())
    if hasattr(buffer, "__array_interface__"):
        base = buffer
        # Some owners of memory have an array interface without being arrays: they end the chain.
        while hasattr(base.base, "strides"):
            base = base.base
        # A base may be smaller than its view (as_strided): keep whichever covers the other.
        inner, outer = _array_span(buffer), _array_span(base)
        return outer if outer.covers(inner) else inner
    return span_of(buffer)


def _is_torch_tensor(obj: object) -> bool:
    # torch is recognised, never imported: if it is not loaded, nothing can be a tensor.
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return isinstance(tensor, type) and isinstance(obj, tensor)


def _torch_span(tensor: Any) -> Span:
    if tensor.numel() == 0:
        raise InvalidInputError("the tensor is empty: it occupies no memory to register")
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.element_size()
    return _torch_device_span(tensor, tensor.data_ptr(), nbytes)


def _torch_device_span(tensor: Any, address: int, nbytes: int) -> Span:
    device = tensor.device
    if device.type == "cpu":
        return Span(address=address, nbytes=nbytes, owner=tensor)
    if device.type == "cuda":  # ROCm builds of torch call AMD devices "cuda" as well
        return Span(
            address=address,
            nbytes=nbytes,
            kind=MemoryKind.VRAM,
            device=device.index or 0,
            owner=tensor,
        )
    raise InvalidInputError(
        f"tensors on device {device} cannot be registered",
        next_step="use a cpu or cuda (CUDA or ROCm) tensor",
    )


def _array_span(array: Any) -> Span:
    interface = array.__array_interface__
    address = interface["data"][0]
    shape = interface["shape"]
    itemsize = array.dtype.itemsize
    if 0 in shape:
        raise InvalidInputError("the array is empty: it occupies no memory to register")
    strides = array.strides
    if any(s < 0 for s in strides):
        raise InvalidInputError(
            f"the array has negative strides {strides}", next_step="register its base array"
        )
    nbytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize
    return Span(address=address, nbytes=nbytes, owner=array)


def _buffer_span(buffer: Any) -> Span:
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidInputError(
            f"a {type(buffer).__name__} is no buffer",
            next_step="pass a torch tensor, numpy array, buffer object, Span or (address, nbytes)",
        ) from None
    if view.nbytes == 0 or not view.contiguous:
        raise InvalidInputError(
            f"the buffer has {view.nbytes} bytes and contiguous={view.contiguous}",
            next_step="pass a non-empty contiguous buffer",
        )
    import numpy as np

    array = np.frombuffer(view, dtype=np.uint8)
    return Span(address=int(array.ctypes.data), nbytes=view.nbytes, owner=array)
