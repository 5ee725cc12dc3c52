"""A fence under way: two proofs, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.pollable import Deferred
from kvxfer.core.transport import Fence

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Fencing"]


class Fencing:
    """Done once our own copies have ended and the peer can write nothing of ours. Loop thread only.

    ``wake`` is called with the answer in ``pollable``.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.pollable: Deferred[Fence] = Deferred()
        self._wake = wake
        self._copies_ended = False
        self._peer_reason: str | None = None

    def own_copies_ended(self) -> None:
        """Nothing of ours touches the peer's memory, or moves its bytes into ours."""
        self._copies_ended = True
        self._conclude()

    def peer_answered(self, reason: str) -> None:
        """Empty: proven. Otherwise why it is not."""
        self._peer_reason = reason
        self._conclude()

    def too_late(self, attempts: int) -> None:
        """Our copies did not end in time."""
        if not self._copies_ended:
            self._resolve(f"copies of {attempts} attempts are still running")

    def _conclude(self) -> None:
        if self._copies_ended and self._peer_reason is not None:
            self._resolve(self._peer_reason)

    def _resolve(self, reason: str) -> None:
        self.pollable.resolve(Fence(done=not reason, reason=reason))
        self._wake()
