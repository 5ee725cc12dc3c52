"""The mooncake backend on the real engine over tcp: bytes, limits, memory and whom it talks to."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from mooncake_rig import BLOCKS, FIRST

from kvxfer.backends.mooncake import MooncakeConfig, MooncakeTransport
from kvxfer.backends.mooncake.identity import NBYTES as TOKEN
from kvxfer.backends.mooncake.wire import pack_region
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.capabilities import Visibility
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, HandshakeError, InvalidInputError, StaleError
from kvxfer.testing.memory import pattern
from kvxfer.testing.two_sides import BLOCK, NBYTES

BATCHES = {
    "blocks": BLOCKS,
    "slices": Batch([0, 1, 1, 0], [1024, 4096, 0, 8704], [512, 0, 4608, 9728], [1536] * 4),
    "odd sizes": Batch([1, 0, 1], [3, 4096, 100], [1, 7, 65536], [5, 4097, 1]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_read_and_write_between_processes(rig, batch):
    """Pieces of any size and offset move exactly what they name, in both directions; DONE of a
    WRITE means that the peer sees the bytes at the first look."""
    r = rig()
    path = r.connect(r.far())
    attempt = r.read(path, batch)
    assert (attempt.state, attempt.accepted) == (AttemptState.DONE, Accepted.ALL)
    moved = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
    for p, a, b, n in zip(*batch.lists(), strict=True):
        moved[p][a : a + n] = np.frombuffer(pattern(p, NBYTES), np.uint8)[b : b + n]
    assert [bytes(a) for a in r.arrays] == [bytes(m) for m in moved]
    for array in r.arrays:
        array[:] = 0x5A
    assert r.transport.capabilities.visible(Op.WRITE) is Visibility.VISIBLE
    assert r.moved(Op.WRITE, path, batch).state is AttemptState.DONE
    expected = [bytearray(pattern(p, NBYTES)) for p in range(2)]
    for p, _, b, n in zip(*batch.lists(), strict=True):
        expected[p][b : b + n] = b"\x5a" * n
    assert [r.fars[0].read(b) for b in r.there] == expected


def test_a_full_queue_refuses_and_drains(rig):
    """The engine fails pieces beyond its queue: a post that would pass it is refused before it
    gets there, posts nothing, and goes through once earlier ones have ended."""
    r = rig()
    path = r.connect(r.far())
    most = r.transport.capabilities.max_pieces
    at = np.arange(most, dtype=np.int64) * 8
    batch = Batch(np.zeros(most, np.int32), at, at, np.full(most, 8, np.int64))
    posted = []

    def fill():
        for _ in range(8):
            posted.append(r.transport.post(Op.READ, path, batch))

    with pytest.raises(BackpressureError) as caught:
        fill()
    assert caught.value.engine.message.startswith("the engine's queue to this peer is full")
    assert len(posted) >= 2
    r.until(lambda: all(a.terminal for a in posted), "what was posted ended")
    assert {a.state for a in posted} == {AttemptState.DONE}
    assert r.read(path, batch).state is AttemptState.DONE
    assert all(r.landed(batch))


def test_unregistered_local_memory_never_reaches_the_engine(rig):
    """The engine would read into memory that nobody registered; we refuse."""
    r = rig()
    path = r.connect(r.far())
    stranger = np.zeros(BLOCK, np.uint8)
    number = r.transport._engine.submit(
        Op.READ,
        path.remote.name,
        int(stranger.ctypes.data),
        path.remote_base[0],
        BLOCK,
    )
    r.until(lambda: r.transport._engine.state(number) == 1, "the engine did it")
    assert bytes(stranger) == pattern(0, NBYTES)[:BLOCK]
    r.transport.deregister(r.regions[0])
    with pytest.raises(StaleError, match="not registered"):
        r.transport.post(Op.READ, path, FIRST)
    assert r.read(path, Batch([1], [0], [0], [BLOCK])).state is AttemptState.DONE


def test_ranges_are_checked_before_the_engine(rig):
    """Offsets outside a region, ours or the peer's, are refused with range and size."""
    r = rig()
    path = r.connect(r.far())
    for batch, side in (
        (Batch([0], [NBYTES - 1], [0], [2]), "local"),
        (Batch([0], [0], [NBYTES], [1]), "remote"),
    ):
        with pytest.raises(InvalidInputError, match=f"{side} byte {NBYTES + 1}"):
            r.transport.post(Op.READ, path, batch)
    assert r.read(path, FIRST).state is AttemptState.DONE


@pytest.mark.parametrize("op", list(Op))
def test_a_descriptor_that_lies_fails_and_moves_nothing_outside(rig, op):
    """Memory that the peer never registered, or that leaves a region: the peer's engine refuses it,
    the -1 is told as what it is, READ is drained, and the path goes on working."""
    r = rig()
    path = r.connect(r.far())
    true = r.there[0].descriptor
    for address in (BLOCK, path.remote_base[0] + NBYTES - BLOCK // 2):
        forged = r.prepare([attrs.evolve(true, data=pack_region(address))])
        attempt = r.moved(op, forged, FIRST)
        assert attempt.state is AttemptState.FAILED
        assert attempt.error.code == -1
        assert attempt.error.message.startswith("the peer has not registered the memory")
        assert attempt.drained == (op is Op.READ)
    assert not any(a.any() for a in r.arrays)
    assert all(r.fars[0].guards_intact(b) for b in r.there)
    r.until(lambda: r.read(path, BLOCKS).state is AttemptState.DONE, "the path works again")
    assert all(r.landed(BLOCKS))


def test_one_bad_piece_fails_the_whole_and_drains_it(rig):
    """The engine's status of a batch says "failed" while other pieces still move. Ours waits for
    all of them: what is drained stays as it is."""
    r = rig()
    path = r.connect(r.far())
    r.fars[0].deregister(r.there[1])
    n = 200
    at = np.arange(n, dtype=np.int64) * 1024
    pair = np.zeros(n, np.int32)
    pair[0] = 1
    attempt = r.read(path, Batch(pair, at, at, np.full(n, 1024, np.int64)))
    assert attempt.state is AttemptState.FAILED
    assert attempt.error.message.startswith("the peer has not registered the memory")
    assert (attempt.accepted, attempt.drained_by) == (Accepted.ALL, "every piece has ended")
    for array in r.arrays:
        array[:] = 0x11
    path = r.prepare()
    r.until(lambda: r.read(path, FIRST).state is AttemptState.DONE, "another READ")
    assert (r.arrays[0][BLOCK:] == 0x11).all()
    assert (r.arrays[1] == 0x11).all()


@pytest.mark.parametrize("data", [b"", b"[1]", b"[2,4096]", b"[1,0]", b'[1,"x"]', b"\xff" * 40])
def test_garbage_descriptors_are_error_values(rig, data):
    """A descriptor that is none is a ``HandshakeError`` of ``prepare``; good ones work after it."""
    r = rig()
    r.connect(r.far())
    wrong = attrs.evolve(r.there[0].descriptor, data=data)
    _, error = r.outcome(r.transport.prepare(r.peer, [(r.regions[0], wrong)]))
    assert isinstance(error, HandshakeError)
    assert r.read(r.prepare(), BLOCKS).state is AttemptState.DONE


@pytest.mark.parametrize("op", list(Op))
def test_another_life_at_the_address_is_never_done(rig, op):
    """The engine knows peers by address: a process that took over the one of a peer that died is
    read in its place. Here the bytes that name the peer's incarnation change under a path."""
    r = rig()
    other = MooncakeTransport()
    try:
        far = np.arange(NBYTES, dtype=np.uint8)
        theirs = other.register(span_of(far))
        peer = r.answer(r.transport.connect(other.local_info()))
        path = r.answer(r.transport.prepare(peer, [(r.regions[0], theirs.descriptor)]))
        assert r.moved(op, path, FIRST).state is AttemptState.DONE
        other._tokens._memory[0] = 0
        attempt = r.moved(op, path, FIRST)
        assert attempt.state is AttemptState.FAILED
        assert attempt.error.message.startswith("another incarnation answers")
        assert attempt.drained == (op is Op.READ)
        with pytest.raises(Exception, match="is lost"):
            r.transport.post(op, path, FIRST)
    finally:
        other.close()


def test_without_verify_peer_no_piece_is_added(rig):
    """``verify_peer=False`` moves what is asked for and nothing else."""
    r = rig(verify_peer=False)
    path = r.connect(r.far())
    attempt = r.transport.post(Op.READ, path, BLOCKS)
    assert path.remote.pieces == len(BLOCKS)
    r.until(lambda: attempt.terminal, "the attempt ended")
    assert attempt.state is AttemptState.DONE
    assert all(r.landed(BLOCKS))


def test_memory_inside_registered_memory_shares_it(rig):
    """The engine refuses overlapping memory (-7): what lies inside a region is registered with it,
    and the range goes when the last one goes; what overlaps otherwise is refused."""
    r = rig()
    transport = r.transport
    array = np.zeros(4 * BLOCK, np.uint8)
    whole = transport.register(span_of(array))
    inner = transport.register(span_of(array[BLOCK : 2 * BLOCK]))
    both = np.lib.stride_tricks.as_strided(array[3 * BLOCK :], (2 * BLOCK,), (1,))
    with pytest.raises(InvalidInputError, match="overlap"):
        transport.register(attrs.evolve(span_of(both), owner=array))
    transport.deregister(whole)
    assert not transport._engine.register(int(array.ctypes.data) + 2**40, 1), "the engine works"
    assert transport._engine.register(int(array.ctypes.data), 16) == -7, "still registered"
    transport.deregister(inner)
    again = transport.register(span_of(array))
    transport.deregister(again)


def test_the_places_for_identities_come_back(rig):
    """After many posts, good and refused ones, no place and no piece is still counted."""
    r = rig()
    path = r.connect(r.far())
    free = len(r.transport._tokens._free)
    for _ in range(50):
        assert r.read(path, FIRST).state is AttemptState.DONE
    r.until(lambda: not r.transport._flights.under_way, "nothing under way")
    assert len(r.transport._tokens._free) == free
    assert (path.remote.pieces, path.remote.flights) == (0, 0)
    r.answer(r.transport.disconnect(r.peer))
    assert not r.transport._remotes


def test_config_is_refused_before_an_engine_starts():
    """An engine that took tcp although it was asked for RDMA does not become a transport."""
    with pytest.raises(InvalidInputError, match="took tcp"):
        MooncakeTransport(MooncakeConfig.from_options({"protocol": "rdma"}))


def test_token_is_registered_memory(rig):
    """The identity can be read by whoever is told its address, as nothing else of ours can."""
    r = rig()
    description = r.transport.description
    assert description.protocol == "tcp"
    assert description.tcp_version >= 2
    tokens = r.transport._tokens
    assert tokens.nbytes % TOKEN == 0
