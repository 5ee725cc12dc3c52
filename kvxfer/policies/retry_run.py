"""The attempts of one retried thing: what is left of each budget, and what happened.

Every retry is paid from one of three budgets:

* *refusals*: the engine refused, or the error proves that nothing of the attempt can land
  (``Verdict.drained``). Cheap and safe to repeat, so there are many.
* *reposts*: the peer may have acted on the attempt. READ and WRITE are idempotent into memory that
  is still pinned, so they may be repeated, but not for long.
* *rebuilds*: the path or what we know of the peer has to be made anew first. Expensive for both
  sides; the circuit breaker bounds them further.

A queue that refuses for ever may have lost its own count (mori's can, after refusals of calls
that were cut into small post batches), so backpressure that used up its refusals is answered by a
rebuild, while there is budget for one, before the run gives up.

tenacity's stop, wait and retry objects are callables of a ``RetryCallState``; they are called
directly, with a state on our clock.  tenacity's own loop is not used: it stamps
``time.monotonic`` and keeps its statistics per thread.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING

import attrs
import tenacity

from kvxfer.core.checks import at_least
from kvxfer.core.verdict import Action, HistoryEntry, Verdict
from kvxfer.errors import ErrorKind, TransferError
from kvxfer.policies.backoff import CallState

if TYPE_CHECKING:
    import random

    from tenacity.wait import WaitBaseT

    from kvxfer.core.verdict import EngineError
    from kvxfer.policies.retry import RetryPolicy

__all__ = ["Budget", "Decision", "RetryRun"]

_MESSAGE_LIMIT = 240
"""Characters of an engine's message that the history keeps."""

# tenacity's call state must name a loop; this one never runs.
_LOOP = tenacity.Retrying()

_PATH_ACTIONS = frozenset({Action.REBUILD, Action.REHANDSHAKE})


@attrs.frozen(kw_only=True)
class Budget:
    """How often one run may try again. The module's text says what each count means."""

    refusals: int = attrs.field(default=200, validator=at_least(0))
    """On one path; a rebuild starts a new count. 200 last about 7 s with the default waits."""
    reposts: int = attrs.field(default=4, validator=at_least(0))
    """In one run."""
    rebuilds: int = attrs.field(default=3, validator=at_least(0))
    """In one run."""

    @property
    def total(self) -> int:
        """Most retries that one run can make."""
        return self.refusals * (self.rebuilds + 1) + self.reposts + self.rebuilds


@attrs.frozen(kw_only=True)
class Decision:
    """What to do after an attempt.

    ``again``: do ``action``, and post again at ``at`` (seconds of the caller's clock, always
    before the deadline).  Not ``again``: it is over and failed with ``kind``; ``action`` is FAIL,
    or REBUILD or REHANDSHAKE where the path needs it for the sake of others.  WAIT, never with
    ``again``: the attempt has not ended, so nothing was decided; ``kind`` is None.
    """

    again: bool
    at: float
    action: Action
    reason: str
    kind: ErrorKind | None = None


class RetryRun:
    """The attempts of one retried thing. One thread at a time; never waits.

    ``attempts`` counts those that ended; ``elided`` those that ``history`` does not list.
    """

    __slots__ = (
        "_budget",
        "_final",
        "_first",
        "_latest",
        "_policy",
        "_state",
        "_wait",
        "attempts",
        "deadline",
        "elided",
        "rebuilds",
        "refusals",
        "reposts",
    )

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        start: float,
        deadline: float,
        rng: random.Random,
        wait: WaitBaseT,
        budget: Budget,
    ) -> None:
        self.deadline = deadline
        self.attempts = 0
        self.refusals = 0
        self.reposts = 0
        self.rebuilds = 0
        self.elided = 0
        self._policy = policy
        self._wait = wait
        self._budget = budget
        self._state = CallState(_LOOP, start, rng)
        keep = policy.max_history
        self._first: list[HistoryEntry] = []
        self._latest: collections.deque[HistoryEntry] = collections.deque(maxlen=keep - keep // 2)
        self._final: Decision | None = None

    def __repr__(self) -> str:
        over = f" over: {self._final.reason}" if self._final else ""
        return f"<RetryRun {self.attempts} attempts, deadline {self.deadline}{over}>"

    @property
    def history(self) -> tuple[HistoryEntry, ...]:
        """The first and the latest attempts, oldest first; ``elided`` more lie between them."""
        return (*self._first, *self._latest)

    @property
    def over(self) -> bool:
        """Whether the run gave up. It stays so."""
        return self._final is not None

    def after(self, verdict: Verdict, now: float, message: str = "") -> Decision:
        """Judge an attempt that failed at ``now``. About 6 us with the default policy.

        Once the run gave up, the same decision is returned for ever and nothing is counted.
        """
        if self._final is not None:
            return self._final
        if verdict.action is Action.WAIT:
            return Decision(
                again=False, at=now, action=Action.WAIT, reason=f"{verdict.rule}: not ended yet"
            )
        self.attempts += 1
        self._record(verdict, now, message)
        if not verdict.retryable or verdict.action is Action.FAIL:
            return self._give_up(now, f"{verdict.rule}: not retryable", verdict)
        action, exhausted = self._affordable(verdict)
        if exhausted:
            return self._give_up(now, exhausted, verdict)
        state = self._state
        state.settle(verdict, message, self.attempts, now)
        try:
            declined, wait = self._consult(state)
        except Exception as error:  # noqa: BLE001 - users' objects; the progress thread must live
            why = f"a stop, wait or retry object raised {type(error).__name__}: {error}"
            return self._give_up(now, why, verdict)
        if declined:
            return self._give_up(now, declined, verdict)
        at = now + wait
        if at >= self.deadline:
            return self.expire(now, verdict=verdict, wait=wait)
        self._spend(verdict, action)
        state.idle_for += wait
        reason = verdict.rule if action is verdict.action else f"{verdict.rule}: queue is stuck"
        return Decision(again=True, at=at, action=action, reason=reason)

    def expire(self, now: float, *, verdict: Verdict | None = None, wait: float = 0.0) -> Decision:
        """Give up because the deadline passed, or the next wait would pass it."""
        if self._final is not None:
            return self._final
        if wait:
            why = f"the next wait of {wait:.6g} s would pass the deadline"
        else:
            why = "the deadline passed"
        return self._give_up(now, why, verdict, kind=ErrorKind.TIMEOUT)

    def error(self, message: str = "", *, engine: EngineError | None = None) -> TransferError:
        """The final error, with the history. Pickles."""
        last = self.history[-1] if self.attempts else None
        if self._final is not None:
            reason, kind = self._final.reason, self._final.kind
        else:
            reason, kind = "not over", last.kind if last else None
        said = message or (last.message if last else "")
        text = f"gave up after {self.attempts} attempts ({reason})"
        if self.elided:
            text += f", {self.elided} of them not listed"
        return TransferError(
            f"{said}: {text}" if said else text,
            kind=kind or ErrorKind.UNKNOWN,
            engine=engine,
            history=self.history,
        )

    # ---- inside ------------------------------------------------------------------------------

    def _consult(self, state: CallState) -> tuple[str, float]:
        """Ask the tenacity objects, in tenacity's order: retry, wait, stop."""
        policy = self._policy
        if policy.retry is not None and not policy.retry(state):
            return "the retry object declined", 0.0
        wait = float(self._wait(state))
        if not 0.0 <= wait < math.inf:
            raise ValueError(f"the wait must be finite and at least 0, not {wait!r}")
        state.upcoming_sleep = wait
        if policy.stop is not None and policy.stop(state):
            return "the stop object ended it", 0.0
        return "", wait

    def _affordable(self, verdict: Verdict) -> tuple[Action, str]:
        """The action that the budgets allow, or why there is none."""
        budget = self._budget
        if verdict.action in _PATH_ACTIONS:
            if self.rebuilds < budget.rebuilds:
                return verdict.action, ""
            return verdict.action, f"{self.rebuilds} rebuilds did not help"
        if not verdict.drained:
            if self.reposts < budget.reposts:
                return verdict.action, ""
            return verdict.action, f"{self.reposts} re-posts did not help"
        if self.refusals < budget.refusals:
            return verdict.action, ""
        # A queue that never drains may have lost its own count: only a new one helps.
        if verdict.kind is ErrorKind.BACKPRESSURE and self.rebuilds < budget.rebuilds:
            return Action.REBUILD, ""
        return verdict.action, f"refused {self.refusals} times on this path"

    def _spend(self, verdict: Verdict, action: Action) -> None:
        if action in _PATH_ACTIONS:
            self.rebuilds += 1
            self.refusals = 0  # counted per path
        elif verdict.drained:
            self.refusals += 1
        else:
            self.reposts += 1

    def _give_up(
        self, now: float, reason: str, verdict: Verdict | None, kind: ErrorKind | None = None
    ) -> Decision:
        needed = verdict is not None and verdict.action in _PATH_ACTIONS
        self._final = Decision(
            again=False,
            at=now,
            action=verdict.action if verdict is not None and needed else Action.FAIL,
            reason=reason,
            kind=kind or (verdict.kind if verdict is not None else ErrorKind.UNKNOWN),
        )
        return self._final

    def _record(self, verdict: Verdict, now: float, message: str) -> None:
        keep = self._policy.max_history
        entry = HistoryEntry(
            at=now,
            kind=verdict.kind,
            action=verdict.action,
            rule=verdict.rule,
            message=message[:_MESSAGE_LIMIT],
        )
        if len(self._first) < keep // 2:
            self._first.append(entry)
            return
        if len(self._latest) == self._latest.maxlen:
            self.elided += 1
        self._latest.append(entry)
