"""The peer process of two-process tests: what it passes on, and that it never outlives its use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.memory import MemoryKind, span_of
from kvxfer.errors import InvalidInputError, MissingDependencyError, StaleError
from kvxfer.testing.memory import digest, pattern
from kvxfer.testing.peer import decode_descriptor, decode_info, encode_descriptor, encode_info
from kvxfer.testing.peer_process import PeerProcess, PeerProcessError

HERE = "test_peer_process"


class Chatty(LoopbackTransport):
    """Prints where a line protocol would be, as engines do."""

    def _register(self, span):
        os.write(1, b"engine: registering\n")
        print("and again", flush=True)
        return super()._register(span)


class Fussy(LoopbackTransport):
    def __init__(self, *, limit):
        super().__init__()
        self.limit = limit

    def _register(self, span):
        if span.nbytes > self.limit:
            raise StaleError(f"{span.nbytes} is too much", next_step="ask for less")
        return super()._register(span)


class CrashesAtTheEnd(LoopbackTransport):
    def _close(self, deadline):
        os.kill(os.getpid(), signal.SIGSEGV)


class CannotStart(LoopbackTransport):
    def __init__(self):
        raise MissingDependencyError("no engine here")


@pytest.fixture
def peer():
    peers = []

    def make(engine, **options):
        peers.append(PeerProcess(f"{HERE}:{engine.__name__}", options=options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.dispose()


def ended(pid: int) -> bool:
    """Whether the process is gone, or waits for nothing but its parent to notice."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_memory_is_read_and_filled_from_outside(peer):
    """``fill``, ``read`` and ``digest`` see the peer's own bytes; an engine that prints to standard
    output does not disturb them."""
    far = peer(Chatty)
    buffer = far.register(5000)
    assert buffer.descriptor.incarnation == far.info.incarnation
    far.fill(buffer, 9)
    assert far.read(buffer, 10, 20) == pattern(9, 5000)[10:30]
    assert far.digest(buffer) == digest(pattern(9, 5000))
    assert far.guards_intact(buffer)


def test_errors_keep_their_type(peer):
    """What the peer's transport raises is raised here, with its next step; the peer goes on."""
    far = peer(Fussy, limit=5000)
    with pytest.raises(StaleError, match=r"9999 is too much\. ask for less"):
        far.register(9999)
    with pytest.raises(InvalidInputError, match="vram"):
        far.register(64, kind=MemoryKind.VRAM)
    assert far.register(100).nbytes == 100


def test_reopen_is_another_life(peer):
    """``reopen`` gives a new incarnation in the same process."""
    far = peer(Chatty)
    pid, first = far.pid, far.info.incarnation
    far.close()
    far.reopen()
    assert far.pid == pid
    assert far.info.incarnation != first


def test_stop_kill_and_death_are_noticed(peer):
    """A stopped process is not alive; a killed one answers with PeerProcessError, not a hang."""
    far = peer(Chatty)
    far.stop()
    assert not far.alive
    far.resume()
    assert far.alive
    far.register(64)
    far.kill()
    assert not far.alive
    with pytest.raises(PeerProcessError, match="status -9 during 'register'"):
        far.register(64)


def test_a_crash_at_the_end_is_an_error():
    """A backend that crashes while it is closed fails the test that used it."""
    far = PeerProcess(f"{HERE}:CrashesAtTheEnd")
    with pytest.raises(PeerProcessError, match="status -11"):
        far.dispose()


def test_a_backend_that_cannot_start_says_why():
    """The error of the constructor comes through."""
    with pytest.raises(MissingDependencyError, match="no engine here"):
        PeerProcess(f"{HERE}:CannotStart")


@pytest.mark.parametrize("stopped", [False, True])
def test_dies_with_its_parent(stopped):
    """The child of a parent that was killed ends, even while it stands still."""
    program = (
        "import sys\n"
        "from kvxfer.testing.peer_process import PeerProcess\n"
        f"peer = PeerProcess('{HERE}:Chatty')\n"
        + ("peer.stop()\n" if stopped else "")
        + "print(peer.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert not ended(pid)
        parent.kill()
        deadline = time.monotonic() + 20
        while not ended(pid):
            assert time.monotonic() < deadline, "the peer process outlives its parent"
            time.sleep(0.01)


def test_values_survive_the_way():
    """PeerInfo and Descriptor come back equal from their JSON form."""
    far = LoopbackTransport()
    info = far.local_info()
    assert decode_info(encode_info(info)) == info
    descriptor = far.register(span_of(np.zeros(8, np.uint8))).descriptor
    assert decode_descriptor(encode_descriptor(descriptor)) == descriptor
