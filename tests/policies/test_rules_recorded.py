"""The MoRI-IO rules against a recording of the real engine."""

from __future__ import annotations

import random

import pytest

from kvxfer.core.verdict import Action, EngineError, Op
from kvxfer.errors import ErrorKind
from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.policies.retry import Budget, RetryPolicy
from kvxfer.policies.rules import builtin_rules
from kvxfer.testing.softrdma.samples import Sample, Surface, Verdict, load_samples

RECORDED = [s for s in load_samples().samples if s.surface is not Surface.EXIT]

ACTIONS = {
    Verdict.SUCCESS: {Action.WAIT},
    Verdict.TRANSIENT: {Action.REPOST},
    Verdict.REBUILD: {Action.REBUILD, Action.REHANDSHAKE},
    Verdict.PERMANENT: {Action.FAIL},
}

# Permanent as they were posted, but there is something better to do than to give up.
BETTER = {
    "size_exceeds_uint32": Action.SPLIT,
    "size_exceeds_uint32_batch": Action.SPLIT,
    "merged_exceeds_max_message": Action.SPLIT,
    "remote_memory_unknown": Action.REHANDSHAKE,
}

# Says the same words as a queue that will drain: only its persistence gives it away.
LEAKED = "sq_full_leaked_depth"


@pytest.fixture(scope="module")
def rules() -> ClassifierRegistry:
    return ClassifierRegistry(builtin_rules())


def engine_error(sample: Sample) -> EngineError:
    if sample.surface is Surface.STATUS:
        return EngineError(backend="moriio", code=sample.code, message=sample.message)
    exception = (f"builtins.{sample.exception}", "builtins.Exception", "builtins.BaseException")
    return EngineError(backend="moriio", message=sample.message, exception=exception)


def named(name: str) -> EngineError:
    return engine_error(next(s for s in RECORDED if s.name == name))


@pytest.mark.parametrize("sample", RECORDED, ids=lambda s: s.name)
def test_recorded_words(rules: ClassifierRegistry, sample: Sample) -> None:
    """Whatever the real engine was made to say is recognised by exactly one message rule (success
    by its code), and the action is what the experiment showed to help."""
    said = engine_error(sample)
    by_message = [rule for rule in rules.matching(said) if rule.pattern is not None]
    assert len(by_message) == (sample.verdict is not Verdict.SUCCESS)
    if sample.name == LEAKED:
        return
    expected = {BETTER[sample.name]} if sample.name in BETTER else ACTIONS[sample.verdict]
    assert rules.classify(said).action in expected


LANDED = [
    s
    for s in RECORDED
    # Success is no failure; and of the batch that was flushed from its middle on, the first five
    # pieces had landed before: it was only counted after.
    if s.facts.get("landed_later") and s.name not in {"success", "flushed_mid_batch"}
]


@pytest.mark.parametrize("sample", LANDED, ids=lambda s: s.name)
def test_no_proof_where_pieces_landed_after_the_failure(
    rules: ClassifierRegistry, sample: Sample
) -> None:
    """Where pieces were seen to land after the engine said that the call had failed, the verdict
    does not call it drained."""
    assert sample.op is not None
    assert not rules.classify(engine_error(sample), op=Op[sample.op]).drained


def test_there_are_such_recordings() -> None:
    """Refusals half-way, partial posts, notifications and async events are among them."""
    assert {s.name.partition("_")[0] for s in LANDED} == {"sq", "post", "notify", "async"}


def test_a_leaked_queue_is_rebuilt_in_the_end(rules: ClassifierRegistry) -> None:
    """A leaked send queue says "SQ full" for ever: the retry policy bounds it and rebuilds."""
    verdict = rules.classify(named(LEAKED), op=Op.READ, atomic_refusal=True)
    assert (verdict.kind, verdict.drained) == (ErrorKind.BACKPRESSURE, True)
    run = RetryPolicy(budget=Budget(refusals=20)).start(0.0, 60.0, random.Random(1))
    now, actions = 0.0, []
    for _ in range(21):
        decision = run.after(verdict, now)
        actions.append(decision.action)
        now = decision.at
    assert actions == [Action.REPOST] * 20 + [Action.REBUILD]
