"""Which key a dialled peer is expected to answer with, and what changed keys mean for it.

A socket is made for one key and keeps it, so that whatever comes over it, and whatever libzmq
reports of it, is about that key: another key is another socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.core.control_curve import Candidate, CurveAuth
    from kvxfer.core.control_dialler import Dialled, DialledRoute
    from kvxfer.core.control_hub import Hub

__all__ = ["Keying"]


class Keying:
    """Decides for all dialled routes. ``due`` holds when each is to be dialled anew."""

    def __init__(
        self,
        curve: CurveAuth,
        hub: Hub,
        due: dict[DialledRoute, float],
        clock: Callable[[], float],
    ) -> None:
        self.curve = curve
        self._hub = hub
        self._due = due
        self._clock = clock

    def check(self, peer: str) -> None:
        """Raises ``InvalidInputError`` unless ``peer`` (empty: anybody) has an allowed key."""
        self.curve.candidates(peer)

    def pick(self, peer: str, last: Candidate | None, *, following: bool) -> Candidate:
        """The key for a new socket: the one of ``last`` while it is allowed, or the one after."""
        there_are = self.curve.candidates(peer)
        if last not in there_are:
            return there_are[0]
        return there_are[(there_are.index(last) + following) % len(there_are)]

    def refused(self, dialled: Dialled) -> None:
        """An attempt failed, perhaps for its key: the next one is made with another if there is.

        libzmq does not say which it was: a listener does not answer one who has its key wrong.
        """
        if dialled.cut_off or dialled.up or dialled.wants_socket:
            return
        there_are = self.curve.candidates(dialled.peer)
        if len(there_are) < 2:
            return
        dialled.wants_socket = dialled.next_key = True
        # Without a pause until all were tried: it takes a millisecond each.
        last = dialled.candidate == there_are[-1]
        self._due[dialled.route] = self._clock() + (dialled.next_pause() if last else 0.0)

    def changed(self, dialled: Dialled, *, renewed: bool, now: float) -> None:
        """The allow-list is another one; ``renewed``: so is our own pair.

        A connection that is up goes on with the keys it came up with, as long as the peer's is
        allowed.
        """
        key, allowed = dialled.candidate, self.curve.allowed
        if key is not None and not dialled.cut_off and allowed.name(key.key) == key.name:
            # libzmq would come back with our old pair, and be refused once that is removed.
            dialled.wants_socket = dialled.wants_socket or renewed
            return
        was_cut, dialled.cut_off = dialled.cut_off, True
        if not was_cut:
            self._hub.counters["dialled_cut_keys"] += 1
            dialled.cut()
        others = allowed.keys(dialled.peer) if dialled.peer else allowed
        if len(others):
            dialled.wants_socket = True
            self._due[dialled.route] = now
        else:
            self._due.pop(dialled.route, None)
