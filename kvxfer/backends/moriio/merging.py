"""How many work requests the engine makes of a call: what its send queue counts in.

As seen with amd-mori 1.2.4 and checked against the device's count: pieces are sorted by remote
offset; one that begins where its predecessor ends, at the peer, shares its work request.  If it
also begins there locally it joins its predecessor's scatter entry, otherwise it takes an entry of
its own, of which a work request has ``max_msg_sge``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvxfer.core.batch import Int64Array

__all__ = ["work_requests"]


def work_requests(local: Int64Array, remote: Int64Array, size: Int64Array, entries: int) -> int:
    """Work requests for pieces of one call, with up to ``entries`` scatter entries in each."""
    n = len(size)
    if n < 2:
        return n
    if not bool((remote[1:] >= remote[:-1]).all()):
        order = np.argsort(remote, kind="stable")
        local, remote, size = local[order], remote[order], size[order]
    follows = remote[:-1] + size[:-1] == remote[1:]
    if not follows.any():
        return n
    joins = follows & (local[:-1] + size[:-1] == local[1:])
    # Scatter entries per run of pieces that follow each other at the peer.
    begins = np.flatnonzero(~follows) + 1
    starts = np.concatenate(([0], begins))
    takes = np.concatenate(([1], (~joins).astype(np.int64)))
    per_run = np.add.reduceat(takes, starts)
    return int((-(-per_run // entries)).sum())
