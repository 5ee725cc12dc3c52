"""Section 1, the rest: success, and arguments that the engine refuses before posting."""

from __future__ import annotations

from kvxfer.testing.softrdma.pair import PIECE, scattered
from kvxfer.testing.softrdma.samples import Verdict
from kvxfer.testing.softrdma.scenario import Observation, Rig, scenario
from kvxfer.testing.softrdma.session import Outcome

OUT_OF_RANGE = "length out of range"
MISMATCH = "lengths of local offsets, remote offsets or sizes mismatch"
TOO_LARGE = "single request size N exceeds UINT32_MAX; split it before submitting"
NO_BACKEND = "No available backend found, create backend first"
MERGED = (
    "merged RDMA WR K length L exceeds local max_msg_sz M; enable RDMA transfer chunking or "
    "reduce batch size"
)


@scenario(section=1, row="success", verdict=Verdict.SUCCESS)
def success(rig: Rig) -> Observation:
    """READ of one piece."""
    pair = rig.pair()
    outcome = pair.session.read(0, 0, PIECE).wait()
    return rig.status(outcome, landed_later=pair.landed([0]))


@scenario(section=1, row="success", verdict=Verdict.SUCCESS)
def success_empty_batch(rig: Rig) -> Observation:
    """READ of no pieces: succeeds at once, with an empty message."""
    return rig.status(rig.pair().session.read_batch([], [], []).outcome)


@scenario(section=1, row="success", verdict=Verdict.SUCCESS)
def success_zero_size(rig: Rig) -> Observation:
    """READ of zero bytes."""
    return rig.status(rig.pair().session.read(0, 0, 0).wait())


@scenario(section=1, row=OUT_OF_RANGE, verdict=Verdict.PERMANENT)
def length_out_of_range(rig: Rig) -> Observation:
    """READ of one piece that ends beyond the buffer."""
    pair = rig.pair()
    refused = pair.session.read(pair.buffer.nbytes - 100, 0, PIECE).wait()
    again = pair.session.read(pair.buffer.nbytes - 100, 0, PIECE).wait()
    return rig.status(refused, retry=again, valid=pair.session.read(0, 0, PIECE).wait())


@scenario(section=1, row=OUT_OF_RANGE, verdict=Verdict.PERMANENT)
def length_out_of_range_batch(rig: Rig) -> Observation:
    """READ of three pieces of which the last one begins at the buffer's end: none lands."""
    pair = rig.pair()
    offsets = [*scattered(2), pair.buffer.nbytes]
    refused = pair.session.read_batch(offsets, offsets, [PIECE] * 3).wait()
    landed = pair.landed(offsets[:2])
    again = pair.session.read_batch(offsets, offsets, [PIECE] * 3).wait()
    valid = pair.session.read(0, 0, PIECE).wait()
    return rig.status(refused, landed_later=landed, retry=again, valid=valid)


@scenario(section=1, row=MISMATCH, verdict=Verdict.PERMANENT)
def vectors_mismatch(rig: Rig) -> Observation:
    """Session-level READ with two local offsets, one remote offset and one size."""
    pair = rig.pair()

    def post() -> Outcome:
        return pair.session.read_batch([0, PIECE], [0], [PIECE]).wait()

    return rig.status(post(), retry=post(), valid=pair.session.read(0, 0, PIECE).wait())


@scenario(section=1, row=TOO_LARGE, verdict=Verdict.PERMANENT)
def size_exceeds_uint32(rig: Rig) -> Observation:
    """READ of 8 GiB in one piece."""
    pair = rig.pair()
    refused = pair.session.read(0, 0, 1 << 33).wait()
    again = pair.session.read(0, 0, 1 << 33).wait()
    return rig.status(refused, retry=again, valid=pair.session.read(0, 0, PIECE).wait())


@scenario(section=1, row=TOO_LARGE, verdict=Verdict.PERMANENT)
def size_exceeds_uint32_batch(rig: Rig) -> Observation:
    """READ of two pieces, one of which is 8 GiB."""
    pair = rig.pair()
    refused = pair.session.read_batch([0, PIECE], [0, PIECE], [1, 1 << 33]).wait()
    again = pair.session.read_batch([0, PIECE], [0, PIECE], [1, 1 << 33]).wait()
    return rig.status(refused, retry=again, valid=pair.session.read(0, 0, PIECE).wait())


@scenario(section=1, row=MERGED, verdict=Verdict.PERMANENT, environment={"SOFTIBV_MAX_MSG": "8192"})
def merged_exceeds_max_message(rig: Rig) -> Observation:
    """READ of three adjacent pieces of 4 KiB, which mori merges, where the port carries 8 KiB."""
    pair = rig.pair()
    offsets = [0, PIECE, 2 * PIECE]

    def post() -> Outcome:
        return pair.session.read_batch(offsets, offsets, [PIECE] * 3).wait()

    return rig.status(post(), retry=post(), valid=pair.session.read(0, 0, PIECE).wait())


def _engine_read(rig: Rig, *, backend: bool, known: bool) -> Observation:
    engine, peer = rig.engine(backend=backend), rig.peer()
    buffer = engine.buffer(PIECE)
    if known:
        engine.add_peer(peer.description)

    def post() -> Outcome:
        return engine.read(buffer, 0, peer.memory, 0, PIECE).wait()

    refused, again = post(), post()
    if not backend:
        engine.create_backend()
    engine.add_peer(peer.description)
    return rig.status(refused, retry=again, valid=post())


@scenario(section=1, row=NO_BACKEND, verdict=Verdict.PERMANENT)
def no_backend(rig: Rig) -> Observation:
    """Engine-level READ by an engine without a backend."""
    return _engine_read(rig, backend=False, known=True)


@scenario(section=1, row=NO_BACKEND, verdict=Verdict.PERMANENT)
def peer_engine_not_registered(rig: Rig) -> Observation:
    """Engine-level READ from a peer whose engine was not made known: the text is misleading."""
    return _engine_read(rig, backend=True, known=False)
