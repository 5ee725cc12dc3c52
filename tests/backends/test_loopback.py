"""The in-process engine keeps the transport contract."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from kvxfer.backends.loopback import CopyIn, LoopbackConfig, LoopbackTransport
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import MemoryKind, Span, span_of
from kvxfer.core.transport import Path
from kvxfer.core.verdict import Op
from kvxfer.errors import (
    BackpressureError,
    ClosedError,
    InvalidInputError,
    PeerLostError,
    RegionBusyError,
    StaleError,
)

IN_PROGRESS = LoopbackConfig(copy_in=CopyIn.PROGRESS)


class Side:
    """A transport with one registered region of 64 bytes."""

    def __init__(self, fill: int, config: LoopbackConfig | None = None) -> None:
        self.transport = LoopbackTransport(config)
        self.memory = np.full(64, fill, dtype=np.uint8)
        self.region = self.transport.register(span_of(self.memory))

    def connect(self, other: Side) -> Path:
        peer, error = self.transport.connect(other.transport.local_info()).poll()
        assert error is None
        assert peer is not None
        path, error = self.transport.prepare(peer, [(self.region, other.region.descriptor)]).poll()
        assert error is None
        assert path is not None
        return path


@pytest.fixture
def near():
    side = Side(1, IN_PROGRESS)
    yield side
    side.transport.close()


@pytest.fixture
def far():
    side = Side(2, IN_PROGRESS)
    yield side
    side.transport.close()


def piece(local: int, remote: int, size: int = 8) -> Batch:
    return Batch([0], [local], [remote], [size])


@pytest.mark.parametrize("copy_in", list(CopyIn))
@pytest.mark.parametrize("op", list(Op))
def test_moves_exactly_the_pieces(copy_in, op):
    """READ pulls and WRITE pushes the named bytes and no others, in both copy modes."""
    a, b = (Side(f, LoopbackConfig(copy_in=copy_in)) for f in (1, 2))
    a.memory[:] = np.arange(64)
    b.memory[:] = np.arange(64) + 100
    path = a.connect(b)
    attempt = a.transport.post(op, path, Batch([0, 0], [0, 40], [16, 8], [8, 4]), tag="t")
    assert (attempt.state is AttemptState.DONE) == (copy_in is CopyIn.POST)
    assert a.transport.progress() == [attempt]
    assert attempt.state is AttemptState.DONE
    assert attempt.drained
    assert attempt.nbytes == 12
    near, far = np.arange(64, dtype=np.uint8), np.arange(64, dtype=np.uint8) + 100
    if op is Op.READ:
        near[0:8], near[40:44] = far[16:24], far[8:12]
    else:
        far[16:24], far[8:12] = near[0:8], near[40:44]
    assert (a.memory == near).all()
    assert (b.memory == far).all()
    assert a.transport.progress() == []
    a.transport.close()
    b.transport.close()


def test_progress_copies_in_post_order_within_its_budget(near, far):
    """Nothing is copied before ``progress``, then at most ``budget`` attempts, oldest first."""
    path = near.connect(far)
    first = near.transport.post(Op.READ, path, piece(0, 0))
    second = near.transport.post(Op.READ, path, piece(8, 8))
    assert near.memory[0] == 1
    assert near.transport.progress(1) == [first]
    assert second.state is AttemptState.PENDING
    assert near.transport.progress(1) == [second]


def test_credits_refuse_without_posting(far):
    """A post above the credits raises backpressure and leaves nothing behind."""
    side = Side(1, LoopbackConfig(copy_in=CopyIn.PROGRESS, credits=2))
    path = side.connect(far)
    side.transport.post(Op.READ, path, Batch([0, 0], [0, 8], [0, 8], [8, 8]))
    with pytest.raises(BackpressureError, match="2 pieces are queued"):
        side.transport.post(Op.READ, path, piece(16, 16))
    assert len(path.undrained) == 1
    side.transport.progress()
    assert not path.undrained
    side.transport.post(Op.READ, path, piece(16, 16))
    side.transport.close()


def test_unknown_peer_is_an_error_value():
    """Connecting to an incarnation that does not live here answers PeerLostError."""
    side, gone = Side(1), Side(2)
    info = gone.transport.local_info()
    gone.transport.close()
    peer, error = side.transport.connect(info).poll()
    assert peer is None
    assert isinstance(error, PeerLostError)
    side.transport.close()


def test_forgotten_transport_is_not_kept_alive():
    """The table of reachable transports keeps nobody alive."""
    side, gone = Side(1), Side(2)
    info = gone.transport.local_info()
    del gone
    gc.collect()
    assert isinstance(side.transport.connect(info).poll()[1], PeerLostError)


def test_incarnation_is_unique():
    """Report O57: a second transport under a live incarnation is refused."""
    side = Side(1)
    with pytest.raises(InvalidInputError, match="in use"):
        LoopbackTransport(incarnation=side.transport.incarnation)


def test_peer_closed_with_posts_queued(near, far):
    """A peer that closes fails what is queued, drained, with the text the rules know."""
    path = near.connect(far)
    attempt = near.transport.post(Op.READ, path, piece(0, 0))
    far.transport.close()
    near.transport.progress()
    assert attempt.state is AttemptState.FAILED
    assert attempt.accepted is Accepted.NONE
    assert attempt.drained
    assert attempt.error.message == "the peer transport is closed"
    assert near.memory[0] == 1
    with pytest.raises(PeerLostError):
        near.transport.post(Op.READ, path, piece(0, 0))
    assert not path.undrained


def test_region_gone(near, far):
    """A deregistered region fails queued posts, refuses new ones and new paths."""
    path = near.connect(far)
    attempt = near.transport.post(Op.WRITE, path, piece(0, 0))
    far.transport.deregister(far.region)
    near.transport.progress()
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained
    assert far.memory[0] == 2
    with pytest.raises(StaleError):
        near.transport.post(Op.READ, path, piece(0, 0))
    again = near.transport.prepare(path.peer, [(near.region, far.region.descriptor)])
    assert isinstance(again.poll()[1], StaleError)


def test_local_region_is_busy_until_drained(near, far):
    """A region in use cannot be deregistered before the attempt is drained."""
    path = near.connect(far)
    near.transport.post(Op.READ, path, piece(0, 0))
    with pytest.raises(RegionBusyError):
        near.transport.deregister(near.region)
    near.transport.progress()
    near.transport.deregister(near.region)


def test_fence_stops_the_peers_writes(near, far):
    """After the receiver's fence no queued or new WRITE of that incarnation lands."""
    path = near.connect(far)
    back = far.connect(near)
    queued = near.transport.post(Op.WRITE, path, piece(0, 0))
    fence, error = far.transport.fence(back.peer).poll()
    assert error is None
    assert fence is not None
    assert fence.done
    near.transport.progress()
    assert queued.state is AttemptState.FAILED
    assert queued.drained
    late = near.transport.post(Op.WRITE, path, piece(0, 0))
    near.transport.progress()
    assert late.state is AttemptState.FAILED
    assert late.error.message == "the peer fenced or dropped this connection"
    assert (far.memory == 2).all()


def test_fenced_peer_is_let_in_by_our_own_connect(near, far):
    """A fenced incarnation cannot connect until the side that fenced it connects to it again."""
    near.connect(far)
    back = far.connect(near)
    far.transport.fence(back.peer).poll()
    info = far.transport.local_info()
    assert isinstance(near.transport.connect(info).poll()[1], StaleError)
    far.connect(near)
    path = near.connect(far)
    near.transport.post(Op.WRITE, path, piece(0, 0))
    near.transport.progress()
    assert far.memory[0] == 1


def test_fence_drains_our_own_posts(near, far):
    """Our own fence fails posts that had not started and proves them drained."""
    path = near.connect(far)
    attempt = near.transport.post(Op.READ, path, piece(0, 0))
    fence, _ = near.transport.fence(path.peer).poll()
    assert fence is not None
    assert fence.done
    assert near.transport.progress() == [attempt]
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained
    assert near.memory[0] == 1
    # The peer object stays usable: the fence is about what was posted before.
    near.transport.post(Op.READ, path, piece(0, 0))
    near.transport.progress()
    assert near.memory[0] == 2


def test_disconnect_fails_pending_by_our_own_ledger(near, far):
    """Report O08: attempts of a closed connection fail at once and are drained by its fence."""
    path = near.connect(far)
    attempt = near.transport.post(Op.READ, path, piece(0, 0))
    fence, _ = near.transport.disconnect(path.peer).poll()
    assert fence is not None
    assert fence.done
    assert attempt in near.transport.progress()
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained
    with pytest.raises(StaleError):
        near.transport.post(Op.READ, path, piece(0, 0))
    assert near.memory[0] == 1


def test_fence_waits_for_a_running_copy(near, far):
    """The fence is pending while a copy runs in our memory, and ``poll`` does not wait for it."""
    near.connect(far)
    back = far.connect(near)
    with far.transport._memory:
        pending = far.transport.fence(back.peer)
        assert pending.poll() == (None, None)
    fence, _ = pending.poll()
    assert fence is not None
    assert fence.done


def test_cancel_before_it_started(near, far):
    """A cancelled attempt that had not started fails drained and copies nothing."""
    path = near.connect(far)
    attempt = near.transport.post(Op.READ, path, piece(0, 0))
    attempt.request_cancel()
    assert near.transport.progress() == [attempt]
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained
    assert near.memory[0] == 1


def test_close_drains_everything(near, far):
    """``close`` leaves nothing undrained, is idempotent, and later calls are refused."""
    path = near.connect(far)
    attempt = near.transport.post(Op.READ, path, piece(0, 0))
    assert near.transport.close() == []
    assert near.transport.close() == []
    assert attempt.drained
    with pytest.raises(ClosedError):
        near.transport.post(Op.READ, path, piece(0, 0))


def test_read_only_memory_is_refused(near, far):
    """A READ into memory whose owner is read-only is refused before anything is posted."""
    fixed = np.zeros(64, dtype=np.uint8)
    fixed.flags.writeable = False
    region = near.transport.register(span_of(fixed))
    path = near.connect(far)
    only, _ = near.transport.prepare(path.peer, [(region, far.region.descriptor)]).poll()
    assert only is not None
    with pytest.raises(InvalidInputError, match="read-only"):
        near.transport.post(Op.READ, only, piece(0, 0))
    assert not only.undrained


def test_device_memory_is_refused(near):
    """Memory that the CPU cannot reach is refused, naming its kind."""
    with pytest.raises(InvalidInputError, match="vram memory of device 3"):
        near.transport.register(Span(address=4096, nbytes=64, kind=MemoryKind.VRAM, device=3))


def test_two_threads_write_to_each_other():
    """Two sides that copy into each other from two threads at once do not deadlock."""
    a, b = Side(1), Side(2)
    paths = (a.connect(b), b.connect(a))

    def run(side: Side, path: Path) -> None:
        for _ in range(500):
            side.transport.post(Op.WRITE, path, piece(0, 32, 32))
            side.transport.progress()

    threads = [
        threading.Thread(target=run, args=(s, p), daemon=True)
        for s, p in zip((a, b), paths, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert (a.memory[32:] == 2).all()
    assert (b.memory[32:] == 1).all()
