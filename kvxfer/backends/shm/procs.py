"""Which process is which: namespaces, start times, pidfds.

A pid alone names nobody for long.  A pidfd names one process for ever, and the start time tells
whether a pid that a peer sent still belongs to it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ProcessId",
    "ProcessWatch",
    "admit_readers",
    "peer_credentials",
    "peer_pidfd",
    "start_time",
]

SO_PEERPIDFD = 77
"""asm-generic/socket.h, Linux 6.5; Python has no name for it."""
PR_SET_PTRACER = 0x59616D61
"""linux/prctl.h"""
PR_SET_PTRACER_ANY = 2**64 - 1


@attrs.frozen(kw_only=True)
class ProcessId:
    """Names one process on one machine.

    ``namespaces`` are the pid and time namespaces in which ``pid`` and ``start_time`` (clock ticks
    since boot) mean anything; it is empty where /proc shows another pid namespace than ours.
    """

    boot_id: str
    namespaces: str
    pid: int
    start_time: int

    @classmethod
    def current(cls) -> ProcessId:
        """This process. Raises ``OSError`` without /proc."""
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot_id = file.read().decode().strip()
        own = _stat_start_time("self")
        if own is None:
            raise FileNotFoundError("/proc/self/stat is missing")
        return cls(boot_id=boot_id, namespaces=_namespaces(), pid=os.getpid(), start_time=own)

    def comparable(self, other: ProcessId) -> bool:
        """Whether each can look the other's pid up in its own /proc."""
        return bool(self.namespaces) and self.namespaces == other.namespaces


def _namespaces() -> str:
    # A container may see the /proc of its host: then numbers in it are not our numbers.
    if os.readlink("/proc/self") != str(os.getpid()):
        return ""
    names = [os.readlink("/proc/self/ns/pid")]
    if os.path.exists("/proc/self/ns/time"):  # start times are shifted by time namespaces
        names.append(os.readlink("/proc/self/ns/time"))
    return " ".join(names)


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot. None if there is no such process."""
    return _stat_start_time(str(pid))


def _stat_start_time(name: str) -> int | None:
    try:
        fd = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        text = os.read(fd, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    # The command name may hold spaces and parentheses; what follows the last one is numbers.
    return int(text[text.rindex(b")") + 2 :].split()[19])


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """``(pid, uid)`` of the other end. The pid is 0 where our pid namespace does not show it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, _ = struct.unpack("iII", raw)
    return pid, uid


def peer_pidfd(sock: socket.socket, pid: int) -> int | None:
    """A pidfd of the other end; None where the kernel offers no way to get one.

    Raises:
        ProcessLookupError: the process is gone.
    """
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except ProcessLookupError:
        raise
    except OSError:  # before Linux 6.5; EINVAL for a reaped process on some
        return os.pidfd_open(pid) if pid > 0 else None
    os.set_inheritable(fd, False)
    return fd


class ProcessWatch:
    """Tells whether one process still lives, through a pidfd. Owns the pidfd. Any thread."""

    def __init__(
        self,
        pidfd: int,
        *,
        pid: int = 0,
        began: int | None = None,
        look_up: Callable[[int], int | None] = start_time,
    ) -> None:
        self.pidfd = pidfd
        self.pid = pid
        self._began = began
        self._look_up = look_up
        self._poll = _poll_of(pidfd)

    def alive(self) -> bool:
        """Whether the process has not ended. One system call."""
        try:
            return not self._poll.poll(0)
        except RuntimeError:  # another thread asks at this moment: one poll object serves one
            return not _poll_of(self.pidfd).poll(0)

    def same_process(self) -> bool:
        """Whether the pid still belongs to the process that was meant when we connected.

        While the pidfd reports no end, the pid cannot be reused; the start time guards against a
        pidfd that was opened for the wrong process in the first place.
        """
        return self._look_up(self.pid) == self._began

    def close(self) -> None:
        """Idempotent."""
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            self._poll = _poll_of(-1)  # never a descriptor that comes to have this number
            os.close(fd)


def _poll_of(fd: int) -> select.poll:
    """Made once where it is asked often. Of -1 it never tells anything."""
    poll = select.poll()
    if fd >= 0:
        poll.register(fd, select.POLLIN)
    return poll


def admit_readers() -> None:
    """Let every process of our uid read our memory where Yama (ptrace_scope 1) restricts that.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # EINVAL: no Yama in this kernel, so nothing is restricted
            raise OSError(code, os.strerror(code))
