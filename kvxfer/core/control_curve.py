"""CURVE on the control channel: our keys, the allow-list, and who stands behind a connection.

libzmq asks about every key that knocks (ZAP, RFC 27); the answer comes from the allow-list, on the
thread that drives the channel.  A key that is let in becomes part of every message it sends, so a
message is known by the key it came under and not by what it says of itself.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import zmq
import zmq.utils.z85

from kvxfer.core.keys import KeyPair, Security, key_name, read_allow_list, read_key_pair
from kvxfer.errors import ConfigError, InvalidInputError, KvxferError, MissingDependencyError

if TYPE_CHECKING:
    from kvxfer.core.address import Address
    from kvxfer.core.control_hub import Hub

__all__ = ["Candidate", "CurveAuth", "generate_key_pair", "public_of", "require_curve"]

logger = logging.getLogger("kvxfer.control")

DOMAIN = b"kvxfer"
_ZAP = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_FRAMES = 9
"""Envelope, delimiter, version, request id, domain, address, identity, mechanism, key."""
_QUANTUM = 64
"""Requests answered before messages have their turn again."""


def require_curve() -> None:
    """Refuse to go on where libzmq cannot encrypt.

    Raises:
        MissingDependencyError: this libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise MissingDependencyError(
            f"keys are configured, but libzmq {zmq.zmq_version()} was built without CURVE: the "
            "control channel stays closed rather than open to everybody",
            next_step="install a pyzmq wheel from PyPI, or build libzmq with libsodium",
        )


def generate_key_pair(name: str = "") -> KeyPair:
    """New keys, from libzmq's own generator (the system's randomness).

    Raises:
        MissingDependencyError: this libzmq was built without CURVE.
        ConfigError: ``name`` cannot name a peer.
    """
    from kvxfer.core.keys import parse_key

    require_curve()
    public, secret = (parse_key(key.decode()) for key in zmq.curve_keypair())
    return KeyPair(name=name or key_name(public), public=public, secret=secret)


def public_of(secret: bytes) -> bytes:
    """The public key that belongs to a secret one.

    Raises:
        MissingDependencyError: this libzmq was built without CURVE.
    """
    from kvxfer.core.keys import parse_key

    require_curve()
    return parse_key(zmq.curve_public(zmq.utils.z85.encode(secret)).decode())


@attrs.frozen
class Candidate:
    """A key under which a dialled peer may answer, and whose it is."""

    key: bytes
    name: str


class CurveAuth:
    """A ``ChannelAuth`` from key files. All methods are called by the channel's thread.

    Raises:
        ConfigError: a file cannot be read, is open to others, is malformed, or the allow-list is
            empty: nothing is started then.
        MissingDependencyError: libzmq has no CURVE.
    """

    def __init__(self, security: Security) -> None:
        require_curve()
        self.security = security
        self.own = read_key_pair(security.secret_key_file)
        self.allowed = read_allow_list(security.allowed_keys)
        if not self.allowed:
            raise ConfigError(
                f"the allow-list {security.allowed_keys} is empty: nobody would be let in",
                next_step="add the peers' public keys with `kvxfer keys allow`",
            )
        self._stamp = self._stamps()
        self._zap: zmq.Socket[bytes] | None = None
        self._hub: Hub | None = None
        self._complained: object = None

    # ---- the seam of the channel --------------------------------------------------------------

    def start(self, context: zmq.Context[Any]) -> None:
        """Answer libzmq's questions about keys. Before any socket: without it all are admitted."""
        self._zap = context.socket(zmq.ROUTER)
        try:
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP)
        except BaseException:
            self.stop()
            raise

    def attach(self, hub: Hub) -> None:
        """Have the questions answered in the channel's rounds."""
        assert self._zap is not None
        self._hub = hub
        hub.watch(self._zap, self._answer)

    def configure_listener(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def configure_dialled(self, socket: zmq.Socket[bytes], address: Address) -> None:
        """Our side. The peer's key is set by ``aim``."""
        del address
        self._set_own(socket)
        # Until it is aimed at a peer it reaches nobody but ourselves, never a plain listener.
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.own.public)

    def aim(self, socket: zmq.Socket[bytes], candidate: Candidate) -> None:
        """Set whose key must answer."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, candidate.key)

    def _set_own(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)

    def stop(self) -> None:
        zap, self._zap = self._zap, None
        if zap is not None:
            if self._hub is not None:
                self._hub.unwatch(zap)
            zap.close(0)

    # ---- who is who ---------------------------------------------------------------------------

    def name(self, key: bytes) -> str | None:
        """Whose key it is; None if it is not, or no longer, allowed."""
        return self.allowed.name(key)

    def candidates(self, peer: str) -> list[Candidate]:
        """The keys under which ``peer`` may answer; of an unnamed one, all there are.

        Raises:
            InvalidInputError: the allow-list has no key of that name.
        """
        if peer:
            found = [Candidate(key, peer) for key in self.allowed.keys(peer)]
        else:
            found = [Candidate(key, name) for key, name in self.allowed.names.items()]
        if not found:
            raise InvalidInputError(
                f"no key of {peer or 'anybody'} is in the allow-list {self.security.allowed_keys}",
                next_step="add the peer's public key with `kvxfer keys allow`",
            )
        return found

    # ---- rotation -----------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether a file changed since it was last read. A few system calls."""
        return self._stamps() != self._stamp

    def reload(self) -> bool:
        """Read the files again; whether our own pair is another now. All of it or nothing.

        Raises:
            ConfigError: as the constructor, but an empty list is taken: it cuts everybody off.
        """
        stamp = self._stamps()
        own = read_key_pair(self.security.secret_key_file)
        allowed = read_allow_list(self.security.allowed_keys)
        if own.name != self.own.name:
            raise ConfigError(
                f"the new key pair is named {own.name!r}, the running process {self.own.name!r}: "
                "peers know us by that name",
                next_step=f"generate it with the name {self.own.name!r}, or restart",
            )
        renewed = own != self.own
        self.own, self.allowed, self._stamp, self._complained = own, allowed, stamp, None
        logger.info("keys were read again: %d are allowed", len(allowed))
        if not allowed:
            logger.warning("the allow-list %s is empty now", self.security.allowed_keys)
        return renewed

    def complain(self, error: KvxferError) -> None:
        """Log that the files cannot be read again; once per state of the files."""
        stamp = self._stamps()
        if stamp != self._complained:
            self._complained = stamp
            logger.warning("keys are not read again, the ones of before stay valid: %s", error)

    def _stamps(self) -> object:
        paths = [Path(self.security.secret_key_file), Path(self.security.allowed_keys)]
        try:
            if paths[1].is_dir():
                paths += sorted(paths[1].iterdir())
        except OSError:
            return None
        return tuple((str(path), _stamp(path)) for path in paths)

    # ---- ZAP ----------------------------------------------------------------------------------

    def _answer(self) -> None:
        zap, hub = self._zap, self._hub
        if zap is None or hub is None:
            return
        for _ in range(_QUANTUM):
            try:
                frames = zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._decide(zap, hub, frames)
        hub.later(self._answer)

    def _decide(self, zap: zmq.Socket[bytes], hub: Hub, frames: list[bytes]) -> None:
        # Only libzmq can write to this socket; what it writes is checked all the same.
        if len(frames) < 5 or frames[2] != _ZAP_VERSION:
            return
        key = frames[8] if len(frames) == _ZAP_FRAMES else b""
        asked = frames[4] == DOMAIN and len(frames) == _ZAP_FRAMES and frames[7] == b"CURVE"
        name = self.allowed.name(key) if asked else None
        if name is None:
            hub.counters["keys_refused"] += 1
            verdict = [b"400", b"not allowed", b"", b""]
            if hub.counters["keys_refused"] == 1:
                where = frames[5].decode(errors="replace") if len(frames) > 5 else "?"
                logger.warning(
                    "a connection from %s shows a key that is not allowed (%s); further ones are "
                    "only counted (keys_refused)",
                    where,
                    key_name(key),
                )
        else:
            hub.counters["keys_admitted"] += 1
            verdict = [b"200", b"", key.hex().encode(), b""]
        try:
            zap.send_multipart([*frames[:2], _ZAP_VERSION, frames[3], *verdict], zmq.NOBLOCK)
        except zmq.ZMQError:
            hub.counters["keys_refused"] += name is not None  # it gave up waiting: not let in


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_dev, found.st_mtime_ns, found.st_size, found.st_mode)
