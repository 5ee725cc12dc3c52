"""Local copies: whatever the pieces look like, the bytes are those of the plain definition.

Everything here holds for the compiled copier and for the one in Python.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.backends.shm.copying import SCRATCH_BYTES, join

# The fixture names a function, which no example can change.
each_example = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def plainly(memory, target, source, size):
    """Copy piece after piece, into a copy of ``memory``."""
    result = memory.copy()
    for t, s, n in zip(target.tolist(), source.tolist(), size.tolist(), strict=True):
        result[t : t + n] = memory[s : s + n]
    return result


def check(copier, memory, half, *, target, source, size):
    """Sources lie below ``half``, targets above: the copier agrees, also after ``join``."""
    expected = plainly(memory, target + half, source, size)
    joined = join(target, source, size)
    assert joined[2].sum() == size.sum()
    original, base = memory.copy(), memory.ctypes.data
    for to, of, nbytes in (joined, (target, source, size)):
        memory[:] = original
        scratch = np.empty(SCRATCH_BYTES, np.uint8)
        copier.copy_pieces(base + half + to, base + of, nbytes, scratch)
        assert (memory == expected).all()


@each_example
@given(
    unit=st.sampled_from([1, 2, 7, 64, 100, 1024, 4096]),
    count=st.integers(1, 80),
    shift=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_equal_pieces(each_copier, unit, count, shift, stride, seed):  # noqa: PLR0917
    """Equal pieces on any grid, aligned to their size or not, in any order."""
    rng = np.random.default_rng(seed)
    shuffled = seed % 2
    half = 3 * unit * count + 64
    memory = rng.integers(0, 256, 2 * half, dtype=np.uint8)
    order = [rng.permutation(count) if shuffled else np.arange(count) for _ in "ab"]
    target = (order[0] * unit * stride[0] + shift[0]).astype(np.int64)
    source = (order[1] * unit * stride[1] + shift[1]).astype(np.int64)
    size = np.full(count, unit, np.int64)
    check(each_copier, memory, half, target=target, source=source, size=size)


@each_example
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    gaps=st.lists(st.sampled_from([0, 0, 0, 1, 17]), min_size=60, max_size=60),
    seed=st.integers(0, 2**32 - 1),
)
def test_unequal_pieces(each_copier, sizes, gaps, seed):
    """Unequal pieces with and without gaps: neighbours merge, nothing else changes."""
    rng = np.random.default_rng(seed)
    size = np.array(sizes, np.int64)
    step = size + np.array(gaps[: len(sizes)])
    target = np.cumsum(step) - step
    source = (np.cumsum(step[::-1]) - step[::-1])[::-1].copy() if seed % 2 else target.copy()
    half = int(step.sum()) + 8
    memory = rng.integers(0, 256, 2 * half, dtype=np.uint8)
    check(each_copier, memory, half, target=target, source=source, size=size)


def test_join_joins_exactly_the_runs():
    """Pieces are joined if and only if they follow each other on both sides."""
    target = np.array([0, 10, 20, 40, 50, 60, 66])
    source = np.array([100, 110, 130, 150, 160, 170, 175])
    size = np.array([10, 10, 10, 10, 10, 5, 5])
    assert [v.tolist() for v in join(target, source, size)] == [
        [0, 20, 40, 66],
        [100, 130, 150, 175],
        [20, 10, 25, 5],
    ]
    alone = [v[2:4] for v in (target, source, size)]
    assert all(a is b for a, b in zip(join(*alone), alone, strict=True))


@pytest.mark.parametrize("unit", [4096, 16384, 65536])
def test_more_than_the_staging_area(each_copier, unit):
    """More bytes than fit the staging area, by many times and not by a whole multiple."""
    count = 5 * SCRATCH_BYTES // unit + 3
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, 2 * unit * count, dtype=np.uint8)
    target, source = (rng.permutation(count).astype(np.int64) * unit for _ in "ab")
    size = np.full(count, unit, np.int64)
    check(each_copier, memory, unit * count, target=target, source=source, size=size)


def test_a_piece_may_overlap_its_source(each_copier):
    """Moving bytes within one region, forwards or backwards, gives what was there before."""
    for shift in (-100, 100, 0):
        memory = np.random.default_rng(2).integers(0, 256, 5000, dtype=np.uint8)
        expected = memory.copy()
        expected[500 + shift : 4500 + shift] = memory[500:4500]
        base = memory.ctypes.data
        target, source, size = (
            np.array([x], np.int64) for x in (base + 500 + shift, base + 500, 4000)
        )
        each_copier.copy_pieces(target, source, size, np.empty(SCRATCH_BYTES, np.uint8))
        assert (memory == expected).all()


def test_vectors_with_strides(each_copier):
    """Views with steps and other byte layouts than C's are read as numpy reads them."""
    memory = np.random.default_rng(3).integers(0, 256, 8000, dtype=np.uint8)
    expected = memory.copy()
    expected[4000:8000:400], base = memory[0:4000:400], memory.ctypes.data
    grid = np.arange(20, dtype=np.int64) * 200
    each_copier.copy_pieces(
        (base + 4000 + grid)[::2],
        (base + grid)[::2],
        np.ones((10, 3), np.int64)[:, 1],
        np.empty(SCRATCH_BYTES, np.uint8),
    )
    assert (memory == expected).all()


def test_nothing_to_copy(each_copier):
    """Empty vectors are copied in no time and touch nothing."""
    nothing = np.empty(0, np.int64)
    each_copier.copy_pieces(nothing, nothing, nothing, np.empty(SCRATCH_BYTES, np.uint8))


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    largest=st.sampled_from([700, 5000, 70_000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_bulk_at_any_alignment(each_copier, largest, seed):
    """More than a cache holds, in pieces of any size at any address: the bytes of each piece, and
    those between them, are as they should be."""
    rng = np.random.default_rng(seed)
    size = rng.integers(1, largest, 3 * 2**20 // largest).astype(np.int64)
    step = size + rng.integers(0, 70, len(size))
    order = rng.permutation(len(size))
    target = (np.cumsum(step[order]) - step[order])[np.argsort(order)] + seed % 67
    source = np.cumsum(step) - step + seed % 61
    assert size.sum() > 2**20
    half = int(step.sum()) + 128
    memory = rng.integers(0, 256, 2 * half, dtype=np.uint8)
    check(each_copier, memory, half, target=target, source=source, size=size)


@pytest.mark.parametrize("side", ["target", "source"])
def test_what_lies_between_the_pieces_is_not_touched(each_copier, side):
    """Pieces of several regions, with memory that nobody may touch between them, and the staging
    area: numpy must not take all of that for one array."""
    unit, count = 4096, 20
    area = mmap.mmap(-1, 64 * unit + SCRATCH_BYTES)
    memory = np.frombuffer(area, np.uint8)
    base = memory.ctypes.data
    memory[:] = np.random.default_rng(4).integers(0, 256, len(memory), dtype=np.uint8)
    low, high = np.arange(count) * unit, len(memory) - (np.arange(count) + 1) * unit
    spread = np.where(np.arange(count) % 2, low, high)
    forbidden = base + 22 * unit
    scratch = memory[24 * unit : 24 * unit + SCRATCH_BYTES]
    other = np.random.default_rng(5).integers(0, 256, count * unit, dtype=np.uint8)
    at = other.ctypes.data + np.arange(count) * unit
    target, source = (base + spread, at) if side == "target" else (at, base + spread)
    expected = memory.reshape(-1, unit)[spread // unit].copy()
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(forbidden), unit, 0) == 0
    each_copier.copy_pieces(target, source, np.full(count, unit, np.int64), scratch)
    assert protect(ctypes.c_void_p(forbidden), unit, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    if side == "target":
        assert (memory.reshape(-1, unit)[spread // unit].reshape(-1) == other).all()
    else:
        assert (other.reshape(-1, unit) == expected).all()


@pytest.mark.parametrize("shift", [-(2**20), -4097, -1, 1, 63, 2**20])
def test_bulk_that_overlaps_its_source(each_copier, shift):
    """A large piece is moved within one region as a small one is."""
    nbytes, at = 3 * 2**20, 2**21
    memory = np.random.default_rng(5).integers(0, 256, nbytes + 2 * at, dtype=np.uint8)
    expected = memory.copy()
    expected[at + shift : at + shift + nbytes] = memory[at : at + nbytes]
    target, source, size = (np.array([x], np.int64) for x in (at + shift, at, nbytes))
    base = memory.ctypes.data
    scratch = np.empty(SCRATCH_BYTES, np.uint8)
    each_copier.copy_pieces(base + target, base + source, size, scratch)
    assert (memory == expected).all()
