"""What two shm transports say to each other: the address in ``PeerInfo`` and the handover messages.

The token in the address travels over the control channel only.  On the socket each side proves that
it knows it: ``Hello`` and ``Challenge`` bring a fresh nonce each, ``Proof`` and ``Welcome`` a keyed
hash of both.  Whoever listens in place of the peer, or connects without having been told the token,
learns nothing and gets nothing.

Everything is msgpack through msgspec, versioned, bounded in size and checked before use.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, TypeVar

import msgspec

from kvxfer.backends.shm.procs import ProcessId
from kvxfer.errors import WireError

__all__ = [
    "MAX_MESSAGE",
    "MAX_REGIONS",
    "PROTOCOL",
    "Address",
    "Bye",
    "Challenge",
    "Denied",
    "FromClient",
    "FromServer",
    "Gone",
    "Granted",
    "GrantedRegion",
    "Hello",
    "Proof",
    "Refusal",
    "Refused",
    "Revoke",
    "Revoked",
    "SegmentInfo",
    "Want",
    "Welcome",
    "decode_address",
    "decode_from_client",
    "decode_from_server",
    "encode",
    "encode_address",
    "nonce",
    "proves",
    "proof_of",
]

PROTOCOL = 2
"""The only version spoken. A Hello names the lowest and highest that its sender speaks. Version 1
sent the token itself."""
MAX_MESSAGE = 32 * 1024
"""Bytes. The largest legal message, MAX_REGIONS of everything, needs a quarter of it."""
MAX_REGIONS = 64
"""Regions per message; each may bring one file descriptor (the kernel allows 253)."""

T = TypeVar("T")

_U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Token = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Nonce = _Token
_Mac = _Token


class Address(msgspec.Struct, frozen=True, array_like=True):
    """``PeerInfo.data``. The token admits whoever knows it."""

    lowest: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    highest: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    boot_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    namespaces: Annotated[str, msgspec.Meta(max_length=128)]
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    start_time: _U63
    socket: Annotated[str, msgspec.Meta(min_length=2, max_length=107)]
    """A path, or an abstract name with "@" for its leading zero byte."""
    token: _Token

    def __repr__(self) -> str:  # the token stays out of logs
        return f"Address(pid={self.pid}, socket={self.socket!r})"

    @property
    def process(self) -> ProcessId:
        return ProcessId(
            boot_id=self.boot_id,
            namespaces=self.namespaces,
            pid=self.pid,
            start_time=self.start_time,
        )


# ---- from the side that connects ----------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    lowest: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    highest: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    nonce: _Nonce
    incarnation: _Name
    """Who connects."""
    wanted: _Name
    """Whom it means: somebody else may have taken over the socket name."""

    def __repr__(self) -> str:
        return f"Hello(incarnation={self.incarnation!r}, wanted={self.wanted!r})"


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """Answer to ``Challenge``: we were told the token."""

    mac: _Mac


class Want(msgspec.Struct, frozen=True, tag="want"):
    request: _U63
    regions: Annotated[list[_U63], msgspec.Meta(min_length=1, max_length=MAX_REGIONS)]


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """Nothing of ours touches your memory any more, and it is unmapped."""


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """We close. The side that owns the memory expects ``Revoked``; the other's word includes it."""


# ---- from the side that owns the memory ---------------------------------------------------


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Answer to ``Hello``: prove that you were told the token."""

    nonce: _Nonce


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The proof was right; ``mac`` is ours."""

    version: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    mac: _Mac


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: _Name


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """A memory file. Its descriptor travels with the message that mentions it first."""

    segment: _U63
    nbytes: _Positive
    writable: bool
    attached: bool


class GrantedRegion(msgspec.Struct, frozen=True, array_like=True):
    """``segment`` and offset of mapped memory, or None and the address in the owner's process."""

    region: _U63
    nbytes: _Positive
    segment: _U63 | None
    place: _U63


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    request: _U63
    segments: Annotated[list[SegmentInfo], msgspec.Meta(max_length=MAX_REGIONS)]
    regions: Annotated[list[GrantedRegion], msgspec.Meta(max_length=MAX_REGIONS)]


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """``region`` is not registered."""

    request: _U63
    region: _U63


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """``region`` was granted earlier and is deregistered now."""

    region: _U63


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """Stop touching our memory, unmap it, confirm, and hang up: we fenced you."""


class Refusal:
    """Values of ``Refused.reason``."""

    UID = "uid"
    TOKEN = "token"  # noqa: S105 - names what was wrong
    VERSION = "version"
    STALE = "stale"
    BARRED = "barred"
    FULL = "full"


FromClient = Hello | Proof | Want | Revoked | Bye
FromServer = Challenge | Welcome | Refused | Granted | Denied | Gone | Revoke | Bye

_encoder = msgspec.msgpack.Encoder()
_address_decoder = msgspec.msgpack.Decoder(Address)
_client_decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_server_decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encode(message: FromClient | FromServer) -> bytes:
    return _encoder.encode(message)


def encode_address(address: Address) -> bytes:
    return _encoder.encode(address)


def decode_address(data: bytes) -> Address:
    """Raises ``WireError`` on anything else than an address of ours."""
    return _decode(_address_decoder, data)


def decode_from_client(data: bytes) -> FromClient:
    """Raises ``WireError``."""
    return _decode(_client_decoder, data)


def decode_from_server(data: bytes) -> FromServer:
    """Raises ``WireError``."""
    return _decode(_server_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of the shm handover protocol: {error}") from error


# ---- proofs -------------------------------------------------------------------------------


def nonce() -> bytes:
    """Never used before."""
    return secrets.token_bytes(32)


def proof_of(token: bytes, *, server: bool, hello: Hello, challenge: Challenge) -> bytes:
    """That its maker knows ``token``, now, in this conversation, and on which side of it."""
    said = encode(hello) + encode(challenge)  # msgpack: where one ends is never in doubt
    role = b"kvxfer shm server " if server else b"kvxfer shm client "
    return hmac.new(token, role + said, hashlib.sha256).digest()


def proves(mac: bytes, token: bytes, *, server: bool, hello: Hello, challenge: Challenge) -> bool:
    """Whether ``mac`` is that proof. Takes equally long either way."""
    return hmac.compare_digest(
        mac, proof_of(token, server=server, hello=hello, challenge=challenge)
    )
