"""The one module that imports mori: its objects, behind names and types of ours.

``mori.io`` needs torch; ``mori.cpp`` holds the same classes without it.  Of the engine's calls,
those that move or read data release the interpreter lock; ``CreateSession`` and the registrations
do not, so they must find nothing to wait for (see ``Engine.open_session``).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from typing import TYPE_CHECKING, Any

from kvxfer.backends.moriio.address import hang_up
from kvxfer.backends.moriio.config import MoriioConfig
from kvxfer.backends.moriio.environment import environment_for
from kvxfer.backends.moriio.settings import gpu_backends, rdma_settings
from kvxfer.backends.moriio.values import Memory, PeerFailure, Remote
from kvxfer.core.limitedlog import LimitedLog
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import EngineError
from kvxfer.errors import (
    ConfigError,
    HandshakeError,
    MissingDependencyError,
    TransportError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.core.memory import Span

__all__ = [
    "Engine",
    "Memory",
    "PeerFailure",
    "Remote",
    "Session",
    "read_memory",
    "read_remote",
    "renew_status",
    "status_class",
    "verdict_of",
]

BACKEND = "moriio"

_log = LimitedLog(logging.getLogger("kvxfer.backends.moriio"))


class Session:
    """Moves data between one local and one remote memory. Dropped before its engine is ended.

    ``read`` and ``write`` take ``(local, remote, size, status, uid)``, the first three as lists
    of bytes.  They may wait inside the engine; the interpreter lock is free meanwhile.  Of the
    ``qp_per_transfer`` queue pairs a call uses the one numbered ``uid`` modulo their number.
    """

    __slots__ = ("__weakref__", "read", "write")

    def __init__(self, raw: Any) -> None:
        self.read: Any = raw.BatchRead
        self.write: Any = raw.BatchWrite

    def drop(self) -> None:
        """Let go of the engine's object. Later calls raise ``TypeError``."""
        self.read = self.write = None


def status_class() -> Any:
    """The class of what the engine writes a call's fate into: ``InProgress()``, ``Succeeded()``,
    ``Failed()``, ``Code()``, ``Message()``.

    One object, made without arguments, for each call: it must live until the call is over or the
    engine gone.
    """
    return _mori().TransferStatus


def renew_status(status: Any) -> None:
    """Have a status that told of a success say again that nothing was posted.

    The engine sets it at the beginning of every call; should one ever return without, an old
    success must not be taken for its answer.
    """
    status.SetCode(_mori().StatusCode.INIT)


def verdict_of(status: Any) -> tuple[int, str]:
    """Code and message of a call that has failed."""
    return int(status.Code()), str(status.Message())


class Engine:
    """One IOEngine with its backends. ``key`` must be unique for ever.

    ``port`` 0 lets the system choose.  Nothing may be inside a call, and no ``Session`` be used
    afterwards, once ``shut`` is called.

    Raises:
        MissingDependencyError: the wheel is not installed or does not load.
        ConfigError: the wheel has no such backend.
        TransportError: no RDMA device, or the engine refuses its configuration.
    """

    def __init__(self, key: str, address: str, config: MoriioConfig, *, port: int = 0) -> None:
        global _engines_made  # noqa: PLW0603 - decides whether the environment may be added to
        mori = _mori()
        self.key = key
        with environment_for(config, os.environ, first=not _engines_made):
            _engines_made += 1
            try:
                engine = mori.IOEngine(key, mori.IOEngineConfig(host=address, port=port))
                engine.CreateBackend(mori.BackendType.RDMA, rdma_settings(mori, config))
                for name, streams, events in gpu_backends(config):
                    _create_gpu_backend(mori, engine, name, streams, events)
            except RuntimeError as error:
                raise TransportError(
                    f"the MoRI-IO engine does not start: {error}",
                    next_step="check ibv_devinfo: it needs an RDMA device with an active port",
                    engine=EngineError.of(BACKEND, error),
                ) from error
        self._raw: Any = engine
        self._peerless = config.xgmi or config.fabric or _auto_xgmi()
        # Only now: the port is chosen when the backend is created.
        described = engine.GetEngineDesc()
        self.descriptor = bytes(described.pack())
        self.port = int(described.port)

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
            # XGMI and FABRIC, which the engine prefers between GPUs, have no such check and no peer
            # to wait for.
            probe = status_class()()
            if not (self._peerless and local.kind is remote.kind is MemoryKind.VRAM):
                self._raw.Read(local.raw, local.nbytes, remote.raw, remote.nbytes, 1, probe, 0)
            raw = self._raw.CreateSession(local.raw, remote.raw)
        except RuntimeError as error:
            raise HandshakeError(
                f"no session with engine {remote.engine_key}: {error}",
                engine=EngineError.of(BACKEND, error),
            ) from error
        if raw is None:
            code, message = verdict_of(probe)
            raise HandshakeError(
                f"no session with engine {remote.engine_key}: the engine does not know it",
                next_step="connect to the peer first",
                engine=EngineError(backend=BACKEND, code=code, message=message),
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
        hang_up(self.port)
        with _descriptor_zero_kept():
            self._raw = None


@contextlib.contextmanager
def _descriptor_zero_kept() -> Iterator[None]:
    """In EVENT mode an engine closes file descriptor 0, which is not its own, when it ends.

    The interpreter lock is held meanwhile: no Python thread can be given the number.
    """
    try:
        copy = os.dup(0)
    except OSError:  # none there: then the engine may have got it as its own
        yield
        return
    try:
        yield
        try:
            os.fstat(0)
        except OSError:
            os.dup2(copy, 0)
    finally:
        os.close(copy)


def _create_gpu_backend(mori: Any, engine: Any, name: str, streams: int, events: int) -> None:
    """Never run on hardware. The copy kernels are compiled by the wheel, with torch's help."""
    settings = getattr(mori, f"{name.title()}BackendConfig", None)
    if settings is None or name not in mori.BackendType.__members__:
        raise ConfigError(
            f"this amd-mori has no {name} backend",
            next_step=f"set {name.lower()}=False, or install a release that has it",
        )
    engine.CreateBackend(
        mori.BackendType.__members__[name], settings(num_streams=streams, num_events=events)
    )
    try:
        if name == "XGMI":
            from mori.io.scatter_gather_jit import ensure_scatter_gather_kernel

            engine.LoadScatterGatherModule(ensure_scatter_gather_kernel())
        else:
            from mori.io.fabric_copy_jit import ensure_fabric_copy_kernel

            engine.LoadFabricCopyModule(ensure_fabric_copy_kernel())
    except Exception as error:  # noqa: BLE001 - a JIT compiler's; the backend works without
        _log.problem("copy_kernel", "the copy kernel of %s is not loaded: %s", name, error)


def _auto_xgmi() -> bool:
    return os.environ.get("MORI_DISABLE_AUTO_XGMI", "").lower() in ("0", "false", "no", "off")


def read_remote(data: bytes) -> Remote:
    """A peer's engine descriptor.

    Raises:
        WireError: not one.
    """
    raw = _unpack(_mori().EngineDesc, data)
    with _readable(data):
        return Remote(raw=raw, key=str(raw.key), host=str(raw.host), port=int(raw.port))


def read_memory(data: bytes) -> Memory:
    """A peer's memory descriptor.

    Raises:
        WireError: not one.
    """
    with _readable(data):
        return _memory(_unpack(_mori().MemoryDesc, data))


@contextlib.contextmanager
def _readable(data: bytes) -> Iterator[None]:
    """The engine unpacks names that are no text; they fail when they are looked at."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise WireError(f"{len(data)} bytes hold a name that is no text: {error}") from error


def _unpack(kind: Any, data: bytes) -> Any:
    try:
        return kind.unpack(data)
    except (RuntimeError, MemoryError) as error:  # the latter for a length that is a lie
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
_engines_made = 0


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
