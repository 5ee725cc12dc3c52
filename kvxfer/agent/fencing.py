"""Fences over backends to which there is no connection yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Fence

if TYPE_CHECKING:
    from kvxfer.core.transport import Peer, PeerInfo, Transport
    from kvxfer.errors import KvxferError

__all__ = ["ConnectAndFence"]


class ConnectAndFence(Pollable[Fence]):
    """Connect to a peer only to fence it: it may write to us over a backend that we do not use.

    Progress thread only.  The connection is closed again once the fence has answered.
    """

    def __init__(self, transport: Transport, info: PeerInfo) -> None:
        self._transport = transport
        self._peer: Peer | None = None
        self._connecting: Pollable[Peer] = transport.connect(info)
        self._fencing: Pollable[Fence] | None = None
        self._answer: tuple[Fence | None, KvxferError | None] = (None, None)

    def poll(self) -> tuple[Fence | None, KvxferError | None]:
        if self._answer != (None, None):
            return self._answer
        if self._fencing is None:
            self._peer, error = self._connecting.poll()
            if error is not None and self._transport.proves_end(error):
                self._answer = Fence(done=True), None
                return self._answer
            if error is not None:
                why = f"{self._transport.name} does not connect, so nothing fences it: {error}"
                self._answer = Fence(done=False, reason=why), None
                return self._answer
            if self._peer is None:
                return None, None
            self._fencing = self._transport.fence(self._peer)
        self._answer = self._fencing.poll()
        if self._answer != (None, None) and self._peer is not None:
            self._transport.disconnect(self._peer)
        return self._answer
