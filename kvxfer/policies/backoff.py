"""Waiting times as tenacity objects that draw from a generator of ours."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, cast

import attrs
import tenacity

from kvxfer.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenacity.wait import WaitBaseT

    from kvxfer.core.verdict import Verdict

__all__ = ["Backoff", "CallState", "seeded"]

# For a Backoff that somebody uses in a tenacity loop of their own, without our call state.
_OWN = random.Random()  # noqa: S311 - spreads load, guards nothing


class CallState(tenacity.RetryCallState):
    """tenacity's call state on our clock, with our generator.

    tenacity stamps ``time.monotonic`` itself; here ``start_time`` and ``outcome_timestamp`` are
    set by the run, so that stop objects see the caller's time.  ``outcome`` holds a
    ``TransferError`` and is built only when somebody looks: it costs more than the whole decision.
    """

    def __init__(self, retry_object: tenacity.BaseRetrying, start: float, rng: random.Random):
        self.rng = rng
        self.verdict: Verdict | None = None
        self.message = ""
        self._outcome: tenacity.Future | None = None
        super().__init__(retry_object, None, (), {})
        self.start_time = start

    def settle(self, verdict: Verdict, message: str, attempt: int, now: float) -> None:
        """Attempt number ``attempt`` ended with ``verdict`` at ``now``."""
        self.verdict = verdict
        self.message = message
        self.attempt_number = attempt
        self.outcome_timestamp = now
        self._outcome = None
        self.upcoming_sleep = 0.0

    @property
    def outcome(self) -> tenacity.Future | None:
        if self._outcome is None and self.verdict is not None:
            error = TransferError(self.message, kind=self.verdict.kind)
            self._outcome = tenacity.Future.construct(self.attempt_number, error, True)
        return self._outcome

    @outcome.setter
    def outcome(self, value: tenacity.Future | None) -> None:
        self._outcome = value


def _generator(state: tenacity.RetryCallState) -> random.Random:
    return state.rng if isinstance(state, CallState) else _OWN


def _within(
    low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[object, attrs.Attribute[float], object], None]:
    expected = f"{'above' if above else 'at least'} {low:g}"
    expected += f" and at most {high:g}" if high < math.inf else ""

    def check(instance: object, attribute: attrs.Attribute[float], value: object) -> None:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or not low <= value <= high
            or (above and value == low)
        ):
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be a finite number {expected}, "
                f"not {value!r}"
            )

    return check


@attrs.frozen(kw_only=True)
class Backoff(tenacity.wait.wait_base):
    """Exponential waits: ``first``, times ``factor`` after each attempt, at most ``cap``; seconds.

    ``jitter`` is the part of each wait that is random, so that peers refused at the same moment do
    not come back at the same moment: 0.5 draws from half the wait to the whole of it.  A wait is
    never longer than without jitter.
    """

    first: float = attrs.field(default=0.001, validator=_within(0.0, above=True))
    factor: float = attrs.field(default=2.0, validator=_within(1.0))
    cap: float = attrs.field(default=0.05, validator=_within(0.0, above=True))
    jitter: float = attrs.field(default=0.5, validator=_within(0.0, 1.0))

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        try:
            wait = min(self.cap, self.first * self.factor ** (retry_state.attempt_number - 1))
        except OverflowError:
            wait = self.cap
        if self.jitter:
            wait *= 1.0 - self.jitter * _generator(retry_state).random()
        return wait


def seeded(wait: WaitBaseT) -> WaitBaseT:
    """``wait``, with tenacity's own jitter drawn from the call state's generator.

    tenacity's jitter waits call the global ``random``.  They are replaced by equals, also inside
    chains and sums.  Waits of other classes are returned as they are: a user's own can read
    ``retry_state.rng``.
    """
    exact = type(wait)
    known = cast("Any", wait)
    if exact is tenacity.wait_random:
        return _Uniform(known.wait_random_min, known.wait_random_max)
    if exact is tenacity.wait_random_exponential:
        ceiling = tenacity.wait_exponential(known.multiplier, known.max, known.exp_base, known.min)
        return _FullJitter(ceiling, known.min)
    if exact is tenacity.wait_exponential_jitter:
        # Called "initial" before tenacity 9.2.
        first = known.multiplier if hasattr(known, "multiplier") else known.initial
        low = max(0.0, getattr(known, "min", 0.0))
        return _AddedJitter(first, known.exp_base, known.jitter, low, known.max)
    if exact is tenacity.wait_combine:
        return tenacity.wait_combine(*(seeded(part) for part in known.wait_funcs))
    if exact is tenacity.wait_chain:
        return tenacity.wait_chain(*(cast("Any", seeded(part)) for part in known.strategies))
    return wait


@attrs.frozen
class _Uniform(tenacity.wait.wait_base):
    low: float
    high: float

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        return self.low + _generator(retry_state).random() * (self.high - self.low)


@attrs.frozen
class _FullJitter(tenacity.wait.wait_base):
    ceiling: tenacity.wait_exponential
    low: float

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        return _generator(retry_state).uniform(self.low, self.ceiling(retry_state))


@attrs.frozen
class _AddedJitter(tenacity.wait.wait_base):
    first: float
    factor: float
    jitter: float
    low: float
    high: float

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        jitter = _generator(retry_state).uniform(0, self.jitter)
        try:
            wait = self.first * self.factor ** (retry_state.attempt_number - 1) + jitter
        except OverflowError:
            wait = self.high
        return max(self.low, min(wait, self.high))
