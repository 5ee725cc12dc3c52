"""Baselines: the same copies within this process, and the engine's own call without kvxfer.

The backends' own objects are used, so that the engine is the same and has the same connections.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer.cli.bench.rig import Rig
from kvxfer.core.batch import Batch
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import Op
from kvxfer.errors import TransportError
from kvxfer.testing.memory import load
from kvxfer.testing.station import GUARD

__all__ = ["Baseline", "direct_call", "memmove_call"]

Baseline = Callable[[Batch], None]
"""READs a batch and returns when it is done. Raises ``TransportError`` if it failed."""


def memmove_call(rig: Rig) -> Baseline:
    """The same blocks, neighbours as one, on this thread, from memory of this process."""
    from kvxfer.backends.shm.copiers import copier
    from kvxfer.backends.shm.copying import SCRATCH_BYTES

    memory = load(rig.contender.memory)(rig.transport, rig.nbytes + GUARD, MemoryKind.DRAM)
    copy, scratch = copier().copy_pieces, np.empty(SCRATCH_BYTES, np.uint8)
    here, there = rig.region.span.address, memory.span.address + GUARD

    def call(batch: Batch, _keep: object = memory) -> None:
        copy(here + batch.local, there + batch.remote, batch.size, scratch)

    return call


def direct_call(rig: Rig) -> Baseline | None:
    """The engine of ``rig``, called as its own users call it. None where nothing is known of it."""
    make = _ENGINES.get(rig.transport.name)
    return None if make is None else make(rig)


def _shm(rig: Rig) -> Baseline:
    """Copies without chunks, threads or checks."""
    from kvxfer.backends.shm.copying import SCRATCH_BYTES
    from kvxfer.backends.shm.vmread import read_pieces

    path: Any = rig.path
    transport: Any = rig.transport
    near, far = int(path.near[0]), int(path.far[0])
    copy, scratch = transport.copier.copy_pieces, np.empty(SCRATCH_BYTES, np.uint8)
    pid = path.peer.address.pid

    def mapped(batch: Batch) -> None:
        copy(near + batch.local, far + batch.remote, batch.size, scratch)

    def in_place(batch: Batch) -> None:
        read_pieces(pid, near + batch.local, far + batch.remote, batch.size, check=lambda: None)

    return in_place if path.one_place else mapped


def _mooncake(rig: Rig) -> Baseline:
    """One synchronous call for all blocks."""
    path: Any = rig.path
    transport: Any = rig.transport
    raw, name = transport._engine._raw, path.remote.name
    near, far = int(path.local_base[0]), int(path.remote_base[0])

    def call(batch: Batch) -> None:
        here, there = (near + batch.local).tolist(), (far + batch.remote).tolist()
        if raw.batch_transfer_sync_read(name, here, there, batch.size.tolist()):
            raise TransportError("Mooncake's batch_transfer_sync_read failed")

    return call


def _nixl(rig: Rig) -> Baseline:
    """A handle of prepared lists, started and asked for."""
    path: Any = rig.path
    transport: Any = rig.transport

    def call(batch: Batch) -> None:
        agent = transport._agent
        with transport._lock:
            handle = path.describe(agent, Op.READ, batch)
            state = agent.start(handle)
            while state == "PROC":
                state = agent.state(handle)
            handle.release()
        if state != "DONE":
            raise TransportError(f"NIXL's transfer ended as {state}")

    return call


def _moriio(rig: Rig) -> Baseline:
    """A session's ``read`` with a status that is asked for."""
    from kvxfer.backends.moriio.binding import status_class, verdict_of

    path: Any = rig.path
    session = path.lanes[0].whole.session
    uids, new_status = itertools.count(1 << 40), status_class()

    def call(batch: Batch) -> None:
        status = new_status()
        session.read(*batch.lists()[1:], status, next(uids))
        while status.InProgress():
            os.sched_yield()
        if not status.Succeeded():
            raise TransportError(f"MoRI-IO's read failed: {verdict_of(status)}")

    return call


_ENGINES: dict[str, Callable[[Rig], Baseline]] = {
    "shm": _shm,
    "mooncake": _mooncake,
    "nixl": _nixl,
    "moriio": _moriio,
}
