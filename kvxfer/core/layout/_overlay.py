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
    """Owners of layers that may share bytes; a place is (region, offset, owner, layout).

    Errs on the side of naming an owner too many: that costs a comparison, not an error.
    """
    found: set[int] = set()
    cluster: list[tuple[int, int, int, KVLayout]] = []
    region, end = -1, 0
    for place in sorted(places, key=lambda place: place[:3]):
        if cluster and (place[0] != region or place[1] >= end):
            found |= _may_share(cluster)
            cluster = []
        stop = place[1] + place[3].span_nbytes
        end = max(end, stop) if cluster else stop
        region = place[0]
        cluster.append(place)
    return tuple(sorted(found | _may_share(cluster)))


def _may_share(cluster: Sequence[tuple[int, int, int, KVLayout]]) -> set[int]:
    """Of layers whose extents touch one another: all, unless rows of one length part them."""
    if len(cluster) < 2:
        return set()
    row = cluster[0][3].block_stride
    parts: list[tuple[int, int, int]] = []
    for _, offset, owner, layout in cluster:
        width = _width(layout, row) if row and layout.block_stride == row else None
        begin = offset % row if row else 0
        if width is None or begin + width > row:
            return {place[2] for place in cluster}
        parts.append((begin, begin + width, owner))
    parts.sort()
    found: set[int] = set()
    reach, last = parts[0][1], parts[0][2]
    for begin, end, owner in parts[1:]:
        if begin < reach:
            found |= {last, owner}
        if end > reach:
            reach, last = end, owner
    return found


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
