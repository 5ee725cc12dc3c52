"""Remote engines, connections and paths to them, and what became of one that failed a piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvxfer.backends._background import JobThread
from kvxfer.backends.mooncake import messages
from kvxfer.backends.mooncake.handshake import describe
from kvxfer.backends.mooncake.identity import NBYTES, token_of
from kvxfer.core.transport import Path, Peer, PeerInfo, Transport
from kvxfer.errors import PeerLostError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.backends.mooncake.messages import Message
    from kvxfer.backends.mooncake.wire import EngineAddress
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.memory import Descriptor, Region
    from kvxfer.core.verdict import EngineError

__all__ = ["Diagnosis", "MooncakePath", "MooncakePeer", "Remote", "diagnose"]


class Remote:
    """One life of a remote engine, shared by the connections to it.

    All but ``lost`` is guarded by the transport's lock.
    """

    def __init__(self, incarnation: str, where: EngineAddress) -> None:
        self.incarnation = incarnation
        self.address = where.address
        self.name = str(where.address)
        """What the engine calls it."""
        self.token = token_of(incarnation)
        self.token_address = where.token
        self.thread = JobThread(f"kvxfer-mooncake-{incarnation[:8]}", backend="mooncake")
        self.data_port = 0
        self.users: set[MooncakePeer] = set()
        self.connecting = 0
        self.pieces = 0
        """Under way, in the engine's queue to this peer."""
        self.flights = 0
        self.lost: EngineError | None = None

    @property
    def unused(self) -> bool:
        """Nobody needs it any more."""
        return not (self.users or self.connecting or self.flights)

    def check_reachable(self) -> None:
        """Raise ``PeerLostError`` if this life of it has ended."""
        if self.lost is not None:
            raise PeerLostError(
                f"the Mooncake engine at {self.name} is lost: {self.lost.message}",
                next_step="disconnect and connect again",
                engine=self.lost,
            )


class MooncakePeer(Peer):
    def __init__(self, transport: Transport, info: PeerInfo, remote: Remote) -> None:
        super().__init__(transport, info)
        self.remote = remote


class MooncakePath(Path):
    """``remote_base``: the address of each pair's remote region, at the peer."""

    def __init__(
        self,
        peer: MooncakePeer,
        pairs: Sequence[tuple[Region, Descriptor]],
        remote_base: Sequence[int],
    ) -> None:
        super().__init__(peer, pairs)
        self.remote = peer.remote
        self.local_base = [region.span.address for region, _ in self.pairs]
        self.remote_base = list(remote_base)

    def remote_ranges(self, attempt: Attempt) -> list[tuple[int, int]]:
        """Address and bytes of the whole remote regions that the attempt touches."""
        return [(self.remote_base[p], int(self.remote_nbytes[p])) for p in attempt.batch.used_pairs]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Why pieces failed. ``lost``: this life of the peer has ended."""

    message: Message
    detail: str = ""
    lost: bool = False


def diagnose(remote: Remote, ranges: Sequence[tuple[int, int]], timeout: float) -> Diagnosis:
    """Find out by asking the peer's engine what the engine's -1 means; at most ``timeout`` seconds.

    ``ranges``: address and bytes of the remote memory that was used.
    """
    try:
        found = describe(remote.address, timeout)
    except ConnectionRefusedError:
        return Diagnosis(message=messages.PEER_GONE, detail=remote.name, lost=True)
    except TimeoutError:
        return Diagnosis(message=messages.PEER_SILENT, detail=f"{remote.name} in {timeout:g} s")
    except (OSError, WireError) as error:
        return Diagnosis(message=messages.UNREACHABLE, detail=f"{remote.name}: {error}")
    if found.data_port != remote.data_port or not found.covers(remote.token_address, NBYTES):
        return Diagnosis(message=messages.OTHER_LIFE, detail=remote.name, lost=True)
    missing = found.first_uncovered(ranges)
    if missing is not None:
        address, nbytes = missing
        return Diagnosis(
            message=messages.NOT_REGISTERED, detail=f"{nbytes} bytes at {address:#x} of its memory"
        )
    return Diagnosis(message=messages.BROKEN, detail=remote.name)
