"""Mooncake 0.3.13. Its engine says -1 for everything that fails a piece; texts are the backend's.

They begin as in ``backends.mooncake.messages``; a test compares them.  Attempts settle what is
drained themselves.
"""

from __future__ import annotations

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.rule import Proof, RuleTable
from kvxfer.policies.rules.build import RuleMaker

__all__ = ["TABLE"]

_on = RuleMaker("mooncake")

TABLE = RuleTable(
    backend=_on.backend,
    rules=[
        # An incarnation that is gone never comes back: the attempt is lost, the path needs news.
        _on.rebuild(
            "peer_gone",
            "nobody listens at the peer's address",
            kind=ErrorKind.PEER_LOST,
            action=Action.REHANDSHAKE,
            retryable=False,
        ),
        _on.rebuild(
            "other_life",
            "another incarnation answers at the peer's address",
            kind=ErrorKind.STALE,
            action=Action.REHANDSHAKE,
            retryable=False,
        ),
        _on.rebuild(
            "not_registered",
            "the peer has not registered the memory, or not any more",
            kind=ErrorKind.STALE,
            action=Action.REHANDSHAKE,
        ),
        # Stopped, or its network is away: it may come back, and the engine dials again by itself.
        _on.transient("peer_silent", "the peer's engine does not answer", kind=ErrorKind.TIMEOUT),
        _on.transient(
            "unreachable", "the peer's address cannot be reached", kind=ErrorKind.CONNECTION
        ),
        # A connection was lost. For a second after that the engine fails what needs a new one.
        _on.transient(
            "broken",
            "the engine failed, though the peer answers and has the memory",
            kind=ErrorKind.CONNECTION,
        ),
        _on.rebuild(
            "not_submitted", "the engine does not take the piece", drained=Proof.NOT_POSTED
        ),
        _on.transient(
            "queue_full", "the engine's queue to this peer is full", drained=Proof.NOT_POSTED
        ),
        _on.permanent(
            "not_taken",
            "the engine does not register or unregister the memory",
            kind=ErrorKind.RESOURCE,
            drained=Proof.NOT_POSTED,
        ),
        _on.permanent(
            "not_started",
            "the engine does not start",
            kind=ErrorKind.RESOURCE,
            drained=Proof.NOT_POSTED,
        ),
    ],
)
