"""Memory that peers can map: new arrays and tensors, or the storage of an existing tensor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvxfer.backends.shm.memfd import PeerAccess, Segment, find_segment, give_pages_back
from kvxfer.core.memory import Span
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["allocate", "allocate_bytes", "share_storage"]


def allocate(
    shape: int | Sequence[int], dtype: Any, *, peers: PeerAccess = PeerAccess.READ_WRITE
) -> Any:
    """A zeroed array of ``shape`` in shared memory of its own.

    With a ``torch.dtype`` the answer is a CPU tensor (bfloat16 and the float8 types too); with
    anything numpy takes for a dtype it is a numpy array.  The memory lives as long as the array,
    tensor or any view of it.

    Args:
        shape: Lengths of the axes.
        dtype: A ``torch.dtype`` or a numpy dtype.
        peers: READ keeps peers from ever writing it (a seal); a peer that pushes needs READ_WRITE.

    Raises:
        InvalidInputError: the shape or dtype is none, or the array would be empty.
        TransportError: the memory cannot be had.
    """
    import numpy as np

    axes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(not hasattr(n, "__index__") or n < 0 for n in axes):
        raise InvalidInputError(f"shape {axes} must hold integers that are not negative")
    count = 1
    for n in axes:
        count *= int(n)
    if _is_torch_dtype(dtype):
        torch = sys.modules["torch"]
        segment = _segment(count * _itemsize(dtype), axes, dtype, peers)
        return torch.from_numpy(segment.array()).view(dtype).view(axes)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise InvalidInputError(
            f"{dtype!r} is no dtype",
            next_step="pass a numpy dtype, or a torch.dtype such as torch.bfloat16 for a tensor",
        ) from None
    if kind.hasobject:
        raise InvalidInputError(f"dtype {kind} holds Python objects, which cannot be shared")
    segment = _segment(count * kind.itemsize, axes, kind, peers)
    return segment.array().view(kind).reshape(axes)


def allocate_bytes(nbytes: int, *, peers: PeerAccess = PeerAccess.READ_WRITE) -> Span:
    """``nbytes`` zeroed bytes in shared memory, as a span that owns them.

    Raises:
        InvalidInputError: ``nbytes`` is not a positive integer.
        TransportError: the memory cannot be had.
    """
    segment = Segment(nbytes, peers)
    return Span(address=segment.address, nbytes=nbytes, owner=segment)


def share_storage(tensor: Any, *, peers: PeerAccess = PeerAccess.READ_WRITE) -> Span:
    """Move the storage of a CPU tensor into shared memory, in place; returns its new span.

    The content is kept and every torch view of the storage follows, also those made before.
    **Aliases outside torch do not**: a numpy array or a dlpack capsule taken earlier goes on
    showing the old memory, which nobody updates any more and most of which reads as zero.  So do
    raw pointers, such as spans or regions made before.  Call it early, once, before anything else
    holds the address, and while no other thread uses the tensor.

    For the time of the copy the storage exists twice.  Afterwards the old memory keeps its
    addresses, so that a forgotten alias is wrong but harmless, and gives its pages back.

    Idempotent: a storage that is shared already stays where it is.

    Raises:
        InvalidInputError: no torch CPU tensor, an empty one, one already shared with another
            ``peers``, or this version of torch cannot swap a storage's memory.
        TransportError: the memory cannot be had.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(
            f"share_storage takes a torch tensor, not a {type(tensor).__name__}",
            next_step="allocate numpy arrays with allocate() instead",
        )
    if tensor.device.type != "cpu":
        raise InvalidInputError(f"share_storage takes a CPU tensor, not one on {tensor.device}")
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        raise InvalidInputError("the tensor's storage is empty: there is nothing to share")
    found = find_segment(storage.data_ptr(), nbytes)
    if found is not None:
        if found.peers is not peers:
            raise InvalidInputError(
                f"the storage is shared already with peers={found.peers}, not {peers}",
                next_step="decide when it is shared first; seals cannot be changed",
            )
        return Span(address=storage.data_ptr(), nbytes=nbytes, owner=tensor)
    if not hasattr(storage, "_swap_data_ptr_"):
        raise InvalidInputError(
            f"torch {torch.__version__} cannot swap the memory of a storage "
            "(UntypedStorage._swap_data_ptr_ is missing)",
            next_step="create the cache with allocate(shape, torch_dtype) instead",
        )
    segment = Segment(nbytes, peers)
    shared = torch.from_numpy(segment.array())
    old = torch.empty(0, dtype=torch.uint8).set_(storage)
    with torch.no_grad():
        shared.copy_(old)
    address = storage.data_ptr()
    # The storage takes over the pointer together with the deleter that keeps the segment alive,
    # and the other one gets the old memory.
    spare = shared.untyped_storage()
    storage._swap_data_ptr_(spare)
    if storage.data_ptr() != segment.address:
        raise InvalidInputError(
            f"torch {torch.__version__} did not move the storage to the shared memory",
            next_step="create the cache with allocate(shape, torch_dtype) instead",
        )
    segment.replaced = spare
    give_pages_back(address, nbytes)
    return Span(address=segment.address, nbytes=nbytes, owner=tensor)


def _segment(nbytes: int, axes: tuple[int, ...], dtype: object, peers: PeerAccess) -> Segment:
    if nbytes == 0:
        raise InvalidInputError(f"an array of shape {axes} and dtype {dtype} is empty")
    return Segment(nbytes, peers)


def _itemsize(dtype: Any) -> int:
    # Not dtype.itemsize: that came with torch 2.1.
    return int(sys.modules["torch"].empty(0, dtype=dtype).element_size())


def _is_torch_dtype(dtype: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)
