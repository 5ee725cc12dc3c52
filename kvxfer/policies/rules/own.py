"""kvxfer's own exceptions and texts, whatever the backend, and a few builtin exceptions."""

from __future__ import annotations

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.rule import ANY, Proof, RuleTable
from kvxfer.policies.rules.build import RuleMaker

__all__ = ["TABLE"]

_on = RuleMaker(ANY, "kvxfer")
_NOT_POSTED = Proof.NOT_POSTED
"""An exception of ours means that nothing was posted: it is the contract of ``Transport``."""

TABLE = RuleTable(
    backend=ANY,
    rules=[
        _on.transient("backpressure", exception="BackpressureError", drained=_NOT_POSTED),
        _on.permanent(
            "region_busy",
            exception="RegionBusyError",
            kind=ErrorKind.RESOURCE,
            drained=_NOT_POSTED,
        ),
        _on.permanent(
            "handshake",
            exception="HandshakeError",
            kind=ErrorKind.HANDSHAKE,
            drained=_NOT_POSTED,
        ),
        # The peer may be starting, or a link may come back: the budgets bound it.
        _on.rebuild(
            "peer_lost",
            exception="PeerLostError",
            kind=ErrorKind.PEER_LOST,
            drained=_NOT_POSTED,
        ),
        _on.rebuild(
            "stale",
            exception="StaleError",
            kind=ErrorKind.STALE,
            action=Action.REHANDSHAKE,
            drained=_NOT_POSTED,
        ),
        _on.permanent(
            "circuit_open",
            exception="CircuitOpenError",
            kind=ErrorKind.CONNECTION,
            drained=_NOT_POSTED,
        ),
        _on.permanent(
            "closed", exception="ClosedError", kind=ErrorKind.CONNECTION, drained=_NOT_POSTED
        ),
        _on.permanent(
            "capacity", exception="CapacityError", kind=ErrorKind.RESOURCE, drained=_NOT_POSTED
        ),
        _on.permanent("invalid_input", exception="InvalidInputError", drained=_NOT_POSTED),
        _on.permanent("wire", exception="WireError", kind=ErrorKind.HANDSHAKE, drained=_NOT_POSTED),
        _on.permanent(
            "missing_dependency",
            exception="MissingDependencyError",
            kind=ErrorKind.RESOURCE,
            drained=_NOT_POSTED,
        ),
        _on.permanent("plugin", exception="PluginError", drained=_NOT_POSTED),
        # What core.transport says about attempts that were pending when something was closed.
        _on.rebuild("connection_closed", "the connection was closed"),
        _on.permanent("transport_closed", "the transport was closed", kind=ErrorKind.CONNECTION),
        # Builtin exceptions that a backend let through.
        _on.transient(
            "connection_refused",
            exception="builtins.ConnectionRefusedError",
            kind=ErrorKind.CONNECTION,
            drained=_NOT_POSTED,
        ),
        _on.rebuild("connection_error", exception="builtins.ConnectionError"),
        _on.permanent("memory", exception="builtins.MemoryError", kind=ErrorKind.RESOURCE),
    ],
)
