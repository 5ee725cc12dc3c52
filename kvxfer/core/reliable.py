"""Messages that matter: re-sent until confirmed or too old, seen once however often they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvxfer.core.remembered import Remembered
from kvxfer.core.timers import Timers

__all__ = ["Inbox", "Outbox"]


@attrs.define
class _Pending:
    frame: bytes
    until: float
    interval: float


class Outbox:
    """What one agent has sent to one peer and not had confirmed.

    Pure: ``due`` says what to send, the caller sends it.  The interval doubles from ``first`` to
    ``longest`` seconds, so that a dead peer costs little.
    """

    __slots__ = ("_first", "_longest", "_mids", "_pending", "_timers", "expired", "resent")

    def __init__(self, *, first: float = 0.1, longest: float = 1.0) -> None:
        self._first = first
        self._longest = longest
        self._pending: dict[int, _Pending] = {}
        self._timers: Timers[int] = Timers()
        self.resent = 0
        self.expired = 0
        """Messages given up unconfirmed at their ``until``."""

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, mid: object) -> bool:
        return mid in self._pending

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Ids and frames, oldest first."""
        return ((mid, entry.frame) for mid, entry in self._pending.items())

    def put(self, mid: int, frame: bytes, *, now: float, until: float) -> None:
        """Keep ``frame`` until it is confirmed or ``until`` passes. The caller sends it now.

        ``mid`` must be unique among all messages of this agent: receivers know them by sender.
        """
        self._pending[mid] = _Pending(frame, until, self._first)
        self._timers.set(mid, min(now + self._first, until))

    def confirm(self, mid: int) -> bool:
        """The peer has it. False for ids that are not pending (confirmed before, or given up)."""
        self._timers.cancel(mid)
        return self._pending.pop(mid, None) is not None

    def due(self, now: float) -> list[bytes]:
        """Frames to send again now."""
        frames: list[bytes] = []
        for mid in self._timers.pop_due(now):
            entry = self._pending[mid]
            if now >= entry.until:
                del self._pending[mid]
                self.expired += 1
                continue
            frames.append(entry.frame)
            self.resent += 1
            entry.interval = min(entry.interval * 2, self._longest)
            self._timers.set(mid, min(now + entry.interval, entry.until))
        return frames

    def resend_all(self, now: float) -> list[bytes]:
        """Every pending frame, for a connection that came back."""
        frames = []
        for mid, entry in self._pending.items():
            entry.interval = self._first
            self._timers.set(mid, min(now + self._first, entry.until))
            frames.append(entry.frame)
        self.resent += len(frames)
        return frames

    def take_over(self, other: Outbox, now: float) -> list[bytes]:
        """Whatever is pending in ``other`` is pending here instead; returns it, to be sent now."""
        self._pending.update(other._pending)
        other._pending.clear()
        other._timers = Timers()
        return self.resend_all(now)

    def drop(self, mids: Iterable[int]) -> int:
        """Give these up: nobody is there to confirm them. Returns how many were pending."""
        return sum(self.confirm(mid) for mid in mids)

    def next_at(self) -> float | None:
        """When ``due`` has something next."""
        return self._timers.next_at()


class Inbox:
    """Which confirmed messages have been seen: twice equals once.

    Bounded: the oldest of ``capacity`` (sender, mid) pairs is forgotten first, and each ``ttl``
    seconds after it came.  A repeat older than that is processed again, which every handler
    tolerates.
    """

    __slots__ = ("_seen", "duplicates")

    def __init__(self, capacity: int = 65536, ttl: float = 300.0) -> None:
        self._seen: Remembered[tuple[str, int], None] = Remembered(capacity=capacity, ttl=ttl)
        self.duplicates = 0

    def __len__(self) -> int:
        return len(self._seen)

    def seen(self, sender: str, mid: int) -> bool:
        """Whether this message was remembered before."""
        if (sender, mid) in self._seen.entries:
            self.duplicates += 1
            return True
        return False

    def first_time(self, sender: str, mid: int, now: float = 0.0) -> bool:
        """Whether this message is new; remembers it."""
        if self.seen(sender, mid):
            return False
        self.remember(sender, mid, now)
        return True

    def remember(self, sender: str, mid: int, now: float) -> None:
        """It was handled."""
        self._seen.add((sender, mid), None, now)

    def recent(self, limit: int) -> dict[str, list[int]]:
        """By sender: the ids of the last messages seen from it, at most ``limit`` each."""
        found: dict[str, list[int]] = {}
        for sender, mid in reversed(self._seen):
            mids = found.setdefault(sender, [])
            if len(mids) < limit:
                mids.append(mid)
        return found

    def expire(self, now: float) -> None:
        """Forget what is older than the time to live."""
        self._seen.expire(now)

    def next_at(self) -> float | None:
        """When ``expire`` has something next."""
        return self._seen.next_at()
