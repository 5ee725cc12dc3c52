"""The rules that kvxfer ships, against what engines say."""

from __future__ import annotations

import importlib

import pytest

from kvxfer.backends import loopback as loopback_backend
from kvxfer.backends.shm import messages as shm_messages
from kvxfer.core.verdict import Action, EngineError, Op
from kvxfer.errors import ErrorKind
from kvxfer.policies.classify import UNMATCHED, ClassifierRegistry, Rule
from kvxfer.policies.rules import builtin_rules
from kvxfer.policies.rules.moriio_samples import SAMPLES as MORIIO
from kvxfer.policies.rules.samples import Sample, check_samples

BACKENDS = ("own", "loopback", "shm", "moriio", "mooncake", "nixl")
SAMPLES: list[Sample] = [
    sample
    for name in BACKENDS
    for sample in importlib.import_module(f"kvxfer.policies.rules.{name}_samples").SAMPLES
]


@pytest.fixture
def rules() -> ClassifierRegistry:
    return ClassifierRegistry(builtin_rules())


def mori(code: int, message: str) -> EngineError:
    return EngineError(backend="moriio", code=code, message=message)


# ---- rules and samples -----------------------------------------------------------------------


def test_each_sample_hits_exactly_one_rule_and_no_rule_lacks_a_sample(
    rules: ClassifierRegistry,
) -> None:
    """Every table, all tables loaded together."""
    assert check_samples(rules, SAMPLES) == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda rule: [rule], "has no sample"),
        (lambda rule: [rule, Sample(rule="extra", error=mori(13, "SQ full (batch): "))], "caught"),
    ],
)
def test_the_check_can_fail(rules: ClassifierRegistry, spoil: object, complaint: str) -> None:
    """A rule without a sample, and a sample that another rule catches, are found."""
    extra = Rule(
        name="extra",
        backend="moriio",
        code=13,
        pattern="never said",
        kind=ErrorKind.INVALID,
        action=Action.FAIL,
        retryable=False,
    )
    added, *samples = spoil(extra)
    rules.add(added)
    problems = check_samples(rules, [*SAMPLES, *samples])
    assert len(problems) == 1
    assert complaint in problems[0]


def test_the_check_finds_two_rules_for_one_message(rules: ClassifierRegistry) -> None:
    """A second rule that recognises a message is found, even if it would lose."""
    wider = Rule(
        name="wider",
        pattern="SQ full",
        kind=ErrorKind.INVALID,
        action=Action.FAIL,
        retryable=False,
    )
    rules.add(wider)
    sample = Sample(rule="moriio.sq_full", error=mori(13, "SQ full (batch): ep=0"))
    assert any("wider and moriio.sq_full" in p for p in check_samples(rules, [sample], "none"))


def test_nothing_is_unknown_that_is_documented(rules: ClassifierRegistry) -> None:
    """Each sample gets its rule's verdict, in both directions, and none counts as unmatched."""
    for sample in SAMPLES:
        for op in (None, *Op):
            assert rules.classify(sample.error, op=op).rule == sample.rule
    assert rules.unclassified == 0


# ---- report O02, as far as what was measured does not overrule it ----------------------------


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (
            13,
            "SQ full (batch): ep=0 depth=256 requested=8 max=256",
            (Action.REPOST, True, ErrorKind.BACKPRESSURE),
        ),
        (
            13,
            "SQ request exceeds capacity (batch): ep=0 requested=300 max=256",
            (Action.SPLIT, True, ErrorKind.INVALID),
        ),
        # Measured: never cleared, so it is rebuilt and not waited for.
        (
            13,
            "EP is degraded, rejecting new submissions",
            (Action.REBUILD, True, ErrorKind.CONNECTION),
        ),
        (13, "transport retry counter exceeded", (Action.REBUILD, True, ErrorKind.PEER_LOST)),
        (11, "anything", (Action.FAIL, False, ErrorKind.INVALID)),
        (12, "anything", (Action.REHANDSHAKE, False, ErrorKind.STALE)),
        (14, "anything", (Action.REBUILD, True, ErrorKind.CONNECTION)),
        # Measured: permanent until the engine is registered.
        (
            14,
            "No available backend found, create backend first",
            (Action.FAIL, False, ErrorKind.HANDSHAKE),
        ),
        # Measured: HIP errors stick, so the path is rebuilt.
        (15, "anything", (Action.REBUILD, True, ErrorKind.CONNECTION)),
    ],
)
def test_one_code_many_meanings(
    rules: ClassifierRegistry, code: int, message: str, expected: tuple[Action, bool, ErrorKind]
) -> None:
    """Report O02: the code first, the message where the code is ambiguous."""
    verdict = rules.classify(mori(code, message))
    assert (verdict.action, verdict.retryable, verdict.kind) == expected
    assert rules.unclassified == 0


@pytest.mark.parametrize("code", [0, 1, 2])
def test_no_errors_are_no_reason_to_do_anything(rules: ClassifierRegistry, code: int) -> None:
    """Report O02: 0 is success, 1 and 2 are pending. Nothing is re-posted and nothing failed."""
    verdict = rules.classify(mori(code, "success" if code == 0 else ""))
    assert (verdict.action, verdict.retryable) == (Action.WAIT, False)
    assert rules.unclassified == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [(13, ""), (13, "a text of a later release"), (13, "sq full"), (99, "SQ full (batch): ep=0")],
)
def test_unknown_words_are_never_retried(
    rules: ClassifierRegistry, code: int, message: str
) -> None:
    """Report O02: an unknown text under the ambiguous code, and an unknown code, are UNKNOWN and
    counted once."""
    verdict = rules.classify(mori(code, message))
    assert verdict.rule == UNMATCHED
    assert (verdict.kind, verdict.retryable, verdict.drained) == (ErrorKind.UNKNOWN, False, False)
    assert rules.unclassified == 1


def test_hints_may_change_their_words(rules: ClassifierRegistry) -> None:
    """What follows " Hint: " has no part in the verdict, also where it quotes another message."""
    plain = rules.classify(mori(13, "remote access error"))
    hinted = mori(13, "remote access error Hint: SQ full (batch): ep=1 or EP is degraded")
    assert rules.classify(hinted) == plain
    partial = "ibv_post_send failed with 12: Cannot allocate memory (posted 5/10 WRs)"
    hinted = mori(13, f"{partial} Hint: as opposed to (posted 0/10 WRs)")
    assert rules.classify(hinted).rule == "moriio.post_send_partial"


# ---- what an error proves --------------------------------------------------------------------

COMPLETIONS = [
    s.error
    for s in MORIIO
    if s.error.code == 13
    and s.rule.partition(".")[2]
    in {"flushed", "peer_unreachable", "remote_access", "local_protection", "completion_error"}
]


@pytest.mark.parametrize("said", COMPLETIONS, ids=lambda e: e.message[:30])
def test_a_completion_error_proves_a_read_and_never_a_write(
    rules: ClassifierRegistry, said: EngineError
) -> None:
    """The queue pair is in error: nothing of a READ lands any more; of a WRITE, packets already
    sent may."""
    assert rules.classify(said, op=Op.READ).drained
    assert not rules.classify(said, op=Op.WRITE).drained
    assert not rules.classify(said, op=Op.WRITE, atomic_refusal=True).drained
    assert not rules.classify(said).drained


@pytest.mark.parametrize(
    "message",
    [
        "SQ full (batch): ep=0 depth=16 requested=8 max=16",
        "EP is degraded, rejecting new submissions",
        "ibv_post_send failed with 12: Cannot allocate memory (posted 0/10 WRs)",
        "ibv_post_send failed with 22: Invalid argument (posted 0/10 WRs)",
        "ibv_post_send failed with 5: Input/output error (posted 0/10 WRs)",
    ],
)
@pytest.mark.parametrize("op", list(Op))
def test_a_refusal_proves_something_only_where_it_is_atomic(
    rules: ClassifierRegistry, message: str, op: Op
) -> None:
    """Seen: 16 to 64 of 512 blocks landed after "SQ full" when a call was several post batches;
    none, then or later, when it was one."""
    assert not rules.classify(mori(13, message), op=op).drained
    assert rules.classify(mori(13, message), op=op, atomic_refusal=True).drained


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (13, "ibv_post_send failed with 12: Cannot allocate memory (posted 5/10 WRs)"),
        (13, "SQ full (notify): ep=0 depth=16 requested=1 max=16"),
        (13, "ibv_post_send (notify) failed with 12: Cannot allocate memory"),
        (13, "verbs async event IBV_EVENT_QP_FATAL: queue pair entered Error state"),
        (13, "verbs async event IBV_EVENT_CQ_ERR: completion queue failed"),
        (13, "verbs async event IBV_EVENT_DEVICE_FATAL: device reported a fatal error"),
        (13, "endpoint retired by a fatal async event"),
        (15, "XGMI: hipEventQuery failed: out of memory"),
        (15, "FABRIC: batch copy launch failed: out of memory"),
    ],
)
@pytest.mark.parametrize("op", list(Op))
def test_what_may_still_land(rules: ClassifierRegistry, code: int, message: str, op: Op) -> None:
    """Partial posts, refused notifications of data under way, and failures that say nothing about
    the queue pair prove nothing, in either direction."""
    assert not rules.classify(mori(code, message), op=op, atomic_refusal=True).drained


def test_partial_posts_are_rebuilt_and_refused_ones_are_not(rules: ClassifierRegistry) -> None:
    """``posted P/T`` makes the difference, and errno 12 and 22 differ when nothing was posted."""
    verdicts = {
        (errno, posted): rules.classify(
            mori(13, f"ibv_post_send failed with {errno}: Some words (posted {posted}/20 WRs)")
        )
        for errno in (5, 12, 22, 122)
        for posted in (0, 1, 10)
    }
    assert {k for k, v in verdicts.items() if v.action is Action.REBUILD} == {
        (errno, posted) for errno in (5, 12, 22, 122) for posted in (1, 10)
    }
    assert verdicts[12, 0].action is Action.REPOST
    assert verdicts[22, 0].kind is ErrorKind.INVALID
    assert verdicts[122, 0] == verdicts[5, 0]
    assert verdicts[5, 0].kind is ErrorKind.UNKNOWN
    assert not verdicts[5, 0].retryable


# ---- texts that other modules own ------------------------------------------------------------


@pytest.mark.parametrize("message", shm_messages.ALL, ids=lambda m: m.text)
def test_shm_texts(rules: ClassifierRegistry, message: shm_messages.Message) -> None:
    """Every text of the shm engine has one rule, of the kind its author meant."""
    for said in (message.engine(), message.engine("process 4711", 3)):
        found = rules.matching(said)
        assert len(found) == 1
        assert found[0].backend == "shm"
        assert rules.classify(said).kind is message.kind


@pytest.mark.parametrize(
    "name", ["PEER_GONE", "REGION_GONE", "LINK_CUT", "QUEUE_FULL", "FENCED", "CANCELLED"]
)
def test_loopback_texts(rules: ClassifierRegistry, name: str) -> None:
    """Every text of the in-process engine has one rule."""
    said = EngineError(backend="loopback", message=getattr(loopback_backend, name))
    assert [rule.backend for rule in rules.matching(said)] == ["loopback"]


def test_nothing_is_posted_again_into_memory_that_its_owner_fenced(
    rules: ClassifierRegistry,
) -> None:
    """A peer that fenced us relies on it that nothing more of ours lands."""
    for backend, text in (
        ("shm", shm_messages.FENCED.text),
        ("loopback", loopback_backend.LINK_CUT),
    ):
        assert not rules.classify(EngineError(backend=backend, message=text)).retryable
