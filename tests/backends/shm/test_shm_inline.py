"""Small copies that ``post`` makes itself: as good as those of the threads, and bounded."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from shm_child import descriptor_from_json, info_from_json
from shm_rig import LIMIT, answer, noise, over

from kvxfer.backends.shm import jobs
from kvxfer.backends.shm.inline import INLINE_PIECES
from kvxfer.core.attempt import AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op

PAGE = 4096


class Gate:
    """Holds the copies of one kind of thread before they copy, until it is opened."""

    def __init__(self, monkeypatch, holds):
        self.inside = threading.Semaphore(0)
        self.open = threading.Event()
        real = jobs.CopyJob._copy_mapped

        def held(job, target, source, size, scratch):
            if holds(threading.current_thread().name):
                self.inside.release()
                assert self.open.wait(LIMIT)
            real(job, target, source, size, scratch)

        monkeypatch.setattr(jobs.CopyJob, "_copy_mapped", held)

    def entered(self):
        assert self.inside.acquire(timeout=LIMIT)


def copies(name):
    return name == "kvxfer-shm-copy"


@pytest.fixture
def gate(monkeypatch):
    """Holds the copy threads."""
    gate = Gate(monkeypatch, copies)
    yield gate
    gate.open.set()


@pytest.fixture
def own_gate(monkeypatch):
    """Holds whoever posts."""
    gate = Gate(monkeypatch, lambda name: not copies(name))
    yield gate
    gate.open.set()


def pages(count, start=0):
    offsets = np.arange(start, start + count) * PAGE
    return Batch([0] * count, offsets, offsets, [PAGE] * count)


def path_to(near, child, size, *, mapped=True):
    info = child.open()
    far = child.register(nbytes=size, mapped=mapped, fill=1)
    here, region = near.register(size)
    peer = near.connect(info_from_json(info))
    return here, near.prepare(peer, [(region, descriptor_from_json(far))])


@pytest.mark.parametrize("op", list(Op))
def test_a_small_copy_is_made_in_post(make_near, make_child, op):
    """It is over when ``post`` returns, ``progress`` tells of it, and no thread was needed."""
    near, child = make_near(inline_nbytes=1 << 20), make_child()
    here, path = path_to(near, child, 16 * PAGE)
    here[:] = 3
    attempt = near.transport.post(op, path, pages(16))
    assert attempt.state is AttemptState.DONE, attempt.error
    assert attempt.drained
    assert near.transport.progress() == [attempt]
    assert not path.undrained
    assert not path.peer.jobs
    assert not near.transport._pool._threads
    if op is Op.READ:
        assert (here == noise(1, 16 * PAGE)).all()
    else:
        assert (child.data(0) == 3).all()


def test_a_stopped_peer_holds_up_nothing(make_near, make_child):
    """Its memory is there while it stands still: the copy does not wait for it."""
    near, child = make_near(inline_nbytes=1 << 20), make_child()
    here, path = path_to(near, child, PAGE)
    child.stop()
    attempt = near.transport.post(Op.READ, path, pages(1))
    assert attempt.state is AttemptState.DONE, attempt.error
    assert (here == noise(1, PAGE)).all()
    child.resume()


def test_no_more_than_so_many_bytes_between_two_looks(make_near, make_child, gate):
    """What exceeds the limit is for the threads, until ``progress`` was called."""
    near, child = make_near(inline_nbytes=4 * PAGE), make_child()
    here, path = path_to(near, child, 16 * PAGE)
    post, progress = near.transport.post, near.transport.progress
    small = [post(Op.READ, path, pages(2, start)) for start in (0, 2)]
    assert all(a.state is AttemptState.DONE for a in small)
    handed = [post(Op.READ, path, pages(1, 4))]
    gate.entered()
    assert not handed[0].terminal
    assert set(progress()) == set(small)
    assert post(Op.READ, path, pages(4, 5)).state is AttemptState.DONE
    progress()
    handed.append(post(Op.READ, path, pages(5, 9)))
    assert not handed[1].terminal
    gate.open.set()
    over(handed)
    assert (here[: 14 * PAGE] == noise(1, 16 * PAGE)[: 14 * PAGE]).all()


def test_no_more_than_so_many_pieces(make_near, make_child, gate):
    """Nor more pieces, however small."""
    near, child = make_near(inline_nbytes=1 << 30), make_child()
    _, path = path_to(near, child, 16 * INLINE_PIECES)

    def bytes_of(count):
        offsets = np.arange(count) * 8
        return Batch([0] * count, offsets, offsets, [1] * count)

    many = near.transport.post(Op.READ, path, bytes_of(INLINE_PIECES + 1))
    gate.entered()
    assert near.transport.post(Op.READ, path, bytes_of(INLINE_PIECES)).terminal
    one = near.transport.post(Op.READ, path, bytes_of(1))
    assert not one.terminal
    gate.open.set()
    over([many, one])


def test_chunks_that_no_thread_has_begun(make_near, make_child, gate, monkeypatch):
    """Of several chunks ``post`` copies one, and the others as well if no thread comes to take
    them: as far as the limit goes."""
    monkeypatch.setattr(jobs, "CHUNK_BYTES_MIN", PAGE)
    near, child = make_near(workers=1, inline_nbytes=6 * PAGE), make_child()
    here, path = path_to(near, child, 16 * PAGE)
    post = near.transport.post
    busy = post(Op.READ, path, pages(14))  # two chunks of more than the limit: for the thread
    gate.entered()
    assert not busy.terminal
    assert post(Op.READ, path, pages(6)).state is AttemptState.DONE  # two of three pages each
    assert near.transport.progress()
    part = post(Op.READ, path, pages(9, 4))  # four pages and five
    assert not part.terminal
    assert near.transport._inline._bytes_left == PAGE
    queued = near.transport._pool._queues[path.peer]
    assert len(queued) == 2
    assert near.transport.progress() == []
    more = post(Op.READ, path, Batch([0] * 4, *[np.arange(4) * 2 * PAGE] * 2, [PAGE] * 4))
    assert more.state is AttemptState.DONE
    gate.open.set()
    over([busy, part])
    assert part.state is AttemptState.DONE
    assert (here[: 14 * PAGE] == noise(1, 16 * PAGE)[: 14 * PAGE]).all()


def test_a_shared_transfer_takes_its_chunks_back(make_near, make_child, gate, monkeypatch):
    """Three chunks, two of which fit: the only thread is busy, so ``post`` copies both."""
    monkeypatch.setattr(jobs, "CHUNK_PIECES", 2)
    near, child = make_near(workers=1, inline_nbytes=4 * PAGE), make_child()
    here, path = path_to(near, child, 16 * PAGE)
    busy = near.transport.post(Op.READ, path, Batch([0], [0], [0], [5 * PAGE]))
    gate.entered()
    part = near.transport.post(Op.READ, path, pages(6, 5))
    assert not part.terminal
    assert near.transport._inline._bytes_left == 0
    assert len(near.transport._pool._queues[path.peer]) == 1
    gate.open.set()
    over([busy, part])
    assert (here[: 11 * PAGE] == noise(1, 16 * PAGE)[: 11 * PAGE]).all()


def test_memory_in_place_is_for_the_threads(make_near, make_child):
    """A page over there may have to be fetched first, for as long as that takes."""
    near, child = make_near(inline_nbytes=1 << 20), make_child()
    here, path = path_to(near, child, PAGE, mapped=False)
    (attempt,) = over([near.transport.post(Op.READ, path, pages(1))])
    assert attempt.state is AttemptState.DONE
    assert near.transport._pool._threads
    assert (here == noise(1, PAGE)).all()


def test_nothing_is_copied_in_post_where_that_is_off(near, make_child, gate):
    """``inline_nbytes=0``."""
    _, path = path_to(near, make_child(), PAGE)
    attempt = near.transport.post(Op.READ, path, pages(1))
    gate.entered()
    assert not attempt.terminal
    gate.open.set()
    over([attempt])


class Posting:
    """A post on a thread of its own, held inside the copy."""

    def __init__(self, near, path, gate):
        self.attempts = []
        self.thread = threading.Thread(
            target=lambda: self.attempts.append(near.transport.post(Op.READ, path, pages(1)))
        )
        self.thread.start()
        gate.entered()

    def over(self, gate):
        gate.open.set()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()
        return self.attempts[0]


def test_a_fence_waits_for_it(make_near, make_child, own_gate):
    """While a post copies, the peer's memory stays mapped and no fence is done."""
    near, child = make_near(inline_nbytes=1 << 20), make_child()
    _, path = path_to(near, child, PAGE)
    posting = Posting(near, path, own_gate)
    fence = near.transport.fence(path.peer)
    leaving = near.transport.disconnect(path.peer)
    # A task of the handover thread that was queued after theirs has run.
    ran = threading.Event()
    near.transport._loop.call(ran.set)
    assert ran.wait(LIMIT)
    assert fence.poll() == leaving.poll() == (None, None)
    assert path.peer.mappings
    attempt = posting.over(own_gate)
    assert answer(fence).done
    assert answer(leaving).done
    assert not path.peer.mappings
    assert attempt.terminal
    assert attempt.drained


def test_close_waits_for_it_and_no_longer_than_asked(make_near, make_child, own_gate):
    """A copy that does not return is among what ``close`` tells of, and memory stays mapped."""
    near, child = make_near(inline_nbytes=1 << 20), make_child()
    _, path = path_to(near, child, PAGE)
    posting = Posting(near, path, own_gate)
    (left,) = near.transport.close(0.2)
    assert not left.drained
    assert path.peer.mappings
    assert posting.over(own_gate) is left
    assert left.drained
    assert not path.peer.mappings


def test_another_thread_does_not_wait_for_it(make_near, make_child, own_gate):
    """Posts of two paths at once: the second copy is for the threads."""
    near, child = make_near(inline_nbytes=1 << 20), make_child()
    _, path = path_to(near, child, PAGE)
    (region, descriptor) = path.pairs[0]
    other = near.prepare(path.peer, [(region, descriptor)])
    posting = Posting(near, path, own_gate)
    (attempt,) = over([near.transport.post(Op.READ, other, pages(1))])
    assert attempt.state is AttemptState.DONE
    assert posting.over(own_gate).state is AttemptState.DONE


def test_interrupted(make_near, make_child, monkeypatch):
    """Ctrl-C while ``post`` copies: the exception comes out, nothing is left under way."""
    near, child = make_near(inline_nbytes=1 << 20), make_child()
    _, path = path_to(near, child, PAGE)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jobs.CopyJob, "_copy_mapped", interrupt)
        with pytest.raises(KeyboardInterrupt):
            near.transport.post(Op.READ, path, pages(1))
    (attempt,) = near.transport.progress()
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained
    assert not path.undrained
    assert not path.peer.jobs
    assert near.transport.post(Op.READ, path, pages(1)).state is AttemptState.DONE
