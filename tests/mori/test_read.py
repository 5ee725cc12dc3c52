"""The moriio backend on the real engine: what the conformance suite cannot provoke."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import threading
import time

import attrs
import numpy as np
import pytest
from mori_rig import MoriSides

from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, HandshakeError, PeerLostError, TransportError
from kvxfer.testing.memory import pattern
from kvxfer.testing.softrdma import AsyncEvent, WcStatus
from kvxfer.testing.two_sides import BLOCK, NBYTES, scattered


@pytest.fixture
def rig(softrdma):
    rigs = []

    def make(**config):
        rigs.append(MoriSides(softrdma, **config))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()


def test_read_and_write_between_processes(rig):
    """READ pulls and WRITE pushes exactly the pieces named, over two pairs in one attempt; the far
    side need not connect to us."""
    r = rig()
    far = r.far()
    path = r.connect(far)
    both = Batch.concat([scattered(8, pair=1), scattered(8, pair=0)])
    attempt = r.read(path, both)
    assert (attempt.state, attempt.accepted) == (AttemptState.DONE, Accepted.ALL)
    assert attempt.drained_by == "completion"
    assert attempt.nbytes == 16 * BLOCK
    assert [r.landed(scattered(8), b) for b in (0, 1)] == [8, 8]
    r.arrays[1][:BLOCK] = 0x5A
    wrote = r.moved(Op.WRITE, path, Batch([1], [0], [7 * BLOCK], [BLOCK]))
    assert wrote.state is AttemptState.DONE
    found = far.read(r.there[1])
    expected = bytearray(pattern(1, NBYTES))
    expected[7 * BLOCK : 8 * BLOCK] = b"\x5a" * BLOCK
    assert found == expected


@pytest.mark.parametrize("op", list(Op))
def test_killed_peer(rig, op):
    """The error names the root cause, not the flush that the status shows; READ is drained by the
    queue pair's error, WRITE by nothing; later posts are refused at once; a restarted peer, which
    is another incarnation, is served by the same engine."""
    r = rig()
    far = r.far()
    path = r.connect(far)
    far.kill()
    attempt = r.moved(op, path, scattered(16))
    assert attempt.state is AttemptState.FAILED
    assert attempt.accepted is Accepted.ALL
    assert attempt.error.code == 13
    assert attempt.error.message.startswith("transport retry counter exceeded")
    assert attempt.error.message.endswith("status: Work Request Flushed Error")
    assert attempt.drained_by == ("local queue pair in error" if op is Op.READ else "")
    with pytest.raises(TransportError, match="dead since") as caught:
        r.transport.post(op, path, scattered(1))
    assert caught.value.engine == attempt.error
    _, error = r.outcome(r.transport.connect(far.info))
    assert isinstance(error, PeerLostError)
    again = r.connect(r.far())
    assert r.moved(op, again, scattered(16)).state is AttemptState.DONE


def test_engine_refusal_posts_nothing(rig):
    """A call that finds the send queue full is refused whole: nothing of it lands, then or later,
    and the same call succeeds once there is room."""
    r = rig(max_send_wr=16, own_admission=False)
    path = r.connect(r.far())
    with r.softrdma.hold():
        first = r.transport.post(Op.READ, path, scattered(12))
        with pytest.raises(BackpressureError) as caught:
            r.transport.post(Op.READ, path, scattered(8, first=12))
    assert caught.value.engine.code == 13
    assert caught.value.engine.message.startswith("SQ full (batch): ")
    assert r.ended(first).state is AttemptState.DONE
    assert r.landed(scattered(8, first=12)) == 0
    retried = r.read(path, scattered(8, first=12))
    assert retried.state is AttemptState.DONE
    assert r.landed(scattered(20)) == 20


def test_own_admission_refuses_before_the_engine(rig):
    """What the send queue has no room for is refused without an engine call, over several pairs
    too, and the room comes back."""
    r = rig(max_send_wr=16)
    path = r.connect(r.far())
    with r.softrdma.hold():
        first = r.transport.post(Op.READ, path, scattered(12))
        before = r.softrdma.counters()
        spread = Batch.concat([scattered(3, pair=0, first=12), scattered(3, pair=1)])
        with pytest.raises(BackpressureError, match="12 of 16") as caught:
            r.transport.post(Op.READ, path, spread)
        assert caught.value.engine.message == "own admission: send queue full"
        assert r.softrdma.counters().posted == before.posted
    r.ended(first)
    assert r.read(path, spread).state is AttemptState.DONE
    assert r.read(path, scattered(16)).state is AttemptState.DONE


def test_second_call_refused(rig):
    """An attempt whose second engine call is refused is FAILED with ``accepted`` UNKNOWN, and
    drained when the first, which was posted, has completed: never half posted in silence."""
    r = rig()
    path = r.connect(r.far())
    both = Batch.concat([scattered(4, pair=0), scattered(4, pair=1)])
    with r.softrdma.hold():
        r.softrdma.refuse_posts(errno.ENOMEM, after=4)
        attempt = r.read(path, both)
        assert attempt.accepted is Accepted.UNKNOWN
        assert "(posted 0/4 WRs)" in attempt.error.message
        assert not attempt.drained
    r.until(lambda: attempt.drained, "drained by the first call's completion")
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained_by == "completion"
    assert [r.landed(scattered(4), b) for b in (0, 1)] == [4, 0]
    assert r.read(path, both).state is AttemptState.DONE


def test_first_call_refused_raises(rig):
    """When the provider takes nothing of the first call, ``post`` raises and nothing lands."""
    r = rig()
    path = r.connect(r.far())
    r.softrdma.refuse_posts(errno.ENOMEM)
    with pytest.raises(TransportError) as caught:
        r.transport.post(Op.READ, path, scattered(4))
    assert caught.value.engine.message.startswith("ibv_post_send failed with 12")
    assert r.transport.progress() == []
    assert r.landed(scattered(4)) == 0
    assert r.read(path, scattered(4)).state is AttemptState.DONE


def test_partly_posted_call_is_not_drained(rig):
    """A call of which some pieces were posted without a signalled tail lands unseen: FAILED,
    UNKNOWN, not drained before the engine is gone."""
    r = rig()
    path = r.connect(r.far())
    before = r.softrdma.counters().executed
    r.softrdma.refuse_posts(errno.ENOMEM, after=5)
    attempt = r.read(path, scattered(10))
    assert attempt.accepted is Accepted.UNKNOWN
    assert "(posted 5/10 WRs)" in attempt.error.message
    r.softrdma.wait_for(lambda c: c.executed == before + 5)
    r.transport.progress()
    assert r.landed(scattered(10)) == 5
    assert not attempt.drained
    with pytest.raises(TransportError, match="dead since"):
        r.transport.post(Op.READ, path, scattered(1))
    assert r.transport.close() == []
    assert attempt.drained_by == "engine closed"


def test_ordered_later_success_proves_a_doubtful_call(rig, softrdma):
    """A call that failed without proof is drained once a later one on its queue pair succeeds."""
    # The device grants less than is asked for: the engine then posts a call in two batches.
    softrdma.device(max_send_wr=16)
    r = rig(max_send_wr=64, own_admission=False)
    path = r.connect(r.far())
    with r.softrdma.hold():
        attempt = r.read(path, scattered(24))
        assert attempt.error.message.startswith("SQ full (batch): ")
        assert "max=16" in attempt.error.message
        assert attempt.accepted is Accepted.UNKNOWN
        assert not attempt.drained
    later = None
    while later is None:  # as long as the queue is still full of what was left behind
        with contextlib.suppress(BackpressureError):
            later = r.read(path, scattered(2, first=28))
    assert later.state is AttemptState.DONE
    assert attempt.drained_by == "ordered later completion on the same queue pair"
    assert r.landed(scattered(24)) == 16


def test_async_event_is_no_proof(rig):
    """The engine fails what is in flight when it hears of a fatal event; the bytes of a READ may
    land after that, so it is not drained."""
    r = rig()
    path = r.connect(r.far())
    with r.softrdma.hold():
        attempt = r.transport.post(Op.READ, path, scattered(4))
        r.softrdma.wait_for(lambda c: c.held == 1)  # and with it nothing of the attempt has moved
        r.softrdma.async_event(AsyncEvent.QP_FATAL)
        r.ended(attempt)
        assert attempt.error.message.startswith("verbs async event IBV_EVENT_QP_FATAL")
        assert r.landed(scattered(4)) == 0
        assert not attempt.drained


@pytest.mark.parametrize("status", [WcStatus.REMOTE_ACCESS, WcStatus.GENERAL])
def test_completion_error_drains_a_read(rig, status):
    """Any completion error leaves the queue pair in error: a READ is drained, a WRITE is not."""
    for op in Op:
        r = rig()
        path = r.connect(r.far())
        r.softrdma.fail_next(status)
        attempt = r.moved(op, path, scattered(1))
        assert attempt.state is AttemptState.FAILED
        assert attempt.drained is (op is Op.READ)


def test_stopped_peer_does_not_stop_the_interpreter(rig):
    """While ``prepare`` waits for a stopped peer's engine, other Python threads run on: the
    engine's CreateSession alone would hold the interpreter lock for seconds."""
    r = rig(control_timeout_ms=1500)
    far = r.far()
    r.there = [far.register(NBYTES) for _ in range(2)]
    peer = r.answer(r.transport.connect(far.info))
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    far.stop()
    thread.start()
    try:
        preparing = r.transport.prepare(peer, [(r.regions[0], r.there[0].descriptor)])
        began = time.monotonic()
        _, error = r.outcome(preparing)
        took = time.monotonic() - began
    finally:
        stop.set()
        thread.join()
        far.resume()
    assert isinstance(error, HandshakeError)
    assert "errno=11" in error.engine.message
    gaps = np.diff([began, *(t for t in ticks if began < t < began + took), began + took])
    assert max(gaps) < took / 3, f"no thread ran for {max(gaps):.2f} of {took:.2f} s"
    r.peer = peer
    path = r.prepare()
    assert r.read(path, scattered(2)).state is AttemptState.DONE


def test_close_with_a_thread_inside_the_engine(rig):
    """``close`` waits for a post that is inside the engine, up to its deadline, and never ends the
    engine under it."""
    r = rig(max_send_wr=16, own_admission=False)
    path = r.connect(r.far())
    outcome = []

    def post():
        for i in range(200):
            try:
                outcome.append(r.transport.post(Op.READ, path, scattered(8, first=i % 16)))
            except (BackpressureError, TransportError) as error:
                outcome.append(error)
            except Exception as error:
                outcome.append(error)
                return

    thread = threading.Thread(target=post)
    thread.start()
    r.until(lambda: len(outcome) > 20, "the thread posts")
    left = r.transport.close(5.0)
    thread.join(10)
    assert not thread.is_alive()
    attempts = [a for a in outcome if hasattr(a, "drained")]
    assert attempts
    assert all(a.terminal for a in attempts)
    assert left == []


def test_descriptor_of_another_size_is_refused(rig):
    """A descriptor whose engine data says something else than itself is refused by ``prepare``."""
    r = rig()
    far = r.far()
    r.there = [far.register(NBYTES) for _ in range(2)]
    peer = r.answer(r.transport.connect(far.info))
    here, good = r.regions[0], r.there[0].descriptor
    for wrong in (
        attrs.evolve(good, nbytes=2 * NBYTES),
        attrs.evolve(good, data=here.descriptor.data),
        attrs.evolve(good, data=good.data[:-9]),
    ):
        _, error = r.outcome(r.transport.prepare(peer, [(here, wrong)]))
        assert isinstance(error, HandshakeError)
        assert "descriptor" in error.message


LEAVE = """
import os, signal, sys
import numpy as np
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.core.memory import Descriptor, span_of
from kvxfer.core.transport import PeerInfo

def answer(pollable):
    while pollable.poll() == (None, None):
        pass
    return pollable.poll()[0]

info = PeerInfo(transport="moriio", incarnation=sys.argv[1], data=bytes.fromhex(sys.argv[2]))
there = Descriptor(
    transport="moriio", incarnation=sys.argv[1], region_id=0, nbytes=int(sys.argv[3]),
    data=bytes.fromhex(sys.argv[4]),
)
transport = MoriioTransport(MoriioConfig(control_timeout_ms=1000, rehearse=False))
here = transport.register(span_of(np.zeros(there.nbytes, np.uint8)))
peer = answer(transport.connect(info))
os.kill(int(sys.argv[5]), signal.SIGSTOP)
preparing = transport.prepare(peer, [(here, there)])
while not transport._generations.current.gate._inside:
    assert preparing.poll() == (None, None)
"""


def test_exit_with_a_thread_inside_the_engine(rig):
    """A process that ends while its engine waits for a silent peer ends with status 0: the exit
    waits for the engine, which would otherwise abort."""
    r = rig()
    far = r.far()
    there = far.register(NBYTES).descriptor
    arguments = [far.info.incarnation, far.info.data.hex(), str(NBYTES), there.data.hex()]
    try:
        done = subprocess.run(
            [sys.executable, "-c", LEAVE, *arguments, str(far.pid)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        far.resume()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
