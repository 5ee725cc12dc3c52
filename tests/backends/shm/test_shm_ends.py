"""Dead, stopped and fenced peers; close; and nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from shm_child import descriptor_from_json, descriptor_to_json, info_from_json, info_to_json
from shm_rig import LIMIT, answer, error_of, noise, over, until

from kvxfer.backends.shm import ShmTransport, jobs, messages
from kvxfer.backends.shm.protocol import decode_address
from kvxfer.core.attempt import AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import PeerLostError, StaleError

MIB = 1 << 20


class Gate:
    """Holds copy threads before they copy, until it is opened."""

    def __init__(self, monkeypatch):
        self.inside = threading.Semaphore(0)
        self.open = threading.Event()
        real = jobs.CopyJob._copy_mapped

        def held(job, target, source, size, scratch):
            self.inside.release()
            assert self.open.wait(LIMIT)
            real(job, target, source, size, scratch)

        monkeypatch.setattr(jobs.CopyJob, "_copy_mapped", held)

    def entered(self, count=1):
        for _ in range(count):
            assert self.inside.acquire(timeout=LIMIT)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def pages(count, start=0):
    offsets = np.arange(start, start + count) * 4096
    return Batch([0] * count, offsets, offsets, [4096] * count)


def path_to(near, child, size, *, place="mapped", near_mapped=True):
    info = child.open()
    far = child.register(nbytes=size, mapped=place == "mapped", fill=1)
    here, region = near.register(size, mapped=near_mapped)
    peer = near.connect(info_from_json(info))
    return here, near.prepare(peer, [(region, descriptor_from_json(far))])


@pytest.mark.parametrize(
    ("op", "place"), [(Op.READ, "mapped"), (Op.WRITE, "mapped"), (Op.READ, "in_place")]
)
def test_peer_killed_while_copies_run(near, make_child, op, place):
    """kill -9 in the middle of a stream of attempts: each ends, DONE with the right bytes or FAILED
    as lost; all are drained, the peer is known to be gone, later posts are refused."""
    child = make_child()
    size = 16 * MIB
    here, path = path_to(near, child, size, place=place)
    attempts, lost = [], None
    deadline = time.monotonic() + LIMIT
    while lost is None:
        assert time.monotonic() < deadline, "posting to a dead peer never failed"
        try:
            attempts.append(near.transport.post(op, path, pages(4096)))
        except PeerLostError as error:
            lost = error
        if len(attempts) == 3:
            child.kill()
        if len(attempts) > 3:
            until(lambda: attempts[-1].terminal, "an attempt ended")
    over(attempts)
    assert lost.message.startswith(messages.PEER_GONE.text)
    assert not path.peer.alive
    failed = [a for a in attempts if a.state is AttemptState.FAILED]
    for attempt in failed:
        assert attempt.error.message.startswith(messages.PEER_GONE.text), attempt.error
    if op is Op.READ and len(failed) < len(attempts):
        assert (here == noise(1, size)).all()
    fence = answer(near.transport.disconnect(path.peer))
    assert fence.done
    assert not path.undrained


@pytest.mark.parametrize("op", list(Op))
def test_death_seen_after_the_copy(near, make_child, gate, op):
    """The owner dies while the last copy runs.  A READ is DONE: what a dead process left in its
    memory file is intact.  A WRITE is FAILED: nobody will ever look at it."""
    child = make_child()
    here, path = path_to(near, child, 4096 * 4)
    here[:] = 3
    attempt = near.transport.post(op, path, pages(4))
    gate.entered()
    child.kill()
    gate.open.set()
    over([attempt])
    if op is Op.READ:
        assert attempt.state is AttemptState.DONE
        assert (here == noise(1, 4096 * 4)).all()
    else:
        assert attempt.state is AttemptState.FAILED
        assert attempt.error.message.startswith(messages.PEER_GONE.text)


def test_queued_copies_of_a_dead_peer_are_dropped(make_near, make_child, gate):
    """What had not started when the peer died fails at once, without waiting for a thread."""
    near = make_near(workers=1)
    child = make_child()
    _, path = path_to(near, child, 4096 * 4)
    running = near.transport.post(Op.READ, path, pages(4))
    gate.entered()
    queued = near.transport.post(Op.READ, path, pages(2))
    child.kill()
    over([queued])
    assert queued.state is AttemptState.FAILED
    assert queued.error.message.startswith((messages.PEER_GONE.text, messages.STOPPED.text))
    assert not running.terminal
    gate.open.set()
    over([running])


def test_alive_turns_false_without_traffic(near, make_child):
    """The end of an idle peer is noticed by itself, and the waker is called."""
    child = make_child()
    _, path = path_to(near, child, 4096)
    woken = threading.Event()
    near.transport.on_change(woken.set)
    assert path.peer.alive
    woken.clear()
    child.kill()
    until(lambda: not path.peer.alive, "the end noticed")
    assert woken.wait(LIMIT)
    lost = near.transport.lost_peers()
    assert lost == [path.peer]
    assert near.transport.lost_peers() == []
    # Its memory was let go of.
    until(lambda: not path.peer.mappings, "unmapped")


def test_connect_to_a_stopped_peer_is_bounded(make_near, make_child):
    """A peer that stands still: connect and prepare answer by the handshake time-out."""
    near = make_near(handshake_timeout=0.3)
    child = make_child()
    info = info_from_json(child.open())
    far = child.register(nbytes=4096)
    _, region = near.register(4096)
    peer = near.connect(info)
    child.stop()
    connecting = near.transport.connect(info)
    preparing = near.transport.prepare(peer, [(region, descriptor_from_json(far))])
    for pollable in (connecting, preparing):
        assert error_of(pollable).message.startswith(messages.NOT_ANSWERING.text)
    child.resume()


def test_stopped_peer_is_read_all_the_same(near, make_child):
    """READ and WRITE need nothing of the peer's process: they work while it stands still."""
    child = make_child()
    here, path = path_to(near, child, MIB)
    child.stop()
    for op in Op:
        over([near.transport.post(op, path, pages(256))])
        assert (here == noise(1, MIB)).all()
    child.resume()


# ---- fences -------------------------------------------------------------------------------


def writer(near, child):
    """Have ``child`` hold our memory mapped writable; ``(array, child's path index, our peer)``."""
    info = child.open()
    child.register(nbytes=MIB, fill=9)
    array, region = near.register(MIB)
    peer = child.connected(info=info_to_json(near.transport.local_info()))
    path = child.prepared(peer["index"], [[0, descriptor_to_json(region.descriptor)]])
    assert "index" in path, path
    return array, path["index"], near.connect(info_from_json(info))


WHOLE = [[0], [0], [0], [MIB]]


def test_fence_takes_our_memory_back(near, make_child):
    """The receiver's fence: the writer unmaps our memory before the fence is done, its later posts
    are refused as fenced, and it is let in again only after we connect to it again."""
    child = make_child()
    array, path, peer = writer(near, child)
    assert child.facts()["mapped"] >= 2
    assert child.ended(child.post(op="write", path=path, batch=WHOLE))["state"] == "done"
    assert (array == noise(9, MIB)).all()
    fence = answer(near.transport.fence(peer))
    assert fence.done
    assert child.facts()["mapped"] == 1  # its own
    array[:] = 1
    with pytest.raises(Exception, match=messages.FENCED.text):
        child.post(op="write", path=path, batch=WHOLE)
    assert (array == 1).all()
    info = info_to_json(near.transport.local_info())
    refused = child.connected(info=info)
    assert refused["error"] == "StaleError"
    assert refused["text"].startswith(messages.FENCED.text)
    near.connect(peer.info)
    assert "index" in child.connected(info=info)


def test_fence_of_a_stopped_writer_is_not_proven(make_near, make_child):
    """A live process that cannot confirm may still write: the fence says so, and which process it
    is.  Once that process has ended, the fence is proven."""
    near = make_near(fence_timeout=0.3)
    child = make_child()
    _, _, peer = writer(near, child)
    child.stop()
    fence = answer(near.transport.fence(peer))
    assert not fence.done
    assert f"process {child.process.pid}" in fence.reason
    assert "mapped writable" in fence.reason
    child.kill()
    until(lambda: answer(near.transport.fence(peer)).done, "proof by the end of the process")


def test_fence_of_a_stopped_writer_that_wakes_up(make_near, make_child):
    """The writer runs again while the fence waits: it confirms, and the fence is done."""
    near = make_near(fence_timeout=LIMIT)
    child = make_child()
    _, _, peer = writer(near, child)
    child.stop()
    pending = near.transport.fence(peer)
    assert pending.poll() == (None, None)
    child.resume()
    assert answer(pending).done


def test_fence_of_a_reader_needs_no_answer(make_near, make_child):
    """Who only mapped memory for reading cannot write: the fence is done though it is stopped."""
    near = make_near(fence_timeout=LIMIT)
    child = make_child()
    info = child.open()
    child.register(nbytes=4096)
    from kvxfer.backends.shm import PeerAccess

    _, region = near.register(4096, peers=PeerAccess.READ)
    peer = child.connected(info=info_to_json(near.transport.local_info()))
    child.prepared(peer["index"], [[0, descriptor_to_json(region.descriptor)]])
    ours = near.connect(info_from_json(info))
    child.stop()
    started = time.monotonic()
    assert answer(near.transport.fence(ours)).done
    assert time.monotonic() - started < LIMIT / 2
    child.resume()


def test_writer_that_hangs_up_without_a_word(make_near, make_child):
    """A connection that breaks proves nothing while the process lives; its end does."""
    near = make_near(fence_timeout=0.3)
    child = make_child()
    _, _, peer = writer(near, child)
    child.hang_up(peer=0)
    holders = near.transport._server._holders
    until(lambda: all(h.link is None for h in holders if h.may_write), "the broken connection")
    fence = answer(near.transport.fence(peer))
    assert not fence.done
    child.kill()
    until(lambda: not holders, "the holder forgotten")


def test_our_own_fence_ends_our_attempts(make_near, make_child, gate):
    """Our fence: what is queued fails, what runs is waited for, all is drained when it is done."""
    near = make_near(workers=1)
    child = make_child()
    _, path = path_to(near, child, 4096 * 8)
    attempts = [near.transport.post(Op.READ, path, pages(4, start=i)) for i in (0, 4)]
    gate.entered()
    pending = near.transport.fence(path.peer)
    over(attempts[1:])
    assert pending.poll() == (None, None)
    gate.open.set()
    assert answer(pending).done
    assert all(a.drained for a in attempts)
    assert attempts[1].state is AttemptState.FAILED


def test_fence_over_a_stuck_copy_is_honest(make_near, make_child, gate):
    """A copy that does not return by ``fence_timeout``: not done, with the number of attempts."""
    near = make_near(fence_timeout=0.2)
    child = make_child()
    _, path = path_to(near, child, 4096)
    attempt = near.transport.post(Op.READ, path, pages(1))
    gate.entered()
    fence = answer(near.transport.fence(path.peer))
    assert not fence.done
    assert "1 attempts are still running" in fence.reason
    gate.open.set()
    over([attempt])
    assert answer(near.transport.fence(path.peer)).done


def test_disconnect_lets_go_of_the_peers_memory(near, make_child):
    """After disconnect nothing of the peer is mapped here, and the peer object is over."""
    child = make_child()
    _, path = path_to(near, child, MIB)
    peer = path.peer
    assert answer(near.transport.disconnect(peer)).done
    assert not peer.mappings
    with pytest.raises(StaleError):
        near.transport.post(Op.READ, path, pages(1))
    assert answer(near.transport.disconnect(peer)).done


def test_disconnect_while_memory_is_under_way(near, make_child):
    """What a peer hands over after we have left is not taken, and does not hide that we left: the
    peer has our word that nothing of its memory is mapped here."""
    child = make_child()
    info = info_from_json(child.open())
    far = child.register(nbytes=MIB)
    _, region = near.register(MIB)
    peer = near.connect(info)
    child.stop()
    preparing = near.transport.prepare(peer, [(region, descriptor_from_json(far))])
    assert preparing.poll() == (None, None)
    leaving = near.transport.disconnect(peer)
    assert isinstance(error_of(preparing), StaleError)
    assert answer(leaving).done
    child.resume()
    until(lambda: child.facts()["holders"] == 0, "the peer knows that we left")
    assert not peer.mappings


def test_cancel_stops_between_chunks(make_near, make_child, gate):
    """A cancelled attempt does not start its remaining chunks; it fails, drained."""
    near = make_near(workers=1)
    child = make_child()
    here, path = path_to(near, child, 2 * jobs.CHUNK_BYTES)
    attempt = near.transport.post(Op.READ, path, pages(2 * jobs.CHUNK_BYTES // 4096))
    gate.entered()
    attempt.request_cancel()
    gate.open.set()
    over([attempt])
    assert attempt.state is AttemptState.FAILED
    assert attempt.error.message.startswith(messages.STOPPED.text)
    assert not here[jobs.CHUNK_BYTES :].any()


def test_backpressure_is_by_pieces_in_flight(make_near, make_child, gate):
    """Above ``queue_pieces`` a post is refused, nothing of it is queued; afterwards it is taken."""
    from kvxfer.errors import BackpressureError

    near = make_near(queue_pieces=6)
    child = make_child()
    _, path = path_to(near, child, 4096 * 8)
    assert near.transport.capabilities.credits == 6
    first = near.transport.post(Op.READ, path, pages(4))
    with pytest.raises(
        BackpressureError, match="4 pieces are in flight, 3 more exceed 6"
    ) as caught:
        near.transport.post(Op.READ, path, pages(3))
    assert caught.value.engine.message.startswith(messages.QUEUE_FULL.text)
    assert list(path.undrained) == [first]
    gate.open.set()
    over([first])
    over([near.transport.post(Op.READ, path, pages(3))])


# ---- nothing left behind ------------------------------------------------------------------


def test_close_frees_everything(make_child):
    """Descriptors, threads, mappings: as many after ``close`` as before, dead peers included."""
    from shm_rig import Near

    child, dead = make_child(), make_child()
    infos = [child.open(), dead.open()]
    fars = [c.register(nbytes=MIB) for c in (child, dead)]

    def round_trip():
        near = Near()
        for info, far in zip(infos, fars, strict=True):
            here, region = near.register(MIB)
            try:
                peer = near.connect(info_from_json(info))
            except PeerLostError:
                continue
            path = near.prepare(peer, [(region, descriptor_from_json(far))])
            over([near.transport.post(op, path, pages(256)) for op in Op])
            back = child.connected(info=info_to_json(near.transport.local_info()))
            child.prepared(back["index"], [[0, descriptor_to_json(region.descriptor)]])
        assert near.transport.close() == []
        del near, here, region

    def facts():
        gc.collect()  # paths, peers and transports refer to one another
        names = sorted(t.name for t in threading.enumerate())
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:kvxfer" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), names, mapped

    round_trip()
    dead.kill()
    before = facts()
    for _ in range(3):
        round_trip()
    until(lambda: facts() == before, f"{before} again, now {facts()}")
    # The child let go of our memory as well.
    until(lambda: child.facts()["mapped"] == 1, "the child unmapped ours")


def test_close_does_not_wait_for_a_stuck_copy(make_child, gate):
    """A copy that does not return is left behind: ``close`` keeps its deadline and names it."""
    from shm_rig import Near

    near = Near()
    child = make_child()
    _, path = path_to(near, child, 4096)
    attempt = near.transport.post(Op.READ, path, pages(1))
    gate.entered()
    started = time.monotonic()
    left = near.transport.close(0.3)
    assert time.monotonic() - started < 5
    assert left == [attempt]
    assert attempt.state is AttemptState.FAILED
    assert not attempt.drained
    gate.open.set()
    over([attempt])


def test_close_waits_for_writers_to_let_go(near, make_child):
    """After ``close`` a well-behaved writer has unmapped our memory: it can be reused."""
    child = make_child()
    writer(near, child)
    near.transport.close()
    assert child.facts()["mapped"] == 1


def test_a_killed_process_leaves_nothing(make_child):
    """What a process holds has no name in any directory, and its socket name goes with it."""
    child = make_child()
    info = info_from_json(child.open())
    child.register(nbytes=MIB)
    name = decode_address(info.data).socket
    pid = child.process.pid
    held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    with open(f"/proc/{pid}/maps") as maps:
        held += [line.split(maxsplit=5)[-1].strip() for line in maps]
    ours = [path for path in held if "kvxfer" in path and not path.endswith((".py", ".so"))]
    assert ours
    assert all(path.startswith("/memfd:kvxfer") for path in ours), ours

    def bound():
        with open("/proc/net/unix") as sockets:
            return name in sockets.read()

    assert bound()
    child.kill()
    assert not bound()


def test_a_process_that_forgets_to_close_ends(tmp_path):
    """Interpreter exit with an open transport, attempts in flight and live arrays: status 0."""
    code = """
import numpy as np
from kvxfer.backends.shm import ShmTransport, allocate
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
a, b = ShmTransport(), ShmTransport()
x, y = allocate(1 << 22, 'u1'), allocate(1 << 22, 'u1')
rx, ry = a.register(span_of(x)), b.register(span_of(y))
def answer(p):
    while p.poll() == (None, None): pass
    return p.poll()[0]
path = answer(a.prepare(answer(a.connect(b.local_info())), [(rx, ry.descriptor)]))
for _ in range(20): a.post(Op.READ, path, Batch([0], [0], [0], [1 << 22]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_many_transports_come_and_go(near):
    """Peers that connect and close leave no entry in our tables."""
    for _ in range(20):
        other = ShmTransport()
        answer(other.connect(near.transport.local_info()))
        answer(near.transport.connect(other.local_info()))
        other.close()
    server = near.transport._server
    until(lambda: not server._holders, "holders gone")
    until(lambda: not near.transport._clients, "clients gone")
    assert not server._barred
