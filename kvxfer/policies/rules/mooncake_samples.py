"""Samples for ``mooncake``.

Evidence: "seen" = printed by ``scripts/mooncake_samples.py`` with the engine of
mooncake-transfer-engine-non-cuda 0.3.13.post1 in two processes over tcp, addresses and ports
aside, and provoked again by the suite of its lane; "source" = the path is there, and could not be
provoked.
"""

from __future__ import annotations

from kvxfer.core.verdict import EngineError
from kvxfer.policies.rules.samples import Sample

__all__ = ["SAMPLES"]

_SAID: tuple[tuple[str, int | None, str, str], ...] = (
    ("peer_gone", -1, "nobody listens at the peer's address: 127.0.0.1:15000", "seen"),
    (
        "other_life",
        None,
        "another incarnation answers at the peer's address: 127.0.0.1:15000",
        "seen",
    ),
    (
        "not_registered",
        -1,
        "the peer has not registered the memory, or not any more: 65536 bytes at 0x7f0000000000 of "
        "its memory",
        "seen",
    ),
    ("peer_silent", -1, "the peer's engine does not answer: 127.0.0.1:15000 in 1 s", "seen"),
    (
        "unreachable",
        None,
        "the peer's address cannot be reached: 127.0.0.1:15000: the answer ends after 0 of 8 bytes",
        "seen",
    ),
    (
        "broken",
        -1,
        "the engine failed, though the peer answers and has the memory: 127.0.0.1:15000",
        "seen",
    ),
    ("queue_full", None, "the engine's queue to this peer is full: 771 of 1024", "seen"),
    (
        "not_taken",
        -3,
        "the engine does not register or unregister the memory: on unregistering",
        "seen",
    ),
    ("not_submitted", -1, "the engine does not take the piece: 127.0.0.1:15000", "source"),
    ("not_started", -1, "the engine does not start", "source"),
)

SAMPLES: tuple[Sample, ...] = tuple(
    Sample(
        rule=f"mooncake.{rule}",
        error=EngineError(backend="mooncake", code=code, message=text),
        evidence=evidence,
    )
    for rule, code, text, evidence in _SAID
)
