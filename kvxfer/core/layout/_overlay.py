"""Layers that may share bytes.

Some engines lay several KV-cache groups over the same memory and keep their block ids apart.  Block
ids of one group cannot tell whether another group's pieces overlap; bytes can.  To compare bytes
only where that is needed, this finds the layers that are not apart by their strides alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.layout._checks import Int64Array
    from kvxfer.core.layout.kv import KVLayout

__all__ = ["overlaid", "refuse_overlap"]


def overlaid(places: Sequence[tuple[int, int, int, KVLayout]]) -> tuple[int, ...]:
    """Owners of layers that may share bytes; a place is (region, offset, owner, layout)."""
    found: set[int] = set()
    ordered = sorted(places, key=lambda place: place[:3])
    for i, (region, offset, owner, layout) in enumerate(ordered):
        end = offset + layout.span_nbytes
        for j in range(i + 1, len(ordered)):
            other_region, other_offset, other_owner, other = ordered[j]
            if other_region != region or other_offset >= end:
                break
            if owner in found and other_owner in found:
                continue
            if not _apart(layout, offset, other, other_offset):
                found |= {owner, other_owner}
    return tuple(sorted(found))


def _apart(a: KVLayout, a_offset: int, b: KVLayout, b_offset: int) -> bool:
    """Whether two interleaved layers stay apart in every row of one length."""
    row = a.block_stride
    if not row or row != b.block_stride:
        return False
    width_a, width_b = _width(a, row), _width(b, row)
    if width_a is None or width_b is None:
        return False
    distance = (b_offset - a_offset) % row
    return width_a <= distance and distance + width_b <= row


def _width(layout: KVLayout, row: int) -> int | None:
    """Bytes of a row that the layout takes up, if it repeats every ``row`` bytes."""
    width = layout.head_nbytes
    for count, stride in (
        (layout.planes, layout.plane_stride),
        (layout.kernel_blocks, layout.kernel_stride),
        (layout.kernel_tokens, layout.token_stride),
        (layout.heads, layout.head_stride),
    ):
        if stride < row:
            width += (count - 1) * stride
        elif stride % row:
            return None
    return width


def refuse_overlap(region: Int64Array, offset: Int64Array, size: Int64Array, label: str) -> None:
    """Refuse pieces that share bytes of one region.

    Raises:
        InvalidInputError: naming the first two.
    """
    order = np.lexsort((offset, region))
    region, offset, size = region[order], offset[order], size[order]
    clash = (region[1:] == region[:-1]) & (offset[1:] < offset[:-1] + size[:-1])
    if clash.any():
        i = int(np.flatnonzero(clash)[0])
        raise InvalidInputError(
            f"{label} would be written twice: {int(size[i])} bytes at {int(offset[i])} and "
            f"{int(size[i + 1])} bytes at {int(offset[i + 1])} of region {int(region[i])} overlap",
            next_step="groups that share memory must hold different block ids",
        )
