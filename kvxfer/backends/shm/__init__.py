"""The embedded default: processes of one machine, shared memory, no server, no NIC.

``allocate`` and ``share_storage`` give memory that peers can map; ``ShmTransport`` moves bytes.
"""

from __future__ import annotations

from kvxfer.backends.shm.allocation import allocate, allocate_bytes, share_storage
from kvxfer.backends.shm.config import ShmConfig
from kvxfer.backends.shm.memfd import PeerAccess
from kvxfer.backends.shm.transport import ShmTransport

__all__ = [
    "PeerAccess",
    "ShmConfig",
    "ShmTransport",
    "allocate",
    "allocate_bytes",
    "share_storage",
]
