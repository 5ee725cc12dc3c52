"""The side that connects: shows the token, asks for regions, checks and maps what it is given."""

from __future__ import annotations

import errno
import itertools
import os
import socket
from typing import TYPE_CHECKING

from kvxfer.backends.shm import messages
from kvxfer.backends.shm.link import Link, socket_name
from kvxfer.backends.shm.loop import READ
from kvxfer.backends.shm.memfd import Mapping, map_peer_file
from kvxfer.backends.shm.peer import RemoteRegion, ShmPeer
from kvxfer.backends.shm.procs import ProcessWatch, peer_credentials, peer_pidfd
from kvxfer.backends.shm.protocol import (
    MAX_REGIONS,
    PROTOCOL,
    Bye,
    Denied,
    Gone,
    Granted,
    GrantedRegion,
    Hello,
    Refusal,
    Refused,
    Revoke,
    Revoked,
    SegmentInfo,
    Want,
    Welcome,
    decode_from_server,
    encode,
)
from kvxfer.errors import (
    HandshakeError,
    KvxferError,
    PeerLostError,
    StaleError,
    TransportError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvxfer.backends.shm.config import ShmConfig
    from kvxfer.backends.shm.loop import HandoverLoop, Timer
    from kvxfer.backends.shm.messages import Message
    from kvxfer.backends.shm.procs import ProcessId

__all__ = ["Client"]

_RETRY_AFTER = 0.02
"""Seconds until the next try where the peer's backlog is full."""
_REFUSALS: dict[str, tuple[Message, type[TransportError]]] = {
    Refusal.UID: (messages.REFUSED_UID, HandshakeError),
    Refusal.TOKEN: (messages.REFUSED_TOKEN, HandshakeError),
    Refusal.VERSION: (messages.REFUSED_VERSION, HandshakeError),
    Refusal.STALE: (messages.REFUSED_STALE, StaleError),
    Refusal.BARRED: (messages.FENCED, StaleError),
    Refusal.FULL: (messages.REFUSED_FULL, HandshakeError),
}


class _Asking:
    """One ``want`` under way: which regions are still missing, and whom to tell."""

    def __init__(self, done: Callable[[KvxferError | None], None]) -> None:
        self.missing: set[int] = set()
        self.requests: list[int] = []
        self.timer: Timer | None = None
        self._done = done
        self._answered = False

    def answer(self, error: KvxferError | None) -> None:
        if not self._answered:
            self._answered = True
            if self.timer is not None:
                self.timer.cancel()
            self._done(error)


class Client:
    """Our connection to one peer. Loop thread only.

    ``cut(message)`` is called when the connection ends from the other side; for a fence of the
    peer, ``revoked`` must be called once nothing of ours touches its memory any more.  ``unmap``
    gets memory that the peer withdrew.
    """

    def __init__(
        self,
        loop: HandoverLoop,
        config: ShmConfig,
        peer: ShmPeer,
        *,
        process: ProcessId,
        cut: Callable[[Message], None],
        unmap: Callable[[Mapping], None],
    ) -> None:
        self._loop = loop
        self._config = config
        self._peer = peer
        self._process = process
        self._cut = cut
        self._unmap = unmap
        self._link: Link | None = None
        self._connected: Callable[[KvxferError | None], None] | None = None
        self._timer: Timer | None = None
        self._requests = itertools.count(1)
        self._asking: dict[int, _Asking] = {}

    # ---- connect ---------------------------------------------------------------------------

    def connect(self, incarnation: str, done: Callable[[KvxferError | None], None]) -> None:
        """Begin; ``done`` hears None or the error within ``handshake_timeout``."""
        self._connected = done
        address = self._peer.address
        if address.boot_id != self._process.boot_id:
            self._fail(messages.OTHER_MACHINE.error(HandshakeError, f"boot id {address.boot_id}"))
            return
        if self._process.comparable(address.process):
            error = self._find_process()
            if error is not None:
                self._fail(error)
                return
        self._timer = self._loop.later(self._config.handshake_timeout, self._too_late)
        self._hello = Hello(
            lowest=PROTOCOL,
            highest=PROTOCOL,
            token=address.token,
            incarnation=incarnation,
            wanted=self._peer.info.incarnation,
        )
        self._dial()

    def _find_process(self) -> TransportError | None:
        address = self._peer.address
        try:
            watch = ProcessWatch(
                os.pidfd_open(address.pid), pid=address.pid, began=address.start_time
            )
        except ProcessLookupError as error:
            return messages.PEER_GONE.error(PeerLostError, f"process {address.pid}", error.errno)
        # The pidfd was taken first: if the start time is right now, it is the right process.
        if not watch.same_process():
            watch.close()
            return messages.PID_REUSED.error(PeerLostError, f"process {address.pid}")
        self._watch(watch)
        self._peer.readable_in_place = True
        return None

    def _watch(self, watch: ProcessWatch) -> None:
        self._peer.watch = watch
        self._loop.watch(watch.pidfd, READ, lambda _: self._process_ended(watch))

    def _process_ended(self, watch: ProcessWatch) -> None:
        self._loop.unwatch(watch.pidfd)
        self._ended(messages.PEER_GONE)

    def _dial(self) -> None:
        if self._connected is None or self._link is not None:
            return
        address = self._peer.address
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(socket_name(address.socket))
        except BlockingIOError:  # its backlog is full
            sock.close()
            self._loop.later(_RETRY_AFTER, self._dial)
            return
        except OSError as error:
            sock.close()
            gone = (
                error.errno in (errno.ECONNREFUSED, errno.ENOENT) and self._peer.watch is not None
            )
            detail = f"{address.socket}: {error.strerror}"
            kind: type[TransportError] = PeerLostError if gone else HandshakeError
            self._fail(messages.UNREACHABLE.error(kind, detail, error.errno))
            return
        pid, uid = peer_credentials(sock)
        if uid not in self._config.allowed_uids:
            sock.close()
            self._fail(
                messages.FOREIGN_UID.error(
                    HandshakeError, f"uid {uid}, we allow {sorted(self._config.allowed_uids)}"
                )
            )
            return
        if self._peer.readable_in_place and pid != address.pid:
            sock.close()
            self._fail(
                messages.BROKEN_PROTOCOL.error(
                    HandshakeError,
                    f"process {pid} listens on the socket of process {address.pid}",
                )
            )
            return
        if self._peer.watch is None:
            try:
                pidfd = peer_pidfd(sock, pid)
            except OSError as error:
                sock.close()
                self._fail(messages.PEER_GONE.error(PeerLostError, code=error.errno))
                return
            if pidfd is not None:
                self._watch(ProcessWatch(pidfd))
        self._link = Link(self._loop, sock, on_message=self._received, on_closed=self._hung_up)
        self._link.send(encode(self._hello))

    def _too_late(self) -> None:
        self._fail(
            messages.NOT_ANSWERING.error(
                HandshakeError, f"within {self._config.handshake_timeout:g} s"
            )
        )

    def _fail(self, error: KvxferError) -> None:
        connected, self._connected = self._connected, None
        self.close()
        if connected is not None:
            connected(error)

    # ---- regions ---------------------------------------------------------------------------

    def want(self, region_ids: Iterable[int], done: Callable[[KvxferError | None], None]) -> None:
        """Have ``peer.regions`` hold these regions; ``done`` hears None or the error."""
        asking = _Asking(done)
        asking.missing = {r for r in region_ids if r not in self._peer.regions}
        if not asking.missing:
            asking.answer(None)
            return
        if self._link is None or self._peer.cut is not None:
            cut = self._peer.cut or messages.PEER_GONE
            asking.answer(cut_error(cut, self._peer))
            return
        asking.timer = self._loop.later(
            self._config.handshake_timeout, lambda: self._give_up(asking)
        )
        wanted = sorted(asking.missing)
        for start in range(0, len(wanted), MAX_REGIONS):
            request = next(self._requests)
            asking.requests.append(request)
            self._asking[request] = asking
            if self._link is not None:
                regions = wanted[start : start + MAX_REGIONS]
                self._link.send(encode(Want(request=request, regions=regions)))

    def _give_up(self, asking: _Asking) -> None:
        self._forget(asking)
        asking.answer(
            messages.NOT_ANSWERING.error(
                HandshakeError, f"within {self._config.handshake_timeout:g} s"
            )
        )

    def _forget(self, asking: _Asking) -> None:
        for request in asking.requests:
            self._asking.pop(request, None)

    # ---- messages --------------------------------------------------------------------------

    def _received(self, data: bytes, fds: list[int]) -> None:
        message = decode_from_server(data)
        if self._connected is not None:
            self._introduced(message)
        elif isinstance(message, Granted):
            self._granted(message, fds)
        elif isinstance(message, Denied):
            asking = self._asking.get(message.request)
            if asking is not None:
                self._forget(asking)
                asking.answer(messages.REGION_GONE.error(StaleError, f"region {message.region}"))
        elif isinstance(message, Gone):
            self._region_gone(message.region)
        elif isinstance(message, Revoke):
            self._ended(messages.FENCED)
        elif isinstance(message, Bye):
            self._ended(messages.PEER_CLOSED)
        else:
            raise WireError(f"{type(message).__name__} out of turn")

    def _introduced(self, message: object) -> None:
        connected = self._connected
        if isinstance(message, Welcome) and message.version == PROTOCOL and connected is not None:
            self._connected = None
            if self._timer is not None:
                self._timer.cancel()
            connected(None)
        elif isinstance(message, Refused) and message.reason in _REFUSALS:
            what, kind = _REFUSALS[message.reason]
            self._fail(what.error(kind, f"process {self._peer.address.pid}"))
        elif isinstance(message, Bye):
            self._fail(messages.PEER_CLOSED.error(PeerLostError))
        else:
            raise WireError(f"{type(message).__name__} instead of Welcome")

    def _granted(self, message: Granted, fds: list[int]) -> None:
        asking = self._asking.get(message.request)
        try:
            for info in message.segments:
                self._map(info, fds)
            for region in message.regions:
                self._peer.regions[region.region] = self._checked(region)
        except HandshakeError as error:
            # The server counts it as handed over; without it the two sides do not agree any more.
            if asking is not None:
                self._forget(asking)
                asking.answer(error)
            self._ended(messages.BROKEN_PROTOCOL)
            return
        self._asking.pop(message.request, None)
        if asking is not None:
            asking.missing.difference_update(region.region for region in message.regions)
            if not asking.missing:
                self._forget(asking)
                asking.answer(None)

    def _map(self, info: SegmentInfo, fds: list[int]) -> None:
        if not info.attached:
            return
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

    def _region_gone(self, region_id: int) -> None:
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

    # ---- the end ---------------------------------------------------------------------------

    def _hung_up(self, reason: str) -> None:
        self._link = None
        if self._connected is not None:
            broken = messages.BROKEN_PROTOCOL.error(HandshakeError, reason)
            gone = messages.PEER_GONE.error(PeerLostError, f"process {self._peer.address.pid}")
            self._fail(broken if reason else gone)
        else:
            self._ended(messages.BROKEN_PROTOCOL if reason else messages.PEER_GONE)

    def _ended(self, why: Message) -> None:
        if self._connected is not None:
            self._fail(cut_error(why, self._peer))
            return
        self._cut(why)

    def fail_asking(self, why: Message) -> None:
        """Answer everything that was asked and cannot be answered any more."""
        for asking in set(self._asking.values()):
            asking.answer(cut_error(why, self._peer))
        self._asking.clear()

    def revoked(self) -> None:
        """Confirm a fence of the peer, and hang up."""
        if self._link is not None:
            self._link.send(encode(Revoked()))
        self.close()

    def bye(self) -> None:
        """Hang up in an orderly way: nothing of ours touches the peer's memory any more."""
        if self._link is not None:
            self._link.send(encode(Bye()))
        self.close()

    def hang_up(self) -> None:
        """End the connection without a word."""
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None

    def close(self) -> None:
        """Hang up, and stop watching the process. Idempotent."""
        self.hang_up()
        watch = self._peer.watch
        if watch is not None:
            self._loop.unwatch(watch.pidfd)
            watch.close()


def cut_error(why: Message, peer: ShmPeer) -> TransportError:
    """``why`` a peer was cut, as the exception that ``post`` and ``prepare`` give."""
    kind: type[TransportError] = PeerLostError
    if why is messages.FENCED or why is messages.STOPPED:
        kind = StaleError
    elif why is messages.BROKEN_PROTOCOL:
        kind = HandshakeError
    return why.error(kind, f"process {peer.address.pid}")
