"""Cutting a batch into engine calls: one per pair, none with more than a send queue takes."""

from __future__ import annotations

from itertools import islice
from operator import add, lt
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvxfer.backends.moriio.merging import work_requests
from kvxfer.core.pieces import least

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvxfer.backends.moriio.config import MoriioConfig
    from kvxfer.backends.moriio.lanes import Lane, PairLane
    from kvxfer.core.batch import Batch, Int64Array, Pieces

__all__ = ["Counting", "Plan", "PlannedCall", "plan_of"]

PlannedCall = tuple["Lane", list[int], list[int], list[int], int]
"""``(lane, local, remote, size, work requests)`` of one engine call."""
Plan = list[PlannedCall]


@attrs.frozen(eq=False)
class Counting:
    """How the engine counts the work requests of a call."""

    entries: int
    """Pieces that follow each other at the peer only, in one work request."""
    chunk_bytes: int
    """0: large pieces stay whole."""
    extra: int
    """Per call: the notification takes a place in the queue as well."""

    @classmethod
    def of(cls, config: MoriioConfig) -> Counting:
        return cls(
            config.max_msg_sge,
            config.chunk_bytes if config.enable_transfer_chunking else 0,
            1 if config.enable_notification else 0,
        )

    def count(self, local: Int64Array, remote: Int64Array, size: Int64Array) -> int:
        """Work requests of one call; where the engine cuts pieces, the most it can make of them."""
        if self.chunk_bytes:
            return int((size // self.chunk_bytes + 1).sum()) + self.extra
        return work_requests(local, remote, size, self.entries) + self.extra

    def count_pieces(self, pieces: Pieces) -> int:
        """``count`` of shared pieces, whatever their base is."""
        return self.count(pieces.local, pieces.remote, pieces.size)

    def count_batch(self, batch: Batch) -> int:
        """``count`` of a batch that makes one call."""
        if not self.chunk_bytes and _apart(batch):
            return len(batch) + self.extra
        return self.count(batch.local, batch.remote, batch.size)


FEW = 64
"""Up to so many pieces lists are quicker than numpy."""


def _apart(batch: Batch) -> bool:
    """Whether the pieces rise at the peer, with gaps: then each takes a work request."""
    if len(batch) <= FEW:
        _, _, remote, size = batch.lists()
        return all(map(lt, map(add, remote, size), islice(remote, 1, None)))
    steps = batch.remote[1:] - batch.remote[:-1]
    return least(steps) > batch.max_size


def plan_of(batch: Batch, lanes: Sequence[PairLane], counting: Counting) -> Plan:
    """The calls that ``batch`` takes over these lanes, in order within a pair.

    Pieces that several layers share are handed to the engine as one set of lists, where the lane
    has a session that counts from the layer's base; see ``PairLane.at``.
    """
    if batch.members is None and (len(lanes) == 1 or len(batch.used_pairs) == 1):
        pairs, local, remote, size = batch.lists()
        count = batch.keep(counting.count_batch)
        lane = lanes[pairs[0]]
        if count <= lane.most or len(size) == 1:
            return [(lane.whole, local, remote, size, count)]
    plan: Plan = []
    shared = batch.shared
    if shared is None:
        for pair, local_v, remote_v, size_v in _grouped(batch):
            plan.extend(_cut(lanes[pair], local_v, remote_v, size_v, counting))
        return plan
    assert batch.members is not None
    each = shared.keep(counting.count_pieces)
    for pair, local_base, remote_base in batch.members:
        pair_lane = lanes[pair]
        at_base = pair_lane.at(local_base, remote_base)
        if at_base is not None and each <= pair_lane.most:
            plan.append((at_base, *batch.shared_lists(), each))
        else:
            own = (shared.local + local_base, shared.remote + remote_base, shared.size)
            plan.extend(_cut(pair_lane, *own, counting))
    return plan


def _grouped(batch: Batch) -> Iterator[tuple[int, Int64Array, Int64Array, Int64Array]]:
    order = np.argsort(batch.pair, kind="stable")
    pair = batch.pair[order]
    local, remote, size = batch.local[order], batch.remote[order], batch.size[order]
    starts = np.flatnonzero(np.diff(pair, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(pair)], strict=True):
        part = slice(start, stop)
        yield int(pair[start]), local[part], remote[part], size[part]


def _cut(
    lane: PairLane, local: Int64Array, remote: Int64Array, size: Int64Array, counting: Counting
) -> Plan:
    count = counting.count(local, remote, size)
    if count <= lane.most or len(size) == 1:
        return [(lane.whole, local.tolist(), remote.tolist(), size.tolist(), count)]
    middle = len(size) // 2
    return [
        *_cut(lane, local[:middle], remote[:middle], size[:middle], counting),
        *_cut(lane, local[middle:], remote[middle:], size[middle:], counting),
    ]
