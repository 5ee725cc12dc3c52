"""Every exception that kvxfer raises.

The tree (each class also derives from the builtin it resembles)::

    KvxferError
    ├── InvalidInputError (ValueError)        an argument is wrong; nothing was posted
    │   ├── ConfigError                       a configuration value is wrong
    │   ├── GeometryError                     two caches cannot be mapped onto each other exactly
    │   └── UnregisteredMemoryError           memory that no region covers
    ├── WireError (ValueError)                bytes from a peer that are no message of ours
    ├── MissingDependencyError (ImportError)  an optional package or library is not installed
    ├── PluginError (RuntimeError)            a plug-in cannot be found, loaded or trusted
    ├── ClosedError (RuntimeError)            the object was closed
    ├── CapacityError (RuntimeError)          one of our own bounded tables is full
    └── TransportError (RuntimeError)         a backend refused or failed; carries an EngineError
        ├── BackpressureError                 refused for now, nothing was posted
        ├── RegionBusyError                   an attempt that is not drained still uses the region
        ├── HandshakeError (ConnectionError)  the two sides could not agree
        ├── PeerLostError (ConnectionError)   the peer process is gone
        ├── StaleError                        peer, region or path is of an older incarnation
        └── CircuitOpenError                  the peer failed too often and is left alone for now

Errors that happen to a *transfer* are values (``TransferError``), carried by ``Failed`` events and
handles; only ``TransferHandle.result()`` raises one.  All of them pickle, because engines move
them between processes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.core.verdict import EngineError, HistoryEntry

__all__ = [
    "BackpressureError",
    "CapacityError",
    "CircuitOpenError",
    "ClosedError",
    "ConfigError",
    "ErrorKind",
    "GeometryError",
    "HandshakeError",
    "InvalidInputError",
    "KvxferError",
    "MissingDependencyError",
    "PeerLostError",
    "PluginError",
    "RegionBusyError",
    "StaleError",
    "TransferError",
    "TransportError",
    "UnregisteredMemoryError",
    "WireError",
]


class ErrorKind(enum.Enum):
    """What went wrong, in the one vocabulary that retry, metrics and events share."""

    BACKPRESSURE = "backpressure"
    """The engine refused for now; the same call can succeed later."""
    RESOURCE = "resource"
    """The engine or host ran out of something that waiting alone may not bring back."""
    TIMEOUT = "timeout"
    """A deadline of ours passed."""
    CONNECTION = "connection"
    """The path to the peer is broken; a rebuilt one may work."""
    HANDSHAKE = "handshake"
    """The two sides could not agree (version, fingerprint, geometry, reachability)."""
    PEER_LOST = "peer_lost"
    """The peer process or host is gone."""
    STALE = "stale"
    """A reference of an older incarnation, already consumed, or gone."""
    EXPIRED = "expired"
    """The reader's lease ended before the bytes were complete."""
    ABORTED = "aborted"
    """The user aborted the transfer."""
    DECLINED = "declined"
    """The consumer said that it will not read."""
    INVALID = "invalid"
    """The caller's arguments are wrong; the same call fails again."""
    UNKNOWN = "unknown"
    """No rule matched: not retried, not taken for drained, counted."""


class KvxferError(Exception):
    """Base of everything kvxfer raises.

    ``next_step`` says what the reader can do about it; it is part of the text.  ``kind`` is what a
    transfer that fails because of it is counted as.
    """

    kind: ErrorKind = ErrorKind.UNKNOWN

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}. {self.next_step}" if self.next_step else self.message

    def __reduce__(self) -> Any:
        # Keyword-only arguments do not survive the default protocol.
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(cls: type[KvxferError], message: str, state: dict[str, Any]) -> KvxferError:
    # The first __new__ in the MRO of a ConnectionError of ours is RuntimeError's, which refuses.
    new = OSError.__new__ if issubclass(cls, OSError) else cls.__new__
    error: KvxferError = new(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidInputError(KvxferError, ValueError):
    """An argument is wrong. Raised before anything is posted."""

    kind = ErrorKind.INVALID


class ConfigError(InvalidInputError):
    """A configuration value is wrong."""


class GeometryError(InvalidInputError):
    """Two caches cannot be mapped onto each other exactly; the text names both geometries."""

    kind = ErrorKind.HANDSHAKE


class UnregisteredMemoryError(InvalidInputError):
    """The memory named is not covered by any registered region."""


class WireError(KvxferError, ValueError):
    """Bytes from outside that are not a valid message. Counted and dropped, never fatal."""


class MissingDependencyError(KvxferError, ImportError):
    """An optional package or system library is missing."""


class PluginError(KvxferError, RuntimeError):
    """A plug-in cannot be found, loaded or trusted; names distribution, entry point and cause."""


class ClosedError(KvxferError, RuntimeError):
    """The agent, transport, path or channel was closed."""

    kind = ErrorKind.CONNECTION


class CapacityError(KvxferError, RuntimeError):
    """One of our own bounded tables is full."""

    kind = ErrorKind.RESOURCE


class TransportError(KvxferError, RuntimeError):
    """A backend refused or failed. Raised by ``post``: nothing was posted.

    ``engine`` holds what the engine itself said, for the classifier.
    """

    def __init__(
        self, message: str, *, next_step: str = "", engine: EngineError | None = None
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.engine = engine


class BackpressureError(TransportError):
    """Refused for now; nothing was posted."""

    kind = ErrorKind.BACKPRESSURE


class RegionBusyError(TransportError):
    """An attempt that is not drained still uses the region."""

    kind = ErrorKind.RESOURCE


class HandshakeError(TransportError, ConnectionError):
    """The two sides could not agree."""

    kind = ErrorKind.HANDSHAKE


class PeerLostError(TransportError, ConnectionError):
    """The peer process or host is gone."""

    kind = ErrorKind.PEER_LOST


class StaleError(TransportError):
    """The peer, region or path belongs to an older incarnation or generation."""

    kind = ErrorKind.STALE


class CircuitOpenError(TransportError):
    """The peer failed too often and is left alone for a while; nothing was tried.

    ``kind`` is that of the last fault.
    """

    kind = ErrorKind.CONNECTION


class TransferError(KvxferError, RuntimeError):
    """Why a transfer failed: the value inside ``Failed`` and ``TransferHandle.error``.

    ``history`` lists the attempts that were made, oldest first.  ``fresh_blocks``: see ``Failed``.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: ErrorKind,
        next_step: str = "",
        engine: EngineError | None = None,
        history: tuple[HistoryEntry, ...] = (),
        fresh_blocks: bool = False,
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.kind = kind
        self.fresh_blocks = fresh_blocks
        self.engine = engine
        self.history = history

    def __str__(self) -> str:
        return f"[{self.kind.value}] {super().__str__()}"
