"""The regions of one peer: asked for, handed over, checked, mapped once, withdrawn."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from kvxfer.backends.shm import messages
from kvxfer.backends.shm.memfd import Mapping, map_peer_file
from kvxfer.backends.shm.peer import RemoteRegion, ShmPeer
from kvxfer.backends.shm.protocol import (
    MAX_REGIONS,
    Denied,
    Granted,
    GrantedRegion,
    SegmentInfo,
    Want,
)
from kvxfer.errors import HandshakeError, KvxferError, StaleError, TransportError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvxfer.backends.shm.loop import Timer

__all__ = ["RegionTable"]


class _Asking:
    """One request of ours: which regions are still missing, and whom to tell."""

    def __init__(self, missing: set[int], done: Callable[[KvxferError | None], None]) -> None:
        self.missing = missing
        self.timer: Timer | None = None
        self._done = done
        self._answered = False

    def answer(self, error: KvxferError | None) -> None:
        if not self._answered:
            self._answered = True
            if self.timer is not None:
                self.timer.cancel()
            self._done(error)


class RegionTable:
    """Fills ``peer.regions`` and ``peer.mappings``. Loop thread only.

    ``unmap`` gets memory that the peer withdrew, to be unmapped once nothing touches it.
    """

    def __init__(self, peer: ShmPeer, *, unmap: Callable[[Mapping], None]) -> None:
        self._peer = peer
        self._unmap = unmap
        self._numbers = itertools.count(1)
        # What was given up after a time-out stays here until its answer comes.
        self._asking: dict[int, _Asking] = {}

    def missing(self, region_ids: Iterable[int]) -> set[int]:
        """Which of these regions the peer must be asked for."""
        return {r for r in region_ids if r not in self._peer.regions}

    def ask(
        self, missing: set[int], done: Callable[[KvxferError | None], None]
    ) -> tuple[_Asking, Iterator[Want]]:
        """The messages to send. ``done`` hears None once all regions are there, or an error."""
        asking = _Asking(missing, done)
        wanted = sorted(missing)
        requests = []
        for start in range(0, len(wanted), MAX_REGIONS):
            number = next(self._numbers)
            self._asking[number] = asking
            requests.append(Want(request=number, regions=wanted[start : start + MAX_REGIONS]))
        return asking, iter(requests)

    def granted(self, message: Granted, fds: list[int]) -> None:
        """The peer handed regions over; takes what it needs from ``fds``.

        Raises:
            WireError: the message makes no sense.
            HandshakeError: the memory is not what it should be. Whoever asked knows already.
        """
        asking = self._asked(message.request)
        try:
            for info in message.segments:
                self._map(info, fds)
            for region in message.regions:
                self._peer.regions[region.region] = self._checked(region)
        except HandshakeError as error:
            asking.answer(error)
            raise
        del self._asking[message.request]
        asking.missing.difference_update(region.region for region in message.regions)
        if not asking.missing:
            asking.answer(None)

    def denied(self, message: Denied) -> None:
        """A region is not registered (any more)."""
        asking = self._asked(message.request)
        del self._asking[message.request]
        asking.answer(messages.REGION_GONE.error(StaleError, f"region {message.region}"))

    def gone(self, region_id: int) -> None:
        """A region that we have was deregistered: unmap its memory if no other one lies there."""
        region = self._peer.regions.pop(region_id, None)
        if region is None:
            return
        region.gone = True
        segment = region.segment
        if segment is None or any(r.segment == segment for r in self._peer.regions.values()):
            return
        mapping = self._peer.mappings.pop(segment, None)
        if mapping is not None:
            self._unmap(mapping)

    def fail(self, error: TransportError) -> None:
        """Answer everything that cannot be answered any more."""
        for asking in set(self._asking.values()):
            asking.answer(error)
        self._asking.clear()

    # ---- inside ----------------------------------------------------------------------------

    def _asked(self, number: int) -> _Asking:
        asking = self._asking.get(number)
        if asking is None:
            raise WireError(f"an answer to request {number}, which we did not make")
        return asking

    def _map(self, info: SegmentInfo, fds: list[int]) -> None:
        if not info.attached:
            return
        if info.segment in self._peer.mappings:
            raise WireError(f"segment {info.segment} came twice")
        if not fds:
            raise WireError(f"segment {info.segment} came without its file")
        fd = fds.pop(0)
        try:
            mapping = map_peer_file(fd, info.nbytes, writable=info.writable)
        finally:
            os.close(fd)
        self._peer.mappings[info.segment] = mapping

    def _checked(self, granted: GrantedRegion) -> RemoteRegion:
        mapping: Mapping | None = None
        address = granted.place
        if granted.segment is not None:
            mapping = self._peer.mappings.get(granted.segment)
            if mapping is None:
                raise WireError(f"segment {granted.segment} was never handed over")
            if granted.place > mapping.nbytes - granted.nbytes:
                raise messages.TOO_SMALL.error(
                    HandshakeError,
                    f"region {granted.region} ends at byte {granted.place + granted.nbytes} of "
                    f"{mapping.nbytes}",
                )
            address = mapping.address + granted.place
        elif granted.place > 2**63 - 1 - granted.nbytes:
            raise WireError(f"region {granted.region} leaves the address space")
        return RemoteRegion(
            region_id=granted.region,
            nbytes=granted.nbytes,
            mapping=mapping,
            address=address,
            segment=granted.segment,
        )
