"""NIXL's metadata is read by us before NIXL reads it: wrong lengths would end the process."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from kvxfer.backends.nixl.metadata import RemoteRegion, check_connection, check_region, read
from kvxfer.errors import WireError

NAME = "kvxfer-0123456789abcdef"
REGION = RemoteRegion(address=0x7F00_0000_1000, nbytes=4096, device=0)
KEY = bytes(9)
"""As of UCX over tcp: no memory domain needs one."""


def bare(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content + b"|"


def field(tag: bytes, content: bytes) -> bytes:
    return tag + bare(content)


def number(tag: bytes, value: int) -> bytes:
    return field(tag, struct.pack("<Q", value))


def connection(name: str = NAME, backend: bytes = b"UCX") -> bytes:
    """As nixl 1.5.1 writes it."""
    return b"".join(
        [
            b"nixlSerDes|",
            field(b"Agent", name.encode()),
            number(b"Conns", 1),
            field(b"t", backend),
            field(b"c", b" an address"),
            bare(b"MemSection"),
            number(b"nixlSecElms", 0),
        ]
    )


def region(
    name: str = NAME,
    *,
    address: int = REGION.address,
    nbytes: int = REGION.nbytes,
    device: int = REGION.device,
    key: bytes = KEY,
    kind: int = 0,
) -> bytes:
    """As nixl 1.5.1 writes it."""
    return b"".join(
        [
            b"nixlSerDes|",
            field(b"Agent", name.encode()),
            number(b"Conns", 0),
            bare(b"MemSection"),
            number(b"nixlSecElms", 1),
            field(b"bknd", b"UCX"),
            field(b"nixlDList", b"nixlSDList"),
            field(b"t", struct.pack("<I", kind)),
            number(b"n", 1),
            bare(struct.pack("<QQQ", address, nbytes, device) + key),
        ]
    )


def test_what_nixl_writes_is_accepted() -> None:
    """Connection and region, DRAM and VRAM, keys with and without memory domains."""
    check_connection(connection(), NAME)
    check_region(region(), NAME, REGION)
    check_region(
        region(device=3, kind=1), NAME, RemoteRegion(address=REGION.address, nbytes=4096, device=3)
    )
    check_region(region(key=b"\x05" + bytes(8) + b"\x02ab\x01c"), NAME, REGION)
    assert read(region()).regions == (REGION,)


@pytest.mark.parametrize(
    "data",
    [
        connection("kvxfer-somebody-else"),
        connection(backend=b"POSIX"),
        connection("\xe9"),
        connection().replace(b" an address", b"\xffan address"),
        region(),
    ],
)
def test_what_is_no_connection_of_that_agent(data: bytes) -> None:
    """Another agent's name would spoil what NIXL knows of that one."""
    with pytest.raises(WireError):
        check_connection(data, NAME)


@pytest.mark.parametrize(
    "data",
    [
        region("kvxfer-somebody-else"),
        region(address=REGION.address + 1),
        region(nbytes=REGION.nbytes * 2),
        region(nbytes=0),
        region(address=2**64 - 1, nbytes=4096),
        region(device=1),
        region(key=b""),
        region(key=b"\x07" + bytes(8) + b"\x00\x00"),
        region(kind=99),
        connection(),
    ],
)
def test_what_is_not_that_region(data: bytes) -> None:
    """Other memory than the descriptor says, keys that end before their memory domains do."""
    with pytest.raises(WireError):
        check_region(data, NAME, REGION)


@pytest.mark.parametrize("make", [connection, region])
def test_every_truncation_is_refused(make: Callable[[], bytes]) -> None:
    """NIXL refuses the good metadata of an agent for ever once it has seen part of it."""
    data = make()
    for end in range(len(data)):
        with pytest.raises(WireError):
            read(data[:end])
    with pytest.raises(WireError):
        read(data + b"|")


@pytest.mark.parametrize("make", [connection, region])
def test_noise_is_refused_or_harmless(make: Callable[[], bytes]) -> None:
    """Changed bytes are refused by ``WireError`` and nothing else, unless they lie in what is
    opaque; lengths and counts never lead outside."""
    rng = random.Random(make.__name__)
    accepted = 0
    for _ in range(3000):
        data = bytearray(make())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        try:
            found = read(bytes(data))
        except WireError:
            continue
        accepted += 1
        assert len(found.agent) == len(NAME)
        assert len(found.connections) + len(found.regions) == 1
    assert accepted, "nothing was left alone: the test changes too much"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (number(b"nixlSecElms", 1), number(b"nixlSecElms", 2**40)),
        (number(b"n", 1), number(b"n", 2**40)),
        (number(b"n", 1), number(b"n", 0)),
        (number(b"n", 1), field(b"n", b"\x01")),
        (field(b"nixlDList", b"nixlSDList"), field(b"nixlDList", b"nixlBDList")),
        (bare(b"MemSection"), struct.pack("<Q", 2**63) + b"MemSection|"),
    ],
)
def test_counts_and_lengths(old: bytes, new: bytes) -> None:
    """A count that is too large would have NIXL read, or allocate, what is not there."""
    data = region()
    assert data.count(old) == 1
    with pytest.raises(WireError):
        check_region(data.replace(old, new), NAME, REGION)
