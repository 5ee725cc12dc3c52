"""Sealed memory files: made here, checked here, mapped here.

A mapped file that shrinks kills the reader with SIGBUS.  The seals SHRINK, GROW and SEAL rule
that out for good, so a consumer checks them, and the size, before it maps.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import itertools
import mmap
import os
import weakref
from typing import Any

from kvxfer.backends.shm import messages
from kvxfer.errors import HandshakeError, InvalidInputError, TransportError

__all__ = [
    "Mapping",
    "PeerAccess",
    "Segment",
    "available_memory",
    "find_segment",
    "give_pages_back",
    "map_peer_file",
]

F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h, Linux 5.1; Python's fcntl has no name for it."""
MFD_NOEXEC_SEAL = 0x8
"""linux/memfd.h, Linux 6.3: vm.memfd_noexec=2 refuses memfds without it."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class PeerAccess(enum.Enum):
    """What peers may do with memory that is handed to them."""

    READ = "read"
    """The file can never be mapped writable again, by anybody (F_SEAL_FUTURE_WRITE)."""
    READ_WRITE = "read_write"
    """Peers map it writable: needed where a peer pushes (WRITE)."""


class Mapping:
    """A mapped stretch of a file. Unmapped by ``close`` or with the last reference."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Python's mmap would keep a duplicate of the fd and refuses to close while arrays live.
        address = _libc.mmap(None, nbytes, prot, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address: int = address
        self.nbytes = nbytes
        self.writable = writable
        # Not at exit: arrays and tensors may still be looked at while the interpreter shuts down.
        self._finalizer = weakref.finalize(self, _libc.munmap, address, nbytes)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Unmap. The caller knows that nobody touches the memory any more. Idempotent."""
        self._finalizer()


_segment_ids = itertools.count(1)
# Without a lock: finalizers change it, and those run anywhere, also under a lock of ours.
_segments: dict[int, weakref.ref[Segment]] = {}


class Segment:
    """Memory of ours in a sealed memfd: what can be handed to peers.

    Lives as long as an array, tensor or span on it; ``fd`` is closed with it.

    Raises:
        InvalidInputError: the size is not positive, or the kernel lacks a needed seal.
        TransportError: the memory cannot be had (carries the errno).
    """

    def __init__(self, nbytes: int, peers: PeerAccess = PeerAccess.READ_WRITE) -> None:
        if type(nbytes) is not int or not 0 < nbytes < 2**63:
            raise InvalidInputError(f"nbytes must be a positive integer, not {nbytes!r}")
        if not isinstance(peers, PeerAccess):
            raise InvalidInputError(f"peers must be a PeerAccess, not {peers!r}")
        self.nbytes = nbytes
        self.peers = peers
        self.segment_id = next(_segment_ids)
        self.replaced: object = None
        """What this memory took the place of; kept so that its addresses are not used again."""
        fd = _create()
        try:
            self._mapping = _commit(fd, nbytes, peers)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.address = self._mapping.address
        finalizer = weakref.finalize(self, _forget, self.segment_id, fd)
        finalizer.atexit = False
        _segments[self.segment_id] = weakref.ref(self)

    def __repr__(self) -> str:
        return f"<Segment {self.segment_id}, {self.nbytes} bytes, peers {self.peers.value}>"

    def array(self) -> Any:
        """The bytes as a numpy ``uint8`` vector, which keeps the segment alive."""
        import numpy as np

        return np.asarray(_Exposed(self))


class _Exposed:
    """Hands numpy the memory; the array keeps this object, and with it the segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (segment.nbytes,),
            "data": (segment.address, False),
        }


def find_segment(address: int, nbytes: int) -> Segment | None:
    """The segment of this process in which these bytes lie entirely."""
    for reference in _segments.copy().values():
        segment = reference()
        if (
            segment is not None
            and segment.address <= address
            and address + nbytes <= segment.address + segment.nbytes
        ):
            return segment
    return None


def map_peer_file(fd: int, nbytes: int, *, writable: bool) -> Mapping:
    """Map a file that a peer handed over, after checking that it cannot shrink.

    Raises:
        HandshakeError: it is not sealed, smaller than ``nbytes``, or cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:  # EINVAL: not a memfd at all
        raise messages.NOT_SEALED.error(HandshakeError, "it is not a memfd", error.errno) from error
    if seals & SEALS != SEALS:
        raise messages.NOT_SEALED.error(
            HandshakeError, f"it has seals {seals:#x}, {SEALS:#x} are needed"
        )
    # After the seals: a sealed file's size does not change any more.
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise messages.TOO_SMALL.error(HandshakeError, f"{size} bytes instead of {nbytes}")
    try:
        return Mapping(fd, nbytes, writable=writable)
    except OSError as error:
        raise messages.MAP_FAILED.error(
            HandshakeError, f"{nbytes} bytes: {error.strerror}", error.errno
        ) from error


def _create() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            fd = os.memfd_create("kvxfer", flags | MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:  # before Linux 6.3
                raise
            fd = os.memfd_create("kvxfer", flags)
    except OSError as error:
        raise _no_memory(0, error) from error
    # Others of our uid could otherwise open it through /proc/PID/fd with more rights.
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o600)
    return fd


def give_pages_back(address: int, nbytes: int) -> None:
    """Return the whole pages of anonymous memory to the kernel: they read as zero from then on.

    The addresses stay valid.  Where the kernel will not (locked or huge pages) nothing happens.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _libc.madvise(start, length, mmap.MADV_DONTNEED)


def available_memory(
    meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max"
) -> int:
    """Bytes that an allocation can hope for: MemAvailable, or the container's limit if lower."""
    available = 2**63
    with contextlib.suppress(OSError), open(meminfo, "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError), open(limit, "rb") as file:
        available = min(available, int(file.read()))  # "max" where there is none
    return available


def _commit(fd: int, nbytes: int, peers: PeerAccess) -> Mapping:
    # The kernel does not refuse too much, it ends processes until it fits: so we refuse.
    available = available_memory()
    if nbytes > available:
        reason = f"more than the {available} bytes available"
        raise messages.NO_MEMORY.error(TransportError, f"{nbytes} bytes: {reason}", errno.ENOMEM)
    try:
        os.ftruncate(fd, nbytes)
        # Committed now, so that lack of memory is an error here and not a SIGBUS later.
        os.posix_fallocate(fd, 0, nbytes)
        mapping = Mapping(fd, nbytes, writable=True)
    except OSError as error:
        raise _no_memory(nbytes, error) from error
    seals = SEALS | (F_SEAL_FUTURE_WRITE if peers is PeerAccess.READ else 0)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        raise InvalidInputError(
            f"the kernel refuses the seals {seals:#x} ({error.strerror})",
            next_step="peers=PeerAccess.READ needs Linux 5.1; use READ_WRITE on older ones",
        ) from error
    return mapping


def _no_memory(nbytes: int, error: OSError) -> TransportError:
    return messages.NO_MEMORY.error(
        TransportError, f"{nbytes} bytes: {error.strerror}", error.errno
    )


def _forget(segment_id: int, fd: int) -> None:
    _segments.pop(segment_id, None)
    os.close(fd)
