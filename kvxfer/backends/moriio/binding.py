"""The one module that imports mori: its objects, behind names and types of ours.

``mori.io`` needs torch; ``mori.cpp`` holds the same classes without it.  Of the engine's calls,
those that move or read data release the interpreter lock; ``CreateSession`` and the registrations
do not, so they must find nothing to wait for (see ``Engine.open_session``).
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.backends.moriio.config import MoriioConfig, PollMode, apply_environment
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import HandshakeError, MissingDependencyError, TransportError, WireError

if TYPE_CHECKING:
    from kvxfer.core.memory import Span

__all__ = [
    "Engine",
    "Memory",
    "PeerFailure",
    "Remote",
    "Session",
    "Status",
    "read_memory",
    "read_remote",
]

BACKEND = "moriio"


@attrs.frozen(kw_only=True)
class Memory:
    """A memory descriptor of the engine, ours or a peer's."""

    raw: Any = attrs.field(repr=False)
    engine_key: str
    nbytes: int
    kind: MemoryKind
    place: tuple[int, int, int]
    """Device, kind and NUMA node: one half of what the engine chooses a queue pair by."""

    def pack(self) -> bytes:
        return bytes(self.raw.pack())


@attrs.frozen(kw_only=True)
class Remote:
    """A peer's engine descriptor."""

    raw: Any = attrs.field(repr=False)
    key: str
    host: str
    port: int


@attrs.frozen(kw_only=True)
class PeerFailure:
    """What ``pop_peer_failure`` tells: the root cause that a flushed status hides."""

    engine_key: str
    reason: str
    detail: str


@attrs.frozen
class Session:
    """Moves data between one local and one remote memory. Gone before its engine is."""

    _raw: Any

    def post(
        self, op: Op, local: list[int], remote: list[int], size: list[int], status: Status
    ) -> None:
        """One engine call. May wait inside the engine; the interpreter lock is free meanwhile."""
        call = self._raw.BatchRead if op is Op.READ else self._raw.BatchWrite
        call(local, remote, size, status.raw, self._raw.AllocateTransferUniqueId())


class Status:
    """What the engine writes a call's fate into. Must live until it is over or the engine gone."""

    __slots__ = ("in_progress", "raw")

    def __init__(self) -> None:
        self.raw: Any = _mori().TransferStatus()
        self.in_progress = self.raw.InProgress
        """Callable: whether the engine is still at it."""

    @property
    def code(self) -> int:
        return int(self.raw.Code())

    @property
    def succeeded(self) -> bool:
        return bool(self.raw.Succeeded())

    @property
    def message(self) -> str:
        return str(self.raw.Message())


class Engine:
    """One IOEngine with its RDMA backend. ``key`` must be unique for ever.

    Nothing may be inside a call, and no ``Session`` be used afterwards, once ``shut`` is called.

    Raises:
        MissingDependencyError: the wheel is not installed or does not load.
        TransportError: no RDMA device, or the engine refuses its configuration.
    """

    def __init__(self, key: str, address: str, config: MoriioConfig) -> None:
        apply_environment(config, os.environ)
        mori = _mori()
        self.key = key
        settings = mori.RdmaBackendConfig(
            qp_per_transfer=config.qp_per_transfer,
            post_batch_size=config.post_batch_size,
            num_worker_threads=1,
            poll_cq_mode=(
                mori.PollCqMode.POLLING
                if config.poll_cq_mode is PollMode.POLLING
                else mori.PollCqMode.EVENT
            ),
            enable_notification=config.enable_notification,
            notif_per_qp=config.notif_per_qp,
        )
        settings.max_send_wr = config.max_send_wr
        try:
            # Port 0: the engine exits the process when a port of ours is taken.
            engine = mori.IOEngine(key, mori.IOEngineConfig(host=address, port=0))
            engine.CreateBackend(mori.BackendType.RDMA, settings)
        except RuntimeError as error:
            raise TransportError(
                f"the MoRI-IO engine does not start: {error}",
                next_step="check ibv_devinfo: it needs an RDMA device with an active port",
                engine=EngineError.of(BACKEND, error),
            ) from error
        self._raw: Any = engine
        self._xgmi = os.environ.get("MORI_DISABLE_AUTO_XGMI", "").startswith("0")
        # Only now: the port is chosen when the backend is created.
        self.descriptor = bytes(engine.GetEngineDesc().pack())

    def register(self, span: Span) -> Memory:
        mori = _mori()
        dram = span.kind is MemoryKind.DRAM
        capsule = _new_capsule(ctypes.c_void_p(span.address), None, None)
        raw = self._raw.RegisterMemory(
            capsule,
            span.nbytes,
            -1 if dram else span.device,
            mori.MemoryLocationType.CPU if dram else mori.MemoryLocationType.GPU,
        )
        return _memory(raw)

    def deregister(self, memory: Memory) -> None:
        self._raw.DeregisterMemory(memory.raw)

    def add_remote(self, remote: Remote) -> None:
        self._raw.RegisterRemoteEngine(remote.raw)

    def remove_remote(self, remote: Remote) -> None:
        self._raw.DeregisterRemoteEngine(remote.raw)

    def open_session(self, local: Memory, remote: Memory) -> Session:
        """Shake hands with the remote engine where that is still to be done. Can take seconds.

        Raises:
            TransportError: what the engine said; a silent peer costs ``MORI_IO_CP_TIMEOUT_MS``.
        """
        try:
            # CreateSession holds the interpreter lock while it waits for the peer (5 s when the
            # peer is stopped).  Engine-level calls do not, and open the same session on their way:
            # this one asks for a byte behind the end, is refused before anything is posted, and
            # leaves queue pair and remote keys behind, so that CreateSession finds them.
            # XGMI, which the engine prefers between GPUs of one node, has no such check and no
            # peer to wait for.
            probe = Status()
            if not (self._xgmi and local.kind is remote.kind is MemoryKind.VRAM):
                self._raw.Read(local.raw, local.nbytes, remote.raw, remote.nbytes, 1, probe.raw, 0)
            raw = self._raw.CreateSession(local.raw, remote.raw)
        except RuntimeError as error:
            raise HandshakeError(
                f"no session with engine {remote.engine_key}: {error}",
                engine=EngineError.of(BACKEND, error),
            ) from error
        if raw is None:
            raise HandshakeError(
                f"no session with engine {remote.engine_key}: the engine does not know it",
                next_step="connect to the peer first",
                engine=EngineError(backend=BACKEND, code=probe.code, message=probe.message),
            )
        return Session(raw)

    def pop_failures(self) -> list[PeerFailure]:
        """What has failed since the last call, oldest first."""
        found = []
        while (event := self._raw.PopPeerFailure()) is not None:
            found.append(
                PeerFailure(
                    engine_key=str(event.remote_engine_key),
                    reason=str(event.reason.name),
                    detail=str(event.detail),
                )
            )
        return found

    def shut(self) -> None:
        """End the engine's threads and free its queue pairs. Idempotent."""
        self._raw = None


def read_remote(data: bytes) -> Remote:
    """A peer's engine descriptor.

    Raises:
        WireError: not one.
    """
    raw = _unpack(_mori().EngineDesc, data)
    return Remote(raw=raw, key=str(raw.key), host=str(raw.host), port=int(raw.port))


def read_memory(data: bytes) -> Memory:
    """A peer's memory descriptor.

    Raises:
        WireError: not one.
    """
    return _memory(_unpack(_mori().MemoryDesc, data))


def _unpack(kind: Any, data: bytes) -> Any:
    try:
        return kind.unpack(data)
    except RuntimeError as error:
        raise WireError(f"{len(data)} bytes are no {kind.__name__} of MoRI-IO: {error}") from error


def _memory(raw: Any) -> Memory:
    dram = raw.loc == _mori().MemoryLocationType.CPU
    return Memory(
        raw=raw,
        engine_key=str(raw.engine_key),
        nbytes=int(raw.size),
        kind=MemoryKind.DRAM if dram else MemoryKind.VRAM,
        place=(int(raw.device_id), int(raw.loc), int(raw.numa_node)),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_module: Any = None


def _mori() -> Any:
    global _module  # noqa: PLW0603 - loaded once, on first use, never at import
    if _module is None:
        try:
            from mori import cpp
        except (ImportError, OSError) as error:
            raise MissingDependencyError(
                f"the MoRI-IO engine does not load: {error}",
                next_step="pip install amd-mori (CPython 3.10, or 3.12 with glibc 2.38) on a host "
                "with ROCm and RDMA libraries",
            ) from error
        _module = cpp
    return _module
