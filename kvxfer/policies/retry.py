"""Whether to try again, when, and what to do first.

One ``RetryPolicy`` has two faces.  The poll face (``start``, ``RetryRun.after``) decides and
never waits; it is what the agent uses.  The blocking face (``call``) loops over the poll face, so
both decide alike.

What is counted, and how tenacity's objects are asked, is in ``retry_run``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from kvxfer.core.checks import at_least
from kvxfer.core.verdict import Action, Verdict
from kvxfer.errors import ConfigError, InvalidInputError, PluginError
from kvxfer.policies.backoff import Backoff, seeded
from kvxfer.policies.retry_run import Budget, Decision, RetryRun
from kvxfer.policies.timeouts import Phase

if TYPE_CHECKING:
    import random

    from tenacity.retry import RetryBaseT
    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

    from kvxfer.core.clock import Clock

__all__ = [
    "Backoff",
    "Budget",
    "Decision",
    "RetryPolicy",
    "RetryRun",
    "default_policy",
    "load_policy",
]

T = TypeVar("T")


def _at_least_one(instance: object, attribute: attrs.Attribute[int], value: object) -> None:
    if value == 0:
        raise ConfigError(f"{type(instance).__name__}.{attribute.name} must be at least 1, not 0")
    at_least(0)(instance, attribute, value)


def _strategy(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return
    raise ConfigError(
        f"{type(instance).__name__}.{attribute.name} must be a tenacity object or another "
        f"callable of a RetryCallState, not {value!r}",
        next_step="pass an instance such as tenacity.stop_after_attempt(5)",
    )


@attrs.frozen(kw_only=True)
class RetryPolicy:
    """When to try again. Immutable, reusable from any thread; one ``RetryRun`` per retried thing.

    Attributes:
        stop: a tenacity stop object: gives up in addition to the deadline and the budgets.
        wait: a tenacity wait object. Default: 1 ms, doubling, at most 50 ms, half of it random: a
            send queue drains within milliseconds.
        retry: a tenacity retry object: may decline what the verdict calls retryable, never the
            reverse. What is retryable is the classifier's business. Its outcome is a
            ``TransferError`` with the verdict's kind.
        connect_wait: ``wait`` in ``Phase.CONNECT``. Default: 20 ms, doubling, at most 1 s: a peer
            that is starting takes seconds.
        budget: counts for posts.
        connect_budget: counts in ``Phase.CONNECT``. Nothing is posted there, so there are as many
            rebuilds as refusals, and the deadline ends it.
        max_history: attempts that are kept for the final error: the first and the latest.

    Raises:
        ConfigError: names the field and the value.
    """

    stop: StopBaseT | None = attrs.field(default=None, validator=_strategy)
    wait: WaitBaseT | None = attrs.field(default=None, validator=_strategy)
    retry: RetryBaseT | None = attrs.field(default=None, validator=_strategy)
    connect_wait: WaitBaseT | None = attrs.field(default=None, validator=_strategy)
    budget: Budget = attrs.field(factory=Budget, validator=attrs.validators.instance_of(Budget))
    connect_budget: Budget = attrs.field(
        factory=lambda: Budget(rebuilds=200), validator=attrs.validators.instance_of(Budget)
    )
    max_history: int = attrs.field(default=16, validator=_at_least_one)
    _waits: tuple[WaitBaseT, WaitBaseT] = attrs.field(init=False, eq=False, repr=False)

    @_waits.default
    def _seeded_waits(self) -> tuple[WaitBaseT, WaitBaseT]:
        post = Backoff() if self.wait is None else self.wait
        connect = Backoff(first=0.02, cap=1.0) if self.connect_wait is None else self.connect_wait
        return seeded(post), seeded(connect)

    def start(
        self, now: float, deadline: float, rng: random.Random, *, phase: Phase = Phase.POST
    ) -> RetryRun:
        """Begin a run at ``now``; nothing is posted at ``deadline`` or later (both clock seconds).

        ``rng`` is drawn from by jitter only.

        Raises:
            InvalidInputError: a time is not finite. There is no retry without a deadline.
        """
        for name, value in (("now", now), ("deadline", deadline)):
            if not math.isfinite(value):
                raise InvalidInputError(f"{name} must be finite clock seconds, not {value!r}")
        connect = phase is Phase.CONNECT
        return RetryRun(
            self,
            start=now,
            deadline=deadline,
            rng=rng,
            wait=self._waits[connect],
            budget=self.connect_budget if connect else self.budget,
        )

    def call(
        self,
        fn: Callable[[], T],
        *,
        classify: Callable[[Exception], Verdict],
        clock: Clock,
        sleep: Callable[[float], object],
        deadline: float,
        rng: random.Random,
        phase: Phase = Phase.POST,
        prepare: Callable[[Action], object] | None = None,
    ) -> T:
        """Call ``fn`` until it returns; waits in ``sleep`` (seconds) on the caller's thread.

        ``prepare`` is called before a retry that needs more than posting again (SPLIT, REBUILD,
        REHANDSHAKE). Without it, ``fn`` has to see to that itself.

        Raises:
            TransferError: with the history; its cause is what ``fn`` raised last. ``fn`` is never
                called at ``deadline`` or later.
        """
        run = self.start(clock.now(), deadline, rng, phase=phase)
        cause: Exception | None = None
        while True:
            now = clock.now()
            if now >= deadline:
                run.expire(now)
                raise run.error() from cause
            try:
                return fn()
            except Exception as error:  # noqa: BLE001 - fn is the caller's; classify judges all
                cause = error
            decision = run.after(classify(cause), clock.now(), str(cause))
            if not decision.again:
                raise run.error(engine=getattr(cause, "engine", None)) from cause
            if prepare is not None and decision.action is not Action.REPOST:
                prepare(decision.action)
            delay = decision.at - clock.now()
            if delay > 0:
                sleep(delay)


def default_policy() -> RetryPolicy:
    """The policy behind the entry point ``default``."""
    return RetryPolicy()


def load_policy(name: str = "default") -> RetryPolicy:
    """The policy that the plug-in ``name`` of the group ``kvxfer.retry_policies`` makes.

    Raises:
        PluginError: there is none, it cannot be loaded, or it makes no ``RetryPolicy``.
    """
    from kvxfer.core.plugins import PluginGroup, load_plugin

    policy = load_plugin(PluginGroup.RETRY_POLICIES, name)()
    if not isinstance(policy, RetryPolicy):
        raise PluginError(
            f"the retry policy plug-in {name!r} returned a {type(policy).__name__}",
            next_step="its entry point must be a callable that returns a RetryPolicy",
        )
    return policy
