"""Peers, paths and memory of the moriio transport, and what a peer's descriptors must be."""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING

import attrs

from kvxfer.backends._background import JobThread
from kvxfer.backends.moriio.binding import BACKEND, Memory, Remote, read_memory, read_remote
from kvxfer.backends.moriio.generation import GenerationEnded
from kvxfer.core.transport import Path, Peer, PeerInfo, Transport
from kvxfer.errors import HandshakeError, RegionBusyError, StaleError, WireError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvxfer.backends.moriio.generation import Generation
    from kvxfer.backends.moriio.lanes import PairLane
    from kvxfer.core.memory import Descriptor, Region, Span

__all__ = [
    "MoriioPath",
    "MoriioPeer",
    "RegisteredMemory",
    "RemoteMemory",
    "checked_memory",
    "checked_remote",
    "engine_key",
    "pack_memory",
]


class MoriioPeer(Peer):
    def __init__(self, transport: Transport, info: PeerInfo, remote: Remote) -> None:
        super().__init__(transport, info)
        self.remote = remote
        self.key_prefix = engine_key(info.incarnation)
        self.address = ""
        """Resolved by the job that connects."""
        self.unproven = 0
        """WRITEs of engines that are gone: what they have sent may still land at the peer."""
        self.fencing = False
        """A fence is under way: nothing may be posted to it."""
        self.thread = JobThread(f"kvxfer-moriio-{info.incarnation[:8]}", backend=BACKEND)


class MoriioPath(Path):
    """``lanes`` has one for each pair, all of one generation, and none once the path is closed."""

    def __init__(
        self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]], lanes: Sequence[PairLane]
    ) -> None:
        super().__init__(peer, pairs)
        self.lanes: tuple[PairLane, ...] = ()
        self.use(lanes)

    def use(self, lanes: Sequence[PairLane]) -> None:
        """Post through these from now on."""
        self.queues = tuple(lane.whole.connection.name for lane in lanes)
        self.lanes = tuple(lanes)


class RegisteredMemory:
    """A span of ours, registered with each engine generation that needs it. Any thread.

    ``Span.views`` are registered once more by themselves: see ``lanes.PairLane``.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Generation, Memory, dict[int, Memory]]] = {}
        self._removed = False

    def on(self, generation: Generation) -> tuple[Memory, Mapping[int, Memory]]:
        """The memory as the engine of ``generation`` knows it, and its views by their offset.

        Raises:
            StaleError: it was removed: its owner may have freed it.
            GenerationEnded: see ``Generation``.
        """
        with self._lock:
            if self._removed:
                raise StaleError(
                    f"the region at {self._span.address:#x} ({self._span.nbytes} bytes) was "
                    "deregistered",
                    next_step="register it and prepare a new path",
                )
            for number, (other, _, _) in tuple(self._known.items()):
                if other.ended:
                    del self._known[number]
            found = self._known.get(generation.number)
            if found is None:
                span = self._span
                whole = generation.register(span)
                views: dict[int, Memory] = {}
                found = self._known[generation.number] = (generation, whole, views)
                for offset, nbytes in span.views:
                    part = attrs.evolve(
                        span, address=span.address + offset, nbytes=nbytes, views=()
                    )
                    views[offset] = generation.register(part)
            return found[1:]

    def remove(self) -> None:
        """Deregister it from every engine that still exists, for good. May wait.

        Raises:
            RegionBusyError: an engine that is being ended has not ended in time.
        """
        with self._lock:
            for number, (generation, whole, views) in tuple(self._known.items()):
                try:
                    for memory in (*views.values(), whole):
                        generation.deregister(memory)
                except GenerationEnded:
                    # Its end, which has begun, deregisters everything: but not before.
                    _await_end(generation)
                del self._known[number]
            self._removed = True


_END_S = 10.0
"""An engine's end waits for handshakes with silent peers, 5 s by default."""
_LOOK_S = 0.001


def _await_end(generation: Generation) -> None:
    end = time.monotonic() + _END_S
    while not generation.ended:
        if time.monotonic() >= end:
            raise RegionBusyError(
                f"engine generation {generation.number} knows the region and has not ended within "
                f"{_END_S:g} s",
                next_step="try again",
            )
        time.sleep(_LOOK_S)


def engine_key(incarnation: str, *, generation: int | None = None) -> str:
    """The key of an engine, or what every generation's begins with.

    Unique for ever: a queue pair that has failed is dead for its two engine keys.
    """
    return f"kvxfer-{incarnation}-" + ("" if generation is None else str(generation))


def checked_remote(incarnation: str, data: bytes) -> Remote:
    """The engine that ``data`` describes.

    Raises:
        HandshakeError: malformed, or of another incarnation.
    """
    try:
        remote = read_remote(data)
    except WireError as error:
        raise HandshakeError(f"the peer's engine descriptor: {error.message}") from error
    if not remote.key.startswith(engine_key(incarnation)):
        raise HandshakeError(
            f"engine {remote.key} is not of incarnation {incarnation}",
            next_step="fetch the peer's current PeerInfo",
        )
    return remote


_HEAD = struct.Struct("<4sIII")
_VIEW = struct.Struct("<QI")
_MAGIC = b"KVM1"
MAX_VIEWS = 65536


def pack_memory(engine: bytes, memory: bytes, views: Mapping[int, bytes]) -> bytes:
    """What a descriptor carries: the engine to ask, and its names for the memory and its views."""
    head = _HEAD.pack(_MAGIC, len(engine), len(memory), len(views))
    tail = [_VIEW.pack(offset, len(view)) + view for offset, view in views.items()]
    return b"".join((head, engine, memory, *tail))


@attrs.frozen(kw_only=True)
class RemoteMemory:
    """A peer's memory: its engine, the whole, and stretches registered by themselves, by offset."""

    remote: Remote
    whole: Memory
    views: Mapping[int, Memory]


def checked_memory(incarnation: str, descriptor: Descriptor) -> RemoteMemory:
    """The engine's form of ``descriptor``.

    Raises:
        HandshakeError: malformed, of another incarnation, or of another size or kind.
    """
    where = f"descriptor {descriptor.region_id}"
    try:
        engine, memory, packed = _unpack(descriptor.data)
        remote = checked_remote(incarnation, engine)
        whole = read_memory(memory)
        views = {offset: read_memory(data) for offset, data in packed}
    except (HandshakeError, WireError) as error:
        raise HandshakeError(f"{where}: {error.message}") from error
    said = (remote.key, descriptor.nbytes, descriptor.kind)
    found = (whole.engine_key, whole.nbytes, whole.kind)
    if said != found:
        raise HandshakeError(
            f"{where} says (engine, bytes, kind) = {said}, its data says {found}",
            next_step="fetch the peer's current descriptors",
        )
    for offset, view in views.items():
        inside = offset + view.nbytes <= whole.nbytes
        if not inside or (view.engine_key, view.kind) != (whole.engine_key, whole.kind):
            raise HandshakeError(f"{where} has a view at byte {offset} that is no part of it")
    return RemoteMemory(remote=remote, whole=whole, views=views)


def _unpack(data: bytes) -> tuple[bytes, bytes, list[tuple[int, bytes]]]:
    try:
        magic, engine, memory, count = _HEAD.unpack_from(data)
        if magic != _MAGIC or count > MAX_VIEWS:
            raise WireError(f"{len(data)} bytes are no memory of a moriio transport")
        start = _HEAD.size + engine
        end = start + memory
        views = []
        at = end
        for _ in range(count):
            offset, length = _VIEW.unpack_from(data, at)
            at += _VIEW.size + length
            views.append((offset, data[at - length : at]))
    except struct.error as error:
        raise WireError(f"{len(data)} bytes are no memory of a moriio transport") from error
    if at != len(data):
        raise WireError(f"{len(data)} bytes, of which {at} are the memory of a moriio transport")
    return data[_HEAD.size : start], data[start:end], views
