"""Dead queue pairs are left behind by a new engine generation; ending the old one is a fence."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, PeerLostError, TransportError
from kvxfer.testing.softrdma import AsyncEvent, WcStatus
from kvxfer.testing.two_sides import scattered


def break_queue(r, far, op=Op.READ):
    """Have the queue pairs to ``far`` fail."""
    r.softrdma.fail_next(WcStatus.GENERAL)
    attempt = r.moved(op, far.path, scattered(1))
    assert attempt.state is AttemptState.FAILED
    with pytest.raises(TransportError, match="dead since"):
        r.transport.post(op, far.path, scattered(1))
    return attempt


class Traffic:
    """READs over one path, one after the other, on a thread of their own."""

    def __init__(self, r, path):
        self.r, self.path = r, path
        self.attempts, self.errors = [], []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.is_set():
            try:
                attempt = self.r.transport.post(Op.READ, self.path, scattered(4))
                self.attempts.append(attempt)
                while not attempt.terminal and not self._stop.is_set():
                    time.sleep(0.0005)
            except BackpressureError:
                pass
            except TransportError as error:
                self.errors.append(error)
                return


def test_rebuild_beside_a_healthy_peer(rig):
    """The next ``prepare`` after a queue pair died makes a second engine, over which the peer is
    reached again. A healthy peer's posts go on without one failure, its open path moves over, and
    the first engine ends."""
    r = rig(generation_linger_s=0.5)
    ill, healthy = r.far(), r.far()
    ill.connect()
    healthy.connect()
    transport = r.transport
    before = (transport.local_info(), [transport.descriptor(x) for x in r.regions])
    break_queue(r, ill)
    with Traffic(r, healthy.path) as traffic:
        r.until(lambda: traffic.attempts, "traffic")
        assert transport.generation == 1
        ill.path.close()
        again = ill.prepare()
        assert (transport.generation, transport.revision) == (2, 1)
        assert r.read(again, scattered(8)).state is AttemptState.DONE
        assert r.landed(scattered(8)) == 8
        r.until(lambda: len(transport._generations.live) == 1, "the first engine ended")
        seen = len(traffic.attempts)
        r.until(lambda: len(traffic.attempts) > seen + 5 or traffic.errors, "traffic goes on")
    for attempt in traffic.attempts:
        r.ended(attempt)
    assert traffic.errors == []
    assert {a.state for a in traffic.attempts} == {AttemptState.DONE}
    after = (transport.local_info(), [transport.descriptor(x) for x in r.regions])
    assert before[0].data != after[0].data
    assert all(a.data != b.data for a, b in zip(before[1], after[1], strict=True))
    assert [d.region_id for d in before[1]] == [d.region_id for d in after[1]]


def test_inbound_peers_use_the_new_descriptors(rig):
    """While the old engine lingers it serves those who still address it; with the descriptors of
    the new one a peer that writes to us goes on after that."""
    r = rig(generation_linger_s=1.0)
    ill, writer = r.far(), r.far()
    ill.connect()
    transport = r.transport

    def write(seconds=20.0):
        info = transport.local_info()
        pairs = [(writer.there[0], transport.descriptor(r.regions[0]))]
        return writer.process.exchange(Op.WRITE, info, pairs, scattered(2)), info

    def done(number):
        return writer.process.exchange_state(number) not in ("pending", "")

    number, old = write()
    r.until(lambda: done(number), "the write over the first engine")
    first = writer.process.exchange_state(number)
    break_queue(r, ill)
    ill.prepare()
    number, new = write()
    assert new != old
    r.until(lambda: done(number), "the write over the second engine")
    assert writer.process.exchange_state(number) == first
    r.until(lambda: len(transport._generations.live) == 1, "the first engine ended")
    number, _ = write()
    r.until(lambda: done(number), "the write after that")
    assert writer.process.exchange_state(number) == first


def test_at_most_two(rig):
    """A queue pair that dies while the first engine still lingers waits for that one's end; a third
    engine never exists beside two."""
    r = rig(generation_linger_s=0.5)
    far = r.far()
    far.connect()
    most = 0
    numbers = []
    for _ in range(3):
        break_queue(r, far)
        far.path.close()
        preparing = r.transport.prepare(far.peer, far.pairs)
        while preparing.poll() == (None, None):
            most = max(most, len(r.transport._generations.live))
            r.transport.progress()
        far.path = r.answer(preparing)
        numbers.append(r.transport.generation)
        assert r.read(far.path, scattered(4)).state is AttemptState.DONE
    assert numbers == [2, 3, 4]
    assert most == 2


def test_patience_has_an_end(rig):
    """Where the first engine cannot be ended in time, ``prepare`` says so, as an error that is
    worth another try, and a later one succeeds."""
    r = rig(generation_linger_s=0.3, generation_drain_s=0.3)
    far = r.far()
    far.connect()
    generation = r.transport._generations.current
    break_queue(r, far)
    with generation:  # somebody is inside the engine
        far.path.close()
        far.path = far.prepare()
        break_queue(r, far)
        far.path.close()
        _, error = r.outcome(r.transport.prepare(far.peer, far.pairs))
        assert isinstance(error, TransportError)
        assert error.engine.message == "engine generation 1 has not ended"
    far.path = far.prepare()
    assert r.transport.generation == 3
    assert r.read(far.path, scattered(4)).state is AttemptState.DONE


def test_no_engine_for_a_dead_peer(rig):
    """A peer that is gone costs no second engine; its successor is served by the first."""
    r = rig()
    far = r.far()
    far.connect()
    far.process.kill()
    r.read(far.path, scattered(8))
    _, error = r.outcome(r.transport.prepare(far.peer, far.pairs))
    assert isinstance(error, PeerLostError)
    assert r.transport.generation == 1
    again = r.far()
    again.connect()
    assert r.read(again.path, scattered(8)).state is AttemptState.DONE
    assert r.transport.generation == 1


def test_one_of_four_queue_pairs(rig):
    """With four queue pairs a dead one is passed over: posts go on, and the next ``prepare``
    rebuilds."""
    r = rig(qp_per_transfer=4, generation_linger_s=0.3)
    far = r.far()
    far.connect()
    r.softrdma.fail_next(WcStatus.GENERAL)
    assert r.read(far.path, scattered(1)).state is AttemptState.FAILED
    for _ in range(12):
        assert r.read(far.path, scattered(4)).state is AttemptState.DONE
    far.path.close()
    far.path = far.prepare()
    assert r.transport.generation == 2
    for _ in range(8):
        assert r.read(far.path, scattered(4)).state is AttemptState.DONE


def test_fence_drains_what_has_no_proof(rig):
    """A READ that an async event failed, one that was posted in part, and one that is still in
    flight are all drained once the old engine is gone, and the fence is done. Asking for it does
    not wait."""
    r = rig(generation_linger_s=0.3, qp_per_transfer=4)
    far = r.far()
    far.connect()
    r.softrdma.refuse_posts(errno.ENOMEM, after=5)
    partly = r.read(far.path, scattered(10))
    with r.softrdma.hold():
        flying = r.transport.post(Op.READ, far.path, scattered(2))
        r.softrdma.wait_for(lambda c: c.held >= 1)
        began = time.monotonic()
        pollable = r.transport.fence(far.peer)
        assert time.monotonic() - began < 0.1
        with pytest.raises(TransportError, match="being fenced"):
            r.transport.post(Op.READ, far.path, scattered(1))
        assert not partly.drained
        assert not flying.terminal
        fence = r.answer(pollable)
    assert (fence.done, fence.ours_done) == (True, True)
    assert partly.drained_by == "engine generation 1 ended"
    assert flying.state is AttemptState.FAILED
    assert flying.accepted is Accepted.UNKNOWN
    assert flying.drained_by == "engine generation 1 ended"
    landed = r.landed(scattered(10))
    time.sleep(0.05)
    assert r.landed(scattered(10)) == landed
    far.path.close()
    far.path = far.prepare()
    assert r.read(far.path, scattered(10)).state is AttemptState.DONE


def test_fence_proves_nothing_of_a_write(rig):
    """What a WRITE has sent may land at the peer whatever becomes of our engine: the fence says so,
    now and later, and the attempt stays undrained. But nothing reads its source any more: the fence
    says that too, and the region is not busy."""
    r = rig(generation_linger_s=0.3)
    far = r.far()
    far.connect()
    attempt = break_queue(r, far, Op.WRITE)
    assert not attempt.drained
    fence = r.answer(r.transport.fence(far.peer))
    assert (fence.done, fence.ours_done) == (False, False)
    assert "1 attempts" in fence.reason
    assert fence.source_done
    assert not attempt.drained
    again = r.answer(r.transport.fence(far.peer))
    assert (again.done, again.source_done) == (False, True)
    assert "1 attempts" in again.reason
    r.transport.deregister(far.path.pairs[0][0])


@pytest.mark.parametrize("op", list(Op))
def test_fence_waits_for_healthy_peers(rig, op):
    """A call of another peer that is still in flight when the fence is asked for completes: the old
    engine waits for it."""
    r = rig(generation_linger_s=0.1)
    ill, healthy = r.far(), r.far()
    ill.connect()
    healthy.connect()
    break_queue(r, ill)
    with r.softrdma.hold():
        flying = r.transport.post(op, healthy.path, scattered(8))
        r.softrdma.wait_for(lambda c: c.held == 1)
        pollable = r.transport.fence(ill.peer)
        r.until(lambda: r.transport.generation == 2, "a second engine")
        time.sleep(0.3)
        assert pollable.poll() == (None, None)
        assert not flying.terminal
    fence = r.answer(pollable)
    assert fence.done
    assert flying.state is AttemptState.DONE


def test_fences_twice_and_close(rig):
    """Fences of several peers, and of one peer twice, are answered; one that is open when the
    transport closes is answered too."""
    r = rig(generation_linger_s=0.2)
    one, two = r.far(), r.far()
    one.connect()
    two.connect()
    answers = [r.transport.fence(p) for p in (one.peer, two.peer, one.peer)]
    assert all(r.answer(a).done for a in answers)
    last = r.transport.fence(two.peer)
    r.transport.close()
    value, error = last.poll()
    assert value is not None
    assert error is None


def test_async_event_then_rebuild(rig):
    """After a fatal event of the device every peer is reached anew over one new generation."""
    r = rig(generation_linger_s=0.3)
    fars = [r.far(), r.far()]
    for far in fars:
        far.connect()
    with r.softrdma.hold():
        attempts = [r.transport.post(Op.READ, f.path, scattered(4)) for f in fars]
        r.softrdma.wait_for(lambda c: c.held == 2)
        r.softrdma.async_event(AsyncEvent.QP_FATAL)
        for attempt in attempts:
            r.ended(attempt)
    for far in fars:
        far.path.close()
        far.path = far.prepare()
        assert r.read(far.path, scattered(4)).state is AttemptState.DONE
    assert r.transport.generation == 2
    r.until(lambda: all(a.drained for a in attempts), "drained by the end of the engine")
    assert {a.drained_by for a in attempts} == {"engine generation 1 ended"}


def test_the_end_of_an_engine_stops_writers(rig):
    """Once a fence is done, a peer that still posts WRITEs with what it knew of the old engine
    changes no byte of our memory: the keys are gone with the engine."""
    r = rig(generation_linger_s=0.2)
    writer = rig()
    transport = r.transport
    peer = writer.answer(writer.transport.connect(transport.local_info()))
    pairs = [(writer.regions[0], transport.descriptor(r.regions[0]))]
    path = writer.answer(writer.transport.prepare(peer, pairs))
    writer.arrays[0][:] = 0x11
    assert writer.moved(Op.WRITE, path, scattered(4)).state is AttemptState.DONE
    assert r.arrays[0].any()
    there = r.answer(transport.connect(writer.transport.local_info()))
    fence = r.answer(transport.fence(there))
    assert fence.done
    before = bytes(r.arrays[0])
    writer.arrays[0][:] = 0x22
    with r.softrdma.hold():
        attempt = writer.transport.post(Op.WRITE, path, scattered(4))
    assert writer.ended(attempt).state is AttemptState.FAILED
    assert bytes(r.arrays[0]) == before
    again = writer.answer(
        writer.transport.prepare(peer, [(writer.regions[0], transport.descriptor(r.regions[0]))])
    )
    assert writer.moved(Op.WRITE, again, scattered(4)).state is AttemptState.DONE
    assert writer.transport.generation == 1
