"""The one module that imports mooncake: its engine, behind names and types of ours.

Pieces are submitted one by one, and each is asked for: the engine's calls for whole batches say
"failed" as soon as one piece has, while others still move, and those that wait keep a core busy
until they end.  A submit of a single piece that is known to the engine takes some microseconds.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from kvxfer.backends.mooncake import messages
from kvxfer.backends.mooncake.config import MooncakeConfig, Protocol
from kvxfer.backends.mooncake.handshake import Description, describe
from kvxfer.core.verdict import Op
from kvxfer.errors import ConfigError, MissingDependencyError, TransportError, WireError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["DISTRIBUTIONS", "DONE", "UNDER_WAY", "Engine"]

UNDER_WAY = 0
DONE = 1
TIMED_OUT = -2
"""Only with ``MC_SLICE_TIMEOUT`` set: the piece is still under way."""

_SELF_S = 5.0
"""Seconds within which an engine that just started must describe itself."""

DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)


def _load() -> ModuleType:
    try:
        from mooncake import engine
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"the Mooncake engine does not load: {error}",
            next_step=(
                "pip install mooncake-transfer-engine-non-cuda (or a build for your device); it "
                "needs the system libraries libibverbs1, libnuma1 and libcurl4"
            ),
        ) from error
    module: ModuleType = engine
    return module


def installed_version() -> str:
    """Name and version of the engine's distribution, empty if none of the known ones is there."""
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


class Engine:
    """One engine, listening. Its calls may come from any thread.

    While it dials a peer for the first time, it holds a lock that every submit needs, for up to a
    minute if the peer is stopped: see that it answers before (``handshake.describe``).

    Raises:
        MissingDependencyError: Mooncake or a library it needs is not there.
        TransportError: it does not start, or not so that it can be reached.
        ConfigError: it took another protocol than it was asked for.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        module = _load()
        self._raw: Any = module.TransferEngine()
        host = config.address
        spelt = f"[{host.host}]" if host.version == 6 else host.host
        code = self._raw.initialize(spelt, "P2PHANDSHAKE", config.protocol.value, config.devices)
        if code:
            raise TransportError(
                f"the Mooncake engine does not start (code {code})",
                next_step="its log on standard error tells why",
                engine=messages.NOT_STARTED.engine("", code),
            )
        self.address = host.with_port(self._raw.get_rpc_port())
        self.description = self._described(config)
        self.reaches_devices = any(
            getattr(module, name, False) for name in ("SUPPORT_CUDA", "SUPPORT_HIP", "SUPPORT_MUSA")
        )
        self._submit = {
            Op.READ: self._raw.batch_transfer_async_read,
            Op.WRITE: self._raw.batch_transfer_async_write,
        }

    def _described(self, config: MooncakeConfig) -> Description:
        try:
            found = describe(self.address, _SELF_S)
        except (OSError, WireError) as error:
            raise TransportError(
                f"the Mooncake engine started, but {self.address} does not describe it: {error}",
                next_step="check that MooncakeConfig.host is an address of this machine",
            ) from error
        if found.protocol != config.protocol.value:
            why = (
                "it found no RDMA device"
                if config.protocol is Protocol.RDMA
                else "check the MC_ variables of the environment"
            )
            raise ConfigError(
                f"the Mooncake engine was asked for {config.protocol.value} and took "
                f"{found.protocol}",
                next_step=why,
            )
        return found

    # ---- memory ----------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> int:
        """0, or the engine's code."""
        return int(self._raw.register_memory(address, nbytes))

    def unregister(self, address: int) -> int:
        """As ``register``."""
        return int(self._raw.unregister_memory(address))

    # ---- pieces ----------------------------------------------------------------------------

    def submit(self, op: Op, peer: str, local: int, remote: int, nbytes: int) -> int:
        """Begin to move one piece; returns an id for ``state``, 0 if nothing was begun."""
        return int(self._submit[op](peer, [local], [remote], [nbytes]))

    def state(self, number: int) -> int:
        """``UNDER_WAY``, ``DONE``, ``TIMED_OUT`` (which goes on), or another: failed, ended.

        Never again once it has ended: the engine has freed it, and crashes.
        """
        return int(self._raw.transfer_check_status(number))

    def shut(self) -> None:
        """Close its ports and connections. Idempotent.

        Takes up to 2 s in which the interpreter stands still: the engine ends its threads holding
        the GIL.
        """
        self._submit = {}
        self._raw = None
