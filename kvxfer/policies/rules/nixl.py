"""NIXL 1.5.1. Its errors are exception classes; the text is just the code, and says nothing more.

The classes live in a version-dependent ``_bindings`` module, so rules give their bare names.
"""

from __future__ import annotations

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.rule import Proof, RuleTable
from kvxfer.policies.rules.build import RuleMaker

__all__ = ["TABLE"]

_on = RuleMaker("nixl")

TABLE = RuleTable(
    backend=_on.backend,
    rules=[
        # An unknown agent, or memory that is not registered (any more) on either side; raised
        # while a transfer is set up. Ranges are checked before we ask.
        _on.rebuild(
            "not_found",
            exception="nixlNotFoundError",
            kind=ErrorKind.STALE,
            action=Action.REHANDSHAKE,
            drained=Proof.NOT_POSTED,
        ),
        # Counts or lengths differ, or own metadata was added.
        _on.permanent("invalid_param", exception="nixlInvalidParamError", drained=Proof.NOT_POSTED),
        # Metadata that is none.
        _on.permanent(
            "mismatch",
            exception="nixlMismatchError",
            kind=ErrorKind.HANDSHAKE,
            drained=Proof.NOT_POSTED,
        ),
        # An engine that does not start with these transports (UCX_TLS, UCX_MODULES).
        _on.permanent("backend", exception="nixlBackendError", kind=ErrorKind.RESOURCE),
        # The post before this one is still in flight: nothing is proven about that.
        _on.permanent("repost_active", exception="nixlRepostActiveError"),
        # Killed peer, in 0.15 to 0.3 s and ever after. The name can be used again once the remote
        # agent was removed. What it proves about an attempt, the backend knows.
        _on.rebuild(
            "remote_disconnect",
            exception="nixlRemoteDisconnectError",
            kind=ErrorKind.PEER_LOST,
            action=Action.REHANDSHAKE,
        ),
        # A wrong operation and an empty list come out of NIXL's Python layer.
        _on.permanent("bad_operation", exception="builtins.KeyError", drained=Proof.NOT_POSTED),
        _on.permanent("empty_list", exception="builtins.IndexError", drained=Proof.NOT_POSTED),
    ],
)
