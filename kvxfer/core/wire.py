"""The control messages: typed, versioned, size-limited, validated. msgspec's msgpack, never pickle.

A frame is ``b"KVX"``, one byte of wire version, then one msgpack-encoded ``Envelope``.  ``decode``
raises ``WireError`` for anything else; the caller counts and drops it.  Unknown fields are skipped,
so that a newer revision can add some.

Versions: ``Hello``, ``HelloRefused`` and ``Who`` always travel as version 1, so that any two
releases can at least tell each other why they do not get along.  A hello names the range its sender
speaks; everything else goes to a peer in the highest version that both ranges hold
(``common_version``).  Version 2 adds ``Sealed``, ``Beat`` and what ``Hello``, ``Release`` and
``Bye`` say beyond version 1.  A message type is never sent in a version older than its own.

Lists of block ids travel as packed little-endian bytes (``pack_ids``).  Durations travel, never
time stamps: the two sides' clocks are not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from kvxfer.errors import WireError

if TYPE_CHECKING:  # a keeper loads this module, and numpy would be most of it
    from kvxfer.core.batch import Int64Array

__all__ = [
    "MAX_FRAME_NBYTES",
    "MAX_LAST_WORDS",
    "MAX_OPAQUE_NBYTES",
    "MAX_PAYLOAD_NBYTES",
    "MESSAGES",
    "WIRE_HANDSHAKE",
    "WIRE_MAX",
    "WIRE_MIN",
    "Accept",
    "Ask",
    "Beat",
    "BlocksWire",
    "Bye",
    "Cancel",
    "Confirm",
    "Decline",
    "DescriptorWire",
    "Envelope",
    "Gone",
    "Grant",
    "Granted",
    "Hello",
    "HelloRefused",
    "KeeperWire",
    "LayerWire",
    "Message",
    "Open",
    "PushFailed",
    "Ref",
    "Refused",
    "Release",
    "Seal",
    "Sealed",
    "TransportWire",
    "Who",
    "common_version",
    "decode",
    "encode",
    "pack_ids",
    "unknown_type",
    "unpack_ids",
]

WIRE_MIN = 1
"""Oldest wire version this code speaks."""
WIRE_MAX = 2
"""Newest wire version this code speaks."""
WIRE_HANDSHAKE = 1
"""The version in which hellos travel, for ever."""
MAX_FRAME_NBYTES = 8 << 20
"""Frames above this are refused. A hello of 1,000 layers has 0.5 MiB, a million block ids 4 MiB."""
MAX_PAYLOAD_NBYTES = 64 << 10
"""What ``seal`` may carry: a first token and its log-probabilities."""
MAX_OPAQUE_NBYTES = 1 << 20
"""What a backend may say of itself or of a region."""
MAX_LAST_WORDS = 1024
"""How many unconfirmed messages, and how many confirmations, a good-bye carries at most."""

_MAGIC = b"KVX"

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Token = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Small = Annotated[int, Meta(ge=0, le=2**20)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Opaque = Annotated[bytes, Meta(max_length=MAX_OPAQUE_NBYTES)]
Packed = Annotated[bytes, Meta(max_length=8 << 20)]
RanksWire = Annotated[dict[Token, Small], Meta(max_length=32)]


# ---- parts of messages ------------------------------------------------------------------------


class DescriptorWire(msgspec.Struct, frozen=True):
    """One region of the sender, by index."""

    region_id: Small
    nbytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    kind: Annotated[str, Meta(pattern="^(dram|vram)$")]
    device: Annotated[int, Meta(ge=-1, le=4096)]
    data: Opaque


class TransportWire(msgspec.Struct, frozen=True):
    """One transport of the sender and its regions, in the order ``LayerWire.region`` indexes."""

    name: Token
    incarnation: Token
    data: Opaque
    regions: Annotated[list[DescriptorWire], Meta(max_length=65536)]


class LayerWire(msgspec.Struct, frozen=True):
    """One layer's cache: its group, its region and its layout in ``KVLayout.to_wire`` form."""

    name: Name
    group: Small
    region: Small
    layout: dict[str, Any]


class BlocksWire(msgspec.Struct, frozen=True):
    """One group's blocks: packed ids and, where known, packed positions of equal count."""

    ids: Packed
    positions: Packed | None = None


class Ref(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names one hold or one accept for ever: transfer id, the keeper's incarnation, its epoch."""

    transfer: Name
    keeper: Token
    epoch: Count
    ticket: Annotated[str, Meta(max_length=64)] = ""
    """Out of the offer: shows that whoever names the hold was handed it. Empty without keys."""


class Granted(msgspec.Struct, frozen=True):
    ref: Ref
    remaining: Seconds
    """Lease left when the keeper answered."""


class Refused(msgspec.Struct, frozen=True):
    ref: Ref
    kind: Token
    message: Text


class KeeperWire(msgspec.Struct, frozen=True):
    """The process that answers while its agent cannot; ``address`` is empty while there is none.

    ``generation`` rises with every change, so that an older hello is known by it.
    """

    address: Annotated[str, Meta(max_length=512)]
    generation: Count


# ---- messages ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Introduces one agent. ``answer`` is set in the reply, which is not answered again."""

    versions: tuple[Small, Small]
    answer: bool
    session: Count
    """Rises whenever the sender wants its connection to this peer built anew."""
    revision: Count
    """Rises whenever the sender registers other caches; an older hello is ignored."""
    name: Name
    address: Annotated[str, Meta(max_length=512)]
    ranks: RanksWire
    fingerprint: Annotated[str, Meta(max_length=512)]
    transports: Annotated[list[TransportWire], Meta(max_length=16)]
    layers: Annotated[list[LayerWire], Meta(max_length=65536)]
    keeper: KeeperWire | None = None
    """Where the sender's keeper is reached. Missing only from a sender that speaks version 1 only:
    who speaks version 2 must say it, also that there is none."""
    failover: Annotated[list[Token], Meta(max_length=16)] = []
    """The transports that the sender may move to, the preferred one first. Empty, or missing from
    an older sender: it uses the first of ``transports`` that the receiver has, and no other."""


class HelloRefused(msgspec.Struct, frozen=True, tag="hello_refused"):
    """The hello was understood and turned down; ``message`` names both sides' values."""

    versions: tuple[Small, Small]
    message: Text


class Who(msgspec.Struct, frozen=True, tag="who"):
    """Answer to a message from somebody whose hello we do not have."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """READ: ask the producer for grants, or renew them. ``seq`` comes back in the ``Grant``."""

    seq: Count
    refs: Annotated[list[Ref], Meta(max_length=65536)]


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """READ: the remaining lease of each hold, counted by the reader from when it sent ``seq``."""

    seq: Count
    granted: Annotated[list[Granted], Meta(max_length=65536)]
    refused: Annotated[list[Refused], Meta(max_length=65536)]


class Release(msgspec.Struct, frozen=True, tag="release", omit_defaults=True):
    """READ: this rank is finished with a hold; ``ok`` tells whether it got the bytes. Confirmed.

    Version 2 says more where it did not get them: why, and whether it gave up for good (``final``).
    It may leave ``ranks`` empty, which stands for those of the sender's hello: who has forgotten
    that answers with ``Who`` and does not confirm.
    """

    ref: Ref
    ranks: RanksWire
    ok: bool
    kind: Annotated[str, Meta(max_length=64)] = ""
    message: Text = ""
    final: bool = False
    seq: Count = 0
    """Every ``Open`` with a lower number was sent before this."""


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    """READ: no rank of the sender's instance will read; an ack for all of them. Confirmed."""

    ref: Ref
    ranks: RanksWire


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """READ: the hold ended before this reader released it. Confirmed."""

    ref: Ref
    kind: Token
    message: Text


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """WRITE: the producer asks for the destination blocks of a transfer."""

    transfer: Name


class Accept(msgspec.Struct, frozen=True, tag="accept", omit_defaults=True):
    """WRITE: the consumer's destination blocks, and how long it will wait. Confirmed."""

    ref: Ref
    groups: Annotated[list[BlocksWire], Meta(max_length=4096)]
    remaining: Seconds
    session: Count = 0
    """The session of the sender's hello under which it may be written, so that a grant that comes
    late is not taken for one of after a fence. Since version 2; 0 from a sender of version 1."""


class Seal(msgspec.Struct, frozen=True, tag="seal"):
    """WRITE: everything of this producer rank has landed. Confirmed.

    From version 2 on the confirmation says only that it arrived; ``Sealed`` says what became of it.
    """

    ref: Ref
    ranks: RanksWire
    nbytes: Count
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_NBYTES)]


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """WRITE: what became of a sealed transfer at the consumer rank. Confirmed. Since version 2.

    ``ok``: it was received. Otherwise the consumer gave up, and ``kind`` and ``message`` say why.
    """

    ref: Ref
    ok: bool
    kind: Annotated[str, Meta(max_length=64)] = ""
    message: Text = ""


class PushFailed(msgspec.Struct, frozen=True, tag="push_failed", omit_defaults=True):
    """WRITE: the producer gave up, or pushes nothing (``began`` is false). Confirmed.

    ``drained``: nothing of it can land any more.  Otherwise ``left`` names the backends over which
    something may, all of them; an older sender names none, and then it may be any.  ``fresh``: the
    same transfer can be pushed at once into fresh destination blocks.
    """

    ref: Ref
    kind: Token
    message: Text
    drained: bool
    began: bool
    left: Annotated[list[Token], Meta(max_length=16)] = []
    fresh: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """WRITE: the consumer no longer wants it; the answer is ``PushFailed``. Confirmed."""

    ref: Ref
    kind: Token
    message: Text


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Between keepers: a sign of life; one that is no ``answer`` asks for one. Since version 2."""

    answer: bool


class Bye(msgspec.Struct, frozen=True, tag="bye", omit_defaults=True):
    """The sender closes in good order.

    Since version 2 it carries what it might overtake: ``confirmed``, the receiver's messages that
    the sender has seen lately, and ``last``, the frames that the receiver has not confirmed.
    """

    confirmed: Annotated[list[Count], Meta(max_length=MAX_LAST_WORDS)] = []
    last: Annotated[list[Opaque], Meta(max_length=MAX_LAST_WORDS)] = []


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """The receiver has seen these message ids. Never confirmed itself."""

    mids: Annotated[list[Count], Meta(max_length=65536)]


Message = (
    Hello
    | HelloRefused
    | Who
    | Open
    | Grant
    | Release
    | Decline
    | Gone
    | Ask
    | Accept
    | Seal
    | Sealed
    | PushFailed
    | Cancel
    | Beat
    | Bye
    | Confirm
)


MESSAGES: tuple[type, ...] = Message.__args__
"""All types of messages."""


class Envelope(msgspec.Struct, frozen=True):
    """Who speaks, which of its messages this is (0: needs no confirmation), and the message."""

    sender: Token
    mid: Count
    body: Message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_HANDSHAKE = (Hello, HelloRefused, Who)
_SINCE: dict[type, int] = {Sealed: 2, Beat: 2}
"""The version that brought a message type; 1 for all others."""


def common_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """The highest version within both ranges (oldest, newest), or None if they do not meet."""
    version = min(ours[1], theirs[1])
    return version if version >= max(ours[0], theirs[0]) else None


def encode(sender: str, body: Message, mid: int = 0, *, version: int = WIRE_MAX) -> bytes:
    """One frame in ``version``; hellos and their like always go in the handshake's version.

    Raises:
        WireError: the message type is newer than ``version``.
    """
    if isinstance(body, _HANDSHAKE):
        version = WIRE_HANDSHAKE
    elif version < _SINCE.get(type(body), WIRE_MIN):
        raise WireError(f"{type(body).__name__} needs wire version {_SINCE[type(body)]}")
    return _MAGIC + bytes((version,)) + _encoder.encode(Envelope(sender, mid, body))


def decode(frame: bytes, versions: tuple[int, int] = (WIRE_MIN, WIRE_MAX)) -> Envelope:
    """The envelope in ``frame``, which must be of one of ``versions`` (oldest, newest).

    Raises:
        WireError: too large, not ours, of an unknown version or type, or with a field that is
            missing, mistyped or out of range. The text says which.
    """
    if len(frame) > MAX_FRAME_NBYTES:
        raise WireError(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_NBYTES}")
    if not frame.startswith(_MAGIC) or len(frame) < 5:
        raise WireError(f"frame of {len(frame)} bytes is no kvxfer message")
    version = frame[3]
    spoken = versions[0] <= version <= versions[1]
    if not spoken and version != WIRE_HANDSHAKE:
        raise WireError(f"wire version {version} is not within {versions[0]} to {versions[1]}")
    try:
        # Copying a small frame is cheaper than a view of it.
        envelope = _decoder.decode(frame[4:] if len(frame) < 4096 else memoryview(frame)[4:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed message: {error}") from None
    if not spoken and not isinstance(envelope.body, _HANDSHAKE):
        raise WireError(f"wire version {version} is not within {versions[0]} to {versions[1]}")
    if version < _SINCE.get(type(envelope.body), WIRE_MIN):
        raise WireError(f"{type(envelope.body).__name__} came in wire version {version}")
    return envelope


class _Tag(msgspec.Struct):
    type: str


class _Tagged(msgspec.Struct):
    body: _Tag


_tags = msgspec.msgpack.Decoder(_Tagged)
_KNOWN_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in Message.__args__)


def unknown_type(frame: bytes) -> str | None:
    """The type of a frame that ``decode`` refused, if it is one we do not know: a newer peer's."""
    if frame[:3] != _MAGIC or len(frame) > MAX_FRAME_NBYTES:
        return None
    try:
        tag = _tags.decode(memoryview(frame)[4:]).body.type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if tag in _KNOWN_TAGS else tag[:64]


def pack_ids(ids: Int64Array) -> bytes:
    """Block ids or positions as little-endian uint32, or as int64 when one does not fit.

    The first byte is the width, 4 or 8.
    """
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < 2**32):
        return b"\x04" + ids.astype("<u4").tobytes()
    return b"\x08" + ids.astype("<i8").tobytes()


def unpack_ids(packed: bytes) -> Int64Array:
    """Inverse of ``pack_ids``.

    Raises:
        WireError: an unknown width, or a length that is no multiple of it.
    """
    width = packed[0] if packed else 0
    if width not in (4, 8) or (len(packed) - 1) % width:
        raise WireError(f"packed ids: {len(packed)} bytes of width {width}")
    import numpy as np

    return np.frombuffer(packed, "<u4" if width == 4 else "<i8", offset=1).astype(np.int64)
