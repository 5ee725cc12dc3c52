"""A small but complete backend: copies between transports of one process, inside ``post``.

It uses nothing but kvxfer's public contract, and passes the conformance suite.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence

from kvxfer.core.attempt import Attempt
from kvxfer.core.capabilities import Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region, Span
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import InvalidInputError, PeerLostError, StaleError

# Who lives where, and one lock for all memory: nothing moves while somebody leaves.
_homes: dict[str, SampleTransport] = {}
_moving = threading.RLock()


class SampleTransport(Transport):
    """``greeting`` shows how a backend takes options; it is said in errors."""

    name = "sample"
    must_be_polled = False

    def __init__(self, *, greeting: str = "sorry", incarnation: str | None = None) -> None:
        super().__init__(incarnation=incarnation)
        self.greeting = greeting
        self._regions: dict[int, Region] = {}
        self._region_ids = itertools.count()
        self._fenced: set[str] = set()
        _homes[self.incarnation] = self

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            ops=frozenset((op, MemoryKind.DRAM, MemoryKind.DRAM) for op in Op),
            visibility=Visibility.VISIBLE,
            fence=FenceScope.PEER,
            data_path_auth=DataPathAuth.SECRET,
            ip_versions=frozenset(),
            process_local=True,
        )

    def local_info(self) -> PeerInfo:
        return PeerInfo(transport=self.name, incarnation=self.incarnation)

    def _register(self, span: Span) -> Region:
        if span.kind is not MemoryKind.DRAM:
            raise InvalidInputError(f"{self.greeting}, no {span.kind.value} here")
        with _moving:
            region_id = next(self._region_ids)  # never one that a peer may still know
            descriptor = Descriptor(
                transport=self.name,
                incarnation=self.incarnation,
                region_id=region_id,
                nbytes=span.nbytes,
            )
            self._regions[region_id] = Region(span=span, descriptor=descriptor)
            return self._regions[region_id]

    def _deregister(self, region: Region) -> None:
        with _moving:
            self._regions.pop(region.descriptor.region_id, None)

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        if info.incarnation not in _homes:
            return Ready(error=self._nobody(info))
        self._fenced.discard(info.incarnation)
        return Ready(Peer(self, info))

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        if peer.info.incarnation not in _homes:
            return Ready(error=self._nobody(peer.info))
        return Ready(Path(peer, pairs))

    def _post(self, attempt: Attempt) -> None:
        path = attempt.path
        with _moving:
            far = _homes.get(path.peer.info.incarnation)
            if far is None:
                raise self._nobody(path.peer.info)
            if self.incarnation in far._fenced:
                raise StaleError(f"{self.greeting}, they have fenced us")
            if any(descriptor.region_id not in far._regions for _, descriptor in path.pairs):
                raise StaleError(f"{self.greeting}, the region is gone")
            for pair, local, remote, size in zip(*attempt.batch.lists(), strict=True):
                region, descriptor = path.pairs[pair]
                here = region.span.address + local
                there = far._regions[descriptor.region_id].span.address + remote
                if attempt.op is Op.READ:
                    ctypes.memmove(here, there, size)
                else:
                    ctypes.memmove(there, here, size)
        attempt.complete()
        self._report(attempt)

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        with _moving:  # nothing of the peer is moving now, and nothing will
            self._fenced.add(peer.info.incarnation)
        return Ready(Fence(done=True))

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        return self._fence(peer)

    def _close(self, deadline: float) -> None:
        with _moving:
            self._regions.clear()
            _homes.pop(self.incarnation, None)

    def _nobody(self, info: PeerInfo) -> PeerLostError:
        said = EngineError(backend=self.name, message=f"nobody lives at {info.incarnation}")
        return PeerLostError(f"{self.greeting}, {said.message}", engine=said)
