"""The wire module of version 1, frozen: what an older release really encodes and decodes.

Only for tests of old against new.  Never change it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from kvxfer.core.batch import Int64Array
from kvxfer.errors import WireError

__all__ = [
    "MAX_FRAME_NBYTES",
    "MAX_PAYLOAD_NBYTES",
    "WIRE_MAX",
    "WIRE_MIN",
    "Accept",
    "Ask",
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
    "LayerWire",
    "Message",
    "Open",
    "PushFailed",
    "Ref",
    "Refused",
    "Release",
    "Seal",
    "TransportWire",
    "Who",
    "decode",
    "encode",
    "pack_ids",
    "unpack_ids",
]

WIRE_MIN = 1
"""Oldest wire version this code speaks."""
WIRE_MAX = 1
"""Newest wire version this code speaks."""
MAX_FRAME_NBYTES = 8 << 20
"""Frames above this are refused. A hello of 1,000 layers has 0.5 MiB, a million block ids 4 MiB."""
MAX_PAYLOAD_NBYTES = 64 << 10
"""What ``seal`` may carry: a first token and its log-probabilities."""

_MAGIC = b"KVX"

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Token = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Small = Annotated[int, Meta(ge=0, le=2**20)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Opaque = Annotated[bytes, Meta(max_length=1 << 20)]
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


class Ref(msgspec.Struct, frozen=True):
    """Names one hold or one accept for ever: transfer id, the keeper's incarnation, its epoch."""

    transfer: Name
    keeper: Token
    epoch: Count


class Granted(msgspec.Struct, frozen=True):
    ref: Ref
    remaining: Seconds
    """Lease left when the keeper answered."""


class Refused(msgspec.Struct, frozen=True):
    ref: Ref
    kind: Token
    message: Text


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


class Release(msgspec.Struct, frozen=True, tag="release"):
    """READ: this rank is finished with a hold; ``ok`` tells whether it got the bytes. Confirmed."""

    ref: Ref
    ranks: RanksWire
    ok: bool


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


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """WRITE: the consumer's destination blocks, and how long it will wait. Confirmed."""

    ref: Ref
    groups: Annotated[list[BlocksWire], Meta(max_length=4096)]
    remaining: Seconds


class Seal(msgspec.Struct, frozen=True, tag="seal"):
    """WRITE: everything of this producer rank has landed. Confirmed."""

    ref: Ref
    ranks: RanksWire
    nbytes: Count
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_NBYTES)]


class PushFailed(msgspec.Struct, frozen=True, tag="push_failed"):
    """WRITE: the producer gave up, or pushes nothing (``began`` is false). Confirmed.

    ``drained``: nothing of it can land any more.
    """

    ref: Ref
    kind: Token
    message: Text
    drained: bool
    began: bool


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """WRITE: the consumer no longer wants it; the answer is ``PushFailed``. Confirmed."""

    ref: Ref
    kind: Token
    message: Text


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The sender closes in good order."""


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
    | PushFailed
    | Cancel
    | Bye
    | Confirm
)


class Envelope(msgspec.Struct, frozen=True):
    """Who speaks, which of its messages this is (0: needs no confirmation), and the message."""

    sender: Token
    mid: Count
    body: Message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(sender: str, body: Message, mid: int = 0) -> bytes:
    """One frame."""
    return _MAGIC + bytes((WIRE_MAX,)) + _encoder.encode(Envelope(sender, mid, body))


def decode(frame: bytes) -> Envelope:
    """The envelope in ``frame``.

    Raises:
        WireError: too large, not ours, of an unknown version or type, or with a field that is
            missing, mistyped or out of range. The text says which.
    """
    if len(frame) > MAX_FRAME_NBYTES:
        raise WireError(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_NBYTES}")
    if frame[:3] != _MAGIC or len(frame) < 5:
        raise WireError(f"frame of {len(frame)} bytes is no kvxfer message")
    if not WIRE_MIN <= frame[3] <= WIRE_MAX:
        raise WireError(f"wire version {frame[3]} is not within {WIRE_MIN} to {WIRE_MAX}")
    try:
        return _decoder.decode(memoryview(frame)[4:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed message: {error}") from None


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
    return np.frombuffer(packed, "<u4" if width == 4 else "<i8", offset=1).astype(np.int64)
