"""Each injected fault does what it says, is counted, and never claims more than is true."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    BackpressureError,
    ConfigError,
    HandshakeError,
    PeerLostError,
    RegionBusyError,
    StaleError,
    TransportError,
)
from kvxfer.testing import FakeClock, Fault, FaultKind, FaultPlan, FaultyTransport
from kvxfer.testing.faults import FaultPoint

FULL = EngineError(backend="loopback", code=13, message="SQ full (batch): ep=1 depth=4")
BATCH = Batch([0] * 8, range(0, 64, 8), range(0, 64, 8), [8] * 8)


class Scene:
    """A faulty transport with one region of ones, a plain peer with one of twos, and a path."""

    def __init__(self, plan: FaultPlan | None = None, **planned: list[Fault | None]) -> None:
        self.clock = FakeClock(100.0)
        self.faulty = FaultyTransport(
            LoopbackTransport(), plan or FaultPlan(**planned), clock=self.clock
        )
        self.peer_side = LoopbackTransport()
        self.near, self.far = (np.full(64, fill, np.uint8) for fill in (1, 2))
        self.region = self.faulty.register(span_of(self.near))
        self.remote = self.peer_side.register(span_of(self.far))

    def path(self):
        peer, _ = self.faulty.connect(self.peer_side.local_info()).poll()
        path, _ = self.faulty.prepare(peer, [(self.region, self.remote.descriptor)]).poll()
        return path

    def read(self, path=None):
        return self.faulty.post(Op.READ, path or self.path(), BATCH)

    def landed(self) -> int:
        """How many of the 8 pieces are in the near memory."""
        return int((self.near.reshape(8, 8) == 2).all(axis=1).sum())


def fault(kind: str, **options) -> Fault:
    return Fault(kind=FaultKind(kind), **options)


def facts(attempt):
    return attempt.state, attempt.accepted, attempt.drained


def test_refuse_raises_with_the_engines_words():
    """A refused post raises the planned error and posts nothing; the next one goes through."""
    scene = Scene(posts=[fault("refuse", error=FULL), fault("refuse", raises=StaleError), None])
    path = scene.path()
    with pytest.raises(BackpressureError) as refused:
        scene.read(path)
    assert refused.value.engine == FULL
    with pytest.raises(StaleError):
        scene.read(path)
    assert scene.landed() == 0
    assert not path.undrained
    assert scene.read(path).state is AttemptState.DONE
    assert scene.faulty.counters == {
        "connect": 1,
        "prepare": 1,
        "post": 3,
        "post.refuse": 2,
    }


def test_refuse_value_is_a_failed_attempt():
    """The engine's other way to refuse: FAILED, nothing accepted, drained, reported."""
    scene = Scene(posts=[fault("refuse_value", error=FULL)])
    attempt = scene.read()
    assert facts(attempt) == (AttemptState.FAILED, Accepted.NONE, True)
    assert attempt.error == FULL
    assert scene.faulty.progress() == [attempt]
    assert scene.landed() == 0


def test_partial_post_moves_a_prefix_and_is_not_drained():
    """A partial post is FAILED at once; its prefix is there; drained comes with the release."""
    scene = Scene(posts=[fault("partial", fraction=0.4)])
    attempt = scene.read()
    assert facts(attempt) == (AttemptState.FAILED, Accepted.UNKNOWN, False)
    assert scene.landed() == 3
    assert scene.faulty.progress() == [attempt]
    with pytest.raises(RegionBusyError):
        scene.faulty.deregister(scene.region)
    assert scene.faulty.held == [attempt]
    assert scene.faulty.release() == 1
    assert scene.faulty.progress() == [attempt]
    assert attempt.drained
    scene.faulty.deregister(scene.region)


def test_partial_post_can_land_late():
    """Pieces posted before a refusal land after FAILED was returned, as a real engine's do."""
    scene = Scene(posts=[fault("partial", lands_late=True, after=0.2)])
    attempt = scene.read()
    scene.faulty.progress()
    assert (scene.landed(), attempt.drained) == (0, False)
    scene.clock.advance(0.2)
    scene.faulty.progress()
    assert (scene.landed(), attempt.drained) == (4, True)
    assert attempt.state is AttemptState.FAILED


def test_late_bytes_land_after_their_owner_gave_up():
    """LATE holds the bytes: they land into memory whose owner timed out, and only then is the
    attempt drained."""
    scene = Scene(posts=[fault("late")])
    attempt = scene.read()
    assert scene.faulty.progress() == []
    assert attempt.fail(EngineError(backend="x", message="time-out"), accepted=Accepted.UNKNOWN)
    assert scene.landed() == 0
    assert not attempt.drained
    scene.faulty.release()
    scene.faulty.progress()
    assert scene.landed() == 8
    assert attempt.drained
    assert attempt.state is AttemptState.FAILED


def test_late_report_has_the_bytes_first():
    """LATE_REPORT moves at once and tells when the clock says so."""
    scene = Scene(posts=[fault("late_report", after=1.5)])
    attempt = scene.read()
    assert scene.landed() == 8
    scene.clock.advance(1.0)
    assert scene.faulty.progress() == []
    scene.clock.advance(0.5)
    assert scene.faulty.progress() == [attempt]
    assert attempt.state is AttemptState.DONE


def test_never_stays_pending_whatever_is_released():
    """NEVER is left by nothing but a fence, a disconnect or close."""
    scene = Scene(posts=[fault("never")])
    attempt = scene.read()
    scene.clock.advance(1e9)
    assert scene.faulty.release() == 0
    assert scene.faulty.progress() == []
    assert attempt.state is AttemptState.PENDING
    fence, _ = scene.faulty.fence(attempt.path.peer).poll()
    assert fence.done
    assert facts(attempt) == (AttemptState.FAILED, Accepted.UNKNOWN, True)
    assert attempt in scene.faulty.progress()


def test_duplicate_is_reported_twice():
    """DUPLICATE reports one end in two calls of ``progress``, and no third."""
    scene = Scene(posts=[fault("duplicate")])
    attempt = scene.read()
    assert [scene.faulty.progress() for _ in range(3)] == [[attempt], [attempt], []]


@pytest.mark.parametrize("kind", ["fail", "fail_drained"])
def test_completion_errors_with_and_without_proof(kind):
    """The attempt is PENDING when ``post`` returns, then fails; the proof comes with the error, or
    not before the release."""
    scene = Scene(posts=[fault(kind, error=FULL)])
    attempt = scene.read()
    assert attempt.state is AttemptState.PENDING
    assert scene.faulty.progress() == [attempt]
    proven = kind == "fail_drained"
    assert facts(attempt) == (AttemptState.FAILED, Accepted.UNKNOWN, proven)
    assert attempt.error == FULL
    assert scene.landed() == 4
    scene.faulty.release()
    assert scene.faulty.progress() == ([] if proven else [attempt])
    assert attempt.drained


def test_peer_gone_fails_everything_of_that_incarnation():
    """What is under way fails, later posts and connects are PeerLostError, other peers go on."""
    scene = Scene(posts=[fault("late"), fault("peer_gone", error=FULL), None])
    path = scene.path()
    other = LoopbackTransport()
    healthy = other.register(span_of(np.full(64, 3, np.uint8)))
    under_way, doomed = scene.read(path), scene.read(path)
    assert {scene.faulty.progress()[0], doomed} == {under_way, doomed}
    assert under_way.state is doomed.state is AttemptState.FAILED
    assert not under_way.drained
    with pytest.raises(PeerLostError):
        scene.read(path)
    error = scene.faulty.connect(scene.peer_side.local_info()).poll()[1]
    assert isinstance(error, PeerLostError)
    assert error.engine == FULL
    peer, _ = scene.faulty.connect(other.local_info()).poll()
    good, _ = scene.faulty.prepare(peer, [(scene.region, healthy.descriptor)]).poll()
    assert scene.read(good).state is AttemptState.DONE


def test_connect_fails_n_times():
    """Report O56: a peer that is not up yet; the third connect works."""
    twice = [fault("fail"), fault("fail", raises=PeerLostError)]
    scene = Scene(connects=[*twice, None])
    info = scene.peer_side.local_info()
    errors = [scene.faulty.connect(info).poll()[1] for _ in range(2)]
    assert [type(e) for e in errors] == [HandshakeError, PeerLostError]
    assert scene.faulty.connect(info).poll()[0] is not None


def test_answers_can_be_late_fail_or_never_come():
    """Connect and prepare answer late by the clock, with an error, or not at all."""
    scene = Scene(
        connects=[fault("late", after=1.0), fault("never")], prepares=[fault("fail"), None]
    )
    slow = scene.faulty.connect(scene.peer_side.local_info())
    never = scene.faulty.connect(scene.peer_side.local_info())
    assert slow.poll() == never.poll() == (None, None)
    scene.clock.advance(1.0)
    peer, _ = slow.poll()
    assert slow.poll()[0] is peer
    assert never.poll() == (None, None)
    pairs = [(scene.region, scene.remote.descriptor)]
    assert isinstance(scene.faulty.prepare(peer, pairs).poll()[1], TransportError)
    assert scene.faulty.prepare(peer, pairs).poll()[0] is not None


def test_impossible_fence_proves_nothing_and_late_bytes_still_land():
    """With the fence impossible, ``disconnect`` fails what is pending without a proof, and what
    was under way lands afterwards: the hazard that promise 3 is about."""
    scene = Scene(posts=[fault("late")], fences=[fault("fail", error=FULL)])
    attempt = scene.read()
    fence, _ = scene.faulty.disconnect(attempt.path.peer).poll()
    assert not fence.done
    assert fence.reason == FULL.message
    assert scene.faulty.progress() == [attempt]
    assert facts(attempt) == (AttemptState.FAILED, Accepted.UNKNOWN, False)
    assert scene.landed() == 0
    scene.faulty.release()
    assert scene.faulty.progress() == [attempt]
    assert scene.landed() == 8
    assert attempt.drained


def test_fence_drops_what_was_held():
    """With a fence, held bytes never land: drained is true."""
    scene = Scene(posts=[fault("late")])
    attempt = scene.read()
    fence, _ = scene.faulty.disconnect(attempt.path.peer).poll()
    assert fence.done
    assert attempt.drained
    scene.faulty.release()
    scene.faulty.progress()
    assert scene.landed() == 0


def test_close_returns_nothing_undrained_once_the_engine_is_closed():
    """``close`` ends every fault: nothing can land any more."""
    scene = Scene(posts=[fault("late"), fault("never"), fault("partial")])
    path = scene.path()
    attempts = [scene.read(path) for _ in range(3)]
    assert scene.faulty.close() == []
    assert all(a.drained and a.terminal for a in attempts)


def test_equal_seeds_give_equal_faults():
    """Probabilities are drawn from the generator that was passed, and from nothing else."""

    def kinds(seed: int) -> list[str]:
        chances = {FaultPoint.POST: {fault("refuse"): 0.3, fault("duplicate"): 0.3}}
        scene = Scene(FaultPlan(chances=chances, rng=random.Random(seed)))
        path = scene.path()
        for _ in range(50):
            try:
                scene.read(path)
            except BackpressureError:
                continue
        return [(i.number, i.fault.kind.value, i.at) for i in scene.faulty.log]

    assert kinds(7) == kinds(7) != kinds(8)
    assert 20 <= len(kinds(7)) <= 40


def test_a_script_comes_before_chances_and_the_log_is_bounded():
    """Scripted calls first, then chances; old injections leave the log but not the counters."""
    chances = {FaultPoint.POST: {fault("duplicate"): 1.0}}
    plan = FaultPlan(posts=[None, fault("refuse")], chances=chances, rng=random.Random(1))
    assert [plan.draw(FaultPoint.POST)[1] for _ in range(3)] == [
        None,
        fault("refuse"),
        fault("duplicate"),
    ]
    faulty = FaultyTransport(
        LoopbackTransport(), FaultPlan(connects=[fault("fail")] * 9), log_size=4
    )
    for _ in range(9):
        faulty.connect(LoopbackTransport().local_info())
    assert [i.number for i in faulty.log] == [5, 6, 7, 8]
    assert faulty.counters["connect.fail"] == 9


@pytest.mark.parametrize(
    "plan",
    [
        {"connects": [fault("partial")]},
        {"chances": {FaultPoint.FENCE: {fault("refuse"): 0.1}}, "rng": random.Random(1)},
        {"chances": {FaultPoint.POST: {fault("refuse"): 0.1}}},
        {"chances": {FaultPoint.POST: {fault("refuse"): 1.1}}, "rng": random.Random(1)},
    ],
)
def test_impossible_plans_are_refused(plan):
    """A plan that could not strike, or not reproducibly, is an error when it is made."""
    with pytest.raises(ConfigError):
        FaultPlan(**plan)


def test_wrapped_transport_keeps_its_name_and_descriptors():
    """Name, incarnation, capabilities and descriptors are the engine's: plain peers reach it."""
    scene = Scene()
    assert scene.faulty.name == "loopback"
    assert scene.faulty.local_info() == scene.faulty.inner.local_info()
    assert scene.faulty.capabilities is scene.faulty.inner.capabilities
    peer, _ = scene.peer_side.connect(scene.faulty.local_info()).poll()
    pairs = [(scene.remote, scene.region.descriptor)]
    path, _ = scene.peer_side.prepare(peer, pairs).poll()
    assert scene.peer_side.post(Op.READ, path, BATCH).state is AttemptState.DONE
    assert (scene.far == 1).all()


class _Blocks(LoopbackTransport):
    """An engine whose ``post`` waits inside, as those with ``may_block_in_post`` do."""

    inside, go_on = None, None

    def _post(self, attempt):
        self.inside.set()
        assert self.go_on.wait(30)
        super()._post(attempt)


@pytest.mark.parametrize("kind", ["fail", "fail_drained"])
def test_nothing_is_drained_while_the_engine_is_inside_post(kind):
    """``progress`` runs while another thread is inside the engine's ``post``: the attempt, whose
    pieces land only then, is neither failed nor drained before."""
    near, far = np.zeros(64, np.uint8), np.full(64, 2, np.uint8)
    engine = _Blocks()
    engine.inside, engine.go_on = threading.Event(), threading.Event()
    faulty = FaultyTransport(engine, FaultPlan(posts=[fault(kind)]))
    peer_side = LoopbackTransport()
    local, remote = faulty.register(span_of(near)), peer_side.register(span_of(far))
    peer, _ = faulty.connect(peer_side.local_info()).poll()
    path, _ = faulty.prepare(peer, [(local, remote.descriptor)]).poll()
    posted = []
    poster = threading.Thread(target=lambda: posted.append(faulty.post(Op.READ, path, BATCH)))
    poster.start()
    assert engine.inside.wait(30)
    faulty.release()
    assert faulty.progress() == []
    (attempt,) = path.undrained
    assert facts(attempt) == (AttemptState.PENDING, Accepted.UNKNOWN, False)
    engine.go_on.set()
    poster.join(30)
    assert posted == faulty.progress() == [attempt]
    assert facts(attempt) == (AttemptState.FAILED, Accepted.UNKNOWN, True)
    assert (near.reshape(8, 8) == 2).all(axis=1).sum() == 4
