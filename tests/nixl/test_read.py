"""The nixl backend on the real library over UCX tcp: what the conformance suite cannot provoke."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import attrs
import numpy as np
import pytest

from kvxfer.backends.nixl import NixlConfig, NixlTransport
from kvxfer.backends.nixl.envelope import Content, unwrap, wrap
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import HandshakeError, PeerLostError, StaleError, TransportError
from kvxfer.testing.memory import pattern
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.two_sides import BLOCK, NBYTES, TwoSides

BACKEND = "kvxfer.backends.nixl:NixlTransport"
DISCONNECTED = "nixl._bindings.nixlRemoteDisconnectError"


def two_sides():
    """Over tcp: shared memory would finish a READ of a stopped peer, tcp needs the peer's help."""
    return TwoSides(
        NixlTransport(NixlConfig(ucx_tls="tcp")),
        lambda: PeerProcess(BACKEND, timeout=60.0, env={"UCX_TLS": "tcp"}),
    )


@pytest.fixture
def rig():
    one = two_sides()
    yield one
    one.close()


BATCHES = {
    "blocks": Batch([0, 1, 1, 0], [0, 4096, 8192, 12288], [8192, 0, 4096, 16384], [4096] * 4),
    "slices": Batch([0, 1, 1, 0], [1024, 4096, 0, 8704], [512, 0, 4608, 9728], [1536] * 4),
    "odd sizes": Batch([1, 0, 1], [3, 4096, 100], [1, 7, 65536], [5, 4097, 1]),
    "layers": Batch.repeated(
        [0, 1, 1],
        [0, 4096, 131072],
        [4096, 0, 65536],
        [0, 8192, 16384],
        [8192, 0, 4096],
        [4096] * 3,
    ),
    "odd layers": Batch.repeated([0, 1], [0, 5000], [77, 0], [3, 9001], [1, 60000], [4096, 777]),
    "odd offsets": Batch([1, 0, 0], [3, 4096, 20001], [1, 7, 65533], [4096] * 3),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_read_and_write_between_processes(rig, batch):
    """Blocks from prepared lists, slices between them and pieces of any size and offset all move
    exactly what they name, in both directions."""
    path = rig.connect(rig.far())
    attempt = rig.read(path, batch)
    assert (attempt.state, attempt.accepted) == (AttemptState.DONE, Accepted.ALL)
    assert all(rig.landed(batch))
    moved = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
    for p, a, b, n in zip(*batch.lists(), strict=True):
        moved[p][a : a + n] = np.frombuffer(pattern(p, NBYTES), np.uint8)[b : b + n]
    assert [bytes(a) for a in rig.arrays] == [bytes(m) for m in moved]
    for array in rig.arrays:
        array[:] = 0x5A
    assert rig.moved(Op.WRITE, path, batch).state is AttemptState.DONE
    expected = [bytearray(pattern(p, NBYTES)) for p in range(2)]
    for p, _, b, n in zip(*batch.lists(), strict=True):
        expected[p][b : b + n] = b"\x5a" * n
    assert [rig.fars[0].read(b) for b in rig.there] == expected


def test_steps_of_one_size_grow_finer(rig):
    """Batches of one piece size on ever finer grids all use prepared lists, and none goes wrong."""
    path = rig.connect(rig.far())
    for step in (1024, 512, 256, 64, 32):
        batch = Batch([0, 1], [step, 5 * step], [9 * step, 3 * step], [1024] * 2)
        assert rig.read(path, batch).state is AttemptState.DONE
        assert all(rig.landed(batch))


@pytest.mark.parametrize("op", list(Op))
def test_killed_peer(rig, op):
    """The disconnect that NIXL raises becomes a value; READ is drained by it, WRITE is not; later
    posts and paths are refused at once; a restarted peer is served."""
    far = rig.far()
    path = rig.connect(far)
    far.kill()
    attempt = rig.moved(op, path, BATCHES["blocks"])
    while attempt.state is AttemptState.DONE:  # into the socket, before UCX has noticed
        attempt = rig.moved(op, path, BATCHES["blocks"])
    assert attempt.state is AttemptState.FAILED
    assert attempt.error.exception[0] == DISCONNECTED
    assert attempt.error.message == "NIXL_ERR_REMOTE_DISCONNECT"
    assert attempt.drained_by == ("endpoint failed" if op is Op.READ else "")
    with pytest.raises(PeerLostError) as caught:
        rig.transport.post(op, path, BATCHES["blocks"])
    assert caught.value.engine.exception[0] == DISCONNECTED
    fence = rig.answer(rig.transport.disconnect(rig.peer))
    assert not fence.done
    _, error = rig.outcome(rig.transport.connect(far.info))
    assert isinstance(error, HandshakeError)
    again = rig.connect(rig.far())
    assert rig.read(again, BATCHES["blocks"]).state is AttemptState.DONE
    assert all(rig.landed(BATCHES["blocks"]))


def test_stopped_peer_lands_late(rig):
    """A READ of a stopped peer stays pending. ``disconnect`` fails it, undrained: its bytes land
    when the peer runs again, which drains it, and only then is the agent forgotten."""
    far = rig.far()
    path = rig.connect(far)
    batch = BATCHES["blocks"]
    assert rig.read(path, batch).state is AttemptState.DONE
    for array in rig.arrays:
        array[:] = 0
    far.stop()
    try:
        attempt = rig.transport.post(Op.READ, path, batch)
        rig.transport.progress()
        assert attempt.state is AttemptState.PENDING
        assert not rig.answer(rig.transport.disconnect(rig.peer)).done
        assert attempt.state is AttemptState.FAILED
        assert attempt.accepted is Accepted.UNKNOWN
        assert not attempt.drained
        assert not any(rig.landed(batch))
    finally:
        far.resume()
    rig.until(lambda: attempt.drained, "the late completion")
    assert attempt.state is AttemptState.FAILED
    assert attempt.drained_by == "late completion"
    assert all(rig.landed(batch))
    rig.until(lambda: len(rig.transport._remotes) == 0, "the agent forgotten")
    path = rig.connect(far)
    assert rig.read(path, batch).state is AttemptState.DONE


def test_refused_post(rig):
    """What NIXL refuses when a transfer is described raises, with its class and code, and posts
    nothing; the path goes on working."""
    far = rig.far()
    good = rig.connect(far)
    path = rig.prepare()
    rig.transport._agent.deregister(rig.regions[1].handle)  # behind our back
    for batch in (Batch([1], [0], [0], [BLOCK]), Batch([1, 1], [0, 9], [0, 9], [1, 2])):
        with pytest.raises(TransportError) as caught:
            rig.transport.post(Op.READ, path, batch)
        assert caught.value.engine.exception[0] == "nixl._bindings.nixlNotFoundError"
        assert caught.value.engine.message == "NIXL_ERR_NOT_FOUND"
    assert not any(array.any() for array in rig.arrays)
    only_first = Batch([0], [0], [0], [BLOCK])
    for either in (good, path):
        assert rig.read(either, only_first).state is AttemptState.DONE


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "of a connection"])
def test_damaged_descriptor_never_reaches_nixl(rig, damage):
    """Once NIXL has seen truncated metadata of an agent, it refuses the good one for ever: damaged
    descriptors are refused before it sees them, and the good ones work afterwards."""
    far = rig.far()
    rig.connect(far)
    data = rig.there[0].descriptor.data
    damaged = {
        "empty": b"",
        "truncated": data[:-7],
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "of a connection": far.info.data,
    }[damage]
    wrong = attrs.evolve(rig.there[0].descriptor, data=damaged)
    _, error = rig.outcome(rig.transport.prepare(rig.peer, [(rig.regions[0], wrong)]))
    assert isinstance(error, HandshakeError)
    assert rig.read(rig.prepare(), BATCHES["blocks"]).state is AttemptState.DONE


POISONS = {
    "truncated": lambda good, other: good[:-7],
    "of another agent": lambda good, other: other,
    "too many sections": lambda good, other: good.replace(
        b"nixlSecElms\x08" + bytes(7) + b"\x01", b"nixlSecElms\x08" + bytes(7) + b"\xff"
    ),
    "a length beyond the end": lambda good, other: good.replace(
        b"nixlDList\x0a" + bytes(7), b"nixlDList" + b"\xff" * 8
    ),
    "a key of no bytes for eight domains": lambda good, other: good[:-10] + b"\xff" + good[-9:],
    "noise": lambda good, other: bytes(range(256)),
}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_poison_in_a_sound_wrapper_is_contained(rig, poison):
    """Metadata that its sender made wrong, digest and all: NIXL would end the process, or refuse
    the good one for ever, or lose another agent. It never sees it; what is under way with another
    peer goes on, and the good descriptor works afterwards."""
    healthy = rig.far()
    path, there = rig.connect(healthy), rig.there
    rig.connect(rig.far())
    mine = rig.there[0].descriptor
    good = unwrap(Content.REGION, mine.data)
    other = unwrap(Content.REGION, there[0].descriptor.data)
    bad = good[:12] + poison(good[12:], other[12:])
    assert bad != good
    wrong = attrs.evolve(mine, data=wrap(Content.REGION, bad))
    attempt = rig.transport.post(Op.READ, path, BATCHES["blocks"])
    _, error = rig.outcome(rig.transport.prepare(rig.peer, [(rig.regions[0], wrong)]))
    assert isinstance(error, HandshakeError)
    rig.until(lambda: attempt.terminal, "the READ from the healthy peer")
    assert attempt.state is AttemptState.DONE
    assert rig.read(rig.prepare(), BATCHES["blocks"]).state is AttemptState.DONE
    assert rig.read(path, BATCHES["slices"]).state is AttemptState.DONE


@pytest.mark.parametrize("poison", ["truncated", "of another agent", "a region", "no connection"])
def test_poisoned_connection_data_is_contained(rig, poison):
    """A peer that says it is reached in a way that is none, or as somebody else, is refused; that
    somebody, and the peer's good data, work."""
    healthy = rig.far()
    path, there = rig.connect(healthy), rig.there
    far = rig.far()
    good = unwrap(Content.CONNECTION, far.info.data)
    one, none = b"Conns\x08" + bytes(7) + b"\x01", b"Conns\x08" + bytes(7) + b"\x00"
    bad = {
        "truncated": good[:-7],
        "of another agent": unwrap(Content.CONNECTION, healthy.info.data),
        "a region": unwrap(Content.REGION, there[0].descriptor.data)[12:],
        "no connection": good.replace(one, none),
    }[poison]
    assert bad != good
    info = attrs.evolve(far.info, data=wrap(Content.CONNECTION, bad))
    _, error = rig.outcome(rig.transport.connect(info))
    assert isinstance(error, HandshakeError)
    assert rig.read(path, BATCHES["blocks"]).state is AttemptState.DONE
    assert rig.read(rig.connect(far), BATCHES["blocks"]).state is AttemptState.DONE
    assert rig.read(path, BATCHES["blocks"]).state is AttemptState.DONE


def test_restarted_peer_is_another_agent(rig):
    """A peer whose agent was opened anew: the old path ends in an error, and the new incarnation is
    served at once, beside what is left of the old one."""
    far = rig.far()
    path = rig.connect(far)
    assert rig.read(path, BATCHES["blocks"]).state is AttemptState.DONE
    far.reopen(pump=rig.transport.progress)
    attempt = rig.read(path, BATCHES["blocks"])
    assert attempt.state is AttemptState.FAILED
    assert attempt.error.exception[0] == DISCONNECTED
    again = rig.connect(far)
    assert rig.read(again, BATCHES["blocks"]).state is AttemptState.DONE
    assert all(rig.landed(BATCHES["blocks"]))


def test_a_stopped_peer_holds_up_nobody(rig):
    """Our calls return at once, and a healthy peer is served, while another one stands still."""
    stopped, healthy = rig.far(), rig.far()
    stuck_path = rig.connect(stopped)
    path = rig.connect(healthy)
    stopped.stop()
    try:
        start = time.monotonic()
        stuck = rig.transport.post(Op.READ, stuck_path, BATCHES["blocks"])
        rig.transport.progress()
        assert time.monotonic() - start < 5.0, "it waited"
        for _ in range(20):
            assert rig.read(path, BATCHES["blocks"]).state is AttemptState.DONE
        assert not stuck.terminal
    finally:
        stopped.resume()
    rig.until(lambda: stuck.terminal, "the peer that runs again")
    assert stuck.state is AttemptState.DONE


def test_deregistered_region_is_refused(rig):
    """A path goes on working for the regions that are still registered, prepared lists or not."""
    path = rig.connect(rig.far())
    rig.transport.deregister(rig.regions[1])
    with pytest.raises(StaleError, match="not registered"):
        rig.transport.post(Op.READ, path, BATCHES["blocks"])
    only_first = Batch([0], [0], [0], [BLOCK])
    assert rig.read(path, only_first).state is AttemptState.DONE


def test_a_process_that_used_it_exits_cleanly():
    """UCX kills a process at exit where its ib module is loaded without a device; ours ends with
    status 0, closed or not, and prints nothing."""
    code = (
        "import sys\n"
        "from kvxfer.backends.nixl import NixlTransport\n"
        "transport = NixlTransport()\n"
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


def test_closed_while_another_thread_asks(rig):
    """Progress is inside NIXL as the transport is closed with transfers in flight: their handles
    are released only when it has left."""
    far = rig.far()
    path = rig.connect(far)
    far.stop()
    attempts = [rig.transport.post(Op.READ, path, BATCHES["blocks"]) for _ in range(4)]
    asked, seen = threading.Event(), []
    ask = rig.transport._agent.state

    def slowly(handle):
        asked.set()
        while not rig.transport.closed:
            time.sleep(0.001)
        state = ask(handle)
        seen.append(state)
        return state

    rig.transport._agent.state = slowly
    thread = threading.Thread(target=rig.transport.progress)
    thread.start()
    assert asked.wait(60.0)
    rig.transport.close(0.0)
    thread.join()
    assert seen[:1] == ["PROC"]
    assert all(attempt.drained for attempt in attempts)
