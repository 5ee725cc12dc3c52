"""Samples for ``loopback``: the constants of ``backends.loopback``."""

from __future__ import annotations

from kvxfer.core.verdict import EngineError
from kvxfer.policies.rules.samples import Sample

__all__ = ["SAMPLES"]

_SAID = (
    ("loopback.queue_full", "the queue to this peer is full"),
    ("loopback.peer_gone", "the peer transport is closed"),
    ("loopback.region_gone", "the peer deregistered the region"),
    ("loopback.link_cut", "the peer fenced or dropped this connection"),
    ("loopback.fenced", "fenced before it started"),
    ("loopback.cancelled", "cancelled before it started"),
)

SAMPLES: tuple[Sample, ...] = tuple(
    Sample(rule=rule, error=EngineError(backend="loopback", message=text)) for rule, text in _SAID
)
