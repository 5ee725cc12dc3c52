"""Asking an engine for its description, over the protocol of its control port.

The engine's own calls tell nothing: ``initialize`` succeeds with any protocol, and a failed piece
is -1.  Its control port describes it to whoever asks: protocol, data port, registered memory.
Unlike the engine's own probe, which waits a minute for a stopped peer, this has our time-out.

A message is its length (8 bytes, little-endian, the kind byte included), one kind byte, and JSON.
Seen with mooncake-transfer-engine-non-cuda 0.3.13.post1.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.address import Address

__all__ = ["Description", "describe", "parse"]

_LENGTH = struct.Struct("<Q")
_METADATA = 1
"""The kind of a request for, and an answer with, the description."""
_MAX_ANSWER = 4 << 20
"""Bytes. A registered buffer takes some hundred bytes of it, so there is room for 20,000.  Reading
JSON takes up to 0.15 us a byte and keeps the GIL all the while: of 64 MiB it took 8 s."""

ACKNOWLEDGED = 2
"""The version of the tcp protocol from which a WRITE is complete when the peer has it in memory."""


@attrs.frozen(kw_only=True)
class Description:
    """What an engine says of itself. ``buffers``: address and length in bytes."""

    protocol: str
    data_port: int
    tcp_version: int
    buffers: tuple[tuple[int, int], ...] = attrs.field(repr=False)

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether one registered buffer holds the whole range."""
        return any(a <= address and address + nbytes <= a + n for a, n in self.buffers)

    def first_uncovered(self, ranges: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The first of ``ranges`` (address, bytes) that is not registered."""
        return next((r for r in ranges if not self.covers(*r)), None)


def describe(address: Address, timeout: float) -> Description:
    """Ask the engine at ``address``; every step together takes at most ``timeout`` seconds.

    Raises:
        ConnectionRefusedError: nobody listens there.
        TimeoutError: somebody does, or nobody is reached, and no answer came.
        OSError: the address cannot be reached.
        WireError: whoever answered is no Mooncake engine of a known kind.
    """
    end = time.monotonic() + timeout
    with socket.create_connection((address.host, address.port or 0), timeout) as link:
        request = b"{}"
        link.sendall(_LENGTH.pack(len(request) + 1) + bytes([_METADATA]) + request)
        (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, end))
        if not 1 < length <= _MAX_ANSWER:
            raise WireError(f"an answer of {length} bytes is no description of an engine")
        answer = _exactly(link, length, end)
    if answer[0] != _METADATA:
        raise WireError(f"an answer of kind {answer[0]} is no description of an engine")
    return parse(answer[1:])


def _exactly(link: socket.socket, count: int, end: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole answer in time")
        link.settimeout(left)
        chunk = link.recv(min(count - len(found), 1 << 20))
        if not chunk:
            raise WireError(f"the answer ends after {len(found)} of {count} bytes")
        found += chunk
    return bytes(found)


def parse(text: bytes) -> Description:
    """A description from its JSON.

    Raises:
        WireError: not JSON, or a field is missing or of another type.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the description is no JSON: {error}") from error
    if not isinstance(told, dict):
        raise WireError(f"the description is a {type(told).__name__}, not an object")
    protocol = told.get("protocol")
    if not isinstance(protocol, str):
        raise WireError(f"the description names no protocol: {protocol!r}")
    buffers = told.get("buffers")
    if buffers is None:  # how it writes an empty list
        buffers = []
    if not isinstance(buffers, list):
        raise WireError(f"the description's buffers are a {type(buffers).__name__}, not a list")
    return Description(
        protocol=protocol,
        # An RDMA engine has no such port; one before version 2 did not say the version.
        data_port=_number(told.get("tcp_data_port", 0), "tcp_data_port"),
        tcp_version=_number(told.get("tcp_proto_version", 1), "tcp_proto_version"),
        buffers=tuple(_buffer(buffer) for buffer in buffers),
    )


def _buffer(told: Any) -> tuple[int, int]:
    if not isinstance(told, dict):
        raise WireError(f"a buffer is a {type(told).__name__}, not an object")
    return _number(told.get("addr"), "addr"), _number(told.get("length"), "length")


def _number(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise WireError(f"{name} is {value!r}, not a number of 64 bits")
    return value
