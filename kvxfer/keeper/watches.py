"""Holds of peers that our agent reads or waits for: who is asked when, and what came of it. Pure.

Grants are counted from when the request was sent.  One is renewed when a third of it is used up:
the agent itself asks at half, so that each has two tries before the other would notice.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from kvxfer.core.timers import Timers
from kvxfer.core.wire import Ref

__all__ = ["SEQ_STRIDE", "Asking", "WatchTable"]

SEQ_STRIDE = 1 << 20
"""An agent numbers its own requests in such steps: between two there is room for its keeper's."""

_SEQS_KEPT = 16
"""Requests per peer whose sending time is remembered; a later answer is ignored."""
_USED = 1 / 3
_PATIENT = 2
"""Unanswered requests after which the agent is asked as well."""


@attrs.define
class _Entry:
    since: float
    """What was asked before does not count: the agent had finished with it then."""
    bound: float
    granted_until: float
    tries: int = 0
    """Requests since the last answer."""


@attrs.frozen
class Asking:
    """One request to one peer. ``urgent``: its keeper did not answer, ask the agent as well."""

    incarnation: str
    seq: int
    refs: tuple[Ref, ...]
    urgent: bool


_Sent = OrderedDict[int, tuple[float, frozenset[Ref]]]


class WatchTable:
    """Bounded by time: every entry has a bound at which it ends by itself.

    Args:
        retry: seconds after which an unanswered request is repeated.
        batch: most holds in one request.
    """

    def __init__(self, *, retry: float, batch: int = 4096) -> None:
        self._retry = retry
        self._batch = batch
        self._entries: dict[Ref, _Entry] = {}
        self._timers: Timers[Ref] = Timers()
        self._sent: dict[str, _Sent] = {}
        self._base = self._used = 0

    def __len__(self) -> int:
        return len(self._entries)

    def number_from(self, seq: int) -> None:
        """Number requests above ``seq``, the agent's latest, and below its next.

        So whoever gets requests of both knows which were sent before the agent said that it is
        finished: it said so under a number of its own.
        """
        if seq > self._base:
            self._base, self._used = seq, 0

    def watch(self, ref: Ref, *, bound: float, granted_until: float, now: float) -> None:
        """Keep ``ref`` granted until ``bound``; what the agent was granted itself counts."""
        entry = self._entries.get(ref)
        if entry is None:
            entry = self._entries[ref] = _Entry(now, bound, granted_until)
        else:
            entry.bound = bound
            entry.granted_until = max(entry.granted_until, granted_until)
        # Not granted yet: the agent has just asked itself.
        first = now + max(self._retry, (entry.granted_until - now) * _USED)
        self._timers.set(ref, min(first, bound))

    def unwatch(self, ref: Ref) -> None:
        """The agent no longer needs it; unknown ones are fine."""
        if self._entries.pop(ref, None) is not None:
            self._timers.cancel(ref)

    def forget_peer(self, incarnation: str) -> None:
        """Nobody is asked there any more; what is watched there ends by its bound."""
        self._sent.pop(incarnation, None)

    def due(self, now: float) -> list[Asking]:
        """Requests to send now, each to be repeated until it is answered."""
        wanted: dict[tuple[str, bool], list[Ref]] = {}
        for ref in self._timers.pop_due(now):
            entry = self._entries[ref]
            if now >= entry.bound:
                del self._entries[ref]
                continue
            wanted.setdefault((ref.keeper, entry.tries >= _PATIENT), []).append(ref)
            entry.tries += 1
            self._timers.set(ref, min(now + self._retry, entry.bound))
        found: list[Asking] = []
        for (incarnation, urgent), refs in wanted.items():
            sent = self._sent.setdefault(incarnation, OrderedDict())
            for begin in range(0, len(refs), self._batch):
                part = tuple(refs[begin : begin + self._batch])
                if self._used + 1 >= SEQ_STRIDE:
                    return found  # the agent has not spoken for a million requests
                self._used += 1
                seq = self._base + self._used
                sent[seq] = (now, frozenset(part))
                if len(sent) > _SEQS_KEPT:
                    sent.popitem(last=False)
                found.append(Asking(incarnation, seq, part, urgent))
        return found

    def granted(
        self, incarnation: str, seq: int, ref: Ref, remaining: float, now: float
    ) -> tuple[float, float] | None:
        """An answer: until when it lasts and when it was asked for; None if it is no news."""
        sent = self._asked(incarnation, seq, ref)
        entry = self._entries.get(ref)
        if sent is None or entry is None or sent < entry.since:
            return None
        entry.tries = 0
        if sent + remaining <= entry.granted_until:
            return None  # an older answer, or one that another has overtaken
        entry.granted_until = sent + remaining
        at = max(sent + remaining * _USED, now + min(self._retry, remaining * _USED))
        self._timers.set(ref, min(at, entry.bound))
        return entry.granted_until, sent

    def refused(self, incarnation: str, seq: int, ref: Ref) -> bool:
        """The peer's agent will not grant it any more: our agent finds out why by itself."""
        if self._asked(incarnation, seq, ref) is None:
            return False
        self.unwatch(ref)
        return True

    def _asked(self, incarnation: str, seq: int, ref: Ref) -> float | None:
        """When that peer was asked for that hold with ``seq``."""
        requests = self._sent.get(incarnation)
        request = None if requests is None else requests.get(seq)
        return None if request is None or ref not in request[1] else request[0]

    def next_at(self) -> float | None:
        """When ``due`` has something next."""
        return self._timers.next_at()
