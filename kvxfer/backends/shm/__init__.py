"""The embedded default: processes of one machine, shared memory, no server, no NIC.

``allocate`` and ``share_storage`` give memory that peers can map; ``ShmTransport`` moves bytes;
``copier()`` says whether its compiled loop is there.
"""

from __future__ import annotations

from kvxfer.backends.shm.allocation import allocate, allocate_bytes, share_storage
from kvxfer.backends.shm.config import ShmConfig
from kvxfer.backends.shm.copiers import Copier, CopierChoice, copier
from kvxfer.backends.shm.memfd import PeerAccess
from kvxfer.backends.shm.transport import ShmTransport

__all__ = [
    "Copier",
    "CopierChoice",
    "PeerAccess",
    "ShmConfig",
    "ShmTransport",
    "allocate",
    "allocate_bytes",
    "copier",
    "share_storage",
]
