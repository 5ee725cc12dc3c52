"""What NIXL's metadata says, read before NIXL reads it.

NIXL and UCX trust metadata: lengths and counts that are wrong end the process, a name that is not
the sender's spoils what is known of somebody else, and truncated metadata of an agent makes the
good one fail for ever.  The wrapper (``envelope``) finds what was damaged on its way; this finds
what was wrong from the start.  What is inside a UCX address or a remote key stays opaque: only the
peer itself can have made it, and over the control channel only peers with our keys are heard.

The format, as nixl 1.5.1 writes it: ``nixlSerDes|``, then fields of a tag, a length (8 bytes,
little-endian), so many bytes, and ``|``.  An ``Agent`` name, the number of ``Conns`` (each a
backend ``t`` and its address ``c``), the text ``MemSection``, and the number of ``nixlSecElms``:
each a backend ``bknd`` and a ``nixlDList``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import attrs

from kvxfer.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Metadata", "RemoteRegion", "check_connection", "check_region", "read"]

_PREFIX = b"nixlSerDes|"
_LENGTH = struct.Struct("<Q")
_COUNT = struct.Struct("<Q")
_DESCRIPTOR = struct.Struct("<QQQ")
"""Address, length, device; a remote key may follow."""

_BACKEND = b"UCX"
_ADDRESS_VERSIONS = (0, 1)
_SEGMENTS = 16
"""Kinds of memory that NIXL numbers are below this."""
MOST = 64
"""Connections, and sections of memory, in one piece of metadata. Ours have one."""


@attrs.frozen(kw_only=True)
class RemoteRegion:
    """One registered stretch: address, bytes, device as NIXL counts it."""

    address: int
    nbytes: int
    device: int


@attrs.frozen(kw_only=True)
class Metadata:
    """``connections``: backends with their addresses."""

    agent: str
    connections: tuple[bytes, ...] = attrs.field(repr=False)
    regions: tuple[RemoteRegion, ...]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def expect(self, text: bytes) -> None:
        """Step over ``text``."""
        if not self._data.startswith(text, self._at):
            found = self._data[self._at : self._at + len(text)]
            raise WireError(f"NIXL metadata has {found!r} at byte {self._at}, expected {text!r}")
        self._at += len(text)

    def field(self, tag: bytes, most: int) -> bytes:
        """The content of the field ``tag``, of at most ``most`` bytes."""
        self.expect(tag)
        return self.bare(most)

    def bare(self, most: int) -> bytes:
        """A field without a tag."""
        head = self._data[self._at : self._at + _LENGTH.size]
        if len(head) < _LENGTH.size:
            raise WireError(f"NIXL metadata ends at byte {len(self._data)}, inside a length")
        (length,) = _LENGTH.unpack(head)
        self._at += _LENGTH.size
        if length > min(most, len(self._data) - self._at):
            raise WireError(f"NIXL metadata has a field of {length} bytes at byte {self._at}")
        content = self._data[self._at : self._at + length]
        self._at += length
        self.expect(b"|")
        return content

    def count(self, tag: bytes) -> int:
        content = self.field(tag, _COUNT.size)
        if len(content) != _COUNT.size:
            raise WireError(f"NIXL metadata counts {tag!r} in {len(content)} bytes, expected 8")
        (number,) = _COUNT.unpack(content)
        if number > MOST:
            raise WireError(f"NIXL metadata has {number} of {tag!r}, more than {MOST}")
        return int(number)

    def end(self) -> None:
        if self._at != len(self._data):
            raise WireError(f"NIXL metadata has {len(self._data) - self._at} bytes too many")


def read(data: bytes) -> Metadata:
    """What ``data`` says.

    Raises:
        WireError: not NIXL metadata, a length or count is wrong, or a backend is not UCX.
    """
    reader = _Reader(data)
    reader.expect(_PREFIX)
    try:
        agent = reader.field(b"Agent", 256).decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError("NIXL metadata names an agent that is no text") from error
    connections = []
    for _ in range(reader.count(b"Conns")):
        _check_backend(reader.field(b"t", 64))
        connections.append(_address(reader.field(b"c", 1 << 16)))
    if reader.bare(64) != b"MemSection":
        raise WireError("NIXL metadata has no section of memory")
    regions: list[RemoteRegion] = []
    for _ in range(reader.count(b"nixlSecElms")):
        _check_backend(reader.field(b"bknd", 64))
        regions.extend(_section(reader))
    reader.end()
    return Metadata(agent=agent, connections=tuple(connections), regions=tuple(regions))


def _check_backend(name: bytes) -> None:
    if name != _BACKEND:
        raise WireError(f"NIXL metadata is for the backend {name!r}, expected {_BACKEND!r}")


def _address(content: bytes) -> bytes:
    """A UCX worker address. UCX ends the process over versions that it does not know."""
    if not content or content[0] & 0xF not in _ADDRESS_VERSIONS:
        raise WireError(f"NIXL metadata has a UCX address that begins with {content[:1]!r}")
    return content


def _section(reader: _Reader) -> list[RemoteRegion]:
    if reader.field(b"nixlDList", 64) != b"nixlSDList":
        raise WireError("NIXL metadata has a list of another kind than nixlSDList")
    kind = reader.field(b"t", 4)
    if len(kind) != 4 or int.from_bytes(kind, "little") >= _SEGMENTS:
        raise WireError(f"NIXL metadata has memory of kind {kind!r}")
    return [_region(reader.bare(1 << 16)) for _ in range(reader.count(b"n"))]


def _region(content: bytes) -> RemoteRegion:
    if len(content) < _DESCRIPTOR.size:
        raise WireError(f"NIXL metadata describes a region in {len(content)} bytes")
    address, nbytes, device = _DESCRIPTOR.unpack_from(content)
    if not nbytes or address + nbytes > 2**64:
        raise WireError(f"NIXL metadata has a region of {nbytes} bytes at {address:#x}")
    _check_key(content[_DESCRIPTOR.size :])
    return RemoteRegion(address=address, nbytes=nbytes, device=device)


def _check_key(key: bytes) -> None:
    """A packed UCX key: a map of memory domains, a kind of memory, and something for each domain.

    UCX reads as many domains as the map says, wherever the key ends.
    """
    if len(key) < 9:
        raise WireError(f"NIXL metadata has a remote key of {len(key)} bytes")
    domains = int.from_bytes(key[:8], "little").bit_count()
    if len(key) < 9 + domains:
        raise WireError(f"NIXL metadata has a remote key of {len(key)} bytes for {domains} domains")


def check_connection(data: bytes, agent: str) -> None:
    """Refuse what is not how to reach ``agent``, and nothing else.

    Raises:
        WireError: says what is wrong.
    """
    found = read(data)
    _check_agent(found, agent)
    if not found.connections or found.regions:
        raise WireError(
            f"NIXL metadata has {len(found.connections)} connections and {len(found.regions)} "
            "regions, expected a connection"
        )


def check_region(data: bytes, agent: str, expected: RemoteRegion) -> None:
    """Refuse what is not the one region of ``agent`` that its descriptor speaks of.

    Raises:
        WireError: says what is wrong.
    """
    found = read(data)
    _check_agent(found, agent)
    regions: Sequence[RemoteRegion] = found.regions
    if found.connections or list(regions) != [expected]:
        raise WireError(f"NIXL metadata has the regions {list(regions)}, expected {expected}")


def _check_agent(found: Metadata, agent: str) -> None:
    if found.agent != agent:
        raise WireError(f"NIXL metadata is of the agent {found.agent!r}, expected {agent!r}")
