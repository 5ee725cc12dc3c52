"""The part of the contract that the base classes keep for every backend."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest

from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.capabilities import Capabilities, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region, Span, span_of
from kvxfer.core.pollable import Deferred, Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    ClosedError,
    HandshakeError,
    KvxferError,
    PeerLostError,
    TransportError,
)

BATCH = Batch([0], [0], [0], [64])
ERROR = EngineError(backend="least", message="no")


class Least(Transport):
    """No more than an author has to write; attempts end when a test says so."""

    name = "least"
    refusal: KvxferError | None = None

    @property
    def capabilities(self) -> Capabilities:
        kinds = (MemoryKind.DRAM, MemoryKind.DRAM)
        return Capabilities(ops=frozenset({(Op.READ, *kinds)}), visibility=Visibility.VISIBLE)

    def local_info(self) -> PeerInfo:
        return PeerInfo(transport=self.name, incarnation=self.incarnation)

    def _register(self, span: Span) -> Region:
        if self.refusal is not None:
            raise self.refusal
        descriptor = Descriptor(
            transport=self.name, incarnation=self.incarnation, region_id=1, nbytes=span.nbytes
        )
        return Region(span=span, descriptor=descriptor)

    def _deregister(self, region: Region) -> None: ...

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        return Ready(Peer(self, info))

    def _prepare(self, peer, pairs) -> Pollable[Path]:
        return Ready(Path(peer, pairs))

    def _post(self, attempt: Attempt) -> None: ...

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        return Ready(Fence(done=False, reason="no fence"))

    def _close(self, deadline: float) -> None: ...


class Scene:
    def __init__(self) -> None:
        self.transport = Least()
        self.region = self.transport.register(span_of(np.zeros(64, np.uint8)))

    def connect(self) -> Peer:
        peer, _ = self.transport.connect(Least().local_info()).poll()
        assert peer is not None
        return peer

    def path(self, peer: Peer | None = None) -> Path:
        peer = peer or self.connect()
        far = Descriptor(
            transport="least", incarnation=peer.info.incarnation, region_id=1, nbytes=64
        )
        path, _ = self.transport.prepare(peer, [(self.region, far)] * 3).poll()
        assert path is not None
        return path

    def post(self) -> Attempt:
        return self.transport.post(Op.READ, self.path(), BATCH)


def test_what_an_author_leaves_out() -> None:
    """A backend writes the abstract methods, all of which begin with an underscore but for what it
    is and where; the others have defaults: no fence, no news, nothing to free, no way to cancel,
    descriptors that stay, peers of which nobody knows whether they ended."""
    assert {m for m in Transport.__abstractmethods__ if not m.startswith("_")} == {
        "capabilities",
        "local_info",
    }
    assert not inspect.isabstract(Least)
    scene = Scene()
    transport = scene.transport
    attempt = scene.post()
    fence, _ = transport.fence(attempt.path.peer).poll()
    assert (fence.done, fence.ours_done) == (False, False)
    assert fence.reason == "least has no fence"
    assert transport.capabilities.fence is FenceScope.NONE
    attempt.request_cancel()
    attempt.path.close()
    assert transport.progress() == []
    assert attempt.state is AttemptState.PENDING
    assert transport.descriptor(scene.region) is scene.region.descriptor
    assert transport.lost_peers() == []
    assert not transport.proves_end(PeerLostError("the peer is gone"))
    assert transport.must_be_polled
    assert transport.config_type is None
    assert transport.close() == [attempt]
    assert transport.progress() == [attempt]


def test_each_connection_has_a_queue() -> None:
    """By default all pairs of a connection share a queue, with a name that no other connection has,
    not even one to the same peer: equal names are one queue."""
    scene = Scene()
    peer, other = scene.connect(), scene.connect()
    again = scene.transport.connect(peer.info).poll()[0]
    assert again is not None
    paths = [scene.path(p) for p in (peer, peer, other, again)]
    assert [path.queues for path in paths] == [(p.queue,) * 3 for p in (peer, peer, other, again)]
    assert len({peer.queue, other.queue, again.queue}) == 3


def test_reports_come_from_any_thread() -> None:
    """What threads of a backend report, attempts and lost peers, comes out once each and calls the
    waker each time."""
    scene = Scene()
    attempts = [scene.post() for _ in range(40)]
    peers = [attempt.path.peer for attempt in attempts]
    woken: list[int] = []
    scene.transport.on_change(lambda: woken.append(threading.get_ident()))

    def report(mine: list[int]) -> None:
        for i in mine:
            attempts[i].complete()
            scene.transport._report(attempts[i])
            scene.transport._report_lost(peers[i])

    threads = [threading.Thread(target=report, args=(range(k, 40, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(scene.transport.progress()) == set(attempts)
    assert set(scene.transport.lost_peers()) == set(peers)
    assert scene.transport.progress() == scene.transport.lost_peers() == []
    assert len(woken) == 80
    assert threading.get_ident() not in woken


def test_what_the_engine_raises_goes_through() -> None:
    """A registration that the engine refuses is its error, and leaves nothing registered."""
    scene = Scene()
    scene.transport.refusal = TransportError("memlock", engine=ERROR)
    with pytest.raises(TransportError) as caught:
        scene.transport.register(span_of(np.zeros(64, np.uint8)))
    assert caught.value.engine == ERROR
    assert scene.transport._registered == {scene.region}


def test_the_first_terminal_state_wins() -> None:
    """``complete``, ``fail`` and ``mark_drained`` say whether they changed anything; of a hundred
    threads that end one attempt, one does."""
    attempt = Scene().post()
    wins: list[bool] = []
    barrier = threading.Barrier(16)

    def end(number: int) -> None:
        barrier.wait()
        if number % 2:
            wins.append(attempt.complete())
        else:
            wins.append(attempt.fail(ERROR, accepted=Accepted.NONE))

    threads = [threading.Thread(target=end, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == [False] * 15 + [True]
    assert not attempt.path.undrained
    state = attempt.state
    assert not attempt.complete()
    assert not attempt.fail(ERROR, accepted=Accepted.UNKNOWN)
    assert not attempt.mark_drained("late")
    assert attempt.state is state


def test_failed_and_drained_are_two_facts() -> None:
    """DONE is drained. FAILED is drained with a proof, with ``accepted=NONE``, or later: by a late
    completion, a second failure that brings the proof, or ``mark_drained``, none of which changes
    the state. What is pending cannot be drained."""
    scene = Scene()
    pending = scene.post()
    assert not pending.mark_drained("too early")
    assert pending.complete(by="the queue pair")
    assert (pending.drained, pending.drained_by) == (True, "the queue pair")
    for accepted, proof, by in (
        (Accepted.NONE, "", "nothing posted"),
        (Accepted.UNKNOWN, "the queue pair died", "the queue pair died"),
        (Accepted.UNKNOWN, "", ""),
    ):
        attempt = scene.post()
        assert attempt.fail(ERROR, accepted=accepted, drained_by=proof)
        assert (attempt.state, attempt.drained_by) == (AttemptState.FAILED, by)
        assert attempt.drained is bool(by) is (attempt not in attempt.path.undrained)
    for late in (
        lambda a: a.complete(by="completion"),
        lambda a: a.fail(ERROR, accepted=Accepted.UNKNOWN, drained_by="proof"),
        lambda a: a.mark_drained("fence"),
    ):
        attempt = scene.post()
        attempt.fail(ERROR, accepted=Accepted.UNKNOWN)
        assert not attempt.fail(ERROR, accepted=Accepted.UNKNOWN)
        assert not attempt.drained
        assert late(attempt)
        assert attempt.drained
        assert attempt.state is AttemptState.FAILED
        assert attempt.error is ERROR
        assert not late(attempt)
        assert not attempt.path.undrained


def test_answers_are_final() -> None:
    """An answer is pending, then a value or an error for ever: the first wins, from any thread; and
    a transport that closes answers what is still open."""
    with pytest.raises(ValueError, match="exactly one"):
        Ready()
    assert Ready(3).poll() == Ready(3).poll() == (3, None)
    error = HandshakeError("no")
    assert Ready(error=error).poll() == (None, error)
    later: Deferred[int] = Deferred()
    assert later.poll() == (None, None)
    thread = threading.Thread(target=later.resolve, args=(1,))
    thread.start()
    thread.join()
    later.resolve(2)
    later.fail(error)
    assert later.poll() == later.poll() == (1, None)

    class NeverConnects(Least):
        def _connect(self, info: PeerInfo) -> Pollable[Peer]:
            return Deferred()

    transport = NeverConnects()
    open_answer = transport.connect(Least().local_info())
    assert open_answer.poll() == (None, None)
    transport.close()
    _, closed = open_answer.poll()
    assert isinstance(closed, ClosedError)
    assert open_answer.poll() == (None, closed)
