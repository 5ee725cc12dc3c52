"""Attempts as groups of engine calls, and the send queues those calls share.

One attempt makes one engine call per pair.  It is DONE when all have succeeded, FAILED as soon as
one has failed, and drained when each call that was posted is proven to be over.
"""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.core.attempt import Accepted

if TYPE_CHECKING:
    from kvxfer.backends.moriio.binding import Status
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.batch import Batch
    from kvxfer.core.verdict import EngineError

__all__ = ["LATER_COMPLETION", "Call", "Group", "Plan", "SendQueue", "by_pair"]

Plan = list[tuple[int, list[int], list[int], list[int]]]
"""``(pair, local, remote, size)`` per engine call."""

LATER_COMPLETION = "ordered later completion on the same queue pair"


class Call:
    """One engine call that was posted, entirely or in part."""

    __slots__ = ("after", "group", "number", "pieces", "queue", "status")

    def __init__(self, group: Group, queue: SendQueue, pieces: int, status: Status) -> None:
        self.group = group
        self.queue = queue
        self.pieces = pieces
        self.status = status
        self.after = queue.last_number
        """Calls numbered up to here had returned from the engine before this one began."""
        self.number = 0
        """Given once the engine call has returned."""


class Group:
    """The engine calls of one attempt. Used by the posting thread until it is published, then by
    the progress thread only."""

    __slots__ = ("attempt", "calls", "failure", "stopped", "taken", "unproven", "whole")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.whole = True
        """Whether the engine has taken every call of the attempt."""
        self.stopped = False
        """A call has failed while there were more to make: they are not made."""
        self.calls: list[Call] = []
        """Those that the engine has taken and that are not over."""
        self.unproven = 0
        """Failed calls whose bytes may still land."""
        self.failure: EngineError | None = None
        self.taken = Accepted.ALL

    def failed(self, error: EngineError, taken: Accepted) -> None:
        """Remember the first failure. ``taken`` is what the engine took of that one call."""
        self.stopped = True
        if self.failure is None:
            self.failure = error
            self.taken = taken if self.whole else Accepted.UNKNOWN

    def settle(self, proof: str) -> bool:
        """Tell the attempt what is known by now; whether that changed it.

        ``proof`` names what ended the last call; it becomes ``drained_by`` if nothing is left.
        """
        over = not self.calls and not self.unproven
        if self.failure is None:
            return over and self.attempt.complete()
        return self.attempt.fail(
            self.failure, accepted=self.taken, drained_by=proof if over else ""
        )


class SendQueue:
    """The queue of one (peer engine, device pair), shared by every session of that pair.

    Room is counted in pieces before the engine merges them, so never too generously.  Any thread.
    """

    def __init__(self, depth: int, *, ordered: bool) -> None:
        self.depth = depth
        self.dead: EngineError | None = None
        """What killed it: no later call succeeds."""
        self.in_flight = 0
        self._ordered = ordered
        self._lock = threading.Lock()
        self._numbers = 0
        self._doubtful: collections.deque[Call] = collections.deque()

    def reserve(self, pieces: int, *, force: bool = False) -> bool:
        """Take room for a call, if there is room or ``force`` is given; whether it was taken."""
        with self._lock:
            if self.in_flight + pieces > self.depth and not force:
                return False
            self.in_flight += pieces
            return True

    def release(self, pieces: int) -> None:
        with self._lock:
            self.in_flight -= pieces

    def posted(self, call: Call) -> None:
        """Give ``call`` its number. Called when the engine call has returned."""
        with self._lock:
            self._numbers += 1
            call.number = self._numbers

    def doubt(self, call: Call) -> None:
        """``call`` has failed and may still land."""
        self._doubtful.append(call)

    def proven_by(self, success: Call) -> list[Call]:
        """Doubtful calls that are over since ``success``, which was posted after them, is.

        A queue pair executes and acknowledges in order; with several of them nothing follows.
        """
        if not self._ordered or not self._doubtful:
            return []
        found = [c for c in self._doubtful if c.number <= success.after]
        for call in found:
            self._doubtful.remove(call)
        return found

    @property
    def last_number(self) -> int:
        return self._numbers


def by_pair(batch: Batch, pairs: int) -> Plan:
    """The calls that ``batch`` takes over a path of so many pairs: one per pair it names.

    Pieces stay in order within their pair.
    """
    pair = batch.pair
    first = int(pair[0])
    if pairs == 1 or bool((pair == first).all()):
        _, local, remote, size = batch.lists()
        return [(first, local, remote, size)]
    order = np.argsort(pair, kind="stable")
    sorted_pair = pair[order]
    starts = np.flatnonzero(np.diff(sorted_pair, prepend=-1)).tolist()
    local, remote, size = (v[order].tolist() for v in (batch.local, batch.remote, batch.size))
    return [
        (int(sorted_pair[start]), local[start:stop], remote[start:stop], size[start:stop])
        for start, stop in zip(starts, [*starts[1:], len(pair)], strict=True)
    ]
