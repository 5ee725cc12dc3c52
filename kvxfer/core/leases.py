"""What a producer holds for readers, and until when.

A hold ends at lease end plus margin; opening or renewing starts the lease anew.  Durations travel:
the producer counts from when it received the request, the reader from when it sent it, so that the
reader's lease ends first whatever the clocks and delays are.  The margin covers what the reader
has posted just before its own end.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import attrs

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
    readers: set[Any] = attrs.field(factory=set)
    """Who opened it and may have to be told that it is gone."""


@attrs.frozen
class Refusal:
    """Why a hold is not granted."""

    kind: ErrorKind
    message: str


class LeaseTable:
    """Holds by transfer id, bounded by ``capacity``; expiry costs nothing for those not due."""

    def __init__(self, *, margin: float, capacity: int = 262144, remembered: int = 65536) -> None:
        self.margin = margin
        self._capacity = capacity
        self._holds: dict[str, Hold] = {}
        self._timers: Timers[str] = Timers()
        self._ended: OrderedDict[str, tuple[int, Refusal]] = OrderedDict()
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, transfer_id: object) -> bool:
        return transfer_id in self._holds

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
        entry = Hold(
            transfer_id=transfer_id, epoch=epoch, lease=lease, ends_at=now + lease, content=content
        )
        self._holds[transfer_id] = entry
        self._timers.set(transfer_id, entry.ends_at + self.margin)
        return entry

    def open(self, transfer_id: str, *, epoch: int, now: float) -> Hold | Refusal | None:
        """Grant or renew. None: never heard of this id (the order to hold may still be coming)."""
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

    def end(self, transfer_id: str, why: Refusal) -> Hold | None:
        """End a hold now; later references get ``why``. None if it is not held."""
        entry = self._holds.pop(transfer_id, None)
        if entry is None:
            return None
        self._timers.cancel(transfer_id)
        self._ended[transfer_id] = (entry.epoch, why)
        self._ended.move_to_end(transfer_id)
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        return entry

    def expire(self, now: float) -> list[Hold]:
        """Holds whose lease and margin have ended; each is ended by this."""
        expired = []
        for transfer_id in self._timers.pop_due(now):
            entry = self.end(
                transfer_id,
                Refusal(ErrorKind.EXPIRED, f"the lease of {transfer_id!r} has ended"),
            )
            if entry is not None:
                expired.append(entry)
        return expired

    def next_at(self) -> float | None:
        """When ``expire`` has something next."""
        return self._timers.next_at()
