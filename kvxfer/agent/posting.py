"""Threads for posts that may block inside an engine, and the count of those that did not return."""

from __future__ import annotations

import collections
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvxfer.core.attempt import Attempt
from kvxfer.core.verdict import EngineError
from kvxfer.errors import KvxferError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.agent.part import Call
    from kvxfer.core.clock import Clock
    from kvxfer.core.transport import Path, Transport
    from kvxfer.policies.credit_queue import Grant

__all__ = ["Job", "Outcome", "PostingThread", "StuckThreads", "post_once", "wrapped"]

Outcome = Attempt | TransportError | None
"""What became of a post. None: it was not made, because the lease ran low while it waited."""


class Job:
    """One post: the call, the credits it holds, and the path it goes over."""

    __slots__ = ("call", "generation", "grant", "path", "transport")

    def __init__(
        self, call: Call, grant: Grant[Call], transport: Transport, path: Path, generation: int
    ) -> None:
        self.call = call
        self.grant = grant
        self.transport = transport
        self.path = path
        self.generation = generation


def post_once(job: Job) -> Attempt | TransportError:
    """Make the post. What it raises is a value: nothing was posted then."""
    transport = job.transport
    try:
        return transport.post(job.call.part.op, job.path, job.call.batch, tag=job.call)
    except TransportError as error:
        return error
    except KvxferError as error:
        # Invalid input or a closed transport: nothing was posted either.
        return wrapped(transport.name, error)
    except Exception as error:  # noqa: BLE001 - a plug-in's bug must fail one call, not the agent
        return wrapped(transport.name, error)


def wrapped(backend: str, error: Exception) -> TransportError:
    """``error`` in the form in which the classifier finds its class."""
    wrapped = TransportError(str(error), engine=EngineError.of(backend, error))
    wrapped.__cause__ = error
    return wrapped


class PostingThread:
    """Runs posts that may block, one at a time. Never joined: it ends when it is left alone.

    ``post``, ``take`` and ``abandon`` are for the progress thread.
    """

    def __init__(self, nudge: Callable[[], None], clock: Clock, name: str) -> None:
        self._nudge = nudge
        self._clock = clock
        self._in: SimpleQueue[Job | None] = SimpleQueue()
        self._out: collections.deque[tuple[Job, Outcome]] = collections.deque()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def post(self, job: Job) -> None:
        self._in.put(job)

    def take(self) -> list[tuple[Job, Outcome]]:
        """What has ended since the last call."""
        return [self._out.popleft() for _ in range(len(self._out))]

    def abandon(self) -> None:
        """End after the post that is running, if it ever returns."""
        self._in.put(None)

    def _run(self) -> None:
        while (job := self._in.get()) is not None:
            late = not job.call.part.may_post(self._clock.now())
            self._out.append((job, None if late else post_once(job)))
            self._nudge()


class StuckThreads:
    """How many posting threads were abandoned inside an engine and have not returned, per peer.

    They outlive the link on which they began.  Bounded: no thread is started for a peer that has as
    many as ``Limits.stuck_threads``.
    """

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self._of.values())

    def of(self, peer: str) -> int:
        return self._of.get(peer, 0)

    @property
    def peers(self) -> dict[str, int]:
        return dict(self._of)

    def began(self, peer: str) -> None:
        self._of[peer] = self.of(peer) + 1

    def returned(self, peer: str) -> None:
        left = self.of(peer) - 1
        if left > 0:
            self._of[peer] = left
        else:
            self._of.pop(peer, None)
