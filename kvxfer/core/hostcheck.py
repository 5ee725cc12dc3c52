"""What ``kvxfer doctor`` asks a backend: can this host run you, and if not, what is missing?

A backend answers with checks (``Transport.host_checks``).  Each has two halves: ``gather`` looks at
the host, and may load the engine; ``judge`` is a pure function of what was gathered.  The doctor
runs all of it in a process of its own, so that an engine that ends its process ends nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

__all__ = ["Finding", "HostCheck", "HostQuery", "Level", "size_text"]


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    """Looked at, and as it should be."""
    NOTE = "note"
    """Nothing is wrong; somebody should know all the same."""
    WARNING = "warning"
    """It works, but not as it could or as somebody may expect."""
    MISSING = "missing"
    """Not installed here. Wrong only where it was asked for."""
    ERROR = "error"
    """It does not work, or not to the end."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at, and what to do about it."""

    backend: str
    level: Level
    what: str
    next_step: str = ""
    check: str = ""
    """The check it came from; filled in by who ran it."""

    def __str__(self) -> str:
        step = f". {self.next_step}" if self.next_step else ""
        return f"{self.backend}: {self.level.value}: {self.what}{step}"


@attrs.frozen(kw_only=True)
class HostQuery:
    """What is to be run on this host."""

    options: Mapping[str, Any] = attrs.field(factory=dict)
    """The backend's configuration as JSON values; empty: its defaults."""
    cache_nbytes: int = 1 << 30
    """KV cache of one worker, in bytes."""


@attrs.frozen
class HostCheck:
    """One question to the host.

    What ``gather`` raises becomes a finding: a ``KvxferError`` with its text and next step.
    """

    name: str
    gather: Callable[[HostQuery], Any]
    judge: Callable[[Any], Sequence[Finding]]


def size_text(nbytes: int) -> str:
    """A number of bytes as people read it: ``"1.5 GiB"``, ``"4096 bytes"``."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"
