"""The real MoRI-IO engine without a GPU, a NIC or kernel RDMA.

The unmodified ``amd-mori`` wheel runs its true RDMA path (engine, sessions, batch READ and WRITE,
send queue admission, completion errors, asynchronous events) on CPU memory, over a small userspace
``libibverbs`` that copies between processes and breaks on request.

Set an environment up with ``python -m kvxfer.testing.softrdma setup VENV``, then, inside it::

    with SoftRdma() as rdma, MoriPeer() as peer, MoriEngine() as engine:
        buffer = engine.buffer(1 << 20)
        session = engine.connect(buffer, peer)
        with rdma.hold():
            transfer = session.read(0, 0, 4096)
        assert transfer.wait().ok

The pytest fixtures are in ``kvxfer.testing.softrdma.pytest_plugin``.  Importing this package loads
no engine.
"""

from __future__ import annotations

from kvxfer.testing.softrdma.codes import AsyncEvent, SetupCall, WcStatus
from kvxfer.testing.softrdma.control import SoftRdma
from kvxfer.testing.softrdma.engine import MoriEngine
from kvxfer.testing.softrdma.faults import Counters, Faults
from kvxfer.testing.softrdma.peer import MoriPeer
from kvxfer.testing.softrdma.session import Outcome, Session, Transfer

__all__ = [
    "AsyncEvent",
    "Counters",
    "Faults",
    "MoriEngine",
    "MoriPeer",
    "Outcome",
    "Session",
    "SetupCall",
    "SoftRdma",
    "Transfer",
    "WcStatus",
]
