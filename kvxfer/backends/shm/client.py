"""The side that connects: proves itself, asks for regions, checks and maps what it is given."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from kvxfer.backends.shm import messages
from kvxfer.backends.shm.link import Link, socket_name
from kvxfer.backends.shm.loop import READ
from kvxfer.backends.shm.procs import ProcessWatch, peer_credentials, peer_pidfd
from kvxfer.backends.shm.protocol import (
    PROTOCOL,
    Bye,
    Challenge,
    Denied,
    Gone,
    Granted,
    Hello,
    Proof,
    Refusal,
    Refused,
    Revoke,
    Revoked,
    Welcome,
    decode_from_server,
    encode,
    nonce,
    proof_of,
    proves,
)
from kvxfer.backends.shm.regions import RegionTable
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
    from kvxfer.backends.shm.memfd import Mapping
    from kvxfer.backends.shm.messages import Message
    from kvxfer.backends.shm.peer import ShmPeer
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
        self._regions = RegionTable(peer, unmap=unmap)
        self._link: Link | None = None
        self._connected: Callable[[KvxferError | None], None] | None = None
        self._timer: Timer | None = None
        self._challenge: Challenge | None = None

    # ---- connect ---------------------------------------------------------------------------

    def connect(self, incarnation: str, done: Callable[[KvxferError | None], None]) -> None:
        """Begin; ``done`` hears None or the error within ``handshake_timeout``."""
        self._connected = done
        self._timer = self._loop.later(self._config.handshake_timeout, self._too_late)
        address = self._peer.address
        if address.boot_id != self._process.boot_id:
            self._fail(messages.OTHER_MACHINE.error(HandshakeError, f"boot id {address.boot_id}"))
            return
        if self._process.comparable(address.process):
            error = self._find_process()
            if error is not None:
                self._fail(error)
                return
        self._hello = Hello(
            lowest=PROTOCOL,
            highest=PROTOCOL,
            nonce=nonce(),
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
        except OSError as error:  # out of descriptors, or no pidfd_open (before Linux 5.3)
            detail = f"pidfd_open: {error.strerror}"
            return messages.UNREACHABLE.error(HandshakeError, detail, error.errno)
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
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._fail(messages.UNREACHABLE.error(HandshakeError, str(error), error.errno))
            return
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
        self._fail(self._silence())

    def _fail(self, error: KvxferError) -> None:
        connected, self._connected = self._connected, None
        self.close()
        if connected is not None:
            connected(error)

    # ---- regions ---------------------------------------------------------------------------

    def want(self, region_ids: Iterable[int], done: Callable[[KvxferError | None], None]) -> None:
        """Have ``peer.regions`` hold these regions; ``done`` hears None or the error."""
        missing = self._regions.missing(region_ids)
        if not missing:
            done(None)
        elif self._link is None or self._peer.cut is not None:
            done(cut_error(self._peer.cut or messages.PEER_GONE, self._peer))
        else:
            asking, requests = self._regions.ask(missing, done)
            asking.timer = self._loop.later(
                self._config.handshake_timeout, lambda: asking.answer(self._silence())
            )
            for request in requests:
                if self._link is not None:
                    self._link.send(encode(request))

    def _silence(self) -> TransportError:
        return messages.NOT_ANSWERING.error(
            HandshakeError, f"within {self._config.handshake_timeout:g} s"
        )

    # ---- messages --------------------------------------------------------------------------

    def _received(self, data: bytes, fds: list[int]) -> None:
        if self._peer.cut is not None:
            return  # we are on our way out: what was handed over is not mapped any more
        message = decode_from_server(data)
        if self._connected is not None:
            self._introduced(message)
        elif isinstance(message, Granted):
            try:
                self._regions.granted(message, fds)
            except HandshakeError:
                # The peer counts it as handed over: the two sides do not agree any more.
                self._ended(messages.BROKEN_PROTOCOL)
        elif isinstance(message, Denied):
            self._regions.denied(message)
        elif isinstance(message, Gone):
            self._regions.gone(message.region)
        elif isinstance(message, Revoke):
            self._ended(messages.FENCED)
        elif isinstance(message, Bye):
            self._ended(messages.PEER_CLOSED)
        else:
            raise WireError(f"{type(message).__name__} out of turn")

    def _introduced(self, message: object) -> None:
        connected = self._connected
        if isinstance(message, Challenge) and self._challenge is None:
            self._prove(message)
        elif isinstance(message, Welcome) and message.version == PROTOCOL and connected is not None:
            if not self._is_proven(message):
                self._fail(
                    messages.BROKEN_PROTOCOL.error(
                        HandshakeError, "who listens there does not know the peer's token"
                    )
                )
                return
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

    def _prove(self, challenge: Challenge) -> None:
        self._challenge = challenge
        mac = proof_of(
            self._peer.address.token, server=False, hello=self._hello, challenge=challenge
        )
        if self._link is not None:
            self._link.send(encode(Proof(mac=mac)))

    def _is_proven(self, welcome: Welcome) -> bool:
        return self._challenge is not None and proves(
            welcome.mac,
            self._peer.address.token,
            server=True,
            hello=self._hello,
            challenge=self._challenge,
        )

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
        self._regions.fail(cut_error(why, self._peer))

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
