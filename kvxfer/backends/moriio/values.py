"""The engine's descriptors, with what we look at beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from kvxfer.core.memory import MemoryKind

__all__ = ["Memory", "PeerFailure", "Remote"]


@attrs.frozen(kw_only=True)
class Memory:
    """A memory descriptor of the engine, ours or a peer's."""

    raw: Any = attrs.field(repr=False)
    engine_key: str
    nbytes: int
    kind: MemoryKind
    place: tuple[int, int, int]
    """Device, kind and NUMA node: one half of what the engine chooses a queue pair by."""

    def pack(self) -> bytes:
        return bytes(self.raw.pack())


@attrs.frozen(kw_only=True)
class Remote:
    """A peer's engine descriptor."""

    raw: Any = attrs.field(repr=False)
    key: str
    host: str
    port: int


@attrs.frozen(kw_only=True)
class PeerFailure:
    """What ``pop_peer_failure`` tells: the root cause that a flushed status hides."""

    engine_key: str
    reason: str
    detail: str
