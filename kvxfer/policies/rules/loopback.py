"""The in-process engine. Texts as in ``backends.loopback``; a test compares them."""

from __future__ import annotations

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.rule import Proof, RuleTable
from kvxfer.policies.rules.build import RuleMaker

__all__ = ["TABLE"]

_on = RuleMaker("loopback")
# A copy happens whole or not at all, so that every refusal means that nothing was posted.
_NOT_POSTED = Proof.NOT_POSTED

TABLE = RuleTable(
    backend=_on.backend,
    rules=[
        _on.transient("queue_full", "the queue to this peer is full", drained=_NOT_POSTED),
        # An incarnation never comes back.
        _on.rebuild(
            "peer_gone",
            "the peer transport is closed",
            kind=ErrorKind.PEER_LOST,
            action=Action.REHANDSHAKE,
            retryable=False,
            drained=_NOT_POSTED,
        ),
        _on.rebuild(
            "region_gone",
            "the peer deregistered the region",
            kind=ErrorKind.STALE,
            action=Action.REHANDSHAKE,
            drained=_NOT_POSTED,
        ),
        # The peer relies on it that nothing more of ours lands: not posted again.
        _on.rebuild(
            "link_cut",
            "the peer fenced or dropped this connection",
            kind=ErrorKind.STALE,
            action=Action.REHANDSHAKE,
            retryable=False,
            drained=_NOT_POSTED,
        ),
        _on.permanent(
            "fenced", "fenced before it started", kind=ErrorKind.ABORTED, drained=_NOT_POSTED
        ),
        _on.permanent(
            "cancelled", "cancelled before it started", kind=ErrorKind.ABORTED, drained=_NOT_POSTED
        ),
    ],
)
