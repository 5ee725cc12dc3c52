"""The shared-memory engine. Texts begin as in ``backends.shm.messages``; a test compares them.

Attempts of this engine settle themselves, so few rules claim a proof.
"""

from __future__ import annotations

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.rule import Proof, RuleTable
from kvxfer.policies.rules.build import RuleMaker

__all__ = ["TABLE"]

_on = RuleMaker("shm")
_HANDSHAKE = ErrorKind.HANDSHAKE
_NOT_POSTED = Proof.NOT_POSTED

_ATTEMPTS = [
    _on.transient("queue_full", "the queue of copies for this peer is full", drained=_NOT_POSTED),
    # A process that is gone never comes back under the same incarnation.
    *(
        _on.rebuild(
            name,
            text,
            kind=ErrorKind.PEER_LOST,
            action=Action.REHANDSHAKE,
            retryable=False,
        )
        for name, text in (
            ("peer_gone", "the peer is gone"),
            ("peer_closed", "the peer closed its transport"),
            ("pid_reused", "the peer's process id belongs to another process now"),
        )
    ),
    # The peer relies on it that nothing more of ours lands: not posted again.
    _on.rebuild(
        "fenced",
        "the peer fenced this connection",
        kind=ErrorKind.STALE,
        action=Action.REHANDSHAKE,
        retryable=False,
    ),
    _on.rebuild(
        "region_gone",
        "the peer deregistered the region",
        kind=ErrorKind.STALE,
        action=Action.REHANDSHAKE,
    ),
    _on.permanent("stopped", "stopped before all of it was copied", kind=ErrorKind.ABORTED),
    _on.permanent("not_permitted", "not permitted to read the peer's memory", kind=_HANDSHAKE),
    _on.permanent("not_mapped", "the memory is not mapped"),
    # Any other errno: nothing is known about it, so it is not tried again.
    _on.permanent("read_failed", "process_vm_readv failed", kind=ErrorKind.UNKNOWN),
]

_CONNECTING = [
    *(
        _on.permanent(name, text, kind=_HANDSHAKE, drained=_NOT_POSTED)
        for name, text in (
            ("other_machine", "the peer runs on another machine"),
            ("other_namespace", "the peer lives in another pid namespace"),
            ("foreign_uid", "the peer runs under another uid"),
            ("refused_uid", "the peer refused our uid"),
            ("refused_version", "no common version of the shm handover protocol"),
            ("broken_protocol", "the peer broke the handover protocol"),
            ("not_sealed", "the peer's memory file is not sealed"),
            ("too_small", "the peer's memory file is smaller than it says"),
        )
    ),
    # Many ranks that connect at once can overrun the socket's backlog.
    _on.transient(
        "unreachable",
        "the peer's handover socket cannot be reached",
        kind=_HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    _on.transient(
        "not_answering",
        "the peer does not answer on the handover socket",
        kind=ErrorKind.TIMEOUT,
        drained=_NOT_POSTED,
    ),
    _on.transient(
        "refused_full",
        "the peer has too many connections",
        kind=ErrorKind.RESOURCE,
        drained=_NOT_POSTED,
    ),
    _on.rebuild(
        "refused_token",
        "the peer refused our token",
        kind=_HANDSHAKE,
        action=Action.REHANDSHAKE,
        drained=_NOT_POSTED,
    ),
    _on.rebuild(
        "refused_stale",
        "the peer meant is of another incarnation",
        kind=ErrorKind.STALE,
        action=Action.REHANDSHAKE,
        drained=_NOT_POSTED,
    ),
    _on.permanent(
        "map_failed",
        "the peer's memory cannot be mapped",
        kind=ErrorKind.RESOURCE,
        drained=_NOT_POSTED,
    ),
    _on.permanent(
        "no_memory",
        "cannot commit shared memory",
        kind=ErrorKind.RESOURCE,
        drained=_NOT_POSTED,
    ),
]

TABLE = RuleTable(backend=_on.backend, rules=[*_ATTEMPTS, *_CONNECTING])
