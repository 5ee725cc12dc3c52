"""One engine post and what became of it."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.core.batch import Batch
    from kvxfer.core.transport import Path
    from kvxfer.core.verdict import EngineError, Op

__all__ = ["Accepted", "Attempt", "AttemptState"]


class AttemptState(enum.Enum):
    """PENDING, then DONE or FAILED for ever."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Accepted(enum.Enum):
    """How much of the batch the engine took."""

    NONE = "none"
    ALL = "all"
    UNKNOWN = "unknown"


class Attempt:
    """One engine post.

    The first terminal state wins.  ``drained`` is a fact of its own: True once no engine can touch
    the memory any more on behalf of this attempt, with ``drained_by`` naming the proof.  DONE
    implies drained; FAILED does not.

    Readers may look at the attributes from any thread.  ``complete``, ``fail`` and
    ``mark_drained`` are for the backend that owns the attempt, also from any thread; each returns
    whether it changed anything.
    """

    __slots__ = (
        "_lock",
        "accepted",
        "batch",
        "drained",
        "drained_by",
        "error",
        "handle",
        "nbytes",
        "op",
        "path",
        "state",
        "tag",
    )

    def __init__(self, op: Op, path: Path, batch: Batch, tag: object = None) -> None:
        self.op = op
        self.path = path
        self.batch = batch
        self.tag = tag
        self.state = AttemptState.PENDING
        self.accepted = Accepted.UNKNOWN
        self.drained = False
        self.drained_by = ""
        self.error: EngineError | None = None
        self.nbytes = 0
        self.handle: object = None
        """The backend's own; nobody else looks at it."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        drained = f" drained by {self.drained_by}" if self.drained else ""
        return f"<Attempt {self.op.value} {len(self.batch)} pieces {self.state.value}{drained}>"

    @property
    def terminal(self) -> bool:
        return self.state is not AttemptState.PENDING

    def complete(self, *, by: str = "completion") -> bool:
        """All bytes of the batch moved, to the degree ``Capabilities.visibility`` promises.

        Coming after a failure (ours, such as a time-out), it cannot change the state, but it is
        the proof that the attempt is drained.
        """
        with self._lock:
            late = self.state is not AttemptState.PENDING
            if not late:
                self.accepted = Accepted.ALL
                self.nbytes = self.batch.nbytes
                self.drained, self.drained_by = True, by
                self.state = AttemptState.DONE
        if late:
            return self.mark_drained(f"late {by}")
        self.path.settled(self)
        return True

    def fail(self, error: EngineError, *, accepted: Accepted, drained_by: str = "") -> bool:
        """It failed. ``drained_by`` names the proof that nothing lands later, if there is one.

        With ``accepted=NONE`` nothing was posted, which is proof by itself. After an earlier
        failure only the proof counts.
        """
        if accepted is Accepted.NONE and not drained_by:
            drained_by = "nothing posted"
        with self._lock:
            late = self.terminal
            if not late:
                self.accepted = accepted
                self.error = error
                if drained_by:
                    self.drained, self.drained_by = True, drained_by
                self.state = AttemptState.FAILED
        if late:
            return bool(drained_by) and self.mark_drained(drained_by)
        if drained_by:
            self.path.settled(self)
        return True

    def mark_drained(self, by: str) -> bool:
        """A failed attempt's proof arrived. A pending attempt must be failed first."""
        with self._lock:
            if self.drained or not self.terminal:
                return False
            self.drained, self.drained_by = True, by
        self.path.settled(self)
        return True

    def request_cancel(self) -> None:
        """Ask the engine to give up, where ``Capabilities.cancel`` says it can."""
        self.path.peer.transport.cancel(self)
