"""The retry policy, in virtual time."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable

import pytest
import tenacity

from kvxfer.core.verdict import Action, EngineError, HistoryEntry, Verdict
from kvxfer.errors import (
    ConfigError,
    ErrorKind,
    InvalidInputError,
    TransferError,
    TransportError,
)
from kvxfer.policies.retry import (
    Backoff,
    Budget,
    Decision,
    RetryPolicy,
    RetryRun,
    default_policy,
    load_policy,
)
from kvxfer.policies.timeouts import Phase
from kvxfer.testing.clock import FakeClock

MS = 0.001
STEADY = Backoff(first=1 * MS, factor=2, cap=50 * MS, jitter=0)


def verdict(
    action: Action = Action.REPOST,
    kind: ErrorKind = ErrorKind.BACKPRESSURE,
    *,
    retryable: bool = True,
    drained: bool = True,
    rule: str = "test.rule",
) -> Verdict:
    return Verdict(kind=kind, action=action, retryable=retryable, drained=drained, rule=rule)


FULL = verdict(rule="moriio.sq_full")
MAYBE = verdict(Action.REPOST, ErrorKind.CONNECTION, drained=False, rule="test.maybe")
DEAD = verdict(Action.REBUILD, ErrorKind.CONNECTION, drained=False, rule="test.dead")
STALE = verdict(Action.REHANDSHAKE, ErrorKind.STALE, drained=False, rule="test.stale")
SPLIT = verdict(Action.SPLIT, ErrorKind.INVALID, rule="test.split")
WRONG = verdict(Action.FAIL, ErrorKind.INVALID, retryable=False, rule="test.wrong")
LOST = verdict(Action.REBUILD, ErrorKind.PEER_LOST, retryable=False, rule="test.lost")
PENDING = verdict(Action.WAIT, ErrorKind.UNKNOWN, retryable=False, rule="test.pending")


def rng() -> random.Random:
    return random.Random(20)


class Engine:
    """Fails with one verdict after the other, then succeeds; time passes only in ``sleep``."""

    def __init__(self, verdicts: Iterable[Verdict], start: float = 0.0) -> None:
        self.clock = FakeClock(start)
        self.sleeps: list[float] = []
        self.posts = 0
        self._verdicts = iter(verdicts)

    def post(self) -> str:
        self.posts += 1
        failure = next(self._verdicts, None)
        if failure is None:
            return "done"
        error = TransportError(f"no. {self.posts}", engine=EngineError(backend="test"))
        error.verdict = failure
        raise error

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.clock.advance(seconds)

    def call(self, policy: RetryPolicy, deadline: float, **more: object) -> str:
        return policy.call(
            self.post,
            classify=lambda error: error.verdict,
            clock=self.clock,
            sleep=self.sleep,
            deadline=deadline,
            rng=rng(),
            **more,
        )


def forever(item: Verdict) -> Iterable[Verdict]:
    while True:
        yield item


def drive(run: RetryRun, verdicts: Iterable[Verdict], now: float = 0.0) -> list[Decision]:
    """The poll face: each attempt fails at the moment it is made."""
    decisions = []
    for item in verdicts:
        decision = run.after(item, now, "said")
        decisions.append(decision)
        if not decision.again:
            break
        now = decision.at
    return decisions


# ---- report O01 ------------------------------------------------------------------------------


def test_five_refusals_then_success() -> None:
    """Report O01: full five times, then success: 6 posts, sleeps 1, 2, 4, 8, 16 ms."""
    engine = Engine([FULL] * 5)
    assert engine.call(RetryPolicy(wait=STEADY), deadline=0.2) == "done"
    assert engine.posts == 6
    assert engine.sleeps == pytest.approx([1 * MS, 2 * MS, 4 * MS, 8 * MS, 16 * MS])
    assert engine.clock.now() == pytest.approx(31 * MS)


def test_a_sleep_never_passes_the_deadline() -> None:
    """Report O01: deadline 10 ms, full for ever: sleeps 1, 2, 4 only, 4 posts, kind TIMEOUT,
    over before the deadline, and what the engine said is in the history."""
    engine = Engine(forever(FULL))
    with pytest.raises(TransferError, match=r"next wait of 0\.008 s would pass the deadline") as e:
        engine.call(RetryPolicy(wait=STEADY), deadline=10 * MS)
    assert engine.posts == 4
    assert engine.sleeps == pytest.approx([1 * MS, 2 * MS, 4 * MS])
    assert engine.clock.now() <= 10 * MS
    error = e.value
    assert error.kind is ErrorKind.TIMEOUT
    assert [entry.kind for entry in error.history] == [ErrorKind.BACKPRESSURE] * 4
    assert [entry.at for entry in error.history] == pytest.approx([0, 1 * MS, 3 * MS, 7 * MS])
    assert error.history[-1].rule == "moriio.sq_full"
    assert error.engine == EngineError(backend="test")
    assert isinstance(error.__cause__, TransportError)
    assert str(error.__cause__) == "no. 4"


def test_poll_face_says_the_same_without_waiting() -> None:
    """Report O01 on the poll face: the times at which to post again are decided at once."""
    run = RetryPolicy(wait=STEADY).start(0.0, 10 * MS, rng())
    decisions = drive(run, forever(FULL))
    assert [d.at for d in decisions if d.again] == pytest.approx([1 * MS, 3 * MS, 7 * MS])
    assert (decisions[-1].again, decisions[-1].kind) == (False, ErrorKind.TIMEOUT)
    assert run.attempts == 4


# ---- waits -----------------------------------------------------------------------------------


def test_default_waits() -> None:
    """1 ms, doubling, at most 50 ms, and each between half of that and all of it."""
    run = default_policy().start(0.0, 100.0, rng())
    now, waits = 0.0, []
    for _ in range(12):
        decision = run.after(FULL, now)
        waits.append(decision.at - now)
        now = decision.at
    steady = [min(50 * MS, MS * 2**n) for n in range(12)]
    assert all(s / 2 <= w <= s + 1e-12 for w, s in zip(waits, steady, strict=True))
    assert len({round(w / s, 6) for w, s in zip(waits, steady, strict=True)}) == 12


def test_same_seed_same_decisions() -> None:
    """A run depends on its arguments only; the global generator is neither used nor moved."""
    random.seed(1)
    before = random.getstate()

    def decisions(seed: int) -> list[Decision]:
        run = RetryPolicy().start(5.0, 6.0, random.Random(seed))
        return drive(run, forever(FULL), now=5.0)

    assert decisions(1) == decisions(1)
    assert decisions(1) != decisions(2)
    assert random.getstate() == before


def jitters() -> list[Callable[[], object]]:
    return [
        lambda: tenacity.wait_random(0.001, 0.005),
        lambda: tenacity.wait_random_exponential(0.001, max=0.05),
        lambda: tenacity.wait_random_exponential(0.001, max=0.05, exp_base=3),
        lambda: tenacity.wait_exponential_jitter(max=9, jitter=0.5),
        lambda: tenacity.wait_fixed(0.001) + tenacity.wait_random(0, 0.002),
        lambda: tenacity.wait_chain(
            tenacity.wait_random(0, 1), tenacity.wait_random_exponential(0.01, max=1)
        ),
    ]


@pytest.mark.parametrize("make", jitters())
def test_tenacitys_own_jitter_draws_from_our_generator(make: Callable[[], object]) -> None:
    """tenacity's jitter uses the global generator; here ours gives exactly what that would."""
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    random.seed(99)
    expected = []
    for number in range(1, 9):
        state.attempt_number = number
        expected.append(make()(state))
    run = RetryPolicy(wait=make()).start(0.0, 1e6, random.Random(99))
    random.seed(1)
    assert [run.after(FULL, 0.0).at for _ in range(8)] == pytest.approx(expected)


def test_random_waits_keep_their_minimum() -> None:
    """Older tenacity releases drew from 0 whatever the minimum; here it holds."""
    wait = tenacity.wait_random_exponential(0.001, max=0.05, min=0.0005)
    run = RetryPolicy(wait=wait).start(0.0, 1e6, rng())
    assert all(0.0005 <= run.after(FULL, 0.0).at <= 0.05 for _ in range(100))


def test_a_users_wait_can_use_our_generator() -> None:
    """A wait of a user's own finds the generator and the verdict on the call state."""

    def wait(state: tenacity.RetryCallState) -> float:
        assert state.verdict is FULL
        return 0.5 + state.rng.random()

    run = RetryPolicy(wait=wait).start(0.0, 100.0, random.Random(3))
    assert run.after(FULL, 1.0).at == 1.5 + random.Random(3).random()


def test_backoff_works_in_a_loop_of_tenacitys() -> None:
    """Our wait object can be used in anybody's tenacity loop."""
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    assert Backoff(first=1, cap=9, jitter=0)(state) == 1
    assert 0.5 <= Backoff(first=1, cap=9)(state) <= 1
    state.attempt_number = 10**6
    assert Backoff(first=1, cap=9, jitter=0)(state) == 9


# ---- tenacity objects ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objects",
    [
        {"stop": tenacity.stop_after_attempt(4)},
        {"stop": tenacity.stop_before_delay(0.02)},
        {"stop": tenacity.stop_after_delay(0.02)},
        {"stop": tenacity.stop_after_attempt(9) | tenacity.stop_before_delay(0.1)},
        {"stop": tenacity.stop_after_attempt(6), "wait": tenacity.wait_incrementing(0.001, 0.002)},
        {"stop": tenacity.stop_after_attempt(6), "wait": tenacity.wait_none()},
        {"retry": tenacity.retry_if_exception_message(match=r".*no\. [123]$")},
    ],
    ids=lambda objects: ",".join(type(o).__name__ for o in objects.values()),
)
def test_objects_mean_what_they_mean_in_tenacity(
    objects: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same objects in tenacity's own loop, on the same clock, sleep the same."""
    objects = {"wait": tenacity.wait_exponential(0.001, max=0.05), **objects}
    theirs = Engine(forever(FULL))
    monkeypatch.setattr("tenacity.time.monotonic", theirs.clock.now)
    with pytest.raises((tenacity.RetryError, TransportError)):
        tenacity.Retrying(sleep=theirs.sleep, **objects)(theirs.post)
    ours = Engine(forever(FULL))
    with pytest.raises(TransferError):
        ours.call(RetryPolicy(**objects), deadline=1e9)
    assert ours.sleeps == pytest.approx([s for s in theirs.sleeps if s])
    assert ours.posts == theirs.posts


def test_retry_object_may_decline_but_not_widen() -> None:
    """A user's retry object sees a TransferError with the kind; what a verdict calls not
    retryable stays so."""
    seen: list[BaseException] = []

    def picky(error: BaseException) -> bool:
        seen.append(error)
        return error.kind is not ErrorKind.CONNECTION

    policy = RetryPolicy(retry=tenacity.retry_if_exception(picky))
    run = policy.start(0.0, 1.0, rng())
    assert run.after(FULL, 0.0, "full").again
    declined = run.after(MAYBE, 0.1)
    assert (declined.again, declined.kind) == (False, ErrorKind.CONNECTION)
    assert "retry object declined" in declined.reason
    assert (type(seen[0]), seen[0].message) == (TransferError, "full")
    always = RetryPolicy(retry=tenacity.retry_always).start(0.0, 1.0, rng())
    assert not always.after(WRONG, 0.0).again


@pytest.mark.parametrize("field", ["stop", "wait", "retry"])
def test_a_broken_object_ends_the_run(field: str) -> None:
    """A user's object that raises is a reason to give up, never an exception out of ``after``."""

    def broken(state: object) -> float:
        raise KeyError("idle_for")

    run = RetryPolicy(**{field: broken}).start(0.0, 1.0, rng())
    decision = run.after(FULL, 0.0)
    assert not decision.again
    assert decision.kind is ErrorKind.BACKPRESSURE
    assert "raised KeyError: 'idle_for'" in decision.reason


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf"), "soon"])
def test_an_impossible_wait_ends_the_run(wait: object) -> None:
    """So is a wait that is no duration."""
    run = RetryPolicy(wait=lambda _: wait).start(0.0, 1.0, rng())
    decision = run.after(FULL, 0.0)
    assert not decision.again
    assert "raised ValueError" in decision.reason


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stop": 3}, r"RetryPolicy\.stop must be a tenacity object .*, not 3"),
        ({"wait": tenacity.wait_none}, r"RetryPolicy\.wait .*wait_none.*pass an instance"),
        ({"max_history": 0}, r"RetryPolicy\.max_history must be at least 1, not 0"),
        ({"max_history": True}, r"RetryPolicy\.max_history must be an integer"),
    ],
)
def test_wrong_options(options: dict[str, object], complaint: str) -> None:
    """The error names the field, what was expected, and the value."""
    with pytest.raises(ConfigError, match=complaint):
        RetryPolicy(**options)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Budget(reposts=-1), r"Budget\.reposts must be an integer of at least 0, not -1"),
        (lambda: Budget(rebuilds=1.0), r"Budget\.rebuilds"),
        (lambda: Backoff(first=0), r"Backoff\.first must be a finite number above 0, not 0"),
        (lambda: Backoff(cap=float("inf")), r"Backoff\.cap must be a finite number above 0"),
        (lambda: Backoff(factor=0.5), r"Backoff\.factor must be a finite number at least 1"),
        (lambda: Backoff(jitter=1.1), r"Backoff\.jitter .* at least 0 and at most 1, not 1.1"),
        (lambda: Backoff(jitter=True), r"Backoff\.jitter .*not True"),
    ],
)
def test_wrong_numbers(make: Callable[[], object], complaint: str) -> None:
    """So do those of the parts."""
    with pytest.raises(ConfigError, match=complaint):
        make()


# ---- what a verdict leads to -----------------------------------------------------------------


@pytest.mark.parametrize("item", [FULL, MAYBE, DEAD, STALE, SPLIT])
def test_retryable_verdicts_keep_their_action(item: Verdict) -> None:
    """What to do before the next post is the classifier's word; the reason names its rule."""
    decision = RetryPolicy().start(0.0, 1.0, rng()).after(item, 0.0)
    assert (decision.again, decision.action, decision.reason) == (True, item.action, item.rule)
    assert 0.0 <= decision.at < 1.0


def test_not_retryable() -> None:
    """FAIL ends it at once. A rebuild that is not for this transfer is still asked for."""
    wrong = RetryPolicy().start(0.0, 1.0, rng()).after(WRONG, 0.5)
    assert (wrong.again, wrong.action, wrong.kind) == (False, Action.FAIL, ErrorKind.INVALID)
    lost = RetryPolicy().start(0.0, 1.0, rng()).after(LOST, 0.5)
    assert (lost.again, lost.action, lost.kind) == (False, Action.REBUILD, ErrorKind.PEER_LOST)


def test_giving_up_for_time_still_asks_for_the_rebuild() -> None:
    """Others share the path: when this transfer has no time left, it is rebuilt all the same."""
    decision = RetryPolicy(wait=tenacity.wait_fixed(2)).start(0.0, 1.0, rng()).after(DEAD, 0.5)
    assert (decision.again, decision.action) == (False, Action.REBUILD)
    assert decision.kind is ErrorKind.TIMEOUT


def test_wait_is_no_attempt() -> None:
    """An attempt that has not ended is neither counted nor recorded, and ends nothing."""
    run = RetryPolicy().start(0.0, 1.0, rng())
    decision = run.after(PENDING, 0.1)
    assert (decision.again, decision.action, decision.kind) == (False, Action.WAIT, None)
    assert (run.attempts, run.history, run.over) == (0, (), False)
    assert run.after(FULL, 0.2).again


def test_first_final_decision_stays() -> None:
    """Once given up, a late report changes nothing and counts nothing."""
    run = RetryPolicy().start(0.0, 1.0, rng())
    final = run.after(WRONG, 0.5)
    assert run.over
    assert run.after(FULL, 0.6) is final
    assert run.expire(2.0) is final
    assert (run.attempts, len(run.history)) == (1, 1)


def test_at_the_deadline_is_too_late() -> None:
    """Nothing is posted at the deadline itself, as with stop_before_delay."""
    policy = RetryPolicy(wait=tenacity.wait_fixed(0.5))
    assert not policy.start(0.0, 1.0, rng()).after(FULL, 0.5).again
    assert policy.start(0.0, 1.0, rng()).after(FULL, 0.49).again
    assert not policy.start(0.0, 1.0, rng()).after(FULL, 1.5).again


def test_expire() -> None:
    """A deadline that passes while the engine is silent gives TIMEOUT."""
    run = RetryPolicy().start(0.0, 2.0, rng())
    decision = run.expire(2.0)
    assert (decision.again, decision.kind) == (False, ErrorKind.TIMEOUT)
    assert "the deadline passed" in str(run.error("no answer"))


def test_no_deadline_no_retry() -> None:
    """Promise 7: a run without a finite deadline cannot be started."""
    for bad in (float("inf"), float("nan")):
        with pytest.raises(InvalidInputError, match="deadline must be finite"):
            RetryPolicy().start(0.0, bad, rng())
        with pytest.raises(InvalidInputError, match="now must be finite"):
            RetryPolicy().start(bad, 1.0, rng())


# ---- budgets ---------------------------------------------------------------------------------


def test_what_the_peer_never_saw_has_its_own_budget() -> None:
    """Refusals and posts that may have acted are counted apart: 4 of the latter end the run,
    however few of the former there were, and the other way round."""
    policy = RetryPolicy(budget=Budget(refusals=10, reposts=2, rebuilds=0))
    run = policy.start(0.0, 100.0, rng())
    decisions = drive(run, [FULL, MAYBE, FULL, MAYBE, FULL, MAYBE])
    assert [d.again for d in decisions] == [True] * 5 + [False]
    assert decisions[-1].reason == "2 re-posts did not help"
    assert (run.refusals, run.reposts) == (3, 2)
    run = policy.start(0.0, 100.0, rng())
    decisions = drive(run, [MAYBE, *forever_n(FULL, 11)])
    assert [d.again for d in decisions] == [True] * 11 + [False]
    assert decisions[-1].reason == "refused 10 times on this path"
    assert decisions[-1].kind is ErrorKind.BACKPRESSURE


def forever_n(item: Verdict, n: int) -> list[Verdict]:
    return [item] * n


def test_rebuilds_are_few() -> None:
    """REBUILD and REHANDSHAKE share a budget, whatever the error proves about drained."""
    drained = verdict(Action.REBUILD, ErrorKind.CONNECTION, drained=True)
    run = RetryPolicy(budget=Budget(rebuilds=3)).start(0.0, 100.0, rng())
    decisions = drive(run, [DEAD, STALE, drained, DEAD])
    assert [d.again for d in decisions] == [True, True, True, False]
    assert decisions[-1].reason == "3 rebuilds did not help"


def test_a_queue_that_never_drains_is_rebuilt() -> None:
    """A leaked queue (mori with small post batches says "SQ full" for ever) is rebuilt after so
    many refusals; the count then starts anew, and rebuilds are bounded."""
    policy = RetryPolicy(wait=STEADY, budget=Budget(refusals=5, rebuilds=2))
    run = policy.start(0.0, 1000.0, rng())
    decisions = drive(run, forever(FULL))
    rebuilt = [i for i, d in enumerate(decisions) if d.action is Action.REBUILD]
    assert rebuilt == [5, 11]
    assert all(d.again for d in decisions[:-1])
    assert decisions[5].reason == "moriio.sq_full: queue is stuck"
    assert len(decisions) == 18
    assert run.attempts == policy.budget.total + 1 - policy.budget.reposts


def test_only_backpressure_is_answered_by_a_rebuild() -> None:
    """A refused connection is not a stuck queue: it just ends."""
    refused = verdict(Action.REPOST, ErrorKind.CONNECTION)
    run = RetryPolicy(budget=Budget(refusals=3)).start(0.0, 1000.0, rng())
    assert [d.action for d in drive(run, forever(refused))] == [Action.REPOST] * 3 + [Action.FAIL]


def test_connecting_has_its_own_budget_and_waits() -> None:
    """Report O56: connect fails at 0 and a little later, then works; rebuild verdicts there do
    not use up the few rebuilds of a transfer, and the waits reach seconds."""
    lost = verdict(Action.REBUILD, ErrorKind.PEER_LOST)
    policy = RetryPolicy()
    run = policy.start(0.0, 60.0, rng(), phase=Phase.CONNECT)
    decisions = drive(run, forever_n(lost, 30))
    assert all(d.again for d in decisions)
    assert 0.01 <= decisions[0].at <= 0.02
    assert 0.5 <= decisions[29].at - decisions[28].at <= 1.0
    posts = drive(policy.start(0.0, 60.0, rng()), forever_n(lost, 30))
    assert len(posts) == 4


# ---- history and errors ----------------------------------------------------------------------


def test_history_is_bounded_and_counts_what_it_leaves_out() -> None:
    """The first and the latest attempts are kept; the rest is counted, and the error says so."""
    policy = RetryPolicy(budget=Budget(refusals=1000), max_history=7, wait=tenacity.wait_fixed(1))
    run = policy.start(0.0, 1e6, rng())
    for i in range(100):
        run.after(FULL, float(i), f"no. {i}" + "x" * 1000)
    assert [entry.at for entry in run.history] == [0, 1, 2, 96, 97, 98, 99]
    assert (run.attempts, run.elided) == (100, 93)
    assert all(len(entry.message) <= 240 for entry in run.history)
    text = str(run.error())
    assert "100 attempts" in text
    assert "93 of them not listed" in text


def test_short_histories_are_complete() -> None:
    """Nothing is left out before the bound, and the last message is the error's."""
    run = RetryPolicy(max_history=7).start(0.0, 1e6, rng())
    for i in range(2):
        run.after(MAYBE, float(i), f"no. {i}")
    assert run.history == tuple(
        HistoryEntry(
            at=float(i),
            kind=ErrorKind.CONNECTION,
            action=Action.REPOST,
            rule="test.maybe",
            message=f"no. {i}",
        )
        for i in range(2)
    )
    assert run.elided == 0
    assert str(run.error()).startswith("[connection] no. 1: gave up after 2 attempts")


def test_errors_pickle_with_their_history() -> None:
    """Errors travel between processes; the history and the engine's words come along."""
    engine = Engine([FULL, WRONG])
    with pytest.raises(TransferError) as caught:
        engine.call(RetryPolicy(), deadline=1.0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.history == caught.value.history
    assert (copy.kind, copy.engine) == (ErrorKind.INVALID, EngineError(backend="test"))


def test_policies_pickle() -> None:
    """A policy can be handed to worker processes."""
    policy = RetryPolicy(stop=tenacity.stop_after_attempt(5), wait=tenacity.wait_random(0, 1))
    copy = pickle.loads(pickle.dumps(policy))
    ours = drive(policy.start(0.0, 100.0, random.Random(5)), forever(FULL))
    theirs = drive(copy.start(0.0, 100.0, random.Random(5)), forever(FULL))
    assert ours == theirs
    assert len(ours) == 5


# ---- the blocking face -----------------------------------------------------------------------


def test_call_prepares_before_it_tries_again() -> None:
    """SPLIT, REBUILD and REHANDSHAKE are handed to the caller in time; REPOST needs nothing."""
    engine = Engine([FULL, SPLIT, DEAD, STALE])
    log: list[object] = []
    engine.call(RetryPolicy(), deadline=1.0, prepare=log.append)
    assert log == [Action.SPLIT, Action.REBUILD, Action.REHANDSHAKE]


def test_call_does_not_begin_after_the_deadline() -> None:
    """With no time left nothing is posted at all, also when a sleep took too long."""
    engine = Engine([], start=5.0)
    with pytest.raises(TransferError, match="gave up after 0 attempts") as caught:
        engine.call(RetryPolicy(), deadline=5.0)
    assert caught.value.kind is ErrorKind.TIMEOUT
    assert engine.posts == 0
    late = Engine([FULL])
    late.sleep = lambda seconds: late.clock.advance(seconds + 9)
    with pytest.raises(TransferError, match="the deadline passed") as caught:
        late.call(RetryPolicy(), deadline=1.0)
    assert late.posts == 1
    assert caught.value.kind is ErrorKind.TIMEOUT


def test_call_lets_interrupts_through() -> None:
    """Ctrl-C is not an engine's error."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RetryPolicy().call(
            interrupted,
            classify=lambda _: FULL,
            clock=FakeClock(),
            sleep=lambda _: None,
            deadline=1.0,
            rng=rng(),
        )


def test_the_default_is_found_by_name() -> None:
    """The entry point ``default`` gives the default policy."""
    assert load_policy() == default_policy() == RetryPolicy()
