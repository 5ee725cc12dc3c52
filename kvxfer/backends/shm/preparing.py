"""What has to hold before a path exists, and before a post goes out on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.backends._local import is_writable
from kvxfer.backends.shm import messages
from kvxfer.core.verdict import Op
from kvxfer.errors import HandshakeError, InvalidInputError, KvxferError, StaleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.backends.shm.peer import RemoteRegion, ShmPeer
    from kvxfer.core.memory import Descriptor, Region

__all__ = ["check_pair", "why_not"]


def why_not(peer: ShmPeer, pairs: Sequence[tuple[Region, Descriptor]]) -> KvxferError | None:
    """Why no path can be made over what the peer granted. None if it can."""
    for _, descriptor in pairs:
        number = descriptor.region_id
        region = peer.regions.get(number)
        if region is None:  # withdrawn between the grant and now
            return messages.REGION_GONE.error(StaleError, f"region {number}")
        if region.nbytes != descriptor.nbytes:
            return InvalidInputError(
                f"the descriptor of region {number} says {descriptor.nbytes} bytes, the peer "
                f"registered {region.nbytes}",
                next_step="fetch the peer's current descriptors",
            )
        if region.mapping is None and not peer.readable_in_place:
            return messages.OTHER_NAMESPACE.error(
                HandshakeError,
                f"region {number} is not in a memory file, and process {peer.address.pid} of "
                f"namespaces {peer.address.namespaces or 'unknown'} cannot be read from here",
            )
    return None


def check_pair(op: Op, local: Region, remote: RemoteRegion) -> None:
    """Refuse an op that these two regions do not allow.

    Raises:
        StaleError: the peer deregistered its region.
        InvalidInputError: the memory that the op would change must not be changed.
    """
    if remote.gone:
        raise messages.REGION_GONE.error(StaleError, f"region {remote.region_id}")
    if op is Op.READ:
        if not is_writable(local.span):
            raise InvalidInputError(
                f"a read would change the local region at {local.span.address:#x} "
                f"({local.nbytes} bytes), whose owner is read-only",
                next_step="register writable memory",
            )
        return
    if remote.mapping is None:
        raise InvalidInputError(
            f"shm cannot write to region {remote.region_id}: it is not in a memory file of its "
            "owner",
            next_step="its owner must make it with allocate() or move it with share_storage()",
        )
    if not remote.mapping.writable:
        raise InvalidInputError(
            f"shm cannot write to region {remote.region_id}: its owner lets peers only read it",
            next_step="its owner must allocate it with peers=PeerAccess.READ_WRITE",
        )
