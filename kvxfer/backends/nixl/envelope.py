"""A wrapper around NIXL's metadata, because NIXL must never see bytes that are not whole.

Metadata that arrives truncated is refused by NIXL, and the good metadata of the same agent is
refused ever after.  So it travels with its length and digest, and is loaded only if both hold.
"""

from __future__ import annotations

import enum
import hashlib
import struct

from kvxfer.errors import WireError

__all__ = ["Content", "unwrap", "wrap"]

_HEAD = struct.Struct("<4sBBI32s")
_MAGIC = b"kvxn"
_VERSION = 1

MAX_PAYLOAD = 1 << 20
"""Bytes. A region's metadata is some hundred bytes, more with the keys of many rails."""


class Content(enum.IntEnum):
    """What is inside."""

    CONNECTION = 1
    REGION = 2


def wrap(content: Content, payload: bytes) -> bytes:
    """``payload`` with length and digest."""
    digest = hashlib.sha256(payload).digest()
    return _HEAD.pack(_MAGIC, _VERSION, int(content), len(payload), digest) + payload


def unwrap(content: Content, data: bytes) -> bytes:
    """What ``wrap`` was given, bit for bit.

    Raises:
        WireError: not whole, not of this kind, or not ours at all.
    """
    if len(data) < _HEAD.size:
        raise WireError(f"{len(data)} bytes are too few for NIXL metadata")
    magic, version, found, length, digest = _HEAD.unpack_from(data)
    payload = data[_HEAD.size :]
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"no NIXL metadata of version {_VERSION}: it begins with {data[:5]!r}")
    if found != content:
        raise WireError(f"NIXL metadata of kind {found}, expected {content.name} ({content})")
    if length != len(payload) or length > MAX_PAYLOAD:
        raise WireError(f"NIXL metadata says {length} bytes and has {len(payload)}")
    if hashlib.sha256(payload).digest() != digest:
        raise WireError("NIXL metadata is damaged: its digest does not match")
    return payload
