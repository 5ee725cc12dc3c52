"""What holds for every script of verdicts, policy and deadline."""

from __future__ import annotations

import random

import tenacity
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.core.verdict import Action, Verdict
from kvxfer.errors import ErrorKind, TransferError
from kvxfer.policies.retry import Backoff, Budget, Decision, RetryPolicy
from kvxfer.policies.timeouts import Phase
from kvxfer.testing.clock import FakeClock

RETRYABLE = [Action.REPOST, Action.SPLIT, Action.REBUILD, Action.REHANDSHAKE]

verdicts = st.builds(
    Verdict,
    kind=st.sampled_from(ErrorKind),
    action=st.sampled_from(RETRYABLE),
    # Mostly retryable: scripts that end at once show little.
    retryable=st.sampled_from([True] * 9 + [False]),
    drained=st.booleans(),
    rule=st.just("a rule"),
)

policies = st.builds(
    RetryPolicy,
    stop=st.none() | st.builds(tenacity.stop_after_attempt, st.integers(1, 20)),
    wait=st.none()
    | st.builds(
        Backoff, first=st.floats(1e-4, 0.01), cap=st.floats(1e-3, 0.1), jitter=st.floats(0, 1)
    )
    | st.builds(tenacity.wait_random_exponential, st.just(0.001), st.floats(0.001, 0.1))
    | st.builds(tenacity.wait_none),
    budget=st.builds(
        Budget,
        refusals=st.integers(0, 12),
        reposts=st.integers(0, 5),
        rebuilds=st.integers(0, 4),
    ),
    max_history=st.integers(1, 8),
)

scripts = st.lists(st.tuples(verdicts, st.floats(0, 0.02)), max_size=60)


class Failure(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__("said")
        self.verdict = verdict


def poll_face(
    policy: RetryPolicy,
    script: list[tuple[Verdict, float]],
    *,
    start: float,
    deadline: float,
    seed: int,
    phase: Phase,
) -> tuple[list[Decision], list[float], TransferError | None]:
    """Decisions, the times of the posts, and the error if it gave up. A post takes as long as the
    script says; after the script's end the next one succeeds."""
    run = policy.start(start, deadline, random.Random(seed), phase=phase)
    now, posts, decisions = start, [], []
    for verdict, took in script:
        if now >= deadline:
            decisions.append(run.expire(now))
            return decisions, posts, run.error()
        posts.append(now)
        now += took
        decisions.append(run.after(verdict, now, "said"))
        if not decisions[-1].again:
            return decisions, posts, run.error()
        now = max(now, decisions[-1].at)
    if now >= deadline:
        decisions.append(run.expire(now))
        return decisions, posts, run.error()
    posts.append(now)
    return decisions, posts, None


@given(
    policy=policies,
    script=scripts,
    length=st.floats(1e-3, 2.0),
    seed=st.integers(0, 2**32),
    phase=st.sampled_from([Phase.POST, Phase.CONNECT]),
)
@settings(deadline=None, max_examples=300)
def test_both_faces_decide_alike(
    policy: RetryPolicy,
    script: list[tuple[Verdict, float]],
    length: float,
    seed: int,
    phase: Phase,
) -> None:
    """Same script, same seed: same posts at the same times, same actions, same history, and the
    same error; and no decision to post lies at or beyond the deadline."""
    start = 1000.0
    deadline = start + length
    decisions, posts, error = poll_face(
        policy, script, start=start, deadline=deadline, seed=seed, phase=phase
    )

    clock = FakeClock(start)
    made: list[float] = []
    actions: list[Action] = []

    def post() -> str:
        made.append(clock.now())
        if len(made) > len(script):
            return "done"
        verdict, took = script[len(made) - 1]
        clock.advance(took)
        raise Failure(verdict)

    caught: TransferError | None = None
    try:
        policy.call(
            post,
            classify=lambda failure: failure.verdict,
            clock=clock,
            sleep=clock.advance,
            deadline=deadline,
            rng=random.Random(seed),
            phase=phase,
            prepare=actions.append,
        )
    except TransferError as failure:
        caught = failure
    # The clock adds up sleeps, so times agree but for rounding.
    assert len(made) == len(posts)
    assert all(abs(a - b) < 1e-6 for a, b in zip(made, posts, strict=True))
    assert actions == [d.action for d in decisions if d.again and d.action is not Action.REPOST]
    assert (caught is None) == (error is None)
    if caught is not None and error is not None:
        assert caught.kind is error.kind
        assert str(caught) == str(error)
        assert [h.rule for h in caught.history] == [h.rule for h in error.history]

    assert all(d.at < deadline for d in decisions if d.again)
    assert all(at < deadline for at in posts)
    assert all(d.kind is not None for d in decisions if not d.again)
    assert [d.again for d in decisions[:-1]] == [True] * (len(decisions) - 1)
    budget = policy.connect_budget if phase is Phase.CONNECT else policy.budget
    assert len(posts) <= budget.total + 1


@given(policy=policies, script=scripts, seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=100)
def test_decisions_depend_on_arguments_only(
    policy: RetryPolicy, script: list[tuple[Verdict, float]], seed: int
) -> None:
    """The same run twice, with the global generator disturbed in between, decides the same."""
    how = {"start": 0.0, "deadline": 2.0, "seed": seed, "phase": Phase.POST}
    first = poll_face(policy, script, **how)
    random.seed(seed)
    second = poll_face(policy, script, **how)
    assert first[:2] == second[:2]


@given(script=scripts, keep=st.integers(1, 8))
@settings(deadline=None, max_examples=100)
def test_history_keeps_count(script: list[tuple[Verdict, float]], keep: int) -> None:
    """Attempts = listed + elided, listed is at most what was asked for, in order of time."""
    run = RetryPolicy(max_history=keep).start(0.0, 1e9, random.Random(1))
    now = 0.0
    for verdict, took in script:
        now += took
        run.after(verdict, now)
    assert len(run.history) + run.elided == run.attempts
    assert len(run.history) <= keep
    assert [h.at for h in run.history] == sorted(h.at for h in run.history)
