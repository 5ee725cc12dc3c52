"""Reaching peers and opening sessions: what ``connect`` and ``prepare`` do on a peer's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.backends.moriio import address
from kvxfer.backends.moriio.generation import GenerationEnded
from kvxfer.backends.moriio.lanes import Lane, PairLane
from kvxfer.backends.moriio.peers import MoriioPath, checked_memory
from kvxfer.backends.moriio.posting import check_alive
from kvxfer.errors import ClosedError, HandshakeError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.backends.moriio.binding import Memory, Remote
    from kvxfer.backends.moriio.config import MoriioConfig
    from kvxfer.backends.moriio.generation import Generation
    from kvxfer.backends.moriio.generations import Generations
    from kvxfer.backends.moriio.peers import MoriioPeer, RegisteredMemory, RemoteMemory
    from kvxfer.core.memory import Descriptor, Region
    from kvxfer.core.transport import Path, Peer

__all__ = ["Preparer"]


class Preparer:
    """Waits for peers; so it runs on their threads, each of which serves one peer.

    ``memory_of`` is the engine's side of a region; it raises ``StaleError`` for one that is not
    registered.  ``closed`` tells whether the transport is.
    """

    def __init__(
        self,
        config: MoriioConfig,
        generations: Generations,
        *,
        memory_of: Callable[[Region], RegisteredMemory],
        closed: Callable[[], bool],
    ) -> None:
        self._config = config
        self._generations = generations
        self._memory_of = memory_of
        self._closed = closed

    def connect(self, peer: MoriioPeer) -> Peer:
        """Find the peer's engine alive, and make it known to ours."""
        peer.address = self._reach(peer.remote)
        self._generations.current.add_remote(peer.remote)
        return peer

    def prepare(self, peer: MoriioPeer, pairs: Sequence[tuple[Region, Descriptor]]) -> Path:
        """A path over the current engine, or over a new one where queue pairs to it are dead."""
        path = MoriioPath(peer, pairs, self._prepared_lanes(peer, pairs))
        if peer.closed:  # in the meantime, and without seeing this path
            path.close()
            raise ClosedError(f"{peer!r} was closed")
        return path

    def move(self, peer: MoriioPeer, path: Path, fresh: Generation) -> None:
        """Give an open path queue pairs of ``fresh``."""
        assert isinstance(path, MoriioPath)
        lanes = path.lanes
        if not lanes or lanes[0].whole.connection.generation.number >= fresh.number:
            return
        # What fails here fails again, and is told, when the path is prepared anew.
        theirs = _theirs(peer, path.pairs)
        self._reach_all(theirs)
        moved = self._lanes(peer, fresh, path.pairs, theirs)
        if not path.closed:
            path.use(moved)

    def _reach(self, remote: Remote) -> str:
        """The address of a peer's engine, after it has taken a TCP connection."""
        try:
            where = address.resolve_ipv4(remote.host)
        except InvalidInputError as error:
            raise HandshakeError(
                f"the peer advertises a host this engine cannot dial: {error.message}",
                next_step=error.next_step,
            ) from error
        address.probe(where, remote.port, self._config.connect_timeout_s)
        return where

    def _reach_all(self, theirs: Sequence[RemoteMemory]) -> None:
        for remote in {memory.remote.key: memory.remote for memory in theirs}.values():
            self._reach(remote)

    def _prepared_lanes(
        self, peer: MoriioPeer, pairs: Sequence[tuple[Region, Descriptor]]
    ) -> tuple[PairLane, ...]:
        generation = self._generations.current
        theirs = _theirs(peer, pairs)
        while True:
            self._reach_all(theirs)
            # Only now: for a peer that is not there no engine is made.
            if generation.degraded(memory.remote.key for memory in theirs) is not None:
                patience = self._config.generation_linger_s + self._config.generation_drain_s
                generation = self._generations.after(generation, patience)
            try:
                return self._lanes(peer, generation, pairs, theirs)
            except GenerationEnded:
                if self._closed() or generation is self._generations.current:
                    raise
                generation = self._generations.current

    def _lanes(
        self,
        peer: MoriioPeer,
        generation: Generation,
        pairs: Sequence[tuple[Region, Descriptor]],
        theirs: Sequence[RemoteMemory],
    ) -> tuple[PairLane, ...]:
        """Sessions for all pairs. Waits for the peers' engines, which have just been reached."""
        lanes = []
        for (region, _), there in zip(pairs, theirs, strict=True):
            memory = self._memory_of(region)
            key = there.remote.key
            generation.add_remote(there.remote)
            whole, views = memory.on(generation)

            def open_lane(here: Memory, far: Memory, key: str = key) -> Lane:
                session = generation.open_session(here, far)
                return Lane(session, generation.connection(key, here.place, far.place))

            lane = open_lane(whole, there.whole)
            check_alive(lane.connection)
            lanes.append(
                PairLane(
                    lane,
                    here={0: whole, **views},
                    there={0: there.whole, **there.views},
                    open_lane=open_lane,
                    later=peer.thread.submit,
                )
            )
        return tuple(lanes)


def _theirs(peer: MoriioPeer, pairs: Sequence[tuple[Region, Descriptor]]) -> list[RemoteMemory]:
    return [checked_memory(peer.info.incarnation, descriptor) for _, descriptor in pairs]
