"""The classifier registry: which rule wins, what is counted, and that it never raises."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.plugins import PluginCatalog
from kvxfer.core.verdict import Action, EngineError, Op
from kvxfer.errors import (
    BackpressureError,
    ConfigError,
    ErrorKind,
    GeometryError,
    TransportError,
)
from kvxfer.policies.classify import (
    UNMATCHED,
    ClassifierRegistry,
    Proof,
    Rule,
    RuleTable,
)


def rule(name: str, **more: object) -> Rule:
    """A rule that fails for good, unless told otherwise."""
    base = {"kind": ErrorKind.INVALID, "action": Action.FAIL, "retryable": False}
    return Rule(name=name, **{**base, **more})


def registry(*rules: Rule | RuleTable) -> ClassifierRegistry:
    return ClassifierRegistry(rules)


def error(message: str = "", code: int | None = None, backend: str = "engine") -> EngineError:
    return EngineError(backend=backend, code=code, message=message)


class LinkDown(ConnectionError):
    pass


# ---- matching --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "hits", "misses"),
    [
        ({"backend": "engine"}, error("x"), error("x", backend="other")),
        ({"code": 7}, error("x", 7), error("x", 8)),
        ({"code": 7}, error("x", 7), error("x")),
        ({"pattern": "queue full"}, error("queue full: 3"), error("the queue full")),
        ({"pattern": re.compile(r"ep \d+ ")}, error("ep 12 died"), error("an ep 12 died")),
        ({"code": 7, "pattern": "x"}, error("xy", 7), error("yx", 7)),
    ],
)
def test_conditions(conditions: dict[str, object], hits: EngineError, misses: EngineError) -> None:
    """A rule matches when all its conditions hold; patterns are asked at the message's start."""
    rules = registry(rule("the rule", **conditions))
    assert rules.classify(hits).rule == "the rule"
    assert rules.classify(misses).rule == UNMATCHED


@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("LinkDown", True),
        ("ConnectionError", True),
        ("builtins.OSError", True),
        (f"{__name__}.LinkDown", True),
        ("Down", False),
        ("other.LinkDown", False),
        ("ValueError", False),
    ],
)
def test_exceptions_match_by_class_name(name: str, hits: bool) -> None:
    """Bare or dotted, the class itself or a base of it; the engine need not be imported."""
    verdict = registry(rule("by class", exception=name)).classify(
        EngineError.of("engine", LinkDown("gone"))
    )
    assert (verdict.rule == "by class") is hits


def test_directions_are_told_apart() -> None:
    """A rule for one direction says nothing about the other, nor where none is known."""
    rules = registry(rule("reads", ops=Op.READ), rule("writes", ops=[Op.WRITE], code=1))
    assert rules.classify(error("x", 1), op=Op.READ).rule == "reads"
    assert rules.classify(error("x", 1), op=Op.WRITE).rule == "writes"
    assert rules.classify(error("x", 1)).rule == UNMATCHED


def test_messages_are_normalised_first() -> None:
    """A table says how to cut its backend's messages; other backends' stay as they are."""
    table = RuleTable(
        backend="engine",
        rules=[rule("exact", backend="engine", pattern=re.compile(r"full\Z"))],
        normalise=lambda message: message.partition(" Hint: ")[0],
    )
    rules = registry(table, rule("other", backend="other", pattern=re.compile(r"full\Z")))
    assert rules.classify(error("full Hint: buy a larger queue")).rule == "exact"
    assert rules.classify(error("full Hint: x", backend="other")).rule == UNMATCHED


# ---- order -----------------------------------------------------------------------------------

SPECIFIC = [
    rule("anything"),
    rule("backend", backend="engine"),
    rule("direction", ops=Op.READ),
    rule("code", code=7),
    rule("code and backend", code=7, backend="engine"),
    rule("base class", exception="OSError", priority=9),
    rule("class", exception="LinkDown"),
    rule("message", pattern="gone"),
    rule("message and code", pattern="gone", code=7),
    rule("message and class", pattern="gone", exception="LinkDown"),
]


@pytest.mark.parametrize("order", [1, -1])
def test_the_more_specific_rule_wins(order: int) -> None:
    """Message before class (the nearer first) before code before direction before backend, in
    whatever order they were registered and whatever the others' priorities."""
    subject = EngineError.of("engine", LinkDown("gone for good"), code=7)
    rules = registry(*SPECIFIC[::order])
    found = [r.name for r in rules.matching(subject, op=Op.READ)]
    assert found == [r.name for r in reversed(SPECIFIC)]
    assert rules.classify(subject, op=Op.READ).rule == "message and class"


def test_then_priority_then_registration() -> None:
    """Among equals the higher priority wins, then the one that came first."""
    rules = registry(
        rule("first", code=1), rule("second", code=1), rule("loud", code=1, priority=5)
    )
    assert [r.name for r in rules.matching(error("x", 1))] == ["loud", "first", "second"]


def test_rules_added_at_run_time_take_effect_at_once() -> None:
    """Verdicts given before are not remembered over a change of rules."""
    rules = registry(rule("old", code=1))
    assert rules.classify(error("x", 1)).rule == "old"
    rules.add(rule("new", code=1, priority=1))
    assert rules.classify(error("x", 1)).rule == "new"
    assert [r.name for r in rules.rules] == ["old", "new"]


# ---- verdicts --------------------------------------------------------------------------------


def test_the_verdict_is_the_rules() -> None:
    """Kind, action, retryable and name are handed on as they stand in the rule."""
    rules = registry(
        rule("busy", kind=ErrorKind.BACKPRESSURE, action=Action.REPOST, retryable=True)
    )
    verdict = rules.classify(error("x"))
    assert (verdict.kind, verdict.action, verdict.retryable, verdict.drained, verdict.rule) == (
        ErrorKind.BACKPRESSURE,
        Action.REPOST,
        True,
        False,
        "busy",
    )


@pytest.mark.parametrize(
    ("proof", "drained"),
    # READ, WRITE, unknown; then the same where the engine's refusals are atomic.
    [
        (Proof.NONE, (False, False, False, False, False, False)),
        (Proof.NOT_POSTED, (True, True, True, True, True, True)),
        (Proof.REFUSED, (False, False, False, True, True, True)),
        (Proof.QUEUE_ERROR, (True, False, False, True, False, False)),
        (False, (False,) * 6),
        (True, (True,) * 6),
    ],
)
def test_which_proof_counts_depends_on_the_direction(
    proof: Proof | bool, drained: tuple[bool, ...]
) -> None:
    """Promise 3: our queue in error proves a READ and never a WRITE; a refusal proves both where
    refusals are atomic; what the direction is unknown of is not drained."""
    rules = registry(rule("r", drained=proof))
    assert drained == tuple(
        rules.classify(error("x"), op=op, atomic_refusal=atomic).drained
        for atomic in (False, True)
        for op in (Op.READ, Op.WRITE, None)
    )


def test_unmatched_is_never_retried() -> None:
    """Reports O02 and promise 3: no rule, no retry, no claim."""
    verdict = registry().classify(error("what?"))
    assert (verdict.kind, verdict.action) == (ErrorKind.UNKNOWN, Action.FAIL)
    assert (verdict.retryable, verdict.drained) == (False, False)


# ---- counting --------------------------------------------------------------------------------


def test_unmatched_errors_are_counted_with_samples() -> None:
    """Each is counted; those that differ in numbers only share a sample."""
    rules = registry(rule("known", code=1))
    for i in range(5):
        rules.classify(error(f"slot {i} is odd", 13))
    rules.classify(error("slot 1 is odd", 14))
    rules.classify(error("fine", 1))
    assert rules.unclassified == 6
    assert [(s.error.message, s.error.code, s.count) for s in rules.samples] == [
        ("slot 0 is odd", 13, 5),
        ("slot 1 is odd", 14, 1),
    ]


def test_samples_are_bounded() -> None:
    """A flood of different errors is counted, and keeps a few samples cut to size."""
    rules = registry()
    for i in range(1000):
        rules.classify(error("x" * i))
    assert rules.unclassified == 1000
    assert len(rules.samples) <= 32
    assert max(len(s.error.message) for s in rules.samples) <= 240


def test_the_cache_is_bounded() -> None:
    """Messages carry numbers: neither many nor long ones pile up."""
    rules = registry(rule("any"))
    for i in range(5000):
        assert rules.classify(error(f"no. {i}")).rule == "any"
    rules.classify(error("y" * 100_000))
    cache = rules._state.cache
    assert len(cache) <= 1024
    assert not any("yyy" in key[2] for key in cache)


# ---- it never raises -------------------------------------------------------------------------


class Broken(Rule):
    """A user's rule that fails where the base asks it."""

    def matches(self, error: EngineError, message: str, op: Op | None) -> bool:
        raise LookupError(message)


def test_a_broken_rule_is_skipped_and_counted() -> None:
    """The others still decide."""
    broken = Broken(name="mine", kind=ErrorKind.INVALID, action=Action.FAIL, retryable=False)
    rules = registry(broken, rule("sound", code=1))
    assert rules.classify(error("a", 1)).rule == "sound"
    assert rules.classify(error("b", 1)).rule == "sound"
    assert rules.classify(error("c", 2)).rule == UNMATCHED
    assert rules.broken == {"mine": 3}


@pytest.mark.parametrize("normalise", [lambda message: message.no_such_thing, lambda message: None])
def test_a_broken_normaliser_is_skipped_and_counted(normalise: Callable[[str], str]) -> None:
    """The message is taken as it came."""
    table = RuleTable(
        backend="engine", rules=[rule("r", backend="engine", pattern="full")], normalise=normalise
    )
    rules = registry(table)
    assert rules.classify(error("full")).rule == "r"
    assert rules.broken == {"normalise engine": 1}


@pytest.mark.parametrize(
    "odd",
    [
        EngineError(backend="engine", code=[], message="unhashable"),
        EngineError(backend="engine", message=None),
        EngineError(backend=None, message="x"),
        EngineError(backend="engine", exception=None, message="x"),
        EngineError(backend="engine", message=b"bytes"),
        None,
        "text",
    ],
    ids=repr,
)
def test_odd_errors(odd: EngineError) -> None:
    """Whatever a sloppy backend puts into an error: UNKNOWN and counted, never an exception."""
    rules = registry(rule("r", backend="engine", pattern="full"), rule("e", exception="OSError"))
    assert rules.classify(odd).kind is ErrorKind.UNKNOWN
    assert rules.unclassified == 1
    assert len(rules.samples) == 1


def test_many_threads_and_a_growing_registry() -> None:
    """Verdicts given while rules are added are always those of one state or the other."""
    rules = registry(rule("old", code=1))
    wrong: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            for i in range(50):
                name = rules.classify(error(f"m{i}", 1)).rule
                if name != "old" and not name.startswith("new"):
                    wrong.append(name)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(50):
        rules.add(rule(f"new{i}", code=1, priority=i + 1))
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert rules.classify(error("m1", 1)).rule == "new49"


# ---- registering -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: rule("r", action=Action.FAIL, retryable=True), "'r': fail cannot be retryable"),
        (lambda: rule("r", action=Action.WAIT, retryable=True), "'r': wait cannot be retryable"),
        (lambda: rule("r", pattern=""), r"Rule\.pattern must be a text .*, not ''"),
        (lambda: rule("r", pattern=3), r"Rule\.pattern must be a text .*, not 3"),
        (lambda: registry(rule("r"), rule("r")), "there is a rule 'r' already"),
        (lambda: registry("r"), "takes Rule and RuleTable objects, not 'r'"),
        (
            lambda: registry(
                RuleTable(backend="e", rules=[], normalise=str.lower),
                RuleTable(backend="e", rules=[], normalise=str.upper),
            ),
            "messages of 'e' are normalised already",
        ),
    ],
)
def test_wrong_rules(make: Callable[[], object], complaint: str) -> None:
    """A rule that makes no sense is refused when it is made or registered."""
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_extend_is_all_or_nothing() -> None:
    """A table with one bad rule changes nothing."""
    rules = registry(rule("there"))
    with pytest.raises(ConfigError):
        rules.extend([rule("good"), rule("there")])
    assert [r.name for r in rules.rules] == ["there"]


# ---- attempts and exceptions -----------------------------------------------------------------


@pytest.fixture
def attempt() -> Iterable[Attempt]:
    """A READ on loopback, as yet without an end."""
    near, far = LoopbackTransport(), LoopbackTransport()
    memory = np.zeros(64, np.uint8)
    local, remote = near.register(span_of(memory)), far.register(span_of(memory.copy()))
    peer, _ = near.connect(far.local_info()).poll()
    path, _ = near.prepare(peer, [(local, remote.descriptor)]).poll()
    yield Attempt(Op.READ, path, Batch([0], [0], [0], [8]))
    near.close()
    far.close()


@pytest.mark.parametrize("proof", ["", "flushed"])
def test_an_attempts_own_drained_counts(attempt: Attempt, proof: str) -> None:
    """An attempt may hold several engine calls: what the words of one of them prove does not
    make it drained, and what its backend proved is not lost."""
    rules = registry(
        rule("proves", pattern="flush", drained=Proof.NOT_POSTED), rule("proves nothing")
    )
    for words in ("flushed", "other"):
        fresh = Attempt(attempt.op, attempt.path, attempt.batch)
        fresh.fail(error(words), accepted=Accepted.UNKNOWN, drained_by=proof)
        assert rules.classify_attempt(fresh).drained is bool(proof)
    assert rules.classify(error("flushed")).drained


def test_an_attempt_without_words(attempt: Attempt) -> None:
    """An attempt that failed with no error of its engine is UNKNOWN, and counted."""
    rules = registry()
    assert rules.classify_attempt(attempt).rule == UNMATCHED
    assert rules.samples[0].error.backend == "loopback"


def test_exceptions_carry_the_engines_words() -> None:
    """What the engine said comes before the class of the exception around it."""
    rules = registry(
        rule("engine", backend="mori", code=13),
        rule("class", exception="BackpressureError", action=Action.REPOST, retryable=True),
    )
    said = BackpressureError("full", engine=error("SQ full", 13, "mori"))
    assert rules.classify_exception(said, "mori").rule == "engine"
    unknown_words = BackpressureError("full", engine=error("what?", 99, "mori"))
    assert rules.classify_exception(unknown_words, "mori").rule == "class"
    assert rules.classify_exception(BackpressureError("full"), "mori").rule == "class"
    assert rules.unclassified == 0


def test_ours_mean_that_nothing_was_posted() -> None:
    """Promise 1: a post that raises posted nothing, so the verdict is drained, even the one on an
    unknown text. An exception of others proves what its rule says."""
    rules = registry()
    ours = rules.classify_exception(TransportError("odd", engine=error("odd")), "e", Op.WRITE)
    assert (ours.rule, ours.drained, ours.retryable) == (UNMATCHED, True, False)
    assert rules.samples[0].error == error("odd")
    assert not rules.classify_exception(OSError("odd"), "e").drained
    assert rules.classify_exception(GeometryError("4 heads against 3"), "e").drained
    assert rules.unclassified == 3


# ---- plug-ins --------------------------------------------------------------------------------


def test_plugins_bring_rules_and_bad_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plug-in whose factory raises, one with a bad rule among good ones, one that returns
    something else: each is reported, and everything sound is there."""
    info = tmp_path / "strangers-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(
        "[kvxfer.classifiers]\n"
        "raises = strangers_rules:raises\n"
        "mixed = strangers_rules:mixed\n"
        "number = strangers_rules:number\n"
        "absent = strangers_rules:absent\n"
    )
    (tmp_path / "strangers_rules.py").write_text(
        "from kvxfer.core.verdict import Action\n"
        "from kvxfer.errors import ErrorKind\n"
        "from kvxfer.policies.classify import Rule\n"
        "def rule(name):\n"
        "    return Rule(name=name, backend='strange', pattern=name, kind=ErrorKind.INVALID,\n"
        "                action=Action.FAIL, retryable=False)\n"
        "def raises(): raise ZeroDivisionError('oops')\n"
        "def mixed(): return [rule('one'), 'junk', rule('moriio.sq_full'), rule('two')]\n"
        "def number(): return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = ClassifierRegistry.from_plugins(PluginCatalog([str(tmp_path)]))
    assert rules.classify(error("one", backend="strange")).rule == "one"
    assert rules.classify(error("two", backend="strange")).rule == "two"
    assert rules.classify(error("SQ full (batch): ", 13, "moriio")).rule == "moriio.sq_full"
    assert len(rules.problems) == 5
    for part in ("ZeroDivisionError: oops", "'junk'", "'moriio.sq_full' already", "'number'"):
        assert sum(part in problem for problem in rules.problems) == 1, part
    assert sum("absent" in problem for problem in rules.problems) == 1
    assert all("strangers" in problem for problem in rules.problems)


def test_the_default_registry_has_no_problems() -> None:
    """What is installed here loads."""
    rules = ClassifierRegistry.from_plugins()
    assert rules.problems == ()
    assert rules.rules
