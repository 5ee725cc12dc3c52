"""Reading memory that lies in another process, where it lies: process_vm_readv.

The call runs without the GIL.  It may stop short at an unmapped page without saying so, therefore
every count is checked.  There is no counterpart that writes: strangers' memory is never written.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.shm import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvxfer.backends.shm.messages import Message
    from kvxfer.core.batch import Int64Array
    from kvxfer.core.verdict import EngineError

__all__ = ["MAX_BYTES", "MAX_IOVECS", "ReadFailed", "read_pieces"]

MAX_IOVECS = 1024
"""IOV_MAX of Linux."""
MAX_BYTES = 2147479552
"""MAX_RW_COUNT of Linux: what one call moves at most (2 GiB less one page)."""

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class ReadFailed(Exception):
    """One read stopped; ``error`` is what the attempt reports. Stays inside this package."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error.message)
        self.error = error


def read_pieces(
    pid: int,
    target: Int64Array,
    source: Int64Array,
    size: Int64Array,
    *,
    check: Callable[[], Message | None],
) -> None:
    """Copy ``size[i]`` bytes from address ``source[i]`` of process ``pid`` to our ``target[i]``.

    ``check`` is asked before the first call and after every call whether the process is still the
    one that was meant; bytes read while it could not say so do not count.

    Raises:
        ReadFailed: the process changed, or the kernel refused or stopped.
    """
    _demand(check)
    here, there = _iovecs(target, size), _iovecs(source, size)
    ends = np.cumsum(size)
    done, moved = 0, 0  # whole pieces, and all bytes
    while done < len(size):
        count = _fitting(ends[done : done + MAX_IOVECS] - moved)
        got = _readv(pid, _row(here, done), count, _row(there, done), count, 0)
        code = ctypes.get_errno() if got < 0 else 0
        _demand(check)
        if got <= 0:
            raise ReadFailed(_explain(pid, code, int(there[done, 0]), int(here[done, 0])))
        before, moved = moved, moved + got
        done += int(np.searchsorted(ends[done : done + count], moved, side="right"))
        if done < len(size):
            # The kernel may stop within a piece: the next call goes on there.
            begun = moved - max(before, int(ends[done - 1]) if done else 0)
            for vectors in (here, there):
                vectors[done, 0] += np.uint64(begun)
                vectors[done, 1] -= np.uint64(begun)


def _demand(check: Callable[[], Message | None]) -> None:
    wrong = check()
    if wrong is not None:
        raise ReadFailed(wrong.engine())


def _fitting(ends: Int64Array) -> int:
    """How many of these pieces one call takes; the last may be longer than the call moves."""
    return min(int(np.searchsorted(ends, MAX_BYTES)) + 1, len(ends))


def _iovecs(address: Int64Array, size: Int64Array) -> npt.NDArray[np.uint64]:
    vectors = np.empty((len(size), 2), dtype=np.uint64)  # struct iovec: base, length
    vectors[:, 0] = address
    vectors[:, 1] = size
    return vectors


def _row(vectors: npt.NDArray[np.uint64], index: int) -> int:
    """The address of one row."""
    return int(vectors.ctypes.data) + index * vectors.strides[0]


def _explain(pid: int, code: int, there: int, here: int) -> EngineError:
    """``there`` and ``here``: the addresses at which it stopped."""
    if code == errno.EPERM:
        return messages.NOT_PERMITTED.engine(f"process {pid}", code)
    if code == errno.ESRCH:
        return messages.PEER_GONE.engine(f"process {pid}", code)
    if code in (errno.EFAULT, 0):  # a short count is followed by EFAULT or by nothing at all
        return messages.NOT_MAPPED.engine(
            f"{there:#x} in process {pid}, or {here:#x} in our own", errno.EFAULT
        )
    return messages.READ_FAILED.engine(f"process {pid}: {os.strerror(code)}", code)
