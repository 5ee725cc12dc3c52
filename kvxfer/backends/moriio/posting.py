"""Posting attempts as groups of engine calls, and settling them from the engine's statuses."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import attrs

from kvxfer.backends.moriio.binding import BACKEND, Session, Status
from kvxfer.backends.moriio.calls import LATER_COMPLETION, Call, Group, Plan, SendQueue
from kvxfer.backends.moriio.fate import judge
from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.verdict import EngineError
from kvxfer.errors import BackpressureError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.backends._background import Gate

__all__ = ["Lane", "Poster", "check_alive"]

FLUSHED = "Work Request Flushed Error"


@attrs.frozen
class Lane:
    """What one pair of a path posts through."""

    session: Session
    queue: SendQueue


def check_alive(queue: SendQueue) -> None:
    """Refuse to feed a queue pair that is in error.

    Raises:
        TransportError: with what killed it.
    """
    if queue.dead is not None:
        raise TransportError(
            f"the queue pair to the peer is dead since: {queue.dead.message}",
            next_step="the peer is reachable again under a new incarnation of either side",
            engine=queue.dead,
        )


class Poster:
    """``post`` may run on several threads at once, ``advance`` on one.

    ``report`` is called with every attempt that changed.  ``root_cause`` is asked what really
    happened to the peer of an attempt whose call was flushed.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        own_admission: bool,
        report: Callable[[Attempt], None],
        root_cause: Callable[[Attempt], str],
    ) -> None:
        self._gate = gate
        self._own_admission = own_admission
        self._report = report
        self._root_cause = root_cause
        self._published: collections.deque[Group] = collections.deque()
        self._pending: list[Call] = []

    # ---- on the posting thread -------------------------------------------------------------

    def post(self, attempt: Attempt, lanes: Sequence[Lane], plan: Plan) -> None:
        """Make the engine calls of ``plan``.

        Raises:
            BackpressureError, TransportError: the engine has taken nothing of the attempt.
        """
        for pair, *_ in plan:
            check_alive(lanes[pair].queue)
        self._reserve(lanes, plan)
        group = Group(attempt)
        refusal: EngineError | None = None
        taken = 0
        with self._gate:
            for pair, local, remote, size in plan:
                refusal = self._call(group, lanes[pair], local, remote, size)
                if refusal is not None:
                    break
                taken += 1
                if group.stopped:
                    break
        _release(lanes, plan[taken:])
        group.whole = taken == len(plan)
        if refusal is not None:
            if not taken:
                raise self._refused(attempt, refusal)
            group.failed(refusal, Accepted.NONE)
        self._published.append(group)

    def _reserve(self, lanes: Sequence[Lane], plan: Plan) -> None:
        """Take room in the send queues for every call, or for none."""
        for i, (pair, _, _, size) in enumerate(plan):
            queue = lanes[pair].queue
            if not queue.reserve(len(size), force=not self._own_admission):
                _release(lanes, plan[:i])
                raise BackpressureError(
                    f"{queue.in_flight} of {queue.depth} places in the send queue are taken, "
                    f"{len(size)} more are needed",
                    engine=EngineError(backend=BACKEND, message="own admission: send queue full"),
                )

    def _call(
        self, group: Group, lane: Lane, local: list[int], remote: list[int], size: list[int]
    ) -> EngineError | None:
        """Make one engine call. Returns the engine's words if it took nothing of it."""
        op = group.attempt.op
        call = Call(group, lane.queue, len(size), Status())
        try:
            lane.session.post(op, local, remote, size, call.status)
        except TypeError as error:  # pybind11 did not even call the engine
            return EngineError.of(BACKEND, error)
        except Exception as error:  # noqa: BLE001 - never seen; it may be half posted
            group.failed(EngineError.of(BACKEND, error), Accepted.UNKNOWN)
            group.unproven += 1
            lane.queue.posted(call)
            lane.queue.doubt(call)
            return None
        lane.queue.posted(call)
        if not call.status.in_progress() and not call.status.succeeded:
            code, message = call.status.code, call.status.message
            fate = judge(op, code, message, call.pieces)
            if fate.accepted is Accepted.NONE:
                refusal = EngineError(backend=BACKEND, code=code, message=message)
                if fate.queue_dead:
                    lane.queue.dead = refusal
                return refusal
            group.stopped = True  # ``advance`` settles it
        group.calls.append(call)
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
        while self._published:
            group = self._published.popleft()
            self._pending.extend(group.calls)
            if group.failure is not None:
                self._settle(group, "")
        still: list[Call] = []
        settled = 0
        for i, call in enumerate(self._pending):
            if settled >= budget:
                still.extend(self._pending[i:])
                break
            if call.status.in_progress():
                still.append(call)
            else:
                settled += 1
                self._over(call)
        self._pending = still

    def finish(self) -> list[Call]:
        """Settle everything that is over; the calls that are not."""
        self.advance(len(self._pending) + sum(len(g.calls) for g in tuple(self._published)))
        return self._pending

    def _over(self, call: Call) -> None:
        group = call.group
        group.calls.remove(call)
        if call.status.succeeded:
            call.queue.release(call.pieces)
            self._settle(group, "completion")
            for doubtful in call.queue.proven_by(call):
                doubtful.queue.release(doubtful.pieces)
                doubtful.group.unproven -= 1
                self._settle(doubtful.group, LATER_COMPLETION)
            return
        code, message = call.status.code, call.status.message
        fate = judge(group.attempt.op, code, message, call.pieces)
        error = self._explain(call, code, message)
        if fate.queue_dead and call.queue.dead is None:
            call.queue.dead = error
        group.failed(error, fate.accepted)
        if fate.proof:
            call.queue.release(call.pieces)
        else:
            group.unproven += 1
            call.queue.doubt(call)
        self._settle(group, fate.proof)

    def _settle(self, group: Group, proof: str) -> None:
        if group.settle(proof):
            self._report(group.attempt)

    def _explain(self, call: Call, code: int, message: str) -> EngineError:
        """The engine's words, with the root cause where the status shows its consequence only."""
        cause = self._root_cause(call.group.attempt)
        if message.startswith(FLUSHED):
            if cause:
                message = f"{cause}; status: {message}"
            elif call.queue.dead is not None:
                return call.queue.dead
        return EngineError(backend=BACKEND, code=code, message=message)


def _release(lanes: Sequence[Lane], plan: Plan) -> None:
    for pair, _, _, size in plan:
        lanes[pair].queue.release(len(size))
