"""The one module that imports nixl: its agent, behind names and types of ours.

Nothing here locks: the agent is not made for concurrent calls, so its user holds a lock.

What NIXL 1.5.1 raises, as ``EngineError.exception[0]`` and ``message`` (a direct subclass of
``Exception``, whose text is only its code); the module of the wheel, ``nixl_cu12`` or another, is
written ``nixl`` here:

    nixl._bindings.nixlNotFoundError          NIXL_ERR_NOT_FOUND          unknown agent or memory
    nixl._bindings.nixlInvalidParamError      NIXL_ERR_INVALID_PARAM      counts or lengths differ
    nixl._bindings.nixlMismatchError          NIXL_ERR_MISMATCH           garbage metadata
    nixl._bindings.nixlBackendError           NIXL_ERR_BACKEND            no connection can be made
    nixl._bindings.nixlRemoteDisconnectError  NIXL_ERR_REMOTE_DISCONNECT  the peer is gone
    nixl._bindings.nixlRepostActiveError      NIXL_ERR_REPOST_ACTIVE      never, handles post once

A transfer can also end in the state ``ERR``: that is an ``EngineError`` with message ``ERR``.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.backends.nixl.config import NixlConfig, apply_environment
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import MissingDependencyError, TransportError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvxfer.core.memory import Span

__all__ = ["DISCONNECTED", "Agent", "describe"]

BACKEND = "nixl"
DISCONNECTED = "nixl._bindings.nixlRemoteDisconnectError"

_KINDS = {MemoryKind.DRAM: "DRAM", MemoryKind.VRAM: "VRAM"}
_OPS = {Op.READ: "READ", Op.WRITE: "WRITE"}


def describe(error: BaseException) -> EngineError:
    """``EngineError.of``, with the wheel's module name made the same for every CUDA version."""
    plain = EngineError.of(BACKEND, error)
    return attrs.evolve(
        plain, exception=tuple(re.sub(r"^nixl_\w+\.", "nixl.", n) for n in plain.exception)
    )


def device_of(kind: MemoryKind, device: int) -> int:
    """NIXL counts host memory as device 0."""
    return 0 if kind is MemoryKind.DRAM else device


class Agent:
    """One NIXL agent with its UCX backend. Methods raise what NIXL raises.

    Raises:
        ConfigError: a setting of the environment.
        MissingDependencyError: NIXL or its UCX plug-in is not there or does not load.
        TransportError: UCX does not start.
    """

    def __init__(self, name: str, config: NixlConfig) -> None:
        apply_environment(config, os.environ)
        try:
            from nixl import _api, _bindings
        except (ImportError, OSError) as error:
            raise MissingDependencyError(
                f"NIXL does not load: {error}", next_step="pip install nixl"
            ) from error
        self.name = name
        self._bindings: Any = _bindings
        settings = _api.nixl_agent_config(
            backends=["UCX"],
            enable_prog_thread=config.enable_prog_thread,
            num_threads=config.num_threads,
        )
        try:
            self._raw: Any = _api.nixl_agent(name, settings)
        except Exception as error:  # its exceptions share no base class but this one
            raise TransportError(
                f"the NIXL agent does not start: {error}",
                next_step="check UCX_TLS, which must name a transport that exists here",
                engine=describe(error),
            ) from error
        if "UCX" not in self._raw.backends:
            raise MissingDependencyError(
                "this NIXL has no UCX plug-in", next_step="check NIXL_PLUGIN_DIR"
            )

    # ---- memory and metadata ---------------------------------------------------------------

    def register(self, span: Span) -> Any:
        row = (span.address, span.nbytes, device_of(span.kind, span.device), "")
        return self._raw.register_memory([row], _KINDS[span.kind], backends=["UCX"])

    def deregister(self, registration: Any) -> None:
        self._raw.deregister_memory(registration, backends=["UCX"])

    def connection_metadata(self) -> bytes:
        """How to reach this agent, without any region."""
        nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG)
        return bytes(
            self._raw.get_partial_agent_metadata(nothing, inc_conn_info=True, backends=["UCX"])
        )

    def region_metadata(self, registration: Any) -> bytes:
        """One region's keys, without how to reach the agent."""
        return bytes(
            self._raw.get_partial_agent_metadata(
                registration, inc_conn_info=False, backends=["UCX"]
            )
        )

    def load_remote(self, metadata: bytes) -> str:
        """Take in metadata of another agent; returns its name. Loading twice changes nothing."""
        name = self._raw.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def connect(self, name: str) -> None:
        self._raw.make_connection(name, backends=["UCX"])

    def remove_remote(self, name: str) -> None:
        """Forget an agent. What is in flight goes on landing, and can no longer be asked about."""
        self._raw.remove_remote_agent(name)

    # ---- transfers -------------------------------------------------------------------------

    def prepare(self, remote: str, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> Any:
        """A list to pick from by index. ``rows``: address, length, device, stride, count.

        ``remote`` is an agent's name, empty for our own side.
        """
        return self._raw.prep_xfer_dlist(
            remote or "NIXL_INIT_AGENT", rows, _KINDS[kind], backends=["UCX"]
        )

    def pick(
        self,
        op: Op,
        local: Any,
        local_index: npt.NDArray[np.int32],
        remote: Any,
        remote_index: npt.NDArray[np.int32],
    ) -> Any:
        """A transfer of prepared pieces, not started."""
        return self._raw.make_prepped_xfer(
            _OPS[op], local, local_index, remote, remote_index, backends=["UCX"]
        )

    def transfer(
        self,
        op: Op,
        kinds: tuple[MemoryKind, MemoryKind],
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        name: str,
    ) -> Any:
        """A transfer of any pieces, not started. Rows: address, length, device."""
        return self._raw.initialize_xfer(
            _OPS[op],
            self._raw.get_xfer_descs(local, _KINDS[kinds[0]]),
            self._raw.get_xfer_descs(remote, _KINDS[kinds[1]]),
            name,
            backends=["UCX"],
        )

    def start(self, handle: Any) -> str:
        """``DONE``, ``PROC`` or ``ERR``. May copy inside the call, with the interpreter free."""
        return str(self._raw.transfer(handle))

    def state(self, handle: Any) -> str:
        """As ``start``."""
        return str(self._raw.check_xfer_state(handle))

    def shut(self) -> None:
        """End the agent. Every handle must have been released before. Idempotent."""
        self._raw = None
