"""Credits per queue pair, counted as the engine counts, so that posts neither wait nor starve."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest

from kvxfer.backends.moriio.merging import work_requests
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Action, Op
from kvxfer.errors import BackpressureError, TransportError
from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.policies.rules import builtin_rules
from kvxfer.testing.two_sides import BLOCK, NBYTES, scattered


@pytest.mark.parametrize("entries", [1, 2, 4])
def test_work_requests_are_counted_as_the_engine_does(rig, entries):
    """Our count of what the engine makes of a batch equals what it posts to the device: for pieces
    in any order, neighbours on both sides or one, over up to ``max_msg_sge`` scatter entries."""
    r = rig(regions=1, max_msg_sge=entries)
    far = r.far()
    far.connect()
    rng = random.Random(7)
    for _ in range(120):
        local, remote, size, a, b = [], [], [], 0, 0
        for _ in range(rng.randint(1, 60)):
            a, b = a + rng.choice((0, 0, 64)), b + rng.choice((0, 0, 0, 64))
            local.append(a)
            remote.append(b)
            size.append(rng.choice((64, 128, 192)))
            a, b = a + size[-1], b + size[-1]
        order = list(range(len(size)))
        rng.shuffle(order)
        vectors = [np.array([v[i] for i in order]) for v in (local, remote, size)]
        before = r.softrdma.counters().posted
        attempt = r.read(far.path, Batch(np.zeros(len(size), int), *vectors))
        assert attempt.state is AttemptState.DONE
        assert r.softrdma.counters().posted - before == work_requests(*vectors, entries)


def neighbours(pieces, *, at=0):
    """Pieces that the engine merges into one work request."""
    offset = at * BLOCK + np.arange(pieces) * 64
    return Batch(np.zeros(pieces, int), offset, offset, np.full(pieces, 64))


def test_merged_pieces_do_not_starve(rig):
    """Sixteen calls of 32 neighbouring pieces each fill a queue of 16 work requests, not one more
    and not one less."""
    r = rig(max_send_wr=16, sq_backoff_us=1000)
    far = r.far()
    far.connect()
    # A post of more pieces than the depth is the agent's to cut; these are below it.
    with r.softrdma.hold():
        flying = [r.transport.post(Op.READ, far.path, neighbours(16, at=i)) for i in range(16)]
        before = r.softrdma.counters()
        with pytest.raises(BackpressureError, match="16 of 16"):
            r.transport.post(Op.READ, far.path, neighbours(16, at=17))
        assert r.softrdma.counters().refused == before.refused
    for attempt in flying:
        assert r.ended(attempt).state is AttemptState.DONE


@pytest.mark.parametrize("op", list(Op))
def test_every_queue_pair_is_filled(rig, op):
    """Four queue pairs of depth 16 take 64 work requests in posts of any size, and the engine
    refuses none: the queue pair of each call is ours to choose, and a post that finds room in
    several only is cut."""
    r = rig(max_send_wr=16, qp_per_transfer=4)
    far = r.far()
    far.connect()
    assert r.transport.capabilities.credits == 64
    with r.softrdma.hold():
        flying = [r.transport.post(op, far.path, scattered(n)) for n in (10, 10, 9, 12, 4, 6, 6, 7)]
        (connection,) = {lane.whole.connection for lane in far.path.lanes}
        assert [q.in_flight for q in connection.queues] == [16, 16, 16, 16]
        with pytest.raises(BackpressureError, match="64 of 64"):
            r.transport.post(op, far.path, scattered(1))
    for attempt in flying:
        assert r.ended(attempt).state is AttemptState.DONE
    assert [q.in_flight for q in connection.queues] == [0, 0, 0, 0]
    assert r.moved(op, far.path, scattered(16)).state is AttemptState.DONE


def test_regions_share_their_queue(rig):
    """Credits belong to the queue pair, not to the region: posts to two regions of one peer fill
    one queue, those to another peer do not."""
    r = rig(max_send_wr=16)
    one, two = r.far(), r.far()
    one.connect()
    two.connect()
    with r.softrdma.hold():
        flying = [r.transport.post(Op.READ, one.path, scattered(8, pair=p)) for p in (0, 1)]
        with pytest.raises(BackpressureError):
            r.transport.post(Op.READ, one.path, scattered(1))
        flying.append(r.transport.post(Op.READ, two.path, scattered(16)))
    assert one.path.queues[0] == one.path.queues[1] != two.path.queues[0]
    for attempt in flying:
        assert r.ended(attempt).state is AttemptState.DONE


def test_a_device_that_grants_less(rig, softrdma):
    """Where the device's queues are shallower than asked for, the first refusal tells, and from
    then on calls are cut and admitted to fit."""
    softrdma.device(max_send_wr=16)
    r = rig(max_send_wr=64)
    far = r.far()
    far.connect()
    with r.softrdma.hold():
        first = r.transport.post(Op.READ, far.path, scattered(16))
        with pytest.raises(BackpressureError) as refused:
            r.transport.post(Op.READ, far.path, scattered(8, first=16))
        assert "max=16" in refused.value.engine.message
        # Kept like that of a call that failed: an earlier call of the engine's may still hold it.
        assert len(r.transport._poster._statuses._failed) == 1
        with pytest.raises(BackpressureError, match="16 of 16"):
            r.transport.post(Op.READ, far.path, scattered(8, first=16))
    r.ended(first)
    with pytest.raises(TransportError, match="more than the 16") as too_large:
        r.transport.post(Op.READ, far.path, scattered(30))
    verdict = ClassifierRegistry(builtin_rules()).classify_exception(
        too_large.value, "moriio", Op.READ
    )
    assert (verdict.action, verdict.most_pieces) == (Action.SPLIT, 16)
    for part in scattered(30).cut(max_pieces=verdict.most_pieces, max_nbytes=2**40):
        attempt = r.read(far.path, part)
        assert (attempt.state, attempt.accepted) == (AttemptState.DONE, Accepted.ALL)
    assert r.landed(scattered(30)) == 30


def test_notifications_take_their_place(rig):
    """With the engine's notifications on, every call takes one place more, and a full queue does
    not fail good data."""
    r = rig(max_send_wr=16, enable_notification=True)
    far = r.far(enable_notification=True)
    far.connect()
    assert r.transport.capabilities.max_pieces == 15
    with r.softrdma.hold():
        first = r.transport.post(Op.READ, far.path, scattered(15))
        with pytest.raises(BackpressureError, match="16 of 16"):
            r.transport.post(Op.READ, far.path, scattered(1))
    assert r.ended(first).state is AttemptState.DONE


def test_layers_share_one_set_of_lists(rig):
    """Layers that lie one behind the other in one region take one set of lists once their sessions
    are there; before that, and where one side has no such view, lists of their own: the same bytes
    either way, in one call per layer."""
    size = NBYTES // 4
    r = rig(regions=1)
    views = tuple((i * size, size) for i in range(1, 4))
    array = np.zeros(NBYTES, np.uint8)
    here = span_of(array)
    region = r.transport.register(attrs.evolve(here, views=views))
    twin = type(r)(r.softrdma, regions=0)  # the far side, in this process, with the same views
    try:
        source = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
        there = twin.transport.register(attrs.evolve(span_of(source), views=views))
        peer = r.answer(r.transport.connect(twin.transport.local_info()))
        path = r.answer(r.transport.prepare(peer, [(region, twin.transport.descriptor(there))]))
        bases = [i * size for i in range(4)]
        offset = np.arange(6) * 2048
        batch = Batch.repeated([0] * 4, bases, bases, offset + 512, offset, np.full(6, 512))
        shifted = path.lanes[0]._shifted
        for _ in range(2):
            array[:] = 0
            before = r.softrdma.counters().posted
            attempt = r.read(path, batch)
            assert attempt.state is AttemptState.DONE
            assert r.softrdma.counters().posted - before == 24
            expected = np.zeros(NBYTES, np.uint8)
            for base in bases:
                for at in offset.tolist():
                    a = base + at
                    expected[a + 512 : a + 1024] = source[a : a + 512]
            assert np.array_equal(array, expected)
            r.until(lambda: all(shifted.values()), "sessions of every base")
        assert set(shifted) == {(b, b) for b in bases[1:]}
        (queue,) = path.lanes[0].whole.connection.queues
        assert queue.in_flight == 0
        odd = Batch.repeated([0], [size], [2 * size + 64], [0], [0], [512])
        assert r.read(path, odd).state is AttemptState.DONE
        assert np.array_equal(array[size : size + 512], source[2 * size + 64 : 2 * size + 576])
    finally:
        twin.close()
