"""The poster of one link: hands calls to the transport, in order, within its credits.

Where a post may block inside the engine it runs on a thread of its own, at most one post at a time
per link, so that a stuck engine call holds up nobody but this peer.
"""

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

    from kvxfer.agent.context import Context
    from kvxfer.agent.links import Link
    from kvxfer.agent.part import Call
    from kvxfer.core.clock import Clock
    from kvxfer.core.transport import Path, Transport

__all__ = ["Poster"]


class Poster:
    """Calls that are ready to post, and the pieces that are in flight. Progress thread only."""

    def __init__(self, ctx: Context, link: Link) -> None:
        self._ctx = ctx
        self._link = link
        self._ready: collections.deque[Call] = collections.deque()
        self._thread: _PostingThread | None = None
        self._posting: Call | None = None
        self.pieces_in_flight = 0

    def __len__(self) -> int:
        return len(self._ready)

    def submit(self, call: Call) -> None:
        """Post ``call`` when its turn comes."""
        self._ready.append(call)
        self._ctx.soon(self)

    def settled(self, pieces: int) -> None:
        """An attempt of that many pieces is drained: its credits are free again."""
        self.pieces_in_flight -= pieces
        self._ctx.in_flight -= pieces
        if self._ready:
            self._ctx.soon(self)

    def link_ended(self) -> None:
        """The link failed or was closed: nothing will be posted on it any more."""
        if self._thread is not None:
            self._thread.abandon()
            if self._posting is not None:
                self._ctx.counters.count("posting_threads.abandoned")
        for call in self._ready:
            call.link_lost()
        self._ready.clear()

    def step(self, now: float) -> None:
        """Post what can be posted now."""
        self._collect(now)
        while self._ready and self._posting is None:
            call = self._ready[0]
            if not call.ready:  # its part was stopped meanwhile
                self._ready.popleft()
                continue
            if not call.part.may_post(self._ctx.clock.now()):
                self._ready.popleft()
                call.park()
                continue
            path = self._link.path
            transport = self._link.transport
            if path is None or transport is None or not self._link.up:
                if self._link.usable:
                    self._link.want_path(now)
                    self._link.when_changed(self)
                return
            if not self._has_credit(transport, call):
                return
            self._ready.popleft()
            self.pieces_in_flight += len(call.batch)
            self._ctx.in_flight += len(call.batch)
            call.posting()
            if transport.capabilities.may_block_in_post:
                self._post_on_thread(transport, path, call)
            else:
                self._deliver(call, _post(transport, path, call), now)

    def _has_credit(self, transport: Transport, call: Call) -> bool:
        credits_ = transport.capabilities.credits
        # With nothing in flight a call goes out whatever its size: parts are cut to the credits.
        return (
            credits_ is None
            or not self.pieces_in_flight
            or self.pieces_in_flight + len(call.batch) <= credits_
        )

    def _post_on_thread(self, transport: Transport, path: Path, call: Call) -> None:
        if self._thread is None:
            self._thread = _PostingThread(
                lambda: self._ctx.nudge(self),
                self._ctx.clock,
                name=f"kvxfer-post-{self._link.incarnation}",
            )
        self._posting = call
        self._thread.post(transport, path, call)

    def _collect(self, now: float) -> None:
        if self._thread is not None:
            for call, outcome in self._thread.take():
                self._posting = None
                self._deliver(call, outcome, now)

    def _deliver(self, call: Call, outcome: Attempt | TransportError | None, now: float) -> None:
        if outcome is None:  # the lease ran low while the call waited for the posting thread
            self.settled(len(call.batch))
            call.park()
        elif isinstance(outcome, Attempt):
            call.posted(outcome, self._link.paths.generation, now)
        else:
            self.settled(len(call.batch))
            call.refused(outcome, self._link.paths.generation, now)


def _post(transport: Transport, path: Path, call: Call) -> Attempt | TransportError:
    try:
        return transport.post(call.part.op, path, call.batch, tag=call)
    except TransportError as error:
        return error
    except KvxferError as error:
        # Invalid input or a closed transport: nothing was posted either.
        return _wrap(transport.name, error)
    except Exception as error:  # noqa: BLE001 - a plug-in's bug must fail one call, not the agent
        return _wrap(transport.name, error)


def _wrap(backend: str, error: Exception) -> TransportError:
    wrapped = TransportError(str(error), engine=EngineError.of(backend, error))
    wrapped.__cause__ = error
    return wrapped


class _PostingThread:
    """Runs posts that may block. One per link; never joined, only abandoned."""

    def __init__(self, nudge: Callable[[], None], clock: Clock, name: str) -> None:
        self._nudge = nudge
        self._clock = clock
        self._in: SimpleQueue[tuple[Transport, Path, Call] | None] = SimpleQueue()
        self._out: collections.deque[tuple[Call, Attempt | TransportError | None]] = (
            collections.deque()
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, transport: Transport, path: Path, call: Call) -> None:
        self._in.put((transport, path, call))

    def take(self) -> list[tuple[Call, Attempt | TransportError | None]]:
        return [self._out.popleft() for _ in range(len(self._out))]

    def abandon(self) -> None:
        self._in.put(None)

    def _run(self) -> None:
        while (job := self._in.get()) is not None:
            transport, path, call = job
            late = not call.part.may_post(self._clock.now())
            self._out.append((call, None if late else _post(transport, path, call)))
            self._nudge()
