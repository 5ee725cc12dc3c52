"""One side of a test: a transport, the memory registered with it, and its own exchanges.

``Station`` is that side in this process.  ``PeerProcess`` (see ``peer_process``) has the same
methods and works in a child.  Tests are written against ``Far``, so they run on both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import Descriptor, MemoryKind, Region
from kvxfer.core.plugins import create_transport
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, ConfigError, KvxferError
from kvxfer.testing.memory import Memory, digest, load, pattern

__all__ = ["GUARD", "Buffer", "Far", "Station", "open_transport"]

T = TypeVar("T")

GUARD = 256
"""Bytes in front of and behind every registered buffer that nobody may touch."""

_GUARD_SEED = 0xA5


@attrs.frozen(kw_only=True)
class Buffer:
    """Registered memory of a side. ``region`` is None where the side lives in another process."""

    key: int
    nbytes: int
    descriptor: Descriptor
    region: Region | None = attrs.field(default=None, eq=False, repr=False)


class Far(ABC):
    """What a test can ask of the other side. Nothing here goes through the transport under test
    but ``register``, ``deregister``, ``exchange`` and ``shut``."""

    @property
    @abstractmethod
    def info(self) -> PeerInfo:
        """How to connect to it."""

    @abstractmethod
    def register(self, nbytes: int, *, kind: MemoryKind = MemoryKind.DRAM) -> Buffer:
        """Allocate memory between two guards and register it."""

    @abstractmethod
    def deregister(self, buffer: Buffer) -> None:
        """Undo the registration; the memory stays readable."""

    @abstractmethod
    def fill(self, buffer: Buffer, seed: int) -> None:
        """Fill the buffer with ``pattern(seed, buffer.nbytes)``."""

    @abstractmethod
    def digest(self, buffer: Buffer) -> str:
        """``digest`` of what the owner sees now."""

    @abstractmethod
    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> bytes:
        """What the owner sees now."""

    @abstractmethod
    def guards_intact(self, buffer: Buffer) -> bool:
        """Whether nobody wrote just outside the buffer."""

    @abstractmethod
    def exchange(
        self, op: Op, info: PeerInfo, pairs: Sequence[tuple[Buffer, Descriptor]], batch: Batch
    ) -> int:
        """Have this side connect to ``info`` and post; returns the exchange's number."""

    @abstractmethod
    def fence(self, info: PeerInfo) -> int:
        """Have this side connect to ``info`` and fence it; returns the number for the state."""

    @abstractmethod
    def exchange_state(self, number: int) -> str:
        """``pending``, ``done``, or ``failed: `` and the reason."""

    @abstractmethod
    def pump(self) -> None:
        """Give the transport a chance to make progress, where nothing else does."""

    @abstractmethod
    def shut(self) -> None:
        """Close the transport in an orderly way; the memory stays readable."""

    @abstractmethod
    def dispose(self) -> None:
        """Free everything. Idempotent; never hangs."""


def open_transport(backend: str, options: Mapping[str, Any]) -> Transport:
    """A new transport of ``backend``, called with ``options`` as keyword arguments.

    ``backend`` is the name of an installed plug-in, or ``module:attribute`` of a class or function
    that returns a transport.
    """
    if ":" not in backend:
        return create_transport(backend, **options)
    transport = load(backend)(**options)
    if not isinstance(transport, Transport):
        raise ConfigError(f"{backend} returned a {type(transport).__name__}, not a Transport")
    return transport


class Station(Far):
    """A side in this process. ``reports`` holds every attempt that ``progress`` returned."""

    def __init__(self, transport: Transport, memory: type[Memory]) -> None:
        self.transport = transport
        self.reports: list[Attempt] = []
        self._factory = memory
        self._memories: dict[int, Memory] = {}
        self._exchanges: list[_Chain] = []
        self._guard = pattern(_GUARD_SEED, GUARD)

    @property
    def info(self) -> PeerInfo:
        return self.transport.local_info()

    def register(self, nbytes: int, *, kind: MemoryKind = MemoryKind.DRAM) -> Buffer:
        memory = self._factory(self.transport, nbytes + 2 * GUARD, kind)
        memory.write(0, self._guard)
        memory.write(GUARD + nbytes, self._guard)
        span = attrs.evolve(memory.span, address=memory.span.address + GUARD, nbytes=nbytes)
        region = self.transport.register(span)
        key = len(self._memories)
        self._memories[key] = memory
        return Buffer(key=key, nbytes=nbytes, descriptor=region.descriptor, region=region)

    def register_again(self, buffer: Buffer) -> Buffer:
        """Register the memory of ``buffer`` once more, after ``deregister``."""
        assert buffer.region is not None
        region = self.transport.register(buffer.region.span)
        return attrs.evolve(buffer, descriptor=region.descriptor, region=region)

    def deregister(self, buffer: Buffer) -> None:
        assert buffer.region is not None
        self.transport.deregister(buffer.region)

    def fill(self, buffer: Buffer, seed: int) -> None:
        self._memories[buffer.key].write(GUARD, pattern(seed, buffer.nbytes))

    def digest(self, buffer: Buffer) -> str:
        return digest(self.read(buffer))

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> bytes:
        nbytes = buffer.nbytes - offset if nbytes is None else nbytes
        return self._memories[buffer.key].read(GUARD + offset, nbytes)

    def guards_intact(self, buffer: Buffer) -> bool:
        memory = self._memories[buffer.key]
        behind = memory.read(GUARD + buffer.nbytes, GUARD)
        return memory.read(0, GUARD) == self._guard == behind

    def exchange(
        self, op: Op, info: PeerInfo, pairs: Sequence[tuple[Buffer, Descriptor]], batch: Batch
    ) -> int:
        regions = []
        for buffer, descriptor in pairs:
            assert buffer.region is not None
            regions.append((buffer.region, descriptor))
        self._exchanges.append(_Exchange(self.transport, info, op, regions, batch))
        return len(self._exchanges) - 1

    def fence(self, info: PeerInfo) -> int:
        self._exchanges.append(_Fencing(self.transport, info))
        return len(self._exchanges) - 1

    def exchange_state(self, number: int) -> str:
        self.pump()
        return self._exchanges[number].state

    def pump(self) -> None:
        self.reports.extend(self.transport.progress())
        for exchange in self._exchanges:
            exchange.advance()

    def shut(self) -> None:
        self.transport.close()

    def dispose(self) -> None:
        self.transport.close()
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()


class _Chain(ABC):
    """Several steps, one whenever the answer to the last is there. Begins with connect."""

    def __init__(self, transport: Transport, info: PeerInfo) -> None:
        self.state = "pending"
        self._transport = transport
        self._connecting = transport.connect(info)

    def advance(self) -> None:
        """Go on as far as possible without waiting."""
        if self.state == "pending":
            try:
                peer = _answer(self._connecting)
                if peer is not None:
                    self._go_on(peer)
            except BackpressureError:
                pass  # the next step posts again
            except KvxferError as error:  # a value for whoever asks for the state
                self.state = f"failed: {error}"

    @abstractmethod
    def _go_on(self, peer: Peer) -> None: ...


class _Exchange(_Chain):
    """Connect, prepare, post, done."""

    def __init__(
        self,
        transport: Transport,
        info: PeerInfo,
        op: Op,
        pairs: Sequence[tuple[Region, Descriptor]],
        batch: Batch,
    ) -> None:
        super().__init__(transport, info)
        self._op = op
        self._pairs = pairs
        self._batch = batch
        self._preparing: Pollable[Path] | None = None
        self._attempt: Attempt | None = None

    def _go_on(self, peer: Peer) -> None:
        if self._preparing is None:
            self._preparing = self._transport.prepare(peer, self._pairs)
        path = _answer(self._preparing)
        if path is None:
            return
        if self._attempt is None:
            self._attempt = self._transport.post(self._op, path, self._batch)
        if self._attempt.state is AttemptState.DONE:
            self.state = "done"
        elif self._attempt.state is AttemptState.FAILED:
            self.state = f"failed: {self._attempt.error}"


class _Fencing(_Chain):
    """Connect, fence, done."""

    _fence: Pollable[Fence] | None = None

    def _go_on(self, peer: Peer) -> None:
        if self._fence is None:
            self._fence = self._transport.fence(peer)
        fence = _answer(self._fence)
        if fence is not None:
            self.state = "done" if fence.done else f"failed: {fence.reason}"


def _answer(pollable: Pollable[T]) -> T | None:
    value, error = pollable.poll()
    if error is not None:
        raise error
    return value
