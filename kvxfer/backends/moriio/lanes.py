"""What the pairs of a path post through: sessions, one per pair and per shifted base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvxfer.backends.moriio.binding import Memory, Session
    from kvxfer.backends.moriio.queues import Connection

__all__ = ["Lane", "PairLane"]


class Lane:
    """One session, and the queue pairs behind it."""

    __slots__ = ("connection", "session")

    def __init__(self, session: Session, connection: Connection) -> None:
        self.session = session
        self.connection = connection


class PairLane:
    """All sessions of one pair of a path.

    The engine counts offsets from where a registration begins.  So layers that lie one behind the
    other in one region take one set of lists only if each of them is registered once more by
    itself, on both sides: ``here`` and ``there`` are those registrations by their base.  Sessions
    between them are opened once a batch has asked for them, by ``later`` on a thread that may wait
    for the peer; until then ``at`` has none.
    """

    def __init__(
        self,
        whole: Lane,
        *,
        here: Mapping[int, Memory],
        there: Mapping[int, Memory],
        open_lane: Callable[[Memory, Memory], Lane],
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        self.whole = whole
        self._here = here
        self._there = there
        self._open_lane = open_lane
        self._later = later
        self._shifted: dict[tuple[int, int], Lane | None] = {}

    @property
    def most(self) -> int:
        """Work requests that one call may have: the depth of a send queue."""
        return self.whole.connection.depth

    def at(self, local_base: int, remote_base: int) -> Lane | None:
        """The lane whose offsets count from these bases, if it is there. Posting thread."""
        if not local_base and not remote_base:
            return self.whole
        key = (local_base, remote_base)
        if key in self._shifted:
            return self._shifted[key]
        self._shifted[key] = None  # asked for once, whatever comes of it
        here, there = self._here.get(local_base), self._there.get(remote_base)
        if here is not None and there is not None:
            self._later(lambda: self._open(key, here, there))
        return None

    def _open(self, key: tuple[int, int], here: Memory, there: Memory) -> None:
        try:
            self._shifted[key] = self._open_lane(here, there)
        except KvxferError:
            self._shifted[key] = None  # posts go on with lists of their own
