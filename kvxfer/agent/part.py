"""A part: all pieces of one submit towards one peer, moved by one or more attempts.

The steps, top to bottom: ``start`` cuts the batch into calls; each call is posted by the link's
poster; ``on_attempt`` takes what the transport reports; a failed call is classified and the retry
policy decides.  A part is DONE only when one attempt of each piece succeeded and every other
attempt is drained.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import attrs

from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Action, EngineError, Op, Verdict
from kvxfer.errors import ErrorKind, TransferError, TransportError

if TYPE_CHECKING:
    from kvxfer.agent.context import Context, Steppable
    from kvxfer.agent.links import Link
    from kvxfer.policies.retry import RetryRun

__all__ = ["Call", "Part"]


class _CallState(enum.Enum):
    WAITING = "waiting"  # for its retry time, or parked for a lease
    READY = "ready"  # in the poster's queue
    POSTING = "posting"
    FLYING = "flying"
    DONE = "done"
    FAILED = "failed"


class Call:
    """One engine call of a part: the retry unit."""

    __slots__ = ("_generation", "_run", "at", "batch", "current", "part", "state")

    def __init__(self, part: Part, batch: Batch, run: RetryRun | None = None) -> None:
        self.part = part
        self.batch = batch
        self.state = _CallState.WAITING
        self.at = -math.inf
        self.current: Attempt | None = None
        self._run = run
        self._generation = 0

    # ---- from the poster ---------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state is _CallState.READY

    def posting(self) -> None:
        self.state = _CallState.POSTING

    def park(self) -> None:
        """Too little lease is left: wait until it is renewed."""
        self.state = _CallState.WAITING
        self.at = math.inf
        self.part.parked = True

    def posted(self, attempt: Attempt, generation: int, now: float) -> None:
        self._generation = generation
        self.current = attempt
        self.part.undrained.add(attempt)
        if self.state is _CallState.POSTING:
            self.state = _CallState.FLYING
        # It may have ended before we learnt that it began.
        self.part.on_attempt(attempt, now)

    def refused(self, error: TransportError, generation: int, now: float) -> None:
        """``post`` raised: nothing was posted."""
        self._generation = generation
        verdict = self.part.ctx.classifier.classify_exception(
            error, backend=self.part.backend, op=self.part.op
        )
        self.failed(attrs.evolve(verdict, drained=True), str(error), error.engine, now)

    def link_lost(self) -> None:
        if self.state in (_CallState.READY, _CallState.WAITING):
            self.part.fail_for_link()

    # ---- decisions ---------------------------------------------------------------------------

    def failed(
        self, verdict: Verdict, message: str, engine: EngineError | None, now: float
    ) -> None:
        """One post was refused or failed: again, in another way, or give the part up."""
        part = self.part
        if self.state in (_CallState.DONE, _CallState.FAILED):
            return
        if part.stopped:
            self._over()
            return
        if not part.link.usable:
            self._over()
            part.fail_for_link()
            return
        if self._run is None:
            self._run = part.ctx.retry.start(now, part.deadline, part.ctx.rng)
        if verdict.action is Action.WAIT and self.current is None:
            # Nothing was posted, so there is nothing to wait for.
            verdict = attrs.evolve(verdict, action=Action.REPOST, retryable=True)
        decision = self._run.after(verdict, now, message)
        if decision.action is Action.WAIT:
            return  # not ended after all: another report or the deadline will come
        if decision.action in (Action.REBUILD, Action.REHANDSHAKE):
            # Also where this call gives up: others share the path.
            part.link.drop_path(now, self._generation)
            if decision.action is Action.REHANDSHAKE:
                part.link.greet_again()
        if not decision.again:
            kind = decision.kind or verdict.kind
            part.ctx.counters.count(f"posts.failed.{kind.value}")
            self._over()
            part.fail(self._run.error(message, engine=engine))
            return
        part.ctx.counters.count(f"posts.retried.{verdict.kind.value}")
        self.current = None
        if decision.action is Action.SPLIT:
            part.split(self, decision.at)
            return
        self.state = _CallState.WAITING
        self.at = decision.at
        part.ctx.at(part, decision.at)

    def _over(self) -> None:
        self.state = _CallState.FAILED
        self.part.call_over(self)

    def halves(self) -> list[Call]:
        """Two calls for the same bytes; one piece is cut in the middle."""
        if len(self.batch) > 1:
            cuts = self.batch.cut(max_pieces=-(-len(self.batch) // 2), max_nbytes=2**62)
        else:
            cuts = self.batch.cut(max_pieces=1, max_nbytes=max(1, -(-self.batch.nbytes // 2)))
        return [Call(self.part, cut, self._run) for cut in cuts]


class Part:
    """See the module. Progress thread only; ``owner`` is stepped when anything changed."""

    def __init__(
        self,
        ctx: Context,
        link: Link,
        op: Op,
        batch: Batch,
        *,
        deadline: float,
        owner: Steppable,
    ) -> None:
        self.ctx = ctx
        self.link = link
        self.op = op
        self.batch = batch
        self.deadline = deadline
        self.lease_end = math.inf
        self.error: TransferError | None = None
        self.stopped = False
        self.parked = False
        self.undrained: set[Attempt] = set()
        self.backend = link.transport.name if link.transport is not None else "kvxfer"
        self._owner = owner
        self._open: dict[Call, None] = {}

    def start(self, now: float) -> None:
        """Cut the batch as the transport needs it and queue the calls."""
        assert self.link.transport is not None
        caps = self.link.transport.capabilities
        most = caps.max_pieces if caps.credits is None else min(caps.max_pieces, caps.credits)
        for cut in self.batch.cut(max_pieces=most, max_nbytes=caps.max_nbytes):
            self._open[Call(self, cut)] = None
        self._submit_due(now)
        if not self._open:
            self.ctx.soon(self._owner)

    def step(self, now: float) -> None:
        """Retry times that have come."""
        self._submit_due(now)

    def _submit_due(self, now: float) -> None:
        if self.stopped:
            return
        next_at = math.inf
        for call in self._open:
            if call.state is _CallState.WAITING:
                if call.at <= now:
                    call.state = _CallState.READY
                    self.link.poster.submit(call)
                else:
                    next_at = min(next_at, call.at)
        if next_at < math.inf:
            self.ctx.at(self, next_at)

    def may_post(self, now: float) -> bool:
        """Whether enough lease is left to begin another post."""
        return self.lease_end - now >= self.ctx.config.min_lease

    def renewed(self, lease_end: float, now: float) -> None:
        """The peer's grant now lasts until ``lease_end``."""
        self.lease_end = lease_end
        if self.parked and self.may_post(now):
            self.parked = False
            for call in self._open:
                if call.state is _CallState.WAITING and call.at == math.inf:
                    call.at = now
            self._submit_due(now)

    # ---- results -----------------------------------------------------------------------------

    def on_attempt(self, attempt: Attempt, now: float) -> None:
        """The transport reported a change of ``attempt``, which is one of ours."""
        call = attempt.tag
        if not isinstance(call, Call) or attempt not in self.undrained:
            return  # before the posting thread returned; ``posted`` looks again
        if attempt.terminal and attempt is call.current and call.state is _CallState.FLYING:
            if attempt.state is AttemptState.DONE:
                call.state = _CallState.DONE
                self.call_over(call)
            else:
                self._attempt_failed(call, attempt, now)
        if attempt.terminal and attempt.drained and attempt in self.undrained:
            self.undrained.discard(attempt)
            self.link.poster.settled(len(attempt.batch))
            self.ctx.soon(self._owner)

    def _attempt_failed(self, call: Call, attempt: Attempt, now: float) -> None:
        error = attempt.error or EngineError(backend=self.backend, message="failed without a word")
        # What the text proves of one engine call says nothing of an attempt that was several: the
        # transport alone tells whether the attempt is drained.
        verdict = self.ctx.classifier.classify_attempt(attempt)
        call.failed(verdict, str(error), error, now)
        self.ctx.soon(self._owner)

    def split(self, call: Call, at: float) -> None:
        """Replace ``call`` by two smaller ones."""
        halves = call.halves()
        if len(halves) < 2:
            self.fail(
                TransferError(
                    f"{self.backend} refuses even a single byte as too large",
                    kind=ErrorKind.INVALID,
                )
            )
            return
        self._open.pop(call, None)
        for half in halves:
            half.at = at
            self._open[half] = None
        self.ctx.at(self, at)

    def call_over(self, call: Call) -> None:
        self._open.pop(call, None)
        if not self._open:
            self.ctx.soon(self._owner)

    def fail(self, error: TransferError) -> None:
        """Give up; the first error stays. What is posted already goes on until it is drained."""
        if self.error is None:
            self.error = error
        self.stop()

    def fail_for_link(self) -> None:
        self.fail(
            TransferError(
                f"the peer cannot be used any more: {self.link.error}",
                kind=self.link.kind_of_failure(),
            )
        )

    def stop(self) -> None:
        """Post nothing more."""
        self.stopped = True
        for call in tuple(self._open):
            if call.state in (_CallState.WAITING, _CallState.READY):
                call.state = _CallState.FAILED
                self._open.pop(call, None)
        self.ctx.forget(self)
        self.ctx.soon(self._owner)

    def cancel(self) -> None:
        """Ask the engine to give up what is in flight, where it can."""
        self.stop()
        for attempt in tuple(self.undrained):
            if not attempt.terminal:
                attempt.request_cancel()

    def abandon(self) -> None:
        """The user took the blocks back without proof: stop counting what is in flight."""
        for attempt in self.undrained:
            self.link.poster.settled(len(attempt.batch))
        self.undrained.clear()

    # ---- facts -------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Every call has ended, one way or the other."""
        return not self._open

    @property
    def drained(self) -> bool:
        """Nothing of it can touch memory any more: no attempt is undrained or being posted."""
        return all(a.drained for a in self.undrained) and not any(
            c.state is _CallState.POSTING for c in self._open
        )

    @property
    def done(self) -> bool:
        return self.settled and self.drained and self.error is None and not self.stopped
