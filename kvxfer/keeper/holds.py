"""What an agent holds for readers, as its keeper knows it. Pure; times are arguments.

The book grants and never refuses: whatever it does not know or may not grant gets no answer, and
the reader asks the agent, which alone judges.  So agent and keeper cannot contradict each other.

Two rules for who feeds it.

Take the requests, then the time, then the orders, then grant.  Every request was then sent before
``now``, so that the reader, which counts from when it sent, never counts further than we do; and an
order that the agent gave before ``now`` is heard before anything is granted, however long this
process was stopped in between.

Tell the agent of every new reader before the grant goes out.  So the agent knows all readers there
can be once it has heard a keeper out, also one that died.
"""

from __future__ import annotations

import hmac
import math
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from kvxfer.core.wire import Ref

__all__ = ["Closing", "Granting", "HoldBook"]


@attrs.define
class _Entry:
    epoch: int
    ticket: str
    lease: float
    ends_at: float
    granted_until: float = -math.inf
    readers: dict[str, int] = attrs.field(factory=dict)
    """By reader that was granted: the number of its latest request."""
    finished: set[str] = attrs.field(factory=set)


@attrs.frozen
class Granting:
    """A grant. ``new``: the agent has to hear of this reader first."""

    remaining: float
    new: bool


@attrs.frozen
class Closing:
    """What became of an order to close."""

    closed: bool
    """False: it had been granted further than the agent knew, and goes on."""
    granted_until: float
    readers: dict[str, int]
    """By reader: the number of its latest request. One that is above what it finished with says
    that it reads again."""


class HoldBook:
    """Holds by transfer id. As large as the agent's own table, which bounds it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, transfer: str, epoch: int, ticket: str, lease: float, ends_at: float) -> None:
        """The agent holds it, or has extended it. A newer epoch replaces an older one."""
        entry = self._entries.get(transfer)
        if entry is None or entry.epoch < epoch:
            self._entries[transfer] = _Entry(epoch, ticket, lease, ends_at)
        elif entry.epoch == epoch:
            entry.ends_at = max(entry.ends_at, ends_at)

    def finished(self, transfer: str, epoch: int, reader: str) -> None:
        """A reader said that it is finished: it is granted nothing more until ``again``."""
        entry = self._find(transfer, epoch)
        if entry is not None:
            entry.finished.add(reader)

    def again(self, transfer: str, epoch: int, reader: str) -> None:
        """The agent has let a reader that was finished try once more."""
        entry = self._find(transfer, epoch)
        if entry is not None:
            entry.finished.discard(reader)

    def close(self, transfer: str, epoch: int, unless_after: float) -> Closing:
        """Grant nothing more, unless it was granted beyond ``unless_after`` already."""
        entry = self._find(transfer, epoch)
        if entry is None:
            return Closing(True, -math.inf, {})
        goes_on = entry.granted_until > unless_after
        if not goes_on:
            del self._entries[transfer]
        return Closing(not goes_on, entry.granted_until, entry.readers)

    def grant(self, ref: Ref, *, reader: str, seq: int, now: float) -> Granting | None:
        """Grant or renew what ``reader`` asked for with number ``seq``; None for no answer."""
        entry = self._find(ref.transfer, ref.epoch)
        if entry is None or now >= entry.ends_at or reader in entry.finished:
            return None
        if not hmac.compare_digest(ref.ticket.encode(), entry.ticket.encode()):
            return None
        entry.ends_at = entry.granted_until = max(entry.ends_at, now + entry.lease)
        latest = entry.readers.get(reader)
        entry.readers[reader] = seq if latest is None else max(latest, seq)
        return Granting(entry.ends_at - now, latest is None)

    def _find(self, transfer: str, epoch: int) -> _Entry | None:
        entry = self._entries.get(transfer)
        return entry if entry is not None and entry.epoch == epoch else None
