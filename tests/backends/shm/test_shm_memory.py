"""Sealed memory files: what is made, what is accepted, and that nobody can make us crash."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys

import attrs
import numpy as np
import pytest
from shm_child import descriptor_from_json, info_from_json
from shm_rig import answer, error_of, over, until

from kvxfer.backends.shm import (
    PeerAccess,
    ShmTransport,
    allocate,
    allocate_bytes,
    memfd,
    messages,
    share_storage,
)
from kvxfer.backends.shm.exports import Export
from kvxfer.backends.shm.memfd import SEALS, Mapping, Segment, find_segment, map_peer_file
from kvxfer.backends.shm.peer import ShmPeer
from kvxfer.backends.shm.protocol import Denied, Granted, GrantedRegion, SegmentInfo
from kvxfer.backends.shm.regions import RegionTable
from kvxfer.core.attempt import AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of, storage_span
from kvxfer.core.transport import PeerInfo
from kvxfer.core.verdict import Op
from kvxfer.errors import (
    HandshakeError,
    InvalidInputError,
    PeerLostError,
    TransportError,
    WireError,
)

PAGE = mmap.PAGESIZE


def memfd_of(nbytes, seals=SEALS):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# ---- what is made -------------------------------------------------------------------------


@pytest.mark.parametrize("peers", list(PeerAccess))
def test_segments_cannot_change_size_or_seals(peers):
    """Neither we nor a peer can shrink, grow or re-seal a memory file."""
    segment = Segment(3 * PAGE, peers)
    for size in (PAGE, 9 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_memory_for_readers_can_never_be_written_by_them():
    """With peers=READ no new writable mapping, no write and no hole is possible, not even through
    a new descriptor; the owner's own mapping stays writable."""
    segment = Segment(2 * PAGE, PeerAccess.READ)
    array = segment.array()
    array[:] = 5
    again = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
    try:
        for fd in (segment.fd, again):
            with pytest.raises(PermissionError):
                Mapping(fd, PAGE, writable=True)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            libc = ctypes.CDLL(None, use_errno=True)
            punch = libc.fallocate(fd, 0x3, ctypes.c_long(0), ctypes.c_long(PAGE))
            assert (punch, ctypes.get_errno()) == (-1, errno.EPERM)
    finally:
        os.close(again)
    array[:] = 6
    assert os.pread(segment.fd, 1, PAGE) == b"\x06"


def test_memory_is_committed_when_it_is_made(monkeypatch):
    """Lack of memory is an error of ``allocate``, with its errno, not a SIGBUS later."""
    assert os.fstat(Segment(PAGE * 8).fd).st_blocks * 512 >= PAGE * 8

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError) as caught:
        allocate_bytes(PAGE)
    assert caught.value.message.startswith(messages.NO_MEMORY.text)
    assert caught.value.engine.code == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_than_the_machine_has_is_refused(monkeypatch, tmp_path):
    """Asking for more than is available is refused before the kernel is asked: it would end other
    processes to make room."""

    def must_not_run(*_):
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(os, "posix_fallocate", must_not_run)
    with pytest.raises(TransportError, match="bytes available") as caught:
        allocate_bytes(1 << 60)
    assert caught.value.engine.code == errno.ENOMEM
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   4 kB\n")
    missing = str(tmp_path / "missing")
    assert memfd.available_memory(str(meminfo), missing) == 4096
    for text, bytes_ in (("max\n", 4096), ("1000\n", 1000), ("9999999\n", 4096)):
        limit.write_text(text)
        assert memfd.available_memory(str(meminfo), str(limit)) == bytes_
    assert memfd.available_memory(missing, missing) == 2**63


def test_memory_lives_as_long_as_a_view_of_it():
    """A slice keeps the memory; with the last view the mapping and the descriptor go."""
    array = allocate((4, 1000), np.float32)
    address = span_of(array).address
    fd = find_segment(address, 16).fd
    part = array[2, 10:20]
    del array
    gc.collect()
    part[:] = 1.5
    assert find_segment(span_of(part).address, part.nbytes) is not None
    del part
    gc.collect()
    assert find_segment(address, 16) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("dtype", ["u1", np.float16, "i8", np.dtype("f4"), bool])
def test_numpy_arrays(dtype):
    """``allocate`` gives zeroed, writable arrays of any numpy dtype, one segment each."""
    array = allocate((3, 5), dtype)
    assert array.shape == (3, 5)
    assert array.dtype == np.dtype(dtype)
    assert not array.any()
    array[:] = 1
    span = storage_span(array[1:])
    assert span.nbytes == array.nbytes
    assert find_segment(span.address, span.nbytes).nbytes == array.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((2, 0), "u1", "empty"),
        ((2, -1), "u1", "not negative"),
        ((2, 1.5), "u1", "integers"),
        (4, "no such dtype", "no dtype"),
        (4, object, "Python objects"),
    ],
)
def test_impossible_arrays_are_refused(shape, dtype, words):
    """A shape or dtype that cannot be is refused, naming it."""
    with pytest.raises(InvalidInputError, match=words):
        allocate(shape, dtype)


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, 2**63])
def test_impossible_sizes_are_refused(nbytes):
    """``allocate_bytes`` takes positive integers only."""
    with pytest.raises(InvalidInputError, match="positive integer"):
        allocate_bytes(nbytes)


def test_nothing_here_imports_torch():
    """Importing the backend, and allocating arrays, loads no torch."""
    code = (
        "import sys; from kvxfer.backends.shm import allocate, ShmTransport; allocate(8, 'u1');"
        "ShmTransport().close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_share_storage_without_torch_is_refused():
    """Something that is no tensor is refused, naming its type and ``allocate``."""
    with pytest.raises(InvalidInputError, match="not a ndarray"):
        share_storage(np.zeros(4))


# ---- torch --------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed in this environment")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int8"])
def test_torch_tensors(torch, dtype):
    """A torch dtype gives a zeroed tensor, also of the types numpy does not know."""
    tensor = allocate((2, 3, 4), getattr(torch, dtype))
    assert tensor.dtype is getattr(torch, dtype)
    assert tensor.shape == (2, 3, 4)
    assert not tensor.view(torch.uint8).any()
    span = storage_span(tensor[1])
    assert span.nbytes == tensor.nbytes
    assert find_segment(span.address, span.nbytes) is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16"])
def test_share_storage_moves_every_view(torch, dtype):
    """The content stays, views made before and after follow, and the memory is in a segment."""
    raw = torch.arange(240, dtype=torch.uint8)
    whole = raw.view(getattr(torch, dtype))
    view = whole[8:16]
    before = raw.clone()
    span = share_storage(view)
    assert span.nbytes == 240
    assert torch.equal(raw, before)
    assert raw.data_ptr() == whole.data_ptr() == span.address
    assert view.data_ptr() == span.address + 8 * whole.element_size()
    segment = find_segment(span.address, span.nbytes)
    raw[100] = 42
    assert os.pread(segment.fd, 1, 100) == b"\x2a"
    # Idempotent, and the seals cannot be changed afterwards.
    assert share_storage(raw).address == span.address
    with pytest.raises(InvalidInputError, match="shared already"):
        share_storage(raw, peers=PeerAccess.READ)


def test_share_storage_leaves_numpy_views_behind(torch):
    """As documented: a numpy array taken earlier shows the old memory from then on, and using it
    is harmless: its addresses stay, its pages go back to the kernel."""
    size = 64 << 20
    tensor = torch.ones(size, dtype=torch.uint8)
    array = tensor.numpy()
    before = _anonymous_bytes()
    share_storage(tensor)
    assert before - _anonymous_bytes() > size // 2
    array[size // 2 :] = 7
    assert (tensor == 1).all()
    assert (array[PAGE : size // 2] == 0).all()


def _anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if "RssAnon" in line)


def test_share_storage_keeps_the_memory_as_long_as_the_storage(torch):
    """The segment goes with the last tensor on the storage, not earlier."""
    tensor = torch.zeros(1024, dtype=torch.uint8)
    span = share_storage(tensor)
    address = span.address
    del span
    view = tensor[5:]
    del tensor
    gc.collect()
    view[:] = 3
    assert find_segment(address, 1024) is not None
    del view
    gc.collect()
    assert find_segment(address, 1024) is None


def test_share_storage_says_when_torch_cannot(torch, monkeypatch):
    """A torch without the private swap is told apart by a test for it, with the way out."""
    tensor = torch.zeros(16)

    class Storage:
        def __init__(self, real):
            self.nbytes, self.data_ptr = real.nbytes, real.data_ptr

    real = tensor.untyped_storage()
    monkeypatch.setattr(torch.Tensor, "untyped_storage", lambda self: Storage(real), raising=True)
    with pytest.raises(InvalidInputError, match=r"_swap_data_ptr_ is missing.*allocate"):
        share_storage(tensor)


@pytest.mark.parametrize("tensor", ["empty", "meta"])
def test_share_storage_refuses_what_has_no_cpu_memory(torch, tensor):
    """An empty tensor or one of another device is refused."""
    with pytest.raises(InvalidInputError, match=r"empty|meta"):
        share_storage(torch.empty(0) if tensor == "empty" else torch.empty(4, device="meta"))


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", True), ("float8_e4m3fn", False)])
def test_tensors_travel(torch, near, make_child, dtype, share):
    """READ and WRITE of bfloat16 and float8 caches between two processes, byte for byte."""
    child = make_child()
    info = child.open()
    far = child.register_tensor(shape=[16, 128], dtype=dtype, share=share)
    tensor = allocate((16, 128), getattr(torch, dtype))
    region = near.transport.register(storage_span(tensor))
    path = near.prepare(near.connect(info_from_json(info)), [(region, descriptor_from_json(far))])
    size = tensor.nbytes
    (attempt,) = over([near.transport.post(Op.READ, path, Batch([0], [0], [0], [size]))])
    assert attempt.state is AttemptState.DONE, attempt.error
    expected = torch.arange(size).remainder(251).to(torch.uint8)
    assert torch.equal(tensor.view(torch.uint8).flatten(), expected)
    tensor.view(torch.uint8).fill_(9)
    over([near.transport.post(Op.WRITE, path, Batch([0], [0], [0], [size]))])
    assert (child.data(0) == 9).all()


# ---- what is accepted ---------------------------------------------------------------------


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_GROW])
def test_files_without_the_seals_are_not_mapped(seals):
    """Every seal is needed; without one of them the file is refused before it is mapped."""
    fd = memfd_of(PAGE, seals)
    try:
        with pytest.raises(HandshakeError, match=messages.NOT_SEALED.text):
            map_peer_file(fd, PAGE, writable=False)
    finally:
        os.close(fd)


def test_files_that_are_no_memfd_are_not_mapped(tmp_path):
    """A file of a disk, which cannot be sealed, is refused."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(HandshakeError, match="not a memfd"):
            map_peer_file(fd, PAGE, writable=False)
    finally:
        os.close(fd)


def test_files_that_are_too_small_are_not_mapped():
    """A file truncated before it was sealed is refused: its missing pages would be SIGBUS."""
    fd = memfd_of(PAGE)
    try:
        with pytest.raises(HandshakeError, match=f"{PAGE} bytes instead of {4 * PAGE}"):
            map_peer_file(fd, 4 * PAGE, writable=False)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("size", "seals", "what"),
    [(4 * PAGE, 0, messages.NOT_SEALED), (PAGE, SEALS, messages.TOO_SMALL)],
    ids=["unsealed", "truncated"],
)
def test_hostile_owner(near, size, seals, what):
    """An owner that hands over an unsealed or truncated file: ``prepare`` refuses it, the
    connection ends, and nothing was mapped."""
    hostile = ShmTransport()
    fd = memfd_of(size, seals)
    try:
        segment = Segment(PAGE)
        region = hostile.register(span_of(segment.array()))
        fake = _FakeSegment(fd=fd, nbytes=4 * PAGE)
        number = region.descriptor.region_id
        hostile._exports._exports[number] = Export(
            region_id=number, nbytes=4 * PAGE, segment=fake, place=0
        )
        _, mine = near.register(4 * PAGE)
        peer = near.connect(hostile.local_info())
        descriptor = attrs.evolve(region.descriptor, nbytes=4 * PAGE)
        error = error_of(near.transport.prepare(peer, [(mine, descriptor)]))
        assert isinstance(error, HandshakeError)
        assert error.message.startswith(what.text)
        until(lambda: not peer.alive, "the hostile peer dropped")
        assert not peer.mappings
        again = error_of(near.transport.prepare(peer, [(mine, descriptor)]))
        assert again.message.startswith(messages.BROKEN_PROTOCOL.text)
    finally:
        hostile.close()
        os.close(fd)


@attrs.define
class _FakeSegment:
    fd: int
    nbytes: int
    segment_id: int = 10**6
    peers: PeerAccess = PeerAccess.READ_WRITE


def test_region_outside_its_file_is_refused(near):
    """An owner that grants a region beyond the end of its (good) file is refused."""
    hostile = ShmTransport()
    try:
        segment = Segment(PAGE)
        region = hostile.register(span_of(segment.array()))
        number = region.descriptor.region_id
        hostile._exports._exports[number] = Export(
            region_id=number, nbytes=PAGE, segment=segment, place=PAGE // 2
        )
        _, mine = near.register(PAGE)
        peer = near.connect(hostile.local_info())
        error = error_of(near.transport.prepare(peer, [(mine, region.descriptor)]))
        assert error.message.startswith(messages.TOO_SMALL.text)
    finally:
        hostile.close()


def test_owner_that_sends_no_file(near, monkeypatch):
    """A grant without the descriptor it speaks of ends the connection and answers ``prepare``."""
    hostile = ShmTransport()
    try:
        segment = Segment(PAGE)
        region = hostile.register(span_of(segment.array()))
        _, mine = near.register(PAGE)
        peer = near.connect(hostile.local_info())
        send = hostile._server._send
        monkeypatch.setattr(
            hostile._server, "_send", lambda holder, message, fds=(): send(holder, message)
        )
        error = error_of(near.transport.prepare(peer, [(mine, region.descriptor)]))
        assert error.message.startswith(messages.BROKEN_PROTOCOL.text)
        assert isinstance(error, HandshakeError)
    finally:
        hostile.close()


@pytest.fixture
def table(make_near):
    """The regions of a peer that does not exist, and the requests made to it."""
    peer = ShmPeer(make_near().transport, PeerInfo(transport="shm", incarnation="x"), None)
    unmapped = []
    table = RegionTable(peer, unmap=unmapped.append)
    table.peer, table.unmapped = peer, unmapped
    return table


def asked(table, *regions):
    """``(request number, answers)`` of one request for these regions."""
    answers = []
    _, requests = table.ask(set(regions), answers.append)
    (want,) = requests
    return want.request, answers


@pytest.mark.parametrize(
    ("segments", "regions", "words"),
    [
        ([(1, PAGE, True, False)], [(7, 64, 1, 0)], "never handed over"),
        ([(1, PAGE, True, True), (1, PAGE, True, True)], [], "came twice"),
        ([(1, PAGE, True, True), (2, PAGE, True, True)], [], "without its file"),
        ([], [(7, 64, None, 2**63 - 10)], "address space"),
    ],
)
def test_grants_that_make_no_sense(table, segments, regions, words):
    """Whatever a peer grants: it is refused as a breach of the protocol, and nothing crashes."""
    number, answers = asked(table, 7)
    fds = [memfd_of(PAGE)] if segments and segments[0][3] else []
    message = Granted(
        request=number,
        segments=[SegmentInfo(*s) for s in segments],
        regions=[GrantedRegion(*r) for r in regions],
    )
    with pytest.raises(WireError, match=words):
        table.granted(message, fds)
    assert not answers
    table.fail(messages.BROKEN_PROTOCOL.error(HandshakeError))
    assert len(answers) == 1


def test_answers_nobody_asked_for(table):
    """A grant or denial of a request that was not made, or was answered, is refused."""
    with pytest.raises(WireError, match="did not make"):
        table.granted(Granted(request=5, segments=[], regions=[]), [])
    number, answers = asked(table, 7)
    table.denied(Denied(request=number, region=7))
    assert answers[0].message.startswith(messages.REGION_GONE.text)
    with pytest.raises(WireError, match="did not make"):
        table.denied(Denied(request=number, region=7))


def test_requests_are_cut(table):
    """Any number of regions is asked for in bounded messages, answered once all are there."""
    answers = []
    _, requests = table.ask(set(range(150)), answers.append)
    requests = list(requests)
    assert [len(r.regions) for r in requests] == [64, 64, 22]
    for request in requests:
        assert not answers
        regions = [GrantedRegion(r, 64, None, 4096) for r in request.regions]
        table.granted(Granted(request=request.request, segments=[], regions=regions), [])
    assert answers == [None]
    assert table.missing(range(151)) == {150}


def test_mapping_that_fails_is_an_error_value(near, make_child, monkeypatch):
    """Where the kernel refuses to map (here: no address space left), ``prepare`` says so."""
    child = make_child()
    info = child.open()
    far = child.register(nbytes=PAGE)
    _, mine = near.register(PAGE)
    peer = near.connect(info_from_json(info))

    def refuse(*_args, **_options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(memfd, "Mapping", refuse)
    error = error_of(near.transport.prepare(peer, [(mine, descriptor_from_json(far))]))
    assert error.message.startswith(messages.MAP_FAILED.text)
    assert error.engine.code == errno.ENOMEM


def test_deregistered_regions_are_refused_and_unmapped(near, make_child):
    """The owner's ``deregister`` reaches its peers: queued posts fail, later ones are refused, the
    memory is unmapped; registered again it is handed over again."""
    child = make_child()
    info = child.open()
    far = child.register(nbytes=4096, fill=1)
    here, mine = near.register(4096, mapped=False)
    peer = near.connect(info_from_json(info))
    path = near.prepare(peer, [(mine, descriptor_from_json(far))])
    child.deregister(index=0)
    until(lambda: path.remote[0].gone, "the notice")
    with pytest.raises(TransportError, match=messages.REGION_GONE.text):
        near.transport.post(Op.READ, path, Batch([0], [0], [0], [64]))
    until(lambda: not peer.mappings, "unmapped")
    error = error_of(near.transport.prepare(peer, [(mine, descriptor_from_json(far))]))
    assert error.message.startswith(messages.REGION_GONE.text)
    again = child.register_again(index=0)
    path = near.prepare(peer, [(mine, descriptor_from_json(again))])
    over([near.transport.post(Op.READ, path, Batch([0], [0], [0], [4096]))])
    assert (here == child.data(1)).all()


def test_close_tells_peers(near):
    """An orderly close is told apart from a death, and refuses what comes after."""
    owner = ShmTransport()
    span = allocate_bytes(4096)
    region = owner.register(span)
    _, mine = near.register(4096)
    peer = near.connect(owner.local_info())
    path = near.prepare(peer, [(mine, region.descriptor)])
    owner.close()
    until(lambda: not peer.alive, "the close noticed")
    with pytest.raises(PeerLostError):
        near.transport.post(Op.READ, path, Batch([0], [0], [0], [64]))
    fence = answer(near.transport.disconnect(peer))
    assert fence.done
