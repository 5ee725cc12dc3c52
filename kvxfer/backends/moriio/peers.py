"""Peers and paths of the moriio transport, and what a peer's descriptors must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.backends._background import JobThread
from kvxfer.backends.moriio.binding import BACKEND, Memory, Remote, read_memory, read_remote
from kvxfer.core.transport import Path, Peer, PeerInfo, Transport
from kvxfer.errors import HandshakeError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.backends.moriio.posting import Lane
    from kvxfer.core.memory import Descriptor, Region

__all__ = ["MoriioPath", "MoriioPeer", "checked_memory", "checked_remote", "engine_key"]


class MoriioPeer(Peer):
    def __init__(self, transport: Transport, info: PeerInfo, remote: Remote) -> None:
        super().__init__(transport, info)
        self.remote = remote
        self.address = ""
        """Resolved by the job that connects."""
        self.thread = JobThread(f"kvxfer-moriio-{info.incarnation[:8]}", backend=BACKEND)


class MoriioPath(Path):
    """``lanes`` has one for each pair, and none once the path is closed."""

    def __init__(
        self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]], lanes: Sequence[Lane]
    ) -> None:
        super().__init__(peer, pairs)
        self.lanes: tuple[Lane, ...] = tuple(lanes)


def engine_key(incarnation: str, *, generation: int | None = None) -> str:
    """The key of an engine, or what every generation's begins with.

    Unique for ever: a queue pair that has failed is dead for its two engine keys.
    """
    return f"kvxfer-{incarnation}-" + ("" if generation is None else str(generation))


def checked_remote(info: PeerInfo) -> Remote:
    """The engine that ``info`` describes.

    Raises:
        HandshakeError: malformed, or of another incarnation.
    """
    try:
        remote = read_remote(info.data)
    except WireError as error:
        raise HandshakeError(f"the peer's engine descriptor: {error.message}") from error
    if not remote.key.startswith(engine_key(info.incarnation)):
        raise HandshakeError(
            f"engine {remote.key} is not of incarnation {info.incarnation}",
            next_step="fetch the peer's current PeerInfo",
        )
    return remote


def checked_memory(remote: Remote, descriptor: Descriptor) -> Memory:
    """The engine's form of ``descriptor``, if it is what the descriptor says.

    Raises:
        HandshakeError: malformed, of another engine, or of another size or kind.
    """
    try:
        memory = read_memory(descriptor.data)
    except WireError as error:
        raise HandshakeError(f"descriptor {descriptor.region_id}: {error.message}") from error
    said = (remote.key, descriptor.nbytes, descriptor.kind)
    found = (memory.engine_key, memory.nbytes, memory.kind)
    if said != found:
        raise HandshakeError(
            f"descriptor {descriptor.region_id} says (engine, bytes, kind) = {said}, "
            f"its data says {found}",
            next_step="fetch the peer's current descriptors",
        )
    return memory
