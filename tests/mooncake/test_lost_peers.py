"""Peers that are killed, stopped or started again, over the real Mooncake engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import attrs
import pytest
from mooncake_rig import BLOCKS, FIRST

from kvxfer.backends.mooncake.wire import EngineAddress
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import HandshakeError, KvxferError, PeerLostError

BIG = Batch([0, 1], [0, 0], [0, 0], [64 * 4096] * 2)


def quick(call):
    """The result of ``call``, which must not wait for anybody: that would take 5 s or more."""
    start = time.monotonic()
    found = call()
    assert time.monotonic() - start < 4.0, "it waited"
    return found


@pytest.mark.parametrize("op", list(Op))
def test_killed_peer(rig, op):
    """The engine's -1 is told as what it is. READ is drained once every piece has ended, WRITE is
    not; later posts and connections are refused by value; a restarted peer is served."""
    r = rig()
    far = r.far()
    path = r.connect(far)
    far.kill()
    attempt = r.moved(op, path, BLOCKS)
    assert attempt.state is AttemptState.FAILED
    assert (attempt.error.code, attempt.accepted) == (-1, Accepted.ALL)
    assert attempt.error.message.startswith("nobody listens at the peer's address")
    assert attempt.drained_by == ("every piece has ended" if op is Op.READ else "")
    with pytest.raises(PeerLostError):
        r.transport.post(op, path, BLOCKS)
    fence = r.answer(r.transport.disconnect(r.peer))
    assert not fence.done
    assert fence.ours_done == (op is Op.READ)
    _, error = r.outcome(r.transport.connect(far.info))
    assert isinstance(error, PeerLostError)
    again = r.connect(r.far())
    assert r.read(again, BLOCKS).state is AttemptState.DONE
    assert all(r.landed(BLOCKS))


def test_killed_in_the_middle(rig):
    """Whatever had arrived: the attempt is DONE with all its bytes, or FAILED and drained."""
    r = rig()
    far = r.far()
    path = r.connect(far)
    attempts = [r.transport.post(Op.READ, path, BIG) for _ in range(40)]
    far.kill()
    r.until(lambda: all(a.terminal for a in attempts), "every attempt ended")
    assert all(a.drained for a in attempts)
    assert any(a.state is AttemptState.FAILED for a in attempts)


def test_restarted_peer_is_another_incarnation(rig):
    """A peer whose engine was opened anew: the old path fails, its old address is refused, the new
    one is served."""
    r = rig()
    far = r.far()
    path = r.connect(far)
    old = far.info
    far.reopen(pump=r.transport.progress)
    attempt = r.moved(Op.READ, path, FIRST)
    assert attempt.state is AttemptState.FAILED
    _, error = r.outcome(r.transport.connect(old))
    assert isinstance(error, KvxferError)
    again = r.connect(far)
    assert r.read(again, BLOCKS).state is AttemptState.DONE
    assert all(r.landed(BLOCKS))


def test_stopped_peer_lands_late(rig):
    """With a stopped peer nothing of ours waits. The READ stays pending until its owner gives up:
    FAILED at once, undrained; its bytes land when the peer runs again, which drains it."""
    r = rig()
    far, healthy = r.far(), r.far()
    path = r.connect(far)
    peer = r.peer
    assert r.read(path, BLOCKS).state is AttemptState.DONE
    for array in r.arrays:
        array[:] = 0
    far.stop()
    try:
        attempt = quick(lambda: r.transport.post(Op.READ, path, BLOCKS))
        quick(r.transport.progress)
        connecting = quick(lambda: r.transport.connect(far.info))
        _, error = r.outcome(connecting)
        assert isinstance(error, HandshakeError)
        assert attempt.state is AttemptState.PENDING
        fence = r.answer(quick(lambda: r.transport.disconnect(peer)))
        assert (fence.done, fence.ours_done) == (False, False)
        assert (attempt.state, attempt.accepted) == (AttemptState.FAILED, Accepted.UNKNOWN)
        assert not attempt.drained
        assert not any(r.landed(BLOCKS))
    finally:
        far.resume()
    r.until(lambda: attempt.drained, "the late completion")
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained_by == "late completion"
    assert all(r.landed(BLOCKS))
    r.until(lambda: not r.transport._flights.under_way, "nothing under way")
    assert far.info.incarnation not in r.transport._remotes
    assert r.read(r.connect(healthy), BLOCKS).state is AttemptState.DONE


def test_a_stopped_peer_holds_up_nobody(rig):
    """Transfers with a healthy peer go on while another one stands still."""
    r = rig()
    stopped, healthy = r.far(), r.far()
    stuck_path = r.connect(stopped)
    path = r.connect(healthy)
    stopped.stop()
    try:
        stuck = r.transport.post(Op.READ, stuck_path, BIG)
        for _ in range(20):
            assert r.read(path, BLOCKS).state is AttemptState.DONE
        assert not stuck.terminal
    finally:
        stopped.resume()
    r.until(lambda: stuck.terminal, "the peer that runs again")
    assert stuck.state is AttemptState.DONE


def test_close_with_a_stopped_peer(rig):
    """``close`` returns in time; a READ is drained by the end of the engine."""
    r = rig()
    far = r.far()
    path = r.connect(far)
    far.stop()
    try:
        attempts = [r.transport.post(op, path, BIG) for op in Op]
        start = time.monotonic()
        left = r.transport.close(2.0)
        # The engine's own end takes up to 2 s more.
        assert time.monotonic() - start < 6.0
    finally:
        far.resume()
    assert all(a.state is AttemptState.FAILED for a in attempts)
    reading = next(a for a in attempts if a.op is Op.READ)
    assert reading.drained_by == "engine closed"
    assert left == [a for a in attempts if a.op is Op.WRITE]


def test_close_never_joins_a_stuck_thread(rig, monkeypatch):
    """A thread that does not come back from the engine is left to itself, with the engine, and
    counted."""
    r = rig()
    path = r.connect(r.far())
    inside, go = threading.Event(), threading.Event()
    submit = r.transport._engine.submit

    def stuck(*arguments):
        inside.set()
        go.wait(60.0)
        return submit(*arguments)

    monkeypatch.setattr(r.transport._engine, "submit", stuck)
    poster = threading.Thread(target=r.transport.post, args=(Op.READ, path, FIRST), daemon=True)
    poster.start()
    assert inside.wait(30.0)
    start = time.monotonic()
    left = r.transport.close(0.2)
    assert time.monotonic() - start < 2.0
    assert len(left) == 1
    assert r.transport.abandoned == 1
    go.set()
    poster.join(30.0)
    assert not poster.is_alive()


def test_dead_and_silent_addresses(rig):
    """Nobody there, somebody who never answers, somebody who answers nonsense: error values within
    the time-out, and others can still be reached."""
    r = rig(connect_timeout=0.5)
    far = r.far()
    where = EngineAddress.decode(far.info.data)

    def outcome(port):
        moved = EngineAddress(where.version, where.host, port, where.protocol, where.token)
        info = attrs.evolve(far.info, data=moved.encode())
        return r.outcome(r.transport.connect(info))[1]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        error = outcome(port)
        assert isinstance(error, HandshakeError)
        assert "does not answer" in error.message
    assert isinstance(outcome(port), PeerLostError)
    with socket.create_server(("127.0.0.1", 0)) as odd:

        def nonsense():
            link, _ = odd.accept()
            with link:
                link.recv(64)
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=nonsense)
        thread.start()
        error = outcome(odd.getsockname()[1])
        thread.join()
        assert isinstance(error, HandshakeError)
    assert r.read(r.connect(far), BLOCKS).state is AttemptState.DONE


def test_a_process_that_used_it_exits_cleanly():
    """Status 0, closed or not, and nothing on standard output."""
    code = (
        "import sys\n"
        "from kvxfer.backends.mooncake import MooncakeTransport\n"
        "transport = MooncakeTransport()\n"
        "if sys.argv[1] == 'close': transport.close()\n"
    )
    for how in ("close", "leave"):
        done = subprocess.run(
            [sys.executable, "-c", code, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_ipv6():
    """With an IPv6 literal as host the engine is dialled there; the whole process is then IPv6."""
    code = (
        "import time\n"
        "import numpy as np\n"
        "from kvxfer.backends.mooncake import MooncakeConfig, MooncakeTransport\n"
        "from kvxfer.core.batch import Batch\n"
        "from kvxfer.core.memory import span_of\n"
        "from kvxfer.core.verdict import Op\n"
        "a, b = (MooncakeTransport(MooncakeConfig(host='::1')) for _ in range(2))\n"
        "here, there = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8)\n"
        "ours, theirs = a.register(span_of(here)), b.register(span_of(there))\n"
        "def answer(p):\n"
        "    while p.poll() == (None, None): time.sleep(0.001)\n"
        "    assert p.poll()[1] is None, p.poll()[1]\n"
        "    return p.poll()[0]\n"
        "peer = answer(a.connect(b.local_info()))\n"
        "path = answer(a.prepare(peer, [(ours, theirs.descriptor)]))\n"
        "done = a.post(Op.READ, path, Batch([0], [0], [0], [64]))\n"
        "while not done.terminal: a.progress()\n"
        "assert done.error is None, done.error\n"
        "assert (here == there).all()\n"
        "assert a.capabilities.ip_versions == {6}\n"
        "a.close(); b.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
