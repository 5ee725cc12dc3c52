"""Remote agents: loading their metadata, losing them, forgetting them when it is safe.

Everything here is called with the transport's lock held.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

from kvxfer.backends.nixl.binding import Agent, describe, device_of
from kvxfer.backends.nixl.envelope import Content, unwrap, wrap
from kvxfer.backends.nixl.metadata import RemoteRegion, check_connection, check_region
from kvxfer.errors import HandshakeError, PeerLostError, WireError

if TYPE_CHECKING:
    from kvxfer.backends.nixl.paths import NixlPeer
    from kvxfer.core.memory import Descriptor, Span
    from kvxfer.core.verdict import EngineError

__all__ = ["Remote", "Remotes", "agent_name", "pack_region"]

_REGION = struct.Struct("<QI")
"""In front of a region's metadata: its address and device at the peer."""


def agent_name(incarnation: str) -> str:
    """What the agent of a transport is called: unique for ever, as the incarnation is."""
    return f"kvxfer-{incarnation}"


def pack_region(span: Span, metadata: bytes) -> bytes:
    """A region as ``Descriptor.data``."""
    place = _REGION.pack(span.address, device_of(span.kind, span.device))
    return wrap(Content.REGION, place + metadata)


class Remote:
    """A remote agent as NIXL knows it, shared by the connections to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded: set[bytes] = set()
        """Descriptors whose keys NIXL has."""
        self.users: set[NixlPeer] = set()
        self.flights = 0
        self.lost: EngineError | None = None
        """NIXL has said that it is gone: it must be removed before it can be loaded again."""

    def check_reachable(self) -> None:
        """Raise ``PeerLostError`` if NIXL has lost it."""
        if self.lost is not None:
            raise PeerLostError(
                f"NIXL has lost {self.name}: {self.lost}",
                next_step="disconnect and connect again",
                engine=self.lost,
            )


class Remotes:
    """The remote agents, by name."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._known: dict[str, Remote] = {}

    def __len__(self) -> int:
        return len(self._known)

    def users(self) -> list[NixlPeer]:
        """The connections to all of them."""
        return [peer for remote in self._known.values() for peer in remote.users]

    def reach(self, name: str, metadata: bytes) -> Remote:
        """The agent ``name``, loaded and connected.

        Raises:
            HandshakeError: NIXL cannot, the metadata is of another agent, or an earlier
                connection was lost and is not over yet.
        """
        known = self._known.get(name)
        if known is not None and known.lost is None:
            return known
        if known is not None:
            if known.flights:
                raise HandshakeError(
                    f"{known.flights} transfers with {name} are not over since it was lost",
                    next_step="wait until they are drained",
                )
            self._remove(known)
        try:
            check_connection(metadata, name)
        except WireError as error:
            raise HandshakeError(f"the peer's connection data: {error.message}") from error
        try:
            found = self._agent.load_remote(metadata)
            if found == name:
                self._agent.connect(name)
        except Exception as error:  # NIXL's exceptions share no base class but this one
            raise HandshakeError(
                f"NIXL cannot reach {name}: {error}",
                next_step="check that the peer lives and its network is reachable",
                engine=describe(error),
            ) from error
        if found != name:  # never seen: NIXL reads the name that was checked
            raise HandshakeError(f"the peer's connection data is of agent {found}, not of {name}")
        remote = self._known[name] = Remote(name)
        return remote

    def load(self, remote: Remote, descriptor: Descriptor) -> tuple[int, int]:
        """Give NIXL the keys of a peer's region; its address and device at the peer.

        Raises:
            HandshakeError: damaged, of another agent, or NIXL does not take it.
            PeerLostError: the peer is gone.
        """
        try:
            payload = unwrap(Content.REGION, descriptor.data)
            if len(payload) < _REGION.size:
                raise WireError(f"{len(payload)} bytes are too few")
            address, device = _REGION.unpack_from(payload)
            region = RemoteRegion(address=address, nbytes=descriptor.nbytes, device=device)
            check_region(payload[_REGION.size :], remote.name, region)
        except WireError as error:
            raise HandshakeError(
                f"descriptor {descriptor.region_id}: {error.message}",
                next_step="fetch the peer's current descriptors",
            ) from error
        remote.check_reachable()
        if descriptor.data not in remote.loaded:
            try:
                found = self._agent.load_remote(payload[_REGION.size :])
            except Exception as error:  # NIXL's exceptions share no base class but this one
                raise HandshakeError(
                    f"NIXL does not take descriptor {descriptor.region_id} of {remote.name}: "
                    f"{error}",
                    next_step="fetch the peer's current descriptors",
                    engine=describe(error),
                ) from error
            if found != remote.name:
                raise HandshakeError(
                    f"descriptor {descriptor.region_id} holds keys of agent {found}, "
                    f"not of {remote.name}"
                )
            remote.loaded.add(descriptor.data)
        return address, device

    def forget_unused(self) -> None:
        """Forget the agents that nobody uses, once nothing of theirs is in flight.

        Earlier would lose the only way to hear that it is over.
        """
        for remote in tuple(self._known.values()):
            if not remote.users and not remote.flights:
                self._remove(remote)

    def _remove(self, remote: Remote) -> None:
        del self._known[remote.name]
        # Whatever NIXL says to it, the agent is of no use to us any more.
        with contextlib.suppress(Exception):
            self._agent.remove_remote(remote.name)
