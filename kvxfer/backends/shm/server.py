"""The side that owns memory: admits peers, hands memory files over, and takes them back.

A peer proves that it knows the token out of our ``PeerInfo``, which travels over the control
channel, and runs under an allowed uid (SO_PEERCRED).  It then asks for regions by id and receives,
once, the memory file of each.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import socket
import tempfile
from typing import TYPE_CHECKING

from kvxfer.backends.shm.holders import Holder, Revocation
from kvxfer.backends.shm.link import Link, socket_name
from kvxfer.backends.shm.loop import READ, HandoverLoop
from kvxfer.backends.shm.memfd import PeerAccess
from kvxfer.backends.shm.procs import ProcessWatch, peer_credentials, peer_pidfd
from kvxfer.backends.shm.protocol import (
    PROTOCOL,
    Bye,
    Challenge,
    Denied,
    FromServer,
    Gone,
    Granted,
    GrantedRegion,
    Hello,
    Proof,
    Refusal,
    Refused,
    Revoke,
    SegmentInfo,
    Want,
    Welcome,
    decode_from_client,
    encode,
    nonce,
    proof_of,
    proves,
)
from kvxfer.errors import ConfigError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.backends.shm.config import ShmConfig
    from kvxfer.backends.shm.exports import Export

__all__ = ["Server"]

HELLO_TIMEOUT = 5.0
"""Seconds a stranger may hold a connection without introducing itself and proving it."""
MAX_BARRED = 4096
"""Fenced incarnations that are remembered; beyond, the oldest is forgotten and counted."""
_BACKLOG = 128


class Server:
    """Constructed on any thread, then used on the loop's thread only.

    ``find`` looks a registered region up by id.

    Raises:
        ConfigError: the socket cannot be bound; names the directory.
    """

    def __init__(
        self,
        loop: HandoverLoop,
        config: ShmConfig,
        *,
        incarnation: str,
        find: Callable[[int], Export | None],
    ) -> None:
        self._loop = loop
        self._config = config
        self._incarnation = incarnation
        self._find = find
        self.token = secrets.token_bytes(32)
        self.counters: collections.Counter[str] = collections.Counter()
        self._holders: list[Holder] = []
        self._barred: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._directory, self.socket = _choose_name(config)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(socket_name(self.socket))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            self._remove_directory()
            raise ConfigError(f"cannot bind the handover socket {self.socket}: {error}") from error
        self._listener.setblocking(False)

    def start(self) -> None:
        self._loop.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        """Hang up on everybody and free the socket."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._remove_directory()
        for holder in tuple(self._holders):
            self._end(holder)

    def announce_gone(self, region_id: int) -> None:
        """Tell those who were granted a region that it is deregistered."""
        for holder in tuple(self._holders):  # one that does not read is dropped meanwhile
            if region_id not in holder.granted:
                continue
            segment = holder.granted.pop(region_id)
            # The peer applies the same rule and unmaps: should it ask again, it gets the file anew.
            if segment not in holder.granted.values() and segment is not None:
                holder.sent.discard(segment)
            self._send(holder, Gone(region=region_id))

    def admit(self, incarnation: str) -> None:
        """Let an incarnation in again that was fenced."""
        self._barred.pop(incarnation, None)

    def revoke(self, incarnation: str, answer: Callable[[str], None]) -> None:
        """Cut an incarnation off; ``answer("")`` once it cannot write into our memory any more.

        Proven by its word that it unmapped everything, or by the end of its process.  After
        ``fence_timeout`` the answer is the reason why it is not proven.
        """
        self._barred[incarnation] = None
        while len(self._barred) > MAX_BARRED:
            self._barred.popitem(last=False)
            self.counters["barred_forgotten"] += 1
        holders = [h for h in self._holders if h.incarnation == incarnation]
        self._revoke(holders, Revoke(), answer)

    def dismiss(self, answer: Callable[[str], None]) -> None:
        """Tell everybody that we close; ``answer`` as for ``revoke``."""
        self._loop.unwatch(self._listener.fileno())
        self._revoke(list(self._holders), Bye(), answer)

    # ---- proofs ----------------------------------------------------------------------------

    def _revoke(
        self, holders: list[Holder], message: Revoke | Bye, answer: Callable[[str], None]
    ) -> None:
        for holder in holders:
            holder.leaving = True
            self._send(holder, message)
        writers = [h for h in holders if h.may_write and not h.ended]
        Revocation(self._loop, writers, self._config.fence_timeout, answer)

    def _end(self, holder: Holder) -> None:
        """It is certain that the holder touches nothing of ours any more, or we give up."""
        if holder.ended:
            return
        holder.ended = True
        holder.hang_up()
        if holder.watch is not None:
            self._loop.unwatch(holder.watch.pidfd)
            holder.watch.close()
        self._holders.remove(holder)
        for call in holder.on_end:
            call()

    def _lost(self, holder: Holder, reason: str) -> None:
        """The connection broke without a word. What the peer mapped, it may still have mapped."""
        if reason:
            self.counters["links_dropped"] += 1
        holder.hang_up()
        if not holder.may_write or holder.watch is None or not holder.watch.alive():
            self._end(holder)

    # ---- connections -----------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: look again in a moment instead of spinning
            self.counters["accept_failed"] += 1
            self._loop.unwatch(self._listener.fileno())
            self._loop.later(0.1, self._resume)
            return
        pid, uid = peer_credentials(sock)
        try:
            pidfd = peer_pidfd(sock, pid)
        except (OSError, ValueError):  # it has ended since
            sock.close()
            return
        watch = None if pidfd is None else ProcessWatch(pidfd)
        holder = Holder(watch, pid)
        holder.link = Link(
            self._loop,
            sock,
            on_message=lambda data, _fds: self._received(holder, data),
            on_closed=lambda reason: self._lost(holder, reason),
        )
        self._holders.append(holder)
        if uid not in self._config.allowed_uids:
            self._refuse(holder, Refusal.UID)
        elif len(self._holders) > self._config.max_connections:
            self._refuse(holder, Refusal.FULL)
        else:
            holder.hello_timer = self._loop.later(HELLO_TIMEOUT, lambda: self._end(holder))
            if watch is not None:
                self._loop.watch(watch.pidfd, READ, lambda _: self._end(holder))

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self.start()

    def _refuse(self, holder: Holder, reason: str) -> None:
        self.counters[f"refused_{reason}"] += 1
        self._send(holder, Refused(reason=reason))
        self._end(holder)

    def _send(self, holder: Holder, message: FromServer, fds: tuple[int, ...] = ()) -> None:
        if holder.link is not None:
            holder.link.send(encode(message), fds)

    # ---- messages --------------------------------------------------------------------------

    def _received(self, holder: Holder, data: bytes) -> None:
        try:
            message = decode_from_client(data)
        except WireError:
            self.counters["malformed"] += 1
            raise
        if isinstance(message, Hello):
            self._greet(holder, message)
        elif isinstance(message, Proof):
            self._check_proof(holder, message)
        elif not holder.incarnation:
            self.counters["malformed"] += 1
            raise WireError("a message before Hello and Proof")
        elif isinstance(message, Want):
            if not holder.leaving:
                self._grant(holder, message)
        else:  # Revoked or Bye: each says that nothing of ours is mapped any more
            self._end(holder)

    def _greet(self, holder: Holder, hello: Hello) -> None:
        if hello.wanted != self._incarnation:
            self._refuse(holder, Refusal.STALE)
        elif not hello.lowest <= PROTOCOL <= hello.highest:
            self._refuse(holder, Refusal.VERSION)
        elif holder.challenged is None and not holder.incarnation:
            challenge = Challenge(nonce=nonce())
            holder.challenged = (hello, challenge)
            self._send(holder, challenge)
        else:
            self.counters["malformed"] += 1
            raise WireError("a second Hello")

    def _check_proof(self, holder: Holder, proof: Proof) -> None:
        if holder.challenged is None:
            self.counters["malformed"] += 1
            raise WireError("a Proof that nobody asked for")
        (hello, challenge), holder.challenged = holder.challenged, None
        if not proves(proof.mac, self.token, server=False, hello=hello, challenge=challenge):
            self._refuse(holder, Refusal.TOKEN)
        elif hello.incarnation in self._barred:
            self._refuse(holder, Refusal.BARRED)
        else:
            holder.incarnation = hello.incarnation
            if holder.hello_timer is not None:
                holder.hello_timer.cancel()
            mac = proof_of(self.token, server=True, hello=hello, challenge=challenge)
            self._send(holder, Welcome(version=PROTOCOL, mac=mac))

    def _grant(self, holder: Holder, want: Want) -> None:
        segments: dict[int, SegmentInfo] = {}
        regions: list[GrantedRegion] = []
        fds: list[int] = []
        for region_id in dict.fromkeys(want.regions):
            export = self._find(region_id)
            if export is None:
                self._send(holder, Denied(request=want.request, region=region_id))
                return
            segment = export.segment
            if segment is not None and segment.segment_id not in segments:
                attached = segment.segment_id not in holder.sent
                # Without a pidfd the end of a writer could never be proven (before Linux 6.5,
                # across pid namespaces): such peers get to read only.
                writable = segment.peers is PeerAccess.READ_WRITE and holder.watch is not None
                segments[segment.segment_id] = SegmentInfo(
                    segment.segment_id, segment.nbytes, writable, attached
                )
                if attached:
                    fds.append(segment.fd)
                holder.may_write = holder.may_write or writable
            regions.append(
                GrantedRegion(
                    region_id,
                    export.nbytes,
                    None if segment is None else segment.segment_id,
                    export.place,
                )
            )
        holder.sent.update(segments)
        holder.granted.update((region.region, region.segment) for region in regions)
        self._send(
            holder,
            Granted(request=want.request, segments=list(segments.values()), regions=regions),
            tuple(fds),
        )

    def _remove_directory(self) -> None:
        if self._directory:
            with contextlib.suppress(OSError):
                os.unlink(self.socket)
            with contextlib.suppress(OSError):
                os.rmdir(self._directory)


def _choose_name(config: ShmConfig) -> tuple[str, str]:
    """``(directory to remove, socket name)``."""
    if config.socket_dir is None:
        # Unguessable, so that nobody can take the name before us.
        return "", f"@kvxfer-{secrets.token_hex(16)}"
    try:
        directory = tempfile.mkdtemp(prefix="kvxfer-", dir=config.socket_dir)  # mode 0700
    except OSError as error:
        raise ConfigError(
            f"socket_dir={config.socket_dir!r} cannot be used: {error.strerror}"
        ) from error
    path = os.path.join(os.path.abspath(directory), "handover")
    if len(path.encode()) > 107:  # sun_path of Linux
        os.rmdir(directory)
        raise ConfigError(f"socket_dir={config.socket_dir!r} makes a socket path over 107 bytes")
    return directory, path
