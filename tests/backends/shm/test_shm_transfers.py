"""Bytes move between two real processes, whatever kind of memory they lie in."""

from __future__ import annotations

import numpy as np
import pytest
from shm_child import descriptor_from_json, descriptor_to_json, info_from_json, info_to_json
from shm_rig import Near, Raised, noise, over

from kvxfer.backends.shm import CopierChoice, PeerAccess
from kvxfer.core.attempt import AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import InvalidInputError

MIB = 1 << 20


@pytest.fixture(params=[0, 1 << 30], ids=["threads", "post"])
def near(request, each_copier):
    """Transports that copy in C, and in Python, on threads or in ``post`` where they can:
    everything here holds for all of them."""
    side = Near(copier=CopierChoice(each_copier.name), inline_nbytes=request.param)
    yield side
    assert side.transport.copier.name == each_copier.name
    side.transport.close()


def scattered(rng, near_bytes, far_bytes, sizes):
    """Pieces of the given sizes at places that do not overlap, in shuffled slots."""
    slot = max(sizes)
    near = rng.permutation(near_bytes // slot)[: len(sizes)] * slot
    far = rng.permutation(far_bytes // slot)[: len(sizes)] * slot
    return Batch([0] * len(sizes), near, far, sizes)


@pytest.mark.parametrize("place", ["mapped", "in_place"])
def test_read_equal_pieces(near, make_child, place):
    """READ of few and many equal pieces, of any size, at random places: every byte right, no other
    byte touched."""
    child = make_child()
    peer = near.connect(info_from_json(child.open()))
    for seed, (unit, count) in enumerate(
        [(1, 3), (64, 700), (4096, 900), (4096, 15), (12288, 100), (16384, 200), (3 * MIB, 3)]
    ):
        size = unit * (count + 7)
        far = child.register(nbytes=size, mapped=place == "mapped", fill=seed)
        here, region = near.register(size, mapped=False)
        path = near.prepare(peer, [(region, descriptor_from_json(far))])
        batch = scattered(np.random.default_rng(seed), size, size, [unit] * count)
        (attempt,) = over([near.transport.post(Op.READ, path, batch)])
        assert attempt.state is AttemptState.DONE, attempt.error
        expected = np.zeros(size, np.uint8)
        source = noise(seed, size)
        for i in range(count):
            a, b = int(batch.local[i]), int(batch.remote[i])
            expected[a : a + unit] = source[b : b + unit]
        assert (here == expected).all(), f"{count} pieces of {unit} bytes"


@pytest.mark.parametrize("op", list(Op))
def test_odd_pieces_over_many_pairs(near, make_child, op):
    """Pieces of odd sizes over several regions, neighbours among them, arrive exactly."""
    child = make_child()
    peer = near.connect(info_from_json(child.open()))
    sizes = [10_007, 65_536, 4097, 300_000]
    pairs, here = [], []
    for i, size in enumerate(sizes):
        array, region = near.register(size)
        array[:] = noise(100 + i, size)
        here.append(array)
        pairs.append((region, descriptor_from_json(child.register(nbytes=size, fill=i))))
    path = near.prepare(peer, pairs)
    rng = np.random.default_rng(3)
    pair, local, length = [], [], []
    for i, size in enumerate(sizes):
        cuts = np.unique(np.concatenate(([0, size], rng.integers(1, size, 40))))
        kept = rng.random(len(cuts) - 1) < 0.7
        pair += [i] * int(kept.sum())
        local += cuts[:-1][kept].tolist()
        length += np.diff(cuts)[kept].tolist()
    (attempt,) = over([near.transport.post(op, path, Batch(pair, local, local, length))])
    assert attempt.state is AttemptState.DONE, attempt.error
    for i, size in enumerate(sizes):
        mine, theirs = noise(100 + i, size), noise(i, size)
        target, source = (mine, theirs) if op is Op.READ else (theirs, mine)
        for p, at, n in zip(pair, local, length, strict=True):
            if p == i:
                target[at : at + n] = source[at : at + n]
        assert (here[i] == mine).all()
        assert (child.data(i) == theirs).all()


def test_one_path_over_mapped_memory_and_memory_in_place(near, make_child):
    """One READ may draw on both kinds of memory at once."""
    child = make_child()
    peer = near.connect(info_from_json(child.open()))
    size = 64 * 1024
    pairs, here = [], []
    for i in range(4):
        array, region = near.register(size)
        here.append(array)
        far = child.register(nbytes=size, mapped=i % 2 == 0, fill=i)
        pairs.append((region, descriptor_from_json(far)))
    path = near.prepare(peer, pairs)
    pair = np.tile(np.arange(4), 16)
    offset = np.repeat(np.arange(16), 4) * 4096
    (attempt,) = over(
        [near.transport.post(Op.READ, path, Batch(pair, offset, offset, [4096] * 64))]
    )
    assert attempt.state is AttemptState.DONE, attempt.error
    for i in range(4):
        assert (here[i] == noise(i, size)).all()


def test_write_to_memory_that_is_not_in_a_file_is_refused(near, make_child):
    """WRITE never goes into memory in place: refused by ``post``, which names the remedies."""
    child = make_child()
    peer = near.connect(info_from_json(child.open()))
    far = child.register(nbytes=4096, mapped=False, fill=5)
    mapped = child.register(nbytes=4096, fill=6)
    _, region = near.register(4096)
    path = near.prepare(peer, [(region, descriptor_from_json(d)) for d in (far, mapped)])
    with pytest.raises(InvalidInputError, match=r"allocate\(\).*share_storage\(\)"):
        near.transport.post(Op.WRITE, path, Batch([1, 0], [0, 0], [0, 0], [64, 64]))
    assert not path.undrained
    assert (child.data(0) == noise(5, 4096)).all()
    # The refusal is about that region: the other one of the same path takes a WRITE.
    (attempt,) = over([near.transport.post(Op.WRITE, path, Batch([1], [0], [0], [64]))])
    assert attempt.state is AttemptState.DONE
    assert (child.data(1)[:64] == 0).all()


def test_write_to_memory_that_peers_only_read_is_refused(near, make_child):
    """Memory made for readers is mapped read-only: WRITE is refused, READ works."""
    child = make_child()
    peer = near.connect(info_from_json(child.open()))
    far = child.register(nbytes=4096, access="read", fill=7)
    here, region = near.register(4096)
    path = near.prepare(peer, [(region, descriptor_from_json(far))])
    with pytest.raises(InvalidInputError, match=r"peers=PeerAccess\.READ_WRITE"):
        near.transport.post(Op.WRITE, path, Batch([0], [0], [0], [64]))
    (attempt,) = over([near.transport.post(Op.READ, path, Batch([0], [0], [0], [4096]))])
    assert attempt.state is AttemptState.DONE
    assert (here == noise(7, 4096)).all()


def test_read_into_read_only_memory_is_refused(near, make_child):
    """A READ whose destination the owner marked read-only would crash: refused instead."""
    from kvxfer.core.memory import span_of

    child = make_child()
    peer = near.connect(info_from_json(child.open()))
    far = child.register(nbytes=4096)
    fixed = np.frombuffer(bytes(4096), dtype=np.uint8)
    region = near.transport.register(span_of(fixed))
    path = near.prepare(peer, [(region, descriptor_from_json(far))])
    with pytest.raises(InvalidInputError, match="read-only"):
        near.transport.post(Op.READ, path, Batch([0], [0], [0], [64]))


def test_both_sides_read_from_each_other(near, make_child):
    """Each side connects to the other and reads at the same time."""
    child = make_child()
    info = child.open()
    size = MIB
    far = child.register(nbytes=size, fill=1)
    child.register(nbytes=size, fill=2)
    mine, mine_region = near.register(size)
    mine[:] = noise(3, size)
    here, region = near.register(size)
    path = near.prepare(near.connect(info_from_json(info)), [(region, descriptor_from_json(far))])
    peer = child.connected(info_to_json(near.transport.local_info()))
    there = child.prepared(peer["index"], [[1, descriptor_to_json(mine_region.descriptor)]])
    offsets = (np.arange(256) * 4096).tolist()
    batch = [[0] * 256, offsets, offsets, [4096] * 256]
    attempts = [near.transport.post(Op.READ, path, Batch(*batch)) for _ in range(4)]
    number = child.post(op="read", path=there["index"], batch=batch)
    over(attempts)
    assert child.ended(number)["state"] == "done"
    assert (here == noise(1, size)).all()
    assert (child.data(1) == noise(3, size)).all()


def test_regions_of_one_storage_are_mapped_once(near, make_child):
    """However many regions lie in one storage, and however many paths use them: one mapping."""
    child = make_child()
    child_info = child.open()
    array, _ = near.register(MIB)
    from kvxfer.core.memory import span_of

    planes = [
        near.transport.register(span_of(array[i * 1000 : (i + 1) * 1000])) for i in range(300)
    ]
    del child_info
    peer = child.connected(info_to_json(near.transport.local_info()))
    child.register(nbytes=1000, mapped=False)
    for _ in range(2):
        answer = child.prepared(
            peer["index"], [[0, descriptor_to_json(r.descriptor)] for r in planes]
        )
        assert "index" in answer, answer
    assert child.facts()["mapped"] == 1


def test_descriptor_that_lies_about_its_size_is_refused(near, make_child):
    """A descriptor whose size is not the registered one is refused by ``prepare``, naming both."""
    child = make_child()
    info = child.open()
    far = child.register(nbytes=4096)
    _, region = near.register(8192)
    peer = near.connect(info_from_json(info))
    far[3] = 8192
    with pytest.raises(InvalidInputError, match="8192 bytes, the peer registered 4096"):
        near.prepare(peer, [(region, descriptor_from_json(far))])


def test_bad_input_in_the_child_is_told(make_child):
    """The rig itself: an error of the child arrives here (no test can pass by silence)."""
    child = make_child()
    child.open()
    with pytest.raises(Raised, match="workers must be an integer"):
        child.open(workers=0)


@pytest.mark.parametrize("access", list(PeerAccess))
def test_owner_sees_its_own_writes_reach_the_reader(near, make_child, access):
    """What the owner writes after the handover is what a later READ brings."""
    child = make_child()
    info = child.open()
    far = child.register(nbytes=8192, access=access.value)
    here, region = near.register(8192, mapped=False)
    path = near.prepare(near.connect(info_from_json(info)), [(region, descriptor_from_json(far))])
    for value in (7, 9):
        child.fill(index=0, value=value)
        over([near.transport.post(Op.READ, path, Batch([0], [0], [0], [8192]))])
        assert (here == value).all()
