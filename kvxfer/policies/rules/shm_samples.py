"""Samples for ``shm``: texts of ``backends.shm.messages``, with details as the engine adds them."""

from __future__ import annotations

from kvxfer.core.verdict import EngineError
from kvxfer.policies.rules.samples import Sample

__all__ = ["SAMPLES"]

_SAID: tuple[tuple[str, int | None, str], ...] = (
    ("shm.queue_full", None, "the queue of copies for this peer is full"),
    ("shm.peer_gone", 3, "the peer is gone: process 4711; connect to its successor"),
    ("shm.peer_closed", None, "the peer closed its transport; connect to its successor"),
    (
        "shm.pid_reused",
        None,
        "the peer's process id belongs to another process now; connect to the peer's successor",
    ),
    ("shm.fenced", None, "the peer fenced this connection; it must connect to us again"),
    ("shm.region_gone", None, "the peer deregistered the region; fetch the current descriptors"),
    ("shm.stopped", None, "stopped before all of it was copied"),
    ("shm.not_permitted", 1, "not permitted to read the peer's memory: process 4711"),
    ("shm.not_mapped", 14, "the memory is not mapped: process 4711"),
    ("shm.read_failed", 22, "process_vm_readv failed: process 4711: Invalid argument"),
    ("shm.other_machine", None, "the peer runs on another machine"),
    ("shm.other_namespace", None, "the peer lives in another pid namespace"),
    ("shm.foreign_uid", None, "the peer runs under another uid: 1001"),
    ("shm.refused_uid", None, "the peer refused our uid"),
    ("shm.refused_version", None, "no common version of the shm handover protocol"),
    ("shm.broken_protocol", None, "the peer broke the handover protocol"),
    ("shm.not_sealed", None, "the peer's memory file is not sealed"),
    ("shm.too_small", None, "the peer's memory file is smaller than it says: 4096 bytes"),
    ("shm.unreachable", 111, "the peer's handover socket cannot be reached"),
    ("shm.not_answering", None, "the peer does not answer on the handover socket"),
    ("shm.refused_full", None, "the peer has too many connections"),
    ("shm.refused_token", None, "the peer refused our token"),
    ("shm.refused_stale", None, "the peer meant is of another incarnation"),
    ("shm.map_failed", 12, "the peer's memory cannot be mapped: Cannot allocate memory"),
    ("shm.no_memory", 28, "cannot commit shared memory"),
)

SAMPLES: tuple[Sample, ...] = tuple(
    Sample(rule=rule, error=EngineError(backend="shm", code=code, message=text))
    for rule, code, text in _SAID
)
