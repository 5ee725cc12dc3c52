"""What a producer holds for readers, and until when.

A hold ends at lease end plus margin; opening or renewing starts the lease anew.  Durations travel:
the producer counts from when it received the request, the reader from when it sent it, so that the
reader's lease ends first whatever the clocks and delays are.  The margin covers what the reader
has posted just before its own end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from kvxfer.core.remembered import Remembered
from kvxfer.core.timers import Timers
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError

__all__ = ["Hold", "LeaseTable", "Refusal"]


@attrs.define(kw_only=True)
class Hold:
    """Blocks kept for readers. ``content`` is the caller's. Times are clock seconds."""

    transfer_id: str
    epoch: int
    lease: float
    ends_at: float
    content: Any = None
    granted_until: float = -math.inf
    """The latest moment that some reader was promised."""
    closing: bool = False
    """Aborted: nobody is granted anything more."""
    reading: dict[Any, None] = attrs.field(factory=dict)
    """Who opened it and has not said that it is finished: the blocks are not free before, and these
    have to be told, in this order, if it is gone."""
    opened: dict[Any, int] = attrs.field(factory=dict)
    """By reader that opened it: the number of its latest request."""
    consumed: set[Any] = attrs.field(factory=set)
    """Who opened it and got the bytes: nothing more is granted to it."""
    closed: dict[Any, int] = attrs.field(factory=dict)
    """By reader that finished: requests up to this number were sent before it did."""
    shared: int = 0
    """Which life of the keeper may grant it too; 0: none."""
    promised: float = -math.inf
    """A keeper that died may have promised it for so long, margin included."""
    told: float = -math.inf
    """Until when the keeper knows it to be held."""
    asked: float = -math.inf
    """The keeper was asked to let it go unless it has granted it beyond this."""
    question: int = 0
    """The number of that question; 0: none is open."""
    settled: Any = None
    """All that was expected has happened, but somebody is still reading: what to report then."""

    @property
    def readers(self) -> set[Any]:
        """Everybody who opened it."""
        return self.consumed.union(self.reading, self.closed)


@attrs.frozen
class Refusal:
    """Why a hold is not granted."""

    kind: ErrorKind
    message: str


class LeaseTable:
    """Holds by transfer id, bounded by ``capacity``; expiry costs nothing for those not due."""

    def __init__(
        self,
        *,
        margin: float,
        capacity: int = 262144,
        remembered: int = 65536,
        remembered_ttl: float = 300.0,
    ) -> None:
        self.margin = margin
        self._capacity = capacity
        self._holds: dict[str, Hold] = {}
        self._timers: Timers[str] = Timers()
        self._ended: Remembered[str, tuple[int, Refusal]] = Remembered(
            capacity=remembered, ttl=remembered_ttl
        )
        self._now = -math.inf
        """The latest time we were told."""

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, transfer_id: object) -> bool:
        return transfer_id in self._holds

    @property
    def remembered(self) -> int:
        """How many ended holds are remembered, to refuse references to them."""
        return len(self._ended)

    def get(self, transfer_id: str) -> Hold | None:
        return self._holds.get(transfer_id)

    def __iter__(self) -> Any:
        return iter(self._holds.values())

    def hold(
        self, transfer_id: str, *, epoch: int, lease: float, now: float, content: Any = None
    ) -> Hold:
        """Begin a hold.

        Raises:
            InvalidInputError: the id is held already.
            CapacityError: the table is full.
        """
        if transfer_id in self._holds:
            raise InvalidInputError(
                f"transfer {transfer_id!r} is held already (epoch "
                f"{self._holds[transfer_id].epoch})",
                next_step="wait for its Sent, Declined or Expired event, or use another id",
            )
        if len(self._holds) >= self._capacity:
            raise CapacityError(
                f"{self._capacity} transfers are held: the table is full",
                next_step="raise the limit, or shorten the lease",
            )
        self._now = now
        entry = Hold(
            transfer_id=transfer_id, epoch=epoch, lease=lease, ends_at=now + lease, content=content
        )
        self._holds[transfer_id] = entry
        self._timers.set(transfer_id, entry.ends_at + self.margin)
        return entry

    def open(self, transfer_id: str, *, epoch: int, now: float) -> Hold | Refusal | None:
        """Grant or renew. None: never heard of this id (the order to hold may still be coming)."""
        self._now = now
        entry = self._holds.get(transfer_id)
        if entry is None:
            ended = self._ended.get(transfer_id)
            if ended is not None and epoch <= ended[0]:
                return ended[1]
            return None
        if entry.epoch != epoch:
            if epoch > entry.epoch:
                return None
            return Refusal(
                ErrorKind.STALE,
                f"reference to epoch {epoch} of {transfer_id!r}, which is now epoch {entry.epoch}",
            )
        if entry.closing:
            return Refusal(ErrorKind.ABORTED, f"{transfer_id!r} is being given up")
        if now >= entry.ends_at:  # in its margin: too late to promise anything
            return Refusal(ErrorKind.EXPIRED, f"the lease of {transfer_id!r} has ended")
        entry.ends_at = max(entry.ends_at, now + entry.lease)
        entry.granted_until = entry.ends_at
        self._timers.set(transfer_id, entry.ends_at + self.margin)
        return entry

    def shorten(self, transfer_id: str, *, now: float, lease: float) -> None:
        """Grant nothing more and end in ``lease`` seconds, but not before what was granted."""
        entry = self._holds.get(transfer_id)
        if entry is not None:
            entry.closing = True
            entry.ends_at = max(entry.granted_until, min(entry.ends_at, now + lease))
            self._timers.set(transfer_id, entry.ends_at + self.margin)

    def limit(self, transfer_id: str, *, now: float, lease: float) -> None:
        """End in ``lease`` seconds unless somebody opens it again; not later than it would."""
        entry = self._holds.get(transfer_id)
        if entry is not None:
            entry.ends_at = min(entry.ends_at, now + lease)
            self._timers.set(transfer_id, entry.ends_at)

    def granted(self, entry: Hold, until: float) -> bool:
        """Somebody granted it for us until ``until``. True if it lasts longer by that."""
        entry.granted_until = max(entry.granted_until, until)
        if until <= entry.ends_at:
            return False
        entry.ends_at = until
        self._timers.set(entry.transfer_id, until + self.margin)
        return True

    def rearm(self, entry: Hold, now: float) -> None:
        """``expire`` was told to leave it: have it looked at again."""
        held = self._holds.get(entry.transfer_id) is entry
        if held and self._timers.due_at(entry.transfer_id) is None:
            self._timers.set(entry.transfer_id, now)

    def end(self, transfer_id: str, why: Refusal) -> Hold | None:
        """End a hold now; later references get ``why``. None if it is not held."""
        entry = self._holds.pop(transfer_id, None)
        if entry is None:
            return None
        self._timers.cancel(transfer_id)
        self._ended.add(transfer_id, (entry.epoch, why), self._now)
        return entry

    def expire(self, now: float, may: Callable[[Hold], bool] | None = None) -> list[Hold]:
        """Holds whose lease and margin have ended; each is ended by this.

        One that ``may`` not end yet is left alone until ``granted`` or ``rearm``.
        """
        expired = []
        self._now = now
        self._ended.expire(now)
        for transfer_id in self._timers.pop_due(now):
            if may is not None and not may(self._holds[transfer_id]):
                continue
            entry = self.end(
                transfer_id,
                Refusal(ErrorKind.EXPIRED, f"the lease of {transfer_id!r} has ended"),
            )
            if entry is not None:
                expired.append(entry)
        return expired

    def next_at(self) -> float | None:
        """When ``expire`` has something next."""
        times = [at for at in (self._timers.next_at(), self._ended.next_at()) if at is not None]
        return min(times) if times else None
