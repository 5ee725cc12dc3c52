"""Several requests of ours that share one transfer id: the samples of one prompt."""

from __future__ import annotations

import threading

import attrs

from kvxfer.core.remembered import Remembered
from kvxfer.errors import InvalidInputError

__all__ = ["Declines", "Owners"]


@attrs.define
class Owners:
    """Who shares one pull. Complete once each has pulled or declined."""

    transfer_id: str
    expected: int = 0
    pulled: list[str] = attrs.field(factory=list)
    declined: list[str] = attrs.field(factory=list)

    def check(self, owner: str, expected: int) -> None:
        """Refuse whoever does not belong here.

        Raises:
            InvalidInputError: names what does not fit.
        """
        if not isinstance(owner, str) or not owner:
            raise InvalidInputError(f"owner must be a request id, not {owner!r}")
        if isinstance(expected, bool) or not isinstance(expected, int) or expected < 1:
            raise InvalidInputError(f"owners must be their number, at least 1, not {expected!r}")
        if self.expected and expected != self.expected:
            raise InvalidInputError(
                f"{owner!r} says that {expected} owners share transfer {self.transfer_id!r}; "
                f"{(self.pulled + self.declined)[0]!r} said {self.expected}"
            )
        if owner in self.pulled or owner in self.declined:
            did = "pulled" if owner in self.pulled else "declined"
            raise InvalidInputError(f"{owner!r} has {did} transfer {self.transfer_id!r} already")
        if self.complete:
            raise InvalidInputError(
                f"transfer {self.transfer_id!r} has its {self.expected} owners "
                f"{self.pulled + self.declined}: {owner!r} is none of them",
                next_step="name the right number of owners, or use another transfer id",
            )

    def add(self, owner: str, expected: int, *, pulled: bool) -> bool:
        """Take one that was checked; True if it was the last."""
        self.expected = expected
        (self.pulled if pulled else self.declined).append(owner)
        return self.complete

    @property
    def complete(self) -> bool:
        return bool(self.expected) and len(self.pulled) + len(self.declined) >= self.expected


class Declines:
    """Owners that declined before any of the others pulled. Any thread; bounded."""

    def __init__(self, *, capacity: int, ttl: float) -> None:
        self._known: Remembered[tuple[str, int], Owners] = Remembered(capacity=capacity, ttl=ttl)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, transfer_id: str, epoch: int, owner: str, expected: int, now: float) -> bool:
        """One owner declines; True if with it all have.

        Raises:
            InvalidInputError: it does not belong to the others.
        """
        with self._lock:
            owners = self._known.pop((transfer_id, epoch)) or Owners(transfer_id)
            try:
                owners.check(owner, expected)
                if owners.add(owner, expected, pulled=False):
                    return True
            finally:
                if owners.expected and not owners.complete:
                    self._known.add((transfer_id, epoch), owners, now)
            return False

    def take(self, transfer_id: str, epoch: int) -> Owners:
        """What is known when the first one pulls."""
        with self._lock:
            return self._known.pop((transfer_id, epoch)) or Owners(transfer_id)

    def put_back(self, owners: Owners, epoch: int, now: float) -> None:
        """The first one did not pull after all."""
        if owners.expected:
            with self._lock:
                self._known.add((owners.transfer_id, epoch), owners, now)

    def expire(self, now: float) -> None:
        """Forget declines whose other owners never came: the lease ends their hold."""
        with self._lock:
            self._known.expire(now)

    def next_at(self) -> float | None:
        """When ``expire`` has something next."""
        with self._lock:
            return self._known.next_at()
