"""Samples for ``own``."""

from __future__ import annotations

from kvxfer import errors
from kvxfer.core.verdict import EngineError
from kvxfer.policies.rules.samples import Sample

__all__ = ["SAMPLES"]

_RAISED: tuple[tuple[str, BaseException], ...] = (
    ("kvxfer.backpressure", errors.BackpressureError("the queue is full")),
    ("kvxfer.region_busy", errors.RegionBusyError("2 attempts that are not drained use it")),
    ("kvxfer.handshake", errors.HandshakeError("another fingerprint")),
    ("kvxfer.peer_lost", errors.PeerLostError("no transport of that incarnation")),
    ("kvxfer.stale", errors.StaleError("the path is closed")),
    ("kvxfer.circuit_open", errors.CircuitOpenError("the peer failed too often")),
    ("kvxfer.closed", errors.ClosedError("the shm transport is closed")),
    ("kvxfer.capacity", errors.CapacityError("65536 transfers are open")),
    ("kvxfer.invalid_input", errors.InvalidInputError("size[3] is 0, below 1")),
    ("kvxfer.invalid_input", errors.GeometryError("4 heads against 3")),
    ("kvxfer.invalid_input", errors.ConfigError("lease must be positive")),
    ("kvxfer.wire", errors.WireError("3 bytes are no message")),
    ("kvxfer.missing_dependency", errors.MissingDependencyError("nixl is not installed")),
    ("kvxfer.plugin", errors.PluginError("no plug-in 'x'")),
    ("kvxfer.connection_refused", ConnectionRefusedError(111, "Connection refused")),
    ("kvxfer.connection_error", ConnectionResetError(104, "Connection reset by peer")),
    ("kvxfer.connection_error", BrokenPipeError(32, "Broken pipe")),
    ("kvxfer.memory", MemoryError()),
)

_SAID = (
    ("kvxfer.connection_closed", "the connection was closed"),
    ("kvxfer.transport_closed", "the transport was closed"),
)

SAMPLES: tuple[Sample, ...] = (
    *(Sample(rule=rule, error=EngineError.of("any", error)) for rule, error in _RAISED),
    *(Sample(rule=rule, error=EngineError(backend="any", message=text)) for rule, text in _SAID),
)
