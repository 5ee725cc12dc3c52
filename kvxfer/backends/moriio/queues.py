"""The send queues between one engine of ours and one engine of a peer.

The engine keeps ``qp_per_transfer`` queue pairs for each (peer engine, device pair), shared by all
sessions of that pair.  Each has a send queue of bounded depth, counted in work requests, and an
order of its own.
"""

from __future__ import annotations

import collections
import itertools
import threading
from operator import attrgetter
from typing import TYPE_CHECKING

from kvxfer.core.verdict import EngineError

if TYPE_CHECKING:
    from kvxfer.backends.moriio.calls import Call
    from kvxfer.backends.moriio.generation import Generation

__all__ = ["Connection", "SendQueue"]


class SendQueue:
    """One queue pair's send queue. Any thread.

    ``ordered``: everything posted to it is executed and acknowledged in order, because it is one
    queue pair.  Where the engine spreads calls over several, one of these stands for all of them.
    """

    def __init__(self, index: int, *, ordered: bool, lock: threading.Lock) -> None:
        self.index = index
        self.dead: EngineError | None = None
        """What killed it: no later call succeeds."""
        self.in_flight = 0
        """Work requests of calls that are not proven to be over."""
        self._ordered = ordered
        self._lock = lock
        self._numbers = itertools.count(1)
        self.last_number = 0
        self.doubtful: collections.deque[Call] = collections.deque()
        """Calls that have failed and may still land."""

    def release(self, work_requests: int) -> None:
        with self._lock:
            self.in_flight -= work_requests

    def posted(self, call: Call) -> None:
        """Give ``call`` its number. Called when the engine call has returned.

        Of two threads the later may write first: then less is proven later, never too much.
        """
        self.last_number = call.number = next(self._numbers)

    def doubt(self, call: Call) -> None:
        """``call`` has failed and may still land."""
        self.doubtful.append(call)

    def proven_by(self, success: Call) -> list[Call]:
        """Doubtful calls that are over since ``success``, which was posted after them, is.

        A queue pair executes and acknowledges in order; over several of them nothing follows.
        """
        if not self._ordered:
            return []
        found = [c for c in self.doubtful if c.number <= success.after]
        for call in found:
            self.doubtful.remove(call)
        return found


class Connection:
    """All queue pairs between two devices of two engines."""

    def __init__(
        self,
        generation: Generation,
        peer_key: str,
        *,
        name: str,
        queue_pairs: int,
        depth: int,
        ordered: bool,
    ) -> None:
        self.generation = generation
        self.peer_key = peer_key
        self.depth = depth
        """Of each queue. Falls when the engine says that the device granted less."""
        self.name = name
        """For ``Path.queues``."""
        self._lock = threading.Lock()
        self._turns = itertools.count()
        self.queues = tuple(
            SendQueue(i, ordered=ordered, lock=self._lock)
            for i in range(queue_pairs if ordered else 1)
        )

    @property
    def dead(self) -> EngineError | None:
        """What killed it, once no queue pair of it is alive."""
        errors = [queue.dead for queue in self.queues]
        return errors[0] if None not in errors else None

    @property
    def degraded(self) -> EngineError | None:
        """What killed a queue pair of it, if one is dead."""
        return next((q.dead for q in self.queues if q.dead is not None), None)

    def reserve(self, work_requests: int, *, force: bool = False) -> SendQueue | None:
        """Take room on the live queue with the most of it; None if there is not enough.

        ``force`` takes it even so.
        """
        queues = self.queues
        with self._lock:
            if len(queues) == 1:
                queue = queues[0]
            else:
                turn = next(self._turns) % len(queues)
                alive = [q for q in (*queues[turn:], *queues[:turn]) if q.dead is None]
                queue = min(alive or queues, key=_in_flight)
            if queue.in_flight + work_requests > self.depth and not force:
                return None
            queue.in_flight += work_requests
            return queue

    def reserve_parts(self, pieces: int, extra: int) -> list[tuple[SendQueue, int]]:
        """Take room for so many work requests wherever it is; nothing, if it is nowhere enough.

        Returns the live queues and how many each takes; ``extra`` is taken with each part.
        """
        parts = []
        with self._lock:
            for queue in sorted(self.queues, key=_in_flight):
                room = self.depth - queue.in_flight - extra
                if queue.dead is None and room > 0 and pieces:
                    part = min(room, pieces)
                    pieces -= part
                    parts.append((queue, part))
            if pieces:
                return []
            for queue, part in parts:
                queue.in_flight += part + extra
        return parts

    @property
    def room(self) -> tuple[int, int]:
        """Places taken and places there are, over all live queues."""
        alive = [q for q in self.queues if q.dead is None]
        return sum(map(_in_flight, alive)), self.depth * len(alive)


_in_flight = attrgetter("in_flight")
