"""Posting attempts as groups of engine calls, and settling them from the engine's statuses."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

from kvxfer.backends.moriio.binding import BACKEND, verdict_of
from kvxfer.backends.moriio.calls import LATER_COMPLETION, Call, Group
from kvxfer.backends.moriio.fate import depth_in, judge
from kvxfer.backends.moriio.generation import GenerationEnded
from kvxfer.backends.moriio.statuses import Statuses
from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import BackpressureError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.backends.moriio.generation import Generation
    from kvxfer.backends.moriio.plan import Plan, PlannedCall
    from kvxfer.backends.moriio.queues import Connection, SendQueue

__all__ = ["Poster", "check_alive"]

FLUSHED = "Work Request Flushed Error"


def check_alive(connection: Connection) -> None:
    """Refuse to feed queue pairs that are all in error.

    Raises:
        TransportError: with what killed them.
    """
    dead = connection.dead
    if dead is not None:
        raise TransportError(
            f"the queue pair to the peer is dead since: {dead.message}",
            next_step="prepare a new path: it gets queue pairs of a new engine generation",
            engine=dead,
        )


class Poster:
    """``post`` may run on several threads at once, everything else on the progress thread.

    ``report`` is called with every attempt that changed.  ``root_cause`` is asked what really
    happened to the peer of a call that was flushed.
    """

    def __init__(
        self,
        *,
        queue_pairs: int,
        atomic: bool,
        own_admission: bool,
        extra: int,
        report: Callable[[Attempt], None],
        root_cause: Callable[[Call], str],
    ) -> None:
        self._queue_pairs = queue_pairs
        self._atomic = atomic
        self._own_admission = own_admission
        self._extra = extra
        self._report = report
        self._root_cause = root_cause
        self._uids = itertools.count(1)
        self._published: collections.deque[Group] = collections.deque()
        self._pending: list[Call] = []
        self._doubtful: dict[Call, None] = {}
        self._statuses = Statuses()

    # ---- on the posting thread -------------------------------------------------------------

    def post(self, attempt: Attempt, plan: Plan) -> None:
        """Make the engine calls of ``plan``.

        Raises:
            BackpressureError, TransportError: the engine has taken nothing of the attempt.
        """
        plan, queues = self._reserve(plan)
        group = Group(attempt)
        refusal: EngineError | None = None
        taken = 0
        generation = plan[0][0].connection.generation
        inside = generation.posting
        inside.add(group)
        try:
            if generation.leaving:
                raise GenerationEnded(generation.number)
            for entry, queue in zip(plan, queues, strict=True):
                refusal = self._call(group, entry, queue)
                if refusal is not None:
                    break
                taken += 1
                if group.stopped:
                    break
        finally:
            inside.discard(group)
            if taken < len(plan):
                for entry, queue in zip(plan[taken:], queues[taken:], strict=True):
                    queue.release(entry[4])
                group.whole = False
        if refusal is not None:
            if not taken:
                raise self._refused(attempt, refusal)
            group.failed(refusal, Accepted.NONE)
        self._published.append(group)

    def _reserve(self, plan: Plan) -> tuple[Plan, list[SendQueue]]:
        """Take room in the send queues for every call, or for none.

        A call that no single queue has room for is cut into several, where all of them together
        have it: the plan that is returned.
        """
        queues: list[SendQueue] = []
        final: Plan = []
        for entry in plan:
            connection, count = entry[0].connection, entry[4]
            queue = connection.reserve(count, force=not self._own_admission)
            if queue is not None and queue.dead is None:
                queues.append(queue)
                final.append(entry)
                continue
            if queue is not None:
                queue.release(count)
            parts = connection.reserve_parts(len(entry[3]), self._extra)
            if not parts:
                for earlier, reserved in zip(final, queues, strict=True):
                    reserved.release(earlier[4])
                raise self._no_room(connection, plan)
            start = 0
            for part_queue, pieces in parts:
                lane, *vectors, _ = entry
                local, remote, size = (v[start : start + pieces] for v in vectors)
                queues.append(part_queue)
                final.append((lane, local, remote, size, pieces + self._extra))
                start += pieces
        return final, queues

    def _no_room(self, connection: Connection, plan: Plan) -> TransportError:
        check_alive(connection)
        taken, depth = connection.room
        needed = sum(entry[4] for entry in plan if entry[0].connection is connection)
        if needed > depth:
            return TransportError(
                f"{needed} work requests are more than the {depth} that the send queues take",
                next_step="cut the batch",
                engine=EngineError(
                    backend=BACKEND,
                    message=f"own admission: request exceeds capacity, max={depth}",
                ),
            )
        return BackpressureError(
            f"{taken} of {depth} places in the send queue are taken, {needed} more are needed",
            engine=EngineError(backend=BACKEND, message="own admission: send queue full"),
        )

    def _call(self, group: Group, entry: PlannedCall, queue: SendQueue) -> EngineError | None:
        """Make one engine call. Returns the engine's words if it took nothing of it."""
        lane, local, remote, size, count = entry
        status = self._statuses.take()
        call = Call(group, lane.connection, queue, count, status)
        op = group.attempt.op
        # The engine takes the queue pair from the number: one of this call's own choice.
        uid = next(self._uids) * self._queue_pairs + queue.index
        post = lane.session.read if op is Op.READ else lane.session.write
        try:
            post(local, remote, size, status, uid)
        except TypeError as error:  # pybind11 did not even call the engine
            self._statuses.failed(status)
            return EngineError.of(BACKEND, error)
        except Exception as error:  # noqa: BLE001 - never seen; it may be half posted
            group.failed(EngineError.of(BACKEND, error), Accepted.UNKNOWN)
            group.unproven += 1
            queue.posted(call)
            self._doubt(call)
            return None
        queue.posted(call)
        group.calls.append(call)
        if status.Failed():
            code, message = verdict_of(status)
            fate = judge(op, code, message, call.work_requests, atomic=self._atomic)
            granted = depth_in(message)
            if granted is not None:
                call.connection.depth = min(call.connection.depth, granted)
            if fate.accepted is Accepted.NONE:
                refusal = EngineError(backend=BACKEND, code=code, message=message)
                if fate.queue_dead:
                    queue.dead = refusal
                group.calls.pop()
                self._statuses.failed(status)  # an earlier call of the engine's may still hold it
                return refusal
            group.stopped = True  # ``advance`` settles it
        return None

    def _refused(self, attempt: Attempt, refusal: EngineError) -> TransportError:
        """The exception for an attempt of which the engine took nothing."""
        if attempt.terminal:  # failed by a disconnect meanwhile: then that much is known of it
            attempt.fail(refusal, accepted=Accepted.NONE)
            self._report(attempt)
        kind = BackpressureError if refusal.message.startswith("SQ full") else TransportError
        return kind(f"the engine refused: {refusal.message}", engine=refusal)

    # ---- on the progress thread ------------------------------------------------------------

    def advance(self, budget: int) -> None:
        """Settle at most ``budget`` calls that are over. Costs a look at each that is not."""
        published, pending = self._published, self._pending
        while published:
            group = published.popleft()
            pending += group.calls
            if group.failure is not None:
                self._settle(group, "")
        over = [call for call in pending if not call.status.InProgress()]
        if not over:
            return
        del over[budget:]
        if len(over) == len(pending):
            pending.clear()
        else:
            done = set(over)
            self._pending = [call for call in pending if call not in done]
        for call in over:
            self._over(call)

    def finish(self) -> list[Call]:
        """Settle everything that is over; the calls that are not."""
        self.advance(len(self._pending) + sum(len(g.calls) for g in tuple(self._published)))
        return self._pending

    def ended(self, generation: Generation) -> list[Attempt]:
        """The engine of ``generation`` is gone.

        Without queue pairs nothing lands here any more.  What a WRITE has sent may land there: the
        WRITEs that will never be proven drained are returned.
        """
        self.finish()
        proof = f"engine generation {generation.number} ended"
        error = EngineError(backend=BACKEND, message=f"{proof} before the call did")
        mine = [c for c in self._pending if c.connection.generation is generation]
        touched: dict[Attempt, None] = {}
        self._pending = [c for c in self._pending if c.connection.generation is not generation]
        for call in mine:
            group = call.group
            group.calls.remove(call)
            group.failed(error, Accepted.UNKNOWN)
            if group.attempt.op is Op.WRITE:
                group.unproven += 1
            self._settle(group, "" if group.attempt.op is Op.WRITE else proof)
            touched[group.attempt] = None
        for call in [c for c in self._doubtful if c.connection.generation is generation]:
            del self._doubtful[call]
            if call.group.attempt.op is Op.READ:
                call.group.unproven -= 1
                self._settle(call.group, proof)
            touched[call.group.attempt] = None
        return [attempt for attempt in touched if not attempt.drained]

    def _over(self, call: Call) -> None:
        group = call.group
        group.calls.remove(call)
        if call.status.Succeeded():
            call.queue.release(call.work_requests)
            self._statuses.succeeded(call.status)
            self._settle(group, "completion")
            if call.queue.doubtful:
                self._proven_by(call)
            return
        code, message = verdict_of(call.status)
        self._statuses.failed(call.status)
        fate = judge(group.attempt.op, code, message, call.work_requests, atomic=self._atomic)
        error = self._explain(call, code, message)
        if fate.queue_dead and call.queue.dead is None:
            call.queue.dead = error
        group.failed(error, fate.accepted)
        if fate.proof:
            call.queue.release(call.work_requests)
        else:
            group.unproven += 1
            self._doubt(call)
        self._settle(group, fate.proof)

    def _proven_by(self, success: Call) -> None:
        for doubtful in success.queue.proven_by(success):
            doubtful.queue.release(doubtful.work_requests)
            self._doubtful.pop(doubtful, None)
            doubtful.group.unproven -= 1
            self._settle(doubtful.group, LATER_COMPLETION)

    def _doubt(self, call: Call) -> None:
        call.queue.doubt(call)
        self._doubtful[call] = None

    def _settle(self, group: Group, proof: str) -> None:
        if group.settle(proof):
            self._report(group.attempt)

    def _explain(self, call: Call, code: int, message: str) -> EngineError:
        """The engine's words, with the root cause where the status shows its consequence only."""
        cause = self._root_cause(call)
        if message.startswith(FLUSHED):
            if cause:
                message = f"{cause}; status: {message}"
            elif call.queue.dead is not None:
                return call.queue.dead
        return EngineError(backend=BACKEND, code=code, message=message)
