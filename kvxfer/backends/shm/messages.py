"""Every text that the shm engine puts into an ``EngineError``, with what it means.

The start of a text is stable: classifier rules match on it.  Details and the next step follow.
"""

from __future__ import annotations

from typing import TypeVar

import attrs

from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind, TransportError

__all__ = ["ALL", "BACKEND", "Message"]

BACKEND = "shm"

T = TypeVar("T", bound=TransportError)


@attrs.frozen(kw_only=True)
class Message:
    """``text`` is the stable start, ``kind`` the verdict a rule should reach."""

    text: str
    kind: ErrorKind
    next_step: str = ""

    def engine(self, detail: str = "", code: int | None = None) -> EngineError:
        """As a value: text, detail and next step in one line. ``code`` is an errno."""
        message = f"{self.text}: {detail}" if detail else self.text
        if self.next_step:
            message = f"{message}; {self.next_step}"
        return EngineError(backend=BACKEND, code=code, message=message)

    def error(self, cls: type[T], detail: str = "", code: int | None = None) -> T:
        """As an exception that carries the value."""
        message = f"{self.text}: {detail}" if detail else self.text
        return cls(message, next_step=self.next_step, engine=self.engine(detail, code))


# ---- what can happen to an attempt --------------------------------------------------------

PEER_GONE = Message(
    text="the peer is gone",
    kind=ErrorKind.PEER_LOST,
    next_step="connect to its successor",
)
PEER_CLOSED = Message(
    text="the peer closed its transport",
    kind=ErrorKind.PEER_LOST,
    next_step="connect to its successor",
)
FENCED = Message(
    text="the peer fenced this connection",
    kind=ErrorKind.STALE,
    next_step="it must connect to us again, then connect again",
)
REGION_GONE = Message(
    text="the peer deregistered the region",
    kind=ErrorKind.STALE,
    next_step="fetch the peer's current descriptors",
)
STOPPED = Message(
    text="stopped before all of it was copied",
    kind=ErrorKind.ABORTED,
)
NOT_PERMITTED = Message(
    text="not permitted to read the peer's memory",
    kind=ErrorKind.HANDSHAKE,
    next_step=(
        "allocate the peer's cache with allocate() or share_storage(); or run both processes under "
        "one uid, dumpable (prctl PR_SET_DUMPABLE), and where kernel.yama.ptrace_scope is 1 or "
        "more open the owner with ShmConfig(admit_readers=True)"
    ),
)
NOT_MAPPED = Message(
    text="the memory is not mapped",
    kind=ErrorKind.INVALID,
    next_step="check that the owner did not free the region before deregistering it",
)
PID_REUSED = Message(
    text="the peer's process id belongs to another process now",
    kind=ErrorKind.PEER_LOST,
    next_step="connect to the peer's successor",
)
READ_FAILED = Message(
    text="process_vm_readv failed",
    kind=ErrorKind.UNKNOWN,
    next_step="allocate the peer's cache with allocate() or share_storage()",
)
QUEUE_FULL = Message(
    text="the queue of copies for this peer is full",
    kind=ErrorKind.BACKPRESSURE,
)

# ---- what can happen to connect and prepare ------------------------------------------------

OTHER_MACHINE = Message(
    text="the peer runs on another machine",
    kind=ErrorKind.HANDSHAKE,
    next_step="shm reaches processes of this machine only: use moriio, nixl or mooncake",
)
OTHER_NAMESPACE = Message(
    text="the peer lives in another pid namespace",
    kind=ErrorKind.HANDSHAKE,
    next_step=(
        "allocate the peer's cache with allocate() or share_storage(), or start both containers "
        "with one pid namespace (--pid=container:NAME, shareProcessNamespace) and /proc mounted "
        "in it"
    ),
)
FOREIGN_UID = Message(
    text="the peer runs under another uid",
    kind=ErrorKind.HANDSHAKE,
    next_step="run both under one uid, or list the peer's in ShmConfig(allowed_uids=...)",
)
UNREACHABLE = Message(
    text="the peer's handover socket cannot be reached",
    kind=ErrorKind.HANDSHAKE,
    next_step=(
        "an abstract socket name needs a common network namespace: with separate ones set "
        "ShmConfig(socket_dir=...) to a directory that both sides share"
    ),
)
NOT_ANSWERING = Message(
    text="the peer does not answer on the handover socket",
    kind=ErrorKind.TIMEOUT,
    next_step="check whether its process is stopped or holds the GIL",
)
REFUSED_TOKEN = Message(
    text="the peer refused our token",
    kind=ErrorKind.HANDSHAKE,
    next_step="fetch the peer's current PeerInfo over the control channel",
)
REFUSED_UID = Message(
    text="the peer refused our uid",
    kind=ErrorKind.HANDSHAKE,
    next_step="run both under one uid, or list ours in the peer's ShmConfig(allowed_uids=...)",
)
REFUSED_VERSION = Message(
    text="no common version of the shm handover protocol",
    kind=ErrorKind.HANDSHAKE,
    next_step="bring both sides to compatible versions of kvxfer",
)
REFUSED_STALE = Message(
    text="the peer meant is of another incarnation",
    kind=ErrorKind.STALE,
    next_step="fetch the peer's current PeerInfo over the control channel",
)
REFUSED_FULL = Message(
    text="the peer has too many connections",
    kind=ErrorKind.RESOURCE,
    next_step="raise ShmConfig(max_connections=...) there",
)
BROKEN_PROTOCOL = Message(
    text="the peer broke the handover protocol",
    kind=ErrorKind.HANDSHAKE,
    next_step="check that the process at the other end is a kvxfer transport of a known version",
)
NOT_SEALED = Message(
    text="the peer's memory file is not sealed",
    kind=ErrorKind.HANDSHAKE,
    next_step="it could shrink under us (SIGBUS); let kvxfer allocate it",
)
TOO_SMALL = Message(
    text="the peer's memory file is smaller than it says",
    kind=ErrorKind.HANDSHAKE,
    next_step="it was truncated before it was sealed; let kvxfer allocate it",
)
MAP_FAILED = Message(
    text="the peer's memory cannot be mapped",
    kind=ErrorKind.RESOURCE,
    next_step="check the address space limit and vm.max_map_count",
)
NO_MEMORY = Message(
    text="cannot commit shared memory",
    kind=ErrorKind.RESOURCE,
    next_step="check the memory limit of the container (shared memory counts) and free memory",
)

ALL: tuple[Message, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Message)
)
"""For the classifier: one rule per message, matched by the start of the text."""
