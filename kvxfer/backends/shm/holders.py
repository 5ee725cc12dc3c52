"""Who holds memory of ours, and the proof that somebody does not any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.backends.shm.link import Link
    from kvxfer.backends.shm.loop import HandoverLoop, Timer
    from kvxfer.backends.shm.procs import ProcessWatch
    from kvxfer.backends.shm.protocol import Challenge, Hello

__all__ = ["Holder", "Revocation"]


class Holder:
    """A connected peer and what it holds of ours.

    Outlives its connection as long as the peer's process may still write into our memory.
    """

    def __init__(self, watch: ProcessWatch | None, pid: int) -> None:
        self.link: Link | None = None
        self.watch = watch
        self.pid = pid
        self.incarnation = ""
        """Empty until it introduced itself and proved that it was told the token."""
        self.challenged: tuple[Hello, Challenge] | None = None
        """What it must prove; None before, and after it did."""
        self.sent: set[int] = set()
        """Segments whose file it has."""
        self.granted: dict[int, int | None] = {}
        """Regions it has, each with its segment."""
        self.may_write = False
        """It was handed memory that it may map writable."""
        self.leaving = False
        """It was told to let go: it gets nothing more."""
        self.ended = False
        self.on_end: list[Callable[[], None]] = []
        self.hello_timer: Timer | None = None

    def hang_up(self) -> None:
        """End the connection, without any proof."""
        if self.hello_timer is not None:
            self.hello_timer.cancel()
        if self.link is not None:
            self.link.close()
            self.link = None


class Revocation:
    """Waits until some holders have ended, for a bounded time; answers once.

    ``answer("")`` is the proof; anything else is the reason why there is none.
    """

    def __init__(
        self,
        loop: HandoverLoop,
        holders: list[Holder],
        timeout: float,
        answer: Callable[[str], None],
    ) -> None:
        self._answer = answer
        self._timeout = timeout
        self._left = dict.fromkeys(holders)
        self._timer: Timer | None = None
        if not holders:
            answer("")
            return
        self._timer = loop.later(timeout, self._too_late)
        for holder in holders:
            holder.on_end.append(lambda holder=holder: self._ended(holder))  # type: ignore[misc]

    def _ended(self, holder: Holder) -> None:
        if self._left.pop(holder, holder) is None and not self._left:
            self._finish("")

    def _too_late(self) -> None:
        pids = ", ".join(str(holder.pid) for holder in self._left)
        self._finish(
            f"process {pids} has our memory mapped writable and did not confirm within "
            f"{self._timeout:g} s that it unmapped it; it is alive, perhaps stopped: ending it "
            "would be proof"
        )

    def _finish(self, reason: str) -> None:
        if self._timer is not None and not self._timer.cancelled:
            self._timer.cancel()
            self._answer(reason)
