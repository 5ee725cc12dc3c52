"""What a plan leaves unwritten, in bytes; zeroing it is the caller's decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.core.layout._checks import Int64Array
from kvxfer.core.layout.recipe import token_view
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.core.layout.kv import KVLayout
    from kvxfer.core.layout.plan import Uncovered

__all__ = ["uncovered_ranges", "zero_ranges"]


def uncovered_ranges(layout: KVLayout, uncovered: Uncovered) -> tuple[Int64Array, Int64Array]:
    """``(offsets, sizes)`` in the region of all bytes of the uncovered tokens, every head.

    ``layout`` is the destination's.  Ranges are not merged across tokens.
    """
    if not len(uncovered):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    start = uncovered.start // layout.cell_tokens
    stop = uncovered.stop // layout.cell_tokens
    counts = stop - start
    entry = np.repeat(np.arange(len(counts)), counts)
    cell = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts) + start[entry]
    cells, stride, kernels, kernel_stride = token_view(layout)
    kernel, token = np.divmod(cell, cells) if kernels > 1 else (0, cell)
    offsets = (
        layout.offset
        + uncovered.ids[entry] * layout.block_stride
        + kernel * kernel_stride
        + token * stride
    )
    planes = np.arange(layout.planes, dtype=np.int64) * layout.plane_stride
    heads = np.arange(layout.heads, dtype=np.int64) * layout.head_stride
    rows = (offsets[:, None, None] + planes[:, None] + heads).reshape(-1)
    rows.sort()
    # Join what touches: most often whole blocks.
    breaks = np.flatnonzero(rows[1:] != rows[:-1] + layout.head_nbytes) + 1
    first = np.concatenate((np.zeros(1, np.int64), breaks))
    counts = np.diff(np.concatenate((first, [len(rows)])))
    return rows[first], counts * layout.head_nbytes


def zero_ranges(memory: Any, offsets: Int64Array, sizes: Int64Array) -> int:
    """Write zeros into host memory (anything with a writable buffer); returns the bytes zeroed.

    Raises:
        InvalidInputError: the buffer is read-only or not contiguous, or a range leaves it.
    """
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous:
        raise InvalidInputError("the memory to zero must be a writable, contiguous buffer")
    view = view.cast("B")
    total = 0
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        if offset < 0 or offset + size > len(view):
            raise InvalidInputError(
                f"bytes {offset}..{offset + size} lie outside the buffer of {len(view)} bytes"
            )
        view[offset : offset + size] = bytes(size)
        total += size
    return total
