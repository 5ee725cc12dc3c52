"""Attempts as groups of engine calls.

An attempt is DONE when all its calls have succeeded, FAILED as soon as one has failed, and drained
when each call that was posted is proven to be over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.attempt import Accepted

if TYPE_CHECKING:
    from typing import Any

    from kvxfer.backends.moriio.queues import Connection, SendQueue
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.verdict import EngineError

__all__ = ["LATER_COMPLETION", "Call", "Group"]

LATER_COMPLETION = "ordered later completion on the same queue pair"


class Call:
    """One engine call that was posted, entirely or in part."""

    __slots__ = ("after", "connection", "group", "number", "queue", "status", "work_requests")

    def __init__(
        self,
        group: Group,
        connection: Connection,
        queue: SendQueue,
        work_requests: int,
        status: Any,
    ) -> None:
        self.group = group
        self.connection = connection
        self.queue = queue
        self.work_requests = work_requests
        self.status = status
        """The engine's: see ``binding.status_class``."""
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
