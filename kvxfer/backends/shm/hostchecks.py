"""What shm needs of a host, for ``kvxfer doctor``."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import attrs

from kvxfer.backends.shm.config import ShmConfig
from kvxfer.backends.shm.copiers import Copier, copier
from kvxfer.backends.shm.memfd import PeerAccess, Segment, available_memory
from kvxfer.backends.shm.messages import BACKEND
from kvxfer.backends.shm.procs import ProcessId
from kvxfer.core.hostcheck import Finding, HostCheck, HostQuery, Level, size_text
from kvxfer.errors import KvxferError

__all__ = ["CHECKS", "MemoryFacts", "NamespaceFacts", "PtraceFacts"]

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of Linux's include/linux/proc_ns.h."""
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_TIMEOUT_S = 20.0
"""For the two processes that try to read each other; they need some 0.1 s."""

# The one that is read prints where a word of it lies, and lives until its input ends.
_TARGET = """
import ctypes, sys
word = ctypes.create_string_buffer(b"kvxfer doctor")
print(ctypes.addressof(word), flush=True)
sys.stdin.read()
"""
# The one that reads exits with the errno, 0 if it got the word.
_READER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
got = ctypes.create_string_buffer(13)
class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here, there = IoVec(ctypes.addressof(got), 13), IoVec(int(sys.argv[2]), 13)
pid = ctypes.c_int(int(sys.argv[1]))
if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 13:
    sys.exit(ctypes.get_errno() or 255)
sys.exit(0 if got.raw == b"kvxfer doctor" else 255)
"""


# ---- process ids ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class NamespaceFacts:
    """``own_proc``: /proc shows the pid namespace we are in. ``initial``: it is the host's own."""

    own_proc: bool
    initial: bool


def _namespaces(_: HostQuery) -> NamespaceFacts:
    return NamespaceFacts(
        own_proc=bool(ProcessId.current().namespaces),
        initial=os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE,
    )


def judge_namespaces(facts: NamespaceFacts) -> list[Finding]:
    if not facts.own_proc:
        return [
            _finding(
                Level.ERROR,
                "/proc shows another pid namespace than ours: no peer can be told by its pid",
                "mount a /proc of this namespace (containers: do not mount the host's)",
            )
        ]
    if not facts.initial:
        return [
            _finding(
                Level.NOTE,
                "this is a pid namespace of its own: peers must be in the same one",
                "containers: share it (docker --pid, Kubernetes shareProcessNamespace), or use "
                "another backend between them",
            )
        ]
    return [_finding(Level.OK, "peers on this host see each other's process ids")]


# ---- memory --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class MemoryFacts:
    """``error``: why a small sealed memory file cannot be made; sizes are bytes."""

    error: str
    next_step: str
    available: int
    wanted: int


def _memory(query: HostQuery) -> MemoryFacts:
    error, step = "", ""
    try:
        Segment(4096, PeerAccess.READ)
    except KvxferError as found:
        error, step = found.message, found.next_step
    return MemoryFacts(
        error=error, next_step=step, available=available_memory(), wanted=query.cache_nbytes
    )


def judge_memory(facts: MemoryFacts) -> list[Finding]:
    if facts.error:
        return [
            _finding(
                Level.ERROR,
                f"no sealed memory file can be made: {facts.error}",
                facts.next_step or "look at vm.memfd_noexec and the memory limit of the container",
            )
        ]
    if facts.available < facts.wanted:
        return [
            _finding(
                Level.ERROR,
                f"{size_text(facts.available)} of memory are available, less than the "
                f"{size_text(facts.wanted)} of one worker's KV cache",
                "raise the memory limit, or take a smaller cache (--cache-bytes)",
            )
        ]
    return [_finding(Level.OK, f"sealed memory files work; {size_text(facts.available)} are free")]


# ---- reading where memory lies -------------------------------------------------------------


@attrs.frozen(kw_only=True)
class PtraceFacts:
    """``scope`` is Yama's, None without Yama. ``code`` is the errno with which one process of ours
    read another that is not its child; 0: it could. ``admits``: ``ShmConfig.admit_readers``."""

    scope: int | None
    code: int
    admits: bool = False


def _ptrace(query: HostQuery) -> PtraceFacts:
    try:
        scope = int(_YAMA.read_text())
    except (OSError, ValueError):
        scope = None
    admits = ShmConfig.from_options(query.options).admit_readers
    return PtraceFacts(scope=scope, code=_read_a_stranger(), admits=admits)


def _read_a_stranger() -> int:
    """Two processes that are siblings, as two workers are."""
    python = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen(  # noqa: S603 - this interpreter, and a text of ours
        [*python, _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as target:
        assert target.stdout is not None
        address = target.stdout.readline().strip()
        done = subprocess.run(  # noqa: S603
            [*python, _READER, str(target.pid), address],
            check=False,
            timeout=_TIMEOUT_S,
            stderr=subprocess.DEVNULL,
        )
        target.kill()
    return done.returncode


def judge_ptrace(facts: PtraceFacts) -> list[Finding]:
    if facts.code == 0:
        return [_finding(Level.OK, "memory of other processes of ours can be read where it lies")]
    scope = "" if facts.scope is None else f" (kernel.yama.ptrace_scope is {facts.scope})"
    name = errno.errorcode.get(facts.code, str(facts.code))
    if facts.admits and facts.code == errno.EPERM and facts.scope == 1:
        return [_finding(Level.OK, f"strangers are refused{scope}; admit_readers lets peers in")]
    step = "allocate caches with kvxfer.backends.shm.allocate or share_storage, which need no such"
    step += " permission"
    if facts.scope == 1:
        step += ", or set ShmConfig(admit_readers=True), which also admits debuggers"
    elif facts.scope is None:
        step += "; in a container, the seccomp profile must allow process_vm_readv"
    return [
        _finding(
            Level.WARNING,
            f"memory that is not in a memory file of ours cannot be read: process_vm_readv says "
            f"{name}{scope}",
            step,
        )
    ]


# ---- the copy loop -------------------------------------------------------------------------


def _copier(query: HostQuery) -> Copier:
    return copier(ShmConfig.from_options(query.options).copier)


def judge_copier(facts: Copier) -> list[Finding]:
    if facts.name == "compiled":
        return [_finding(Level.OK, "copies with the compiled loop")]
    return [
        _finding(
            Level.NOTE,
            f"copies with Python and numpy, which is slower for small pieces: {facts.reason}",
            "install kvxfer where a C compiler and Python's headers are",
        )
    ]


def _finding(level: Level, what: str, next_step: str = "") -> Finding:
    return Finding(backend=BACKEND, level=level, what=what, next_step=next_step)


CHECKS = (
    HostCheck("pid namespace", _namespaces, judge_namespaces),
    HostCheck("memory files", _memory, judge_memory),
    HostCheck("ptrace scope", _ptrace, judge_ptrace),
    HostCheck("copier", _copier, judge_copier),
)
