"""The poster of one link: hands calls to the transport once they have their credits.

Where a post may block inside the engine it runs on a thread of its own, at most one post at a time
per link, so that a stuck engine call holds up nobody but this peer.  A call that does not return
within ``Timeouts.post`` fails its part; the thread is left alone and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.agent.posting import Job, Outcome, PostingThread, post_once, wrapped
from kvxfer.core.attempt import Attempt
from kvxfer.core.verdict import Action, Verdict
from kvxfer.errors import CapacityError, ErrorKind, TransferError

if TYPE_CHECKING:
    from kvxfer.agent.context import Context
    from kvxfer.agent.links import Link
    from kvxfer.agent.part import Call
    from kvxfer.core.transport import Path, Transport
    from kvxfer.policies.credit_queue import Grant

__all__ = ["Poster"]

_HELD_UP = 0.5
"""Seconds. A deadline that is looked at later than that says nothing of the engine."""

_STUCK = Verdict(
    kind=ErrorKind.TIMEOUT,
    action=Action.FAIL,
    retryable=False,
    drained=False,
    rule="kvxfer.timeouts.post",
)


class Poster:
    """Calls that are ready to post towards one peer. Progress thread only."""

    def __init__(self, ctx: Context, link: Link) -> None:
        self._ctx = ctx
        self._link = link
        self._unplaced: dict[Call, None] = {}
        """Ready, but there is no path, so it is not known which queue they need."""
        self._placed: dict[Call, None] = {}
        """Waiting for credits."""
        self._paused: frozenset[str] = frozenset()
        """Queues in which our calls let others go first, because the thread is busy."""
        self._known: tuple[Path | None, frozenset[str]] = (None, frozenset())
        self._thread: PostingThread | None = None
        self._posting: Job | None = None
        self._post_deadline = 0.0
        self._left: dict[PostingThread, Job] = {}
        """Threads that were abandoned inside the engine, and what they are posting."""

    def __len__(self) -> int:
        return len(self._unplaced) + len(self._placed)

    def submit(self, call: Call) -> None:
        """Post ``call`` when its turn comes."""
        self._unplaced[call] = None
        self._ctx.soon(self)

    def withdraw(self, call: Call) -> None:
        """``call`` is not to be posted any more; unknown ones are fine."""
        self._unplaced.pop(call, None)
        if call in self._placed:
            del self._placed[call]
            self._ctx.desk.withdraw(call)

    def settled(self, grant: Grant[Call]) -> None:
        """What was posted with these credits is drained, or was not posted."""
        self._ctx.in_flight -= grant.pieces
        self._ctx.desk.give_back(grant)

    def path_dropped(self) -> None:
        """A new path may have other queues: whoever waits has to ask again."""
        for call in tuple(self._placed):
            self._put_off(call)

    def link_ended(self) -> None:
        """The link failed or was closed: nothing will be posted on it any more."""
        self.leave_thread()
        for call in (*self._unplaced, *self._placed):
            self.withdraw(call)
            call.link_lost()

    def step(self, now: float) -> None:
        """Take what the thread has done, and queue what can be queued."""
        self._collect(now)
        if self._posting is not None and now >= self._post_deadline:
            if now < self._post_deadline + _HELD_UP:
                self._stuck(now)
            else:
                # We look that late only where this process was held up, its other threads as well.
                self._ctx.counters.count("posts.held_up")
                self._post_deadline = now + _HELD_UP
                self._ctx.at(self, self._post_deadline)
        if not self._unplaced:
            return
        path, transport = self._link.path, self._link.transport
        if path is None or transport is None or not self._link.up:
            if self._link.usable:
                self._link.want_path(now)
                self._link.when_changed(self)
            return
        ready, self._unplaced = self._unplaced, {}
        for call in ready:
            if not call.ready:  # its part was stopped meanwhile
                continue
            if call.part.waits_elsewhere(transport):
                call.hold(now)
                continue
            for part in call.fitting():
                self._place(part, path, transport, now)

    # ---- credits -----------------------------------------------------------------------------

    def _place(self, call: Call, path: Path, transport: Transport, now: float) -> None:
        for name, part in self._by_queue(call, path):
            try:
                self._ctx.desk.ask(
                    part,
                    queue=name,
                    capability=transport.capabilities.credits,
                    peer=self,
                    now=now,
                )
            except CapacityError as error:
                self._ctx.counters.count("admission.refused")
                part.refused(wrapped("kvxfer", error), self._link.paths.generation, now)
                return
            self._placed[part] = None
            if self._posting is not None:
                self._paused |= {name}
                self._ctx.desk.pause(self, (name,))

    def _by_queue(self, call: Call, path: Path) -> list[tuple[str, Call]]:
        """``call`` as calls that need one queue each."""
        names = self._queues_of(path)
        if len(names) == 1:
            return [(path.queues[0], call)]
        return call.by_queue(path.queues)

    def _queues_of(self, path: Path) -> frozenset[str]:
        if self._known[0] is not path:
            self._known = (path, frozenset(path.queues))
        return self._known[1]

    def _put_off(self, call: Call) -> None:
        """Until there is a path again."""
        self.withdraw(call)
        self.submit(call)

    def granted(self, call: Call, grant: Grant[Call], now: float) -> None:
        """``call``, or the first pieces of it, may be posted."""
        desk = self._ctx.desk
        path, transport = self._link.path, self._link.transport
        if path is None or transport is None or not self._link.up:
            desk.give_back(grant)
            self._put_off(call)
            return
        if call.part.waits_elsewhere(transport):
            desk.give_back(grant)
            self.withdraw(call)
            call.hold(now)
            return
        if not call.part.may_post(self._ctx.clock.now()):
            desk.give_back(grant)
            self.withdraw(call)
            call.park()
            return
        blocking = transport.capabilities.may_block_in_post
        limit = self._ctx.config.limits.stuck_threads
        if blocking and self._ctx.stuck.of(self._stuck_name(transport)) >= limit:
            desk.give_back(grant)
            self.withdraw(call)
            self._ctx.counters.count("posting_threads.refused")
            error = CapacityError(
                f"{limit} calls into the {transport.name} engine for this peer do not return",
                next_step="restart this process if they never do",
            )
            call.refused(wrapped(transport.name, error), self._link.paths.generation, now)
            return
        if grant.pieces == len(call.batch):
            self._placed.pop(call, None)
        else:
            call = call.take(grant.pieces)
        self._ctx.in_flight += grant.pieces
        call.posting(grant, now)
        job = Job(call, grant, transport, path, self._link.paths.generation)
        if blocking:
            self._post_on_thread(job, now)
        else:
            self._deliver(job, post_once(job), now)

    # ---- the thread --------------------------------------------------------------------------

    def _post_on_thread(self, job: Job, now: float) -> None:
        if self._thread is None:
            self._thread = PostingThread(
                lambda: self._ctx.nudge(self),
                self._ctx.clock,
                name=f"kvxfer-post-{self._link.incarnation}",
            )
        self._posting = job
        self._post_deadline = now + self._ctx.timeouts.post
        self._ctx.at(self, self._post_deadline)
        self._paused = self._queues_of(job.path)
        self._ctx.desk.pause(self, self._paused)
        self._thread.post(job)

    def _collect(self, now: float) -> None:
        if self._thread is not None:
            for job, outcome in self._thread.take():
                self._posted()
                self._deliver(job, outcome, now)
        for thread in tuple(self._left):
            for job, outcome in thread.take():
                del self._left[thread]
                self._ctx.stuck.returned(self._stuck_name(job.transport))
                self._ctx.counters.count("posting_threads.returned")
                self._deliver(job, outcome, now)
                if isinstance(outcome, Attempt) and not outcome.terminal:
                    outcome.request_cancel()

    def _stuck_name(self, transport: Transport) -> str:
        """The peer, and where it has several the backend: one engine's fault is not another's."""
        peer = self._link.incarnation
        return peer if self._link.switching is None else f"{peer} over {transport.name}"

    def _posted(self) -> None:
        """The thread is free."""
        self._posting = None
        self._ctx.forget(self)
        if self._unplaced:
            self._ctx.soon(self)
        self._ctx.desk.resume(self, self._paused)
        self._paused = frozenset()

    def _stuck(self, now: float) -> None:
        """The engine call did not return in time."""
        job = self._posting
        assert job is not None
        self.leave_thread()
        seconds = self._ctx.timeouts.post
        error = TransferError(
            f"a call into the {job.transport.name} engine did not return within {seconds} s: "
            "Timeouts.post is over",
            kind=ErrorKind.TIMEOUT,
            history=job.call.history,
        )
        self._ctx.counters.count("posts.failed.timeout")
        elsewhere = self._link.gave_up(error, now)
        job.call.part.tell_failed(
            _STUCK,
            error.message,
            refused=False,
            again=elsewhere,
            action=Action.REPOST if elsewhere else Action.FAIL,
        )
        if elsewhere:
            return  # the call waits for the thread, or for the deadline
        job.call.part.fail(error)
        # The thread may still be at work on that path, and posts on one path come one at a time.
        self._link.path_failed(now, job.generation, error)

    def leave_thread(self) -> None:
        """End the thread when it comes back. It is never waited for."""
        thread, job = self._thread, self._posting
        self._thread = None
        if thread is None:
            return
        thread.abandon()
        if job is not None:
            self._left[thread] = job
            self._ctx.stuck.began(self._stuck_name(job.transport))
            self._ctx.counters.count("posting_threads.abandoned")
            self._posted()

    def _deliver(self, job: Job, outcome: Outcome, now: float) -> None:
        call = job.call
        if isinstance(outcome, Attempt):
            call.posted(outcome, job.generation, now)
            return
        self.settled(job.grant)
        if outcome is None:  # the lease ran low while the call waited for the posting thread
            call.park()
        else:
            call.refused(outcome, job.generation, now)
