"""A thin, typed handle on the real mori engine, for tests.

It adds nothing to the engine but what keeps a test process alive: memory outlives its registration,
statuses outlive their transfers, and sessions do not outlive their engine.  It works on
``mori.cpp``, so torch is not needed.
"""

from __future__ import annotations

import importlib
import secrets
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.errors import ClosedError, ConfigError, HandshakeError, MissingDependencyError
from kvxfer.testing.softrdma.buffer import Buffer
from kvxfer.testing.softrdma.control import NEXT_STEP
from kvxfer.testing.softrdma.session import Session, Transfer

if TYPE_CHECKING:
    from kvxfer.testing.softrdma.peer import MoriPeer

__all__ = ["MoriEngine", "PeerFailure", "mori"]


def mori() -> Any:
    """The module ``mori.cpp``.

    Raises:
        MissingDependencyError: It cannot be imported.
    """
    try:
        return importlib.import_module("mori.cpp")
    except ImportError as error:
        raise MissingDependencyError(
            f"cannot import mori.cpp ({error})", next_step=NEXT_STEP
        ) from error


@attrs.frozen(kw_only=True)
class PeerFailure:
    """An entry of the engine's list of failures."""

    reason: str
    """For instance ``PEER_UNREACHABLE``."""
    engine_key: str
    detail: str


class MoriEngine:
    """One mori engine with an RDMA backend. A context manager.

    Every engine keeps one core busy polling: close it when done.  Not thread-safe, but sessions
    are, as far as mori's are.

    Args:
        key: The engine's key; None makes a unique one. mori takes keys for identities: a restarted
            engine with an old key inherits the dead connections of its predecessor.
        host: The IPv4 address to listen on.
        port: The port to listen on; 0 lets the system choose. mori ends the process when the port
            is taken.
        backend: Whether to create the RDMA backend.
        config: Fields of mori's ``RdmaBackendConfig``, ``poll_cq_mode`` by name (``"EVENT"``).
            Notifications are off unless asked for.

    Raises:
        MissingDependencyError: mori cannot be imported.
        ConfigError: mori's configuration has no such field.
        RuntimeError: mori refused to create the backend.
    """

    def __init__(
        self,
        key: str | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        backend: bool = True,
        **config: Any,
    ) -> None:
        self._mori = mori()
        self.key = key or f"softrdma-{secrets.token_hex(6)}"
        self._native = self._mori.IOEngine(
            self.key, self._mori.IOEngineConfig(host=host, port=port)
        )
        self._sessions: list[Session] = []
        self._buffers: list[Buffer] = []
        self._transfers: list[Transfer] = []
        if backend:
            self.create_backend(**config)

    def create_backend(self, **config: Any) -> None:
        """Create the RDMA backend; see the class for ``config`` and errors."""
        settings = self._mori.RdmaBackendConfig()
        for name, value in {"enable_notification": False, **config}.items():
            if not hasattr(settings, name):
                raise ConfigError(f"mori's RdmaBackendConfig has no field {name!r}")
            named_mode = name == "poll_cq_mode" and isinstance(value, str)
            setattr(
                settings, name, self._mori.PollCqMode.__members__[value] if named_mode else value
            )
        self.native.CreateBackend(self._mori.BackendType.RDMA, settings)

    def __enter__(self) -> MoriEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def native(self) -> Any:
        """mori's own engine.

        Raises:
            ClosedError: It was closed.
        """
        if self._native is None:
            raise ClosedError(f"engine {self.key!r} was closed")
        return self._native

    def close(self) -> None:
        """End the engine and all its sessions. Safe to call twice."""
        for session in self._sessions:
            session._close()
        self._sessions.clear()
        self._native = None
        self._transfers.clear()  # last: the engine may have written to their statuses until now
        self._buffers.clear()

    @property
    def description(self) -> bytes:
        """What a peer needs to reach this engine."""
        return bytes(self.native.GetEngineDesc().pack())

    def add_peer(self, description: bytes) -> None:
        """Make a peer's engine known."""
        self.native.RegisterRemoteEngine(self._mori.EngineDesc.unpack(description))

    def buffer(self, nbytes: int, *, seed: int | None = None, device_id: int = -1) -> Buffer:
        """Allocate memory and register it.

        Args:
            nbytes: Its size.
            seed: Fill it with ``pattern(seed, nbytes)``; None leaves it zero.
            device_id: mori's device id; part of what decides which queue pair is used.
        """
        buffer = Buffer(nbytes)
        if seed is not None:
            buffer.fill(seed)
        self.register(buffer, device_id=device_id)
        return buffer

    def register(self, buffer: Buffer, *, device_id: int = -1) -> None:
        """Register memory (again); its descriptor is then another one."""
        buffer.descriptor = self.native.RegisterMemory(
            buffer.capsule,
            buffer.nbytes,
            device_id,
            self._mori.MemoryLocationType.CPU,
        )
        if buffer not in self._buffers:
            self._buffers.append(buffer)

    def deregister(self, buffer: Buffer) -> None:
        """Deregister memory; the bytes stay."""
        self.native.DeregisterMemory(buffer.descriptor)
        buffer.descriptor = None

    def session(self, buffer: Buffer, memory: bytes) -> Session:
        """A session between ``buffer`` and a peer's memory.

        Args:
            buffer: Registered memory of this engine.
            memory: The peer's packed descriptor.

        Raises:
            HandshakeError: mori returned none: no backend, or the peer's engine is not known.
            RuntimeError: mori refused; the text is its own.
        """
        remote = self._mori.MemoryDesc.unpack(memory)
        native = self.native.CreateSession(buffer.descriptor, remote)
        if native is None:
            raise HandshakeError(
                "mori returned no session: it has no backend, or does not know the peer's engine"
            )
        session = Session(self, native)
        self._sessions.append(session)
        return session

    def read(self, buffer: Buffer, local: int, memory: bytes, remote: int, nbytes: int) -> Transfer:
        """Read from a peer's memory without a session of our own; mori opens one when needed."""
        transfer = self.new_transfer(self.native.AllocateTransferUniqueId())
        self.native.Read(
            buffer.descriptor,
            local,
            self._mori.MemoryDesc.unpack(memory),
            remote,
            nbytes,
            transfer._status,
            transfer.uid,
        )
        return transfer

    def connect(self, buffer: Buffer, peer: MoriPeer) -> Session:
        """Make the two engines known to each other and open a session to the peer's memory."""
        peer.add_peer(self.description)
        self.add_peer(peer.description)
        return self.session(buffer, peer.memory)

    def failures(self) -> list[PeerFailure]:
        """Take the failures that the engine has noted, oldest first."""
        found = []
        while (event := self.native.PopPeerFailure()) is not None:
            found.append(
                PeerFailure(
                    reason=event.reason.name,
                    engine_key=event.remote_engine_key,
                    detail=event.detail,
                )
            )
        return found

    def take_notification(self, engine_key: str, uid: int) -> bool:
        """Whether the notification of a peer's transfer has arrived; it is taken."""
        status = self._mori.TransferStatus()
        return bool(self.native.PopInboundTransferStatus(engine_key, uid, status))

    def new_transfer(self, uid: int) -> Transfer:
        """A transfer whose status lives until the engine is done with it.

        mori keeps a bare pointer to the status: dropping it in flight corrupts memory.
        """
        self._transfers = [transfer for transfer in self._transfers if not transfer.done]
        transfer = Transfer(self._mori.TransferStatus(), uid)
        self._transfers.append(transfer)
        return transfer
