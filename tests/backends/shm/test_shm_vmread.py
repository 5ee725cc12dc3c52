"""process_vm_readv: limits, short counts, and errors that say what to do."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from shm_child import descriptor_from_json, info_from_json
from shm_rig import noise, over

from kvxfer.backends.shm import messages, vmread
from kvxfer.backends.shm.vmread import MAX_BYTES, MAX_IOVECS, ReadFailed, read_pieces
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op

PAGE = mmap.PAGESIZE


def fine():
    return None


def address_of(array):
    return array.ctypes.data


def vectors(*columns):
    return [np.array(column, dtype=np.int64) for column in columns]


@pytest.fixture
def torn():
    """Eight pages whose third and fourth are not mapped: ``(array, address)``."""
    memory = mmap.mmap(-1, 8 * PAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = noise(1, 8 * PAGE)
    start = address_of(array)
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert libc.munmap(start + 2 * PAGE, 2 * PAGE) == 0
    yield array, start
    # Fill the gap again, so that nobody else gets these addresses before the owner unmaps them.
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap(start + 2 * PAGE, 2 * PAGE, 3, 0x32, -1, 0)


@pytest.mark.parametrize("count", [1, MAX_IOVECS - 1, MAX_IOVECS, MAX_IOVECS + 1, 5000])
def test_any_number_of_pieces(count):
    """More pieces than one call takes are read by several calls."""
    source = noise(2, count * 8)
    target = np.zeros(count * 8, np.uint8)
    order = np.random.default_rng(3).permutation(count).astype(np.int64) * 8
    calls = []

    def check():
        calls.append(1)

    read_pieces(
        os.getpid(),
        address_of(target) + order,
        address_of(source) + order,
        np.full(count, 8, np.int64),
        check=check,
    )
    assert (target == source).all()
    # Once before the first call, once after each.
    assert len(calls) == 1 + -(-count // MAX_IOVECS)


def test_the_kernels_limit_is_the_documented_one():
    """2147479552 bytes: INT_MAX rounded down to a page, as read(2) says."""
    assert MAX_BYTES == (2**31 - 1) // PAGE * PAGE


def test_more_bytes_than_one_call_moves(monkeypatch):
    """What exceeds the limit of one call, inside one piece or across pieces, is read by more."""
    real = vmread._readv
    asked = []

    def limited(pid, local, n, remote, m, flags):  # noqa: PLR0917 - the kernel's order
        given = ctypes.POINTER(ctypes.c_uint64)
        # The kernel leaves what it is given as it is.
        view = np.ctypeslib.as_array(ctypes.cast(local, given), (n, 2)).copy()
        other = np.ctypeslib.as_array(ctypes.cast(remote, given), (m, 2)).copy()
        left, used = 1000, 0
        for used in range(n):  # as the kernel does: the rest of the request is cut off
            take = min(int(view[used, 1]), left)
            view[used, 1] = other[used, 1] = take
            left -= take
            if not left:
                break
        asked.append(used + 1)
        return real(pid, view.ctypes.data, used + 1, other.ctypes.data, used + 1, flags)

    monkeypatch.setattr(vmread, "_readv", limited)
    monkeypatch.setattr(vmread, "MAX_BYTES", 1000)
    source, target = noise(4, 10_000), np.zeros(10_000, np.uint8)
    sizes = [300, 2500, 1, 1000, 999, 1200, 4000]
    at = np.concatenate(([0], np.cumsum(sizes)))[:-1]
    read_pieces(
        os.getpid(),
        *vectors(address_of(target) + at, address_of(source) + at, sizes),
        check=fine,
    )
    assert (target == source).all()
    assert len(asked) == 10


@pytest.mark.parametrize("across", [False, True], ids=["piece in the hole", "piece over the edge"])
def test_unmapped_page_in_the_middle(torn, across):
    """A bad piece in the middle makes the kernel stop without an error number: found out, and the
    address at which it stopped is named."""
    _, start = torn
    target = np.zeros(8 * PAGE, np.uint8)
    pages = [0, 1, 2, 5, 6]
    size = [PAGE] * 5
    if across:  # one piece over the good second page and the bad third one
        pages, size = [0, 1, 5], [PAGE, 2 * PAGE, PAGE]
    at = np.array(pages) * PAGE
    with pytest.raises(ReadFailed) as caught:
        read_pieces(os.getpid(), *vectors(address_of(target) + at, start + at, size), check=fine)
    error = caught.value.error
    assert error.message.startswith(messages.NOT_MAPPED.text)
    assert error.code == errno.EFAULT
    assert f"{start + 2 * PAGE:#x}" in error.message
    # Nothing after it was read.
    assert not target[5 * PAGE :].any()


def test_unmapped_page_of_a_peer_fails_the_attempt(near, make_child):
    """Through the transport: a torn region fails READs that touch the hole, drained, with the
    address; READs around it still work."""
    child = make_child()
    info = info_from_json(child.open())
    size = 64 * PAGE
    far = child.map_in_place(nbytes=size, fill=6)
    here, mine = near.register(size, mapped=False)
    path = near.prepare(near.connect(info), [(mine, descriptor_from_json(far))])
    hole = child.hole(index=0, offset=30 * PAGE, nbytes=2 * PAGE) // PAGE
    assert hole == 30
    offsets = [i * PAGE for i in (*range(0, 64, 2), *range(1, 64, 2))]
    batch = Batch([0] * 64, offsets, offsets, [PAGE] * 64)
    (attempt,) = over([near.transport.post(Op.READ, path, batch)])
    assert attempt.state is AttemptState.FAILED
    assert attempt.accepted is Accepted.UNKNOWN
    assert attempt.error.message.startswith(messages.NOT_MAPPED.text)
    assert attempt.error.code == errno.EFAULT
    good = Batch([0, 0], [0, 32 * PAGE], [0, 32 * PAGE], [30 * PAGE, 32 * PAGE])
    (attempt,) = over([near.transport.post(Op.READ, path, good)])
    assert attempt.state is AttemptState.DONE, attempt.error
    expected = noise(6, size)
    expected[30 * PAGE : 32 * PAGE] = here[30 * PAGE : 32 * PAGE]
    assert (here == expected).all()


def test_region_freed_before_prepare(near, make_child):
    """A region whose memory is gone already is refused by ``prepare``."""
    from shm_rig import error_of

    child = make_child()
    info = info_from_json(child.open())
    far = child.map_in_place(nbytes=4 * PAGE)
    child.hole(index=0, offset=3 * PAGE, nbytes=PAGE)
    _, mine = near.register(4 * PAGE)
    peer = near.connect(info)
    error = error_of(near.transport.prepare(peer, [(mine, descriptor_from_json(far))]))
    assert error.message.startswith(messages.NOT_MAPPED.text)


def test_process_that_has_ended():
    """ESRCH is reported as a peer that is gone."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    target = np.zeros(8, np.uint8)
    with pytest.raises(ReadFailed) as caught:
        read_pieces(
            ended.pid, *vectors([address_of(target)], [address_of(target)], [8]), check=fine
        )
    assert caught.value.error.message.startswith(messages.PEER_GONE.text)
    assert caught.value.error.code == errno.ESRCH


def test_other_errors_keep_their_number(monkeypatch):
    """An error nobody foresaw is reported with its number and the way out."""

    def fails(*_):
        ctypes.set_errno(errno.ENOSYS)
        return -1

    monkeypatch.setattr(vmread, "_readv", fails)
    with pytest.raises(ReadFailed) as caught:
        read_pieces(1, *vectors([4096], [4096], [8]), check=fine)
    assert caught.value.error.code == errno.ENOSYS
    assert caught.value.error.message.startswith(messages.READ_FAILED.text)


def test_there_is_no_way_to_write_strangers_memory():
    """process_vm_writev is named nowhere in the package but to say that it is not used."""
    from pathlib import Path

    import kvxfer.backends.shm as package

    for file in Path(package.__file__).parent.glob("*.py"):
        assert "process_vm_writev" not in file.read_text(), file.name
