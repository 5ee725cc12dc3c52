"""A connected peer, its mapped memory, and the paths to it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvxfer.core.transport import Path, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.backends.shm.jobs import CopyJob
    from kvxfer.backends.shm.memfd import Mapping
    from kvxfer.backends.shm.messages import Message
    from kvxfer.backends.shm.procs import ProcessWatch
    from kvxfer.backends.shm.protocol import Address
    from kvxfer.core.memory import Descriptor, Region
    from kvxfer.core.transport import PeerInfo, Transport

__all__ = ["RemoteRegion", "ShmPath", "ShmPeer"]


@attrs.define(kw_only=True, eq=False)
class RemoteRegion:
    """A region of the peer as its owner granted it."""

    region_id: int
    nbytes: int
    mapping: Mapping | None
    """None: it lies in the peer's own memory and is read with process_vm_readv."""
    address: int
    """In our address space if mapped, in the peer's otherwise."""
    segment: int | None
    gone: bool = False
    """The owner deregistered it."""


class ShmPeer(Peer):
    """A peer of the shm engine.

    ``alive`` is False once its process has ended or its transport was closed.  The handover thread
    keeps it up to date, without cost to ``progress``; the transport's waker is called on a change.
    """

    def __init__(self, transport: Transport, info: PeerInfo, address: Address) -> None:
        super().__init__(transport, info)
        self.address = address
        self.alive = True
        self.cut: Message | None = None
        """Why nothing can be posted any more; None while all is well. Set once."""
        self.watch: ProcessWatch | None = None
        """None where neither the pid nor the kernel lets us watch the process."""
        self.readable_in_place = False
        """Whether its pid means the same process to us: what process_vm_readv needs."""
        self.regions: dict[int, RemoteRegion] = {}
        self.mappings: dict[int, Mapping] = {}
        self.jobs: set[CopyJob] = set()
        self.pieces_in_flight = 0
        self._lock = threading.Lock()

    def unmap(self) -> None:
        """Let go of the peer's memory. The caller knows that nothing touches it any more."""
        for mapping in self.mappings.values():
            mapping.close()
        self.mappings.clear()
        self.regions.clear()

    def begin(self, job: CopyJob, limit: int) -> bool:
        """Count a job in, unless its pieces exceed ``limit`` with those in flight."""
        with self._lock:
            if self.pieces_in_flight + job.pieces > limit:
                return False
            self.pieces_in_flight += job.pieces
            self.jobs.add(job)
        return True

    def end(self, job: CopyJob) -> None:
        """Count a job out."""
        with self._lock:
            self.pieces_in_flight -= job.pieces
            self.jobs.discard(job)


class ShmPath(Path):
    """Addresses of both sides, per pair."""

    def __init__(
        self,
        peer: ShmPeer,
        pairs: Sequence[tuple[Region, Descriptor]],
        remote: Sequence[RemoteRegion],
    ) -> None:
        super().__init__(peer, pairs)
        self.remote = tuple(remote)
        self.near = np.array([local.span.address for local, _ in pairs], dtype=np.int64)
        self.far = np.array([region.address for region in remote], dtype=np.int64)
        self.bases = list(zip(self.near.tolist(), self.far.tolist(), strict=True))
        """``(near, far)`` of each pair as Python numbers."""
        self.in_place = np.array([region.mapping is None for region in remote], dtype=bool)
        """Which pairs are read with process_vm_readv."""
        same = bool(self.in_place.all()) or not self.in_place.any()
        self.one_place: bool | None = bool(self.in_place[0]) if same else None
        """The answer for all pairs, None if they differ."""
