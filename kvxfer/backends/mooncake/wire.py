"""What two Mooncake transports tell each other, through ``PeerInfo.data`` and ``Descriptor.data``.

msgspec types, so that damage is refused with the field that is wrong.  The engine keeps no secret:
whoever reaches its ports may read and write what is registered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.core.address import Address
from kvxfer.errors import InvalidInputError, WireError

__all__ = ["EngineAddress", "pack_region", "unpack_region"]

VERSION = 1

_Pointer = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How an engine is reached, and where its identity lies.

    ``token`` is the address of ``identity.NBYTES`` bytes that name the incarnation.
    """

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol: Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
    token: _Pointer

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> EngineAddress:
        """What ``encode`` made.

        Raises:
            WireError: damaged, or of another version.
        """
        try:
            found = msgspec.json.decode(data, type=cls)
            if str(found.address) != str(Address.parse(str(found.address))):
                raise WireError(f"{found.address} is no address")
        except (msgspec.MsgspecError, InvalidInputError, UnicodeError) as error:
            raise WireError(f"no address of a Mooncake engine: {error}") from error
        return found

    @property
    def address(self) -> Address:
        """Of the control port.

        Raises:
            InvalidInputError: the host is no host.
        """
        return Address(self.host, self.port)


def pack_region(address: int) -> bytes:
    """A region as ``Descriptor.data``: where it lies at its owner."""
    return msgspec.json.encode([VERSION, address])


def unpack_region(data: bytes) -> int:
    """The address of the region at its owner.

    Raises:
        WireError: damaged, or of another version.
    """
    try:
        version, address = msgspec.json.decode(data, type=tuple[int, _Pointer])
    except msgspec.MsgspecError as error:
        raise WireError(f"no region of a Mooncake engine: {error}") from error
    if version != VERSION:
        raise WireError(f"a region of version {version}, expected {VERSION}")
    return address
