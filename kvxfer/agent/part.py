"""A part: all pieces of one submit towards one peer, moved by one or more attempts.

The steps, top to bottom: ``start`` cuts the batch into calls; each call is posted by the link's
poster once it has its credits, which may cut it further; ``on_attempt`` takes what the transport
reports; a failed call is classified and the retry policy decides.  A part is DONE only when one
attempt of each piece succeeded and every other attempt is drained.

Where the link has moved to another backend, a call goes on over that one, but not before everything
that was posted over the earlier one for the same blocks is drained (``waits_elsewhere``).
"""

from __future__ import annotations

import enum
import math
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.observations import PostFailed
from kvxfer.core.verdict import Action, EngineError, HistoryEntry, Op, Verdict
from kvxfer.errors import ErrorKind, TransferError, TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.context import Context, Steppable
    from kvxfer.agent.handles import TransferHandle
    from kvxfer.agent.links import Link
    from kvxfer.core.transport import Peer, Transport
    from kvxfer.policies.credit_queue import Grant, QueueState
    from kvxfer.policies.retry import RetryRun

__all__ = ["FRESH_BLOCKS", "Call", "Part", "history_of", "undrained_over"]

FRESH_BLOCKS = "begin again with fresh destination blocks; these are drained later, or quarantined"
"""The advice that goes with ``Failed.fresh_blocks``."""


class _CallState(enum.Enum):
    WAITING = "waiting"  # for its retry time, or parked for a lease
    READY = "ready"  # waits for a path or for credits
    POSTING = "posting"
    FLYING = "flying"
    DONE = "done"
    FAILED = "failed"


class Call:
    """One engine call of a part: the retry unit."""

    __slots__ = (
        "_earlier",
        "_generation",
        "_run",
        "at",
        "batch",
        "current",
        "grant",
        "part",
        "state",
        "transport",
    )

    def __init__(self, part: Part, batch: Batch, run: RetryRun | None = None) -> None:
        self.part = part
        self.batch = batch
        self.state = _CallState.WAITING
        self.at = -math.inf
        self.current: Attempt | None = None
        self.grant: Grant[Call] | None = None
        """The credits of the latest post."""
        self.transport = part.link.transport
        """Over which it was posted last, or is to be posted first."""
        self._run = run
        self._earlier: tuple[HistoryEntry, ...] = ()
        """What happened over other backends."""
        self._generation = 0

    # ---- from the poster ---------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state is _CallState.READY

    def by_queue(self, queues: Sequence[str]) -> list[tuple[str, Call]]:
        """This call as calls that go through one queue each; ``queues`` has one per pair."""
        pairs: dict[str, list[int]] = {}
        for pair in self.batch.used_pairs:
            pairs.setdefault(queues[pair], []).append(pair)
        if len(pairs) == 1:
            return [(next(iter(pairs)), self)]
        found = [(name, self._like(self.batch.of_pairs(used))) for name, used in pairs.items()]
        self.part.replace(self, [call for _, call in found])
        return found

    def take(self, pieces: int) -> Call:
        """A call for the first ``pieces`` pieces; this one keeps the others, of which there are."""
        first = self._like(self.batch.slice(0, pieces))
        self.batch = self.batch.slice(pieces, len(self.batch))
        self.part.replace(None, [first])
        return first

    def _like(self, batch: Batch) -> Call:
        call = Call(self.part, batch, self._run)
        call.state, call.at = self.state, self.at
        call.transport, call._earlier = self.transport, self._earlier
        return call

    def posting(self, grant: Grant[Call], now: float) -> None:
        self._forget_other_backend()
        self.state = _CallState.POSTING
        self.grant = grant
        self.part.posting(now)

    def hold(self, now: float) -> None:
        """Something of an earlier backend may still touch the memory: wait until it cannot."""
        if self.part.stopped:
            self._over()
            return
        self.state = _CallState.WAITING
        self.at = math.inf
        self.part.hold(now)

    @property
    def is_elsewhere(self) -> bool:
        """The link has moved to another backend since this was posted."""
        return self.transport is not self.part.link.transport

    def _forget_other_backend(self) -> None:
        """What was tried over another backend is history: its budgets are not this one's."""
        if self.is_elsewhere:
            self._earlier, self._run = self.history, None
            self.transport = self.part.link.transport

    def _again_elsewhere(self, now: float) -> None:
        self.part.ctx.counters.count("failover.reposted")
        self._forget_other_backend()
        self.current = None
        self.state = _CallState.WAITING
        self.at = now
        self.part.ctx.at(self.part, now)

    def park(self) -> None:
        """Too little lease is left: wait until it is renewed."""
        if self.part.stopped:
            self._over()
            return
        self.state = _CallState.WAITING
        self.at = math.inf
        self.part.parked = True

    def posted(self, attempt: Attempt, generation: int, now: float) -> None:
        assert self.grant is not None
        self._generation = generation
        self.current = attempt
        counters = self.part.ctx.counters
        counters.count("posts")
        counters.count("posts.pieces", len(attempt.batch))
        counters.count("posts.bytes", attempt.batch.nbytes)
        self.part.undrained[attempt] = self.grant
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

    def waited_too_long(self, queue: QueueState, seconds: float) -> None:
        """No credits within ``Timeouts.queue``."""
        self.part.fail(
            TransferError(
                f"no credits within {seconds:.3f} s: Timeouts.queue is over; of {queue.limit} "
                f"credits of {queue.name} {queue.in_flight} are in use, {queue.waiting} other "
                "calls wait",
                kind=ErrorKind.TIMEOUT,
                history=self.history,
            )
        )

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
        if verdict.kind is ErrorKind.BACKPRESSURE and self.grant is not None:
            part.ctx.desk.refused(self.grant)
        if part.stopped:
            self._over()
            return
        if not part.link.usable:
            self._over()
            part.fail_for_link(self.history)
            return
        if self.is_elsewhere:
            part.tell_failed(verdict, message, refused=self.current is None, again=True)
            self._again_elsewhere(now)
            return
        if self._run is None:
            self._run = part.ctx.retry.start(now, part.deadline, part.ctx.rng)
        if verdict.action is Action.WAIT and self.current is None:
            # Nothing was posted, so there is nothing to wait for.
            verdict = attrs.evolve(verdict, action=Action.REPOST, retryable=True)
        refused = self.current is None
        decision = self._run.after(verdict, now, message)
        if decision.action is Action.WAIT:
            return  # not ended after all: another report or the deadline will come
        tell = partial(
            part.tell_failed,
            verdict,
            message,
            refused=refused,
            action=decision.action,
            delay=decision.at - now,
        )
        if decision.action in (Action.REBUILD, Action.REHANDSHAKE):
            # Also where this call gives up: others share the path.
            error = TransferError(message, kind=verdict.kind, engine=engine)
            greet = decision.action is Action.REHANDSHAKE
            part.link.path_failed(now, self._generation, error, greet=greet)
            if not part.link.usable:  # too often: nothing is tried for a while
                tell(again=False)
                self._over()
                part.fail_for_link(self.history)
                return
        if not decision.again and not self.is_elsewhere:
            kind = decision.kind or verdict.kind
            part.link.gave_up(TransferError(message, kind=kind, engine=engine), now)
        if self.is_elsewhere:
            part.tell_failed(verdict, message, refused=refused, again=True)
            self._again_elsewhere(now)
            return
        if not decision.again:
            kind = decision.kind or verdict.kind
            part.ctx.counters.count(f"posts.failed.{kind.value}")
            tell(again=False)
            self._over()
            part.fail(self._run.error(message, engine=engine))
            return
        part.ctx.counters.count(f"posts.retried.{verdict.kind.value}")
        tell(again=True)
        self.current = None
        if decision.action is Action.SPLIT:
            part.ctx.counters.count("posts.split")
            part.split(self, decision.at, verdict)
            return
        self.state = _CallState.WAITING
        self.at = decision.at
        part.ctx.at(part, decision.at)

    def _over(self) -> None:
        self.state = _CallState.FAILED
        self.part.call_over(self)

    def release(self) -> None:
        """It is over: an attempt and its credits know their call, and no cycle stays behind."""
        self.current = self.grant = None

    def smaller(self, verdict: Verdict) -> list[Call]:
        """Calls for the same bytes, of the size that the engine named, else two halves.

        One piece is cut in the middle.
        """
        batch = self.batch
        pieces, nbytes = verdict.most_pieces or 2**62, verdict.most_nbytes or 2**62
        if len(batch) <= pieces and batch.nbytes <= nbytes:  # it named none that would help
            pieces = -(-len(batch) // 2)
            nbytes = 2**62 if len(batch) > 1 else max(1, -(-batch.nbytes // 2))
        cuts = batch.cut(max_pieces=pieces, max_nbytes=nbytes)
        return self._cut(cuts)

    def fitting(self) -> list[Call]:
        """This call as calls that the link's backend takes: another one may take less at once."""
        transport = self.part.link.transport
        assert transport is not None
        caps = transport.capabilities
        if len(self.batch) <= caps.max_pieces and self.batch.nbytes <= caps.max_nbytes:
            return [self]
        calls = self._cut(self.batch.cut(max_pieces=caps.max_pieces, max_nbytes=caps.max_nbytes))
        for call in calls:
            call.state, call.at = self.state, self.at
        self.part.replace(self, calls)
        return calls

    def _cut(self, batches: Sequence[Batch]) -> list[Call]:
        calls = [Call(self.part, batch, self._run) for batch in batches]
        for call in calls:
            call.transport, call._earlier = self.transport, self._earlier
        return calls

    @property
    def history(self) -> tuple[HistoryEntry, ...]:
        """What was refused or failed so far."""
        return (*self._earlier, *(self._run.history if self._run is not None else ()))


class Part:
    """See the module. Progress thread only; ``owner`` is stepped when anything changed.

    ``deadline`` is the owner's. ``Timeouts.transfer`` counts from the first post and ends the part
    by itself.
    """

    def __init__(
        self,
        ctx: Context,
        link: Link,
        op: Op,
        batch: Batch,
        *,
        deadline: float,
        owner: Steppable,
        siblings: Sequence[Part] = (),
        handle: TransferHandle | None = None,
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
        self.undrained: dict[Attempt, Grant[Call]] = {}
        """And the credits that each holds."""
        self.held = False
        """Calls wait for what another backend may still do."""
        self.owner = owner
        self._siblings = siblings
        """Parts of the same transfer and link: they may have blocks in common."""
        self._held_since = math.inf
        self._handle = handle
        self._began = math.inf
        self._open: dict[Call, None] = {}

    @property
    def backend(self) -> str:
        """The name of the backend in use."""
        return self.link.transport.name if self.link.transport is not None else "kvxfer"

    def start(self, now: float) -> None:
        """Cut the batch as the transport needs it and queue the calls.

        What needs more than its queue's credits is cut further when its turn comes.
        """
        assert self.link.transport is not None
        caps = self.link.transport.capabilities
        for cut in self.batch.cut(max_pieces=caps.max_pieces, max_nbytes=caps.max_nbytes):
            for call in self._between_layers(cut, self.ctx.desk.largest(caps.credits)):
                self._open[Call(self, call)] = None
        self._submit_due(now)
        if not self._open:
            self.ctx.soon(self.owner)

    def _between_layers(self, batch: Batch, largest: int) -> Sequence[Batch]:
        """Layers that share their lists are cut here: when their turn comes, nobody looks."""
        if batch.members is None or len(batch.members) < 2 or len(batch) <= largest:
            return [batch]
        self.ctx.counters.count("admission.cut")
        return batch.cut(max_pieces=largest, max_nbytes=2**62)

    def step(self, now: float) -> None:
        """Retry times that have come, and the deadline."""
        if now >= self.deadline and self._open and not self.stopped:
            error = TransferError(
                f"not complete {now - self._began:.3f} s after its first post: "
                "Timeouts.transfer is over",
                kind=ErrorKind.TIMEOUT,
                history=self.history,
            )
            self.link.too_late(error, now)
            self.fail(error)
            return
        if self.held:
            self._look_elsewhere(now)
        self._submit_due(now)

    def posting(self, now: float) -> None:
        """Something is posted; the first time, ``Timeouts.transfer`` begins."""
        if self._began == math.inf:
            self._began = now
            if self._handle is not None:
                self.ctx.posted(self._handle, now)
            self.deadline = min(self.deadline, now + self.ctx.timeouts.transfer)
            self.ctx.at(self, self.deadline)

    def tell_failed(
        self,
        verdict: Verdict,
        message: str,
        *,
        refused: bool,
        again: bool,
        action: Action = Action.REPOST,
        delay: float = 0.0,
    ) -> None:
        """Tell the observers that one post was refused or failed, and what is done about it."""
        if not self.ctx.observers:
            return
        self.ctx.observe(
            PostFailed(
                transfer_id="" if self._handle is None else self._handle.transfer_id,
                backend=self.backend,
                op=self.op,
                kind=verdict.kind,
                refused=refused,
                action=action,
                again=again,
                delay=max(0.0, delay) if again else 0.0,
                rule=verdict.rule,
                message=message,
            )
        )

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
        if self._began < math.inf:
            next_at = min(next_at, self.deadline)
        if next_at < math.inf and self._open:
            self.ctx.at(self, next_at)

    # ---- after a change of backend -----------------------------------------------------------

    def waits_elsewhere(self, transport: Transport) -> bool:
        """Whether something posted over another backend may still touch the same blocks.

        Never two engines write one block.
        """
        # Not asked of the link: an engine that has ended may have left an attempt unproven.
        return self.link.switching is not None and any(
            part._is_elsewhere(transport) for part in (self, *self._siblings)
        )

    def _is_elsewhere(self, transport: Transport) -> bool:
        return any(p.transport is not transport for p in self.undrained_peers) or any(
            c.state is _CallState.POSTING and c.transport is not transport for c in self._open
        )

    @property
    def undrained_peers(self) -> dict[Peer, None]:
        """The connections on which something of ours is not drained."""
        return dict.fromkeys(a.path.peer for a in self.undrained if not a.drained)

    def hold(self, now: float) -> None:
        """A call waits for what another backend may still do."""
        if not self.held:
            self.held = True
            self._held_since = now
            self.ctx.counters.count("failover.waited_for_drained")
        self.ctx.at(self, self._held_since + self.ctx.timeouts.drain)

    def _look_elsewhere(self, now: float) -> None:
        """Go on if nothing is in flight elsewhere; ask for fences if that takes too long."""
        transport = self.link.transport
        if transport is None or self.stopped:
            return
        if not self.waits_elsewhere(transport):
            self.held = False
            for call in self._open:
                if call.state is _CallState.WAITING and call.at == math.inf:
                    call.at = now
            return
        fence_at = self._held_since + self.ctx.timeouts.drain
        if now < fence_at:
            self.ctx.at(self, fence_at)
            return
        switching = self.link.switching
        for part in (self, *self._siblings):
            for peer in part.undrained_peers:
                if peer.transport is transport or switching is None:
                    continue
                done, why = switching.proof(peer, self.op)
                if done is False:
                    self._fail_unproven(peer.transport.name, why)
                    return
        # Fences answer when they can, and an engine call that does not return has none.
        self.ctx.at(self, now + self.ctx.config.pump_interval)

    def _fail_unproven(self, left: str, why: str) -> None:
        self.ctx.counters.count("failover.fresh_blocks")
        self.fail(
            TransferError(
                f"{left} failed, and nothing proves that it does not write any more where "
                f"{self.backend} would have to: {why}",
                kind=ErrorKind.CONNECTION,
                next_step=FRESH_BLOCKS,
                history=self.history,
                fresh_blocks=True,
            )
        )

    def drained_one(self) -> None:
        """An attempt of this part or of a sibling is drained."""
        if self.held:
            self.ctx.soon(self)

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
                self.ctx.desk.succeeded(self.undrained[attempt])
                if attempt.path.peer.transport is self.link.transport:
                    self.link.proved(now)
                self.call_over(call)
            else:
                self._attempt_failed(call, attempt, now)
        if attempt.terminal and attempt.drained and attempt in self.undrained:
            self.link.poster.settled(self.undrained.pop(attempt))
            self.ctx.soon(self.owner)
            for part in (self, *self._siblings) if self.link.switching is not None else ():
                part.drained_one()

    def _attempt_failed(self, call: Call, attempt: Attempt, now: float) -> None:
        error = attempt.error or EngineError(backend=self.backend, message="failed without a word")
        # What the text proves of one engine call says nothing of an attempt that was several: the
        # transport alone tells whether the attempt is drained.
        verdict = self.ctx.classifier.classify_attempt(attempt)
        call.failed(verdict, str(error), error, now)
        self.ctx.soon(self.owner)

    def split(self, call: Call, at: float, verdict: Verdict) -> None:
        """Replace ``call`` by smaller ones."""
        smaller = call.smaller(verdict)
        if len(smaller) < 2:
            self.fail(
                TransferError(
                    f"{self.backend} refuses even a single byte as too large",
                    kind=ErrorKind.INVALID,
                )
            )
            return
        for part in smaller:
            part.at = at
        self.replace(call, smaller)
        self.ctx.at(self, at)

    def replace(self, call: Call | None, calls: Sequence[Call]) -> None:
        """``calls`` do what ``call`` was to do, or a part of what another one was."""
        if call is not None:
            self._open.pop(call, None)
        self._open.update(dict.fromkeys(calls))

    def call_over(self, call: Call) -> None:
        call.release()
        self._open.pop(call, None)
        if not self._open:
            self.ctx.forget(self)
            self.ctx.soon(self.owner)

    def fail(self, error: TransferError) -> None:
        """Give up; the first error stays. What is posted already goes on until it is drained."""
        if self.error is None:
            self.error = error
        self.stop()

    def fail_for_link(self, history: tuple[HistoryEntry, ...] = ()) -> None:
        self.fail(
            TransferError(
                f"the peer cannot be used any more: {self.link.error}",
                kind=self.link.kind_of_failure(),
                history=history,
            )
        )

    def stop(self) -> None:
        """Post nothing more."""
        self.stopped = True
        for call in tuple(self._open):
            if call.state in (_CallState.WAITING, _CallState.READY):
                call.state = _CallState.FAILED
                self.link.poster.withdraw(call)
                call.release()
                self._open.pop(call, None)
        self.ctx.forget(self)
        self.ctx.soon(self.owner)

    def cancel(self) -> None:
        """Ask the engine to give up what is in flight, where it can."""
        self.stop()
        for attempt in tuple(self.undrained):
            if not attempt.terminal:
                attempt.request_cancel()

    def abandon(self) -> None:
        """The user took the blocks back without proof: stop counting what is in flight."""
        for grant in self.undrained.values():
            self.link.poster.settled(grant)
        self.undrained.clear()

    def release(self) -> None:
        """The transfer has ended: know nobody who knows us, so that no cycle stays behind.

        A post that has not returned may still come back, and is then counted as before.
        """
        self.owner = _NOBODY
        self._siblings = ()
        for call in self._open:  # after ``abandon``
            if call.state is not _CallState.POSTING:
                call.release()
        self._open.clear()

    # ---- facts -------------------------------------------------------------------------------

    @property
    def history(self) -> tuple[HistoryEntry, ...]:
        """Of the call that was tried most often."""
        if self.error is not None:
            return self.error.history
        return max((call.history for call in self._open), key=len, default=())

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
    def undrained_over(self) -> frozenset[str]:
        """The backends over which something of it may still touch memory."""
        names = {
            attempt.path.peer.transport.name for attempt in self.undrained if not attempt.drained
        }
        posting = [c.transport for c in self._open if c.state is _CallState.POSTING]
        return frozenset(names.union(t.name for t in posting if t is not None))

    @property
    def done(self) -> bool:
        return self.settled and self.drained and self.error is None and not self.stopped


class _Nobody:
    """The owner of a part whose transfer has ended."""

    def step(self, now: float) -> None:
        pass


_NOBODY = _Nobody()


def undrained_over(parts: Sequence[Part], link: Link) -> frozenset[str]:
    """``Part.undrained_over`` of those that go over ``link``."""
    return frozenset[str]().union(*(part.undrained_over for part in parts if part.link is link))


def undrained_peers(parts: Sequence[Part], link: Link) -> list[Peer]:
    """``Part.undrained_peers`` of those that go over ``link``."""
    return list(dict.fromkeys(p for x in parts if x.link is link for p in x.undrained_peers))


def history_of(parts: Sequence[Part]) -> tuple[HistoryEntry, ...]:
    """What was tried for the part that was tried most often."""
    return max((part.history for part in parts), key=len, default=())
