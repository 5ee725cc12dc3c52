"""What the engine can do under a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.capabilities import Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import Op

if TYPE_CHECKING:
    from kvxfer.backends.moriio.config import MoriioConfig
    from kvxfer.backends.moriio.plan import Counting

__all__ = ["capabilities_of"]


def capabilities_of(config: MoriioConfig, counting: Counting) -> Capabilities:
    """The transport's, constant for its life."""
    most = max(config.max_send_wr - counting.extra, 1)
    return Capabilities(
        ops=frozenset((op, a, b) for op in Op for a in MemoryKind for b in MemoryKind),
        # A READ is visible; a WRITE is acknowledged by the peer's NIC, and this is one value.
        visibility=Visibility.ACKED,
        read_visibility=Visibility.VISIBLE,
        fence=FenceScope.ENGINE,
        max_pieces=most,
        max_nbytes=config.max_post_nbytes,
        credits=most * (config.qp_per_transfer if config.one_queue_pair_per_call else 1),
        # Not of one piece in a single-pair path, but of several pairs the later may be refused.
        atomic_refusal=False,
        may_block_in_post=True,
        data_path_auth=DataPathAuth.NONE,
        ip_versions=frozenset({4}),
    )
