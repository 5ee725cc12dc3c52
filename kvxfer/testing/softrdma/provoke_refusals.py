"""Section 1, refusals: the engine did not take the work, or not all of it."""

from __future__ import annotations

import errno

from kvxfer.testing.softrdma.pair import PIECE, MoriPair, scattered
from kvxfer.testing.softrdma.samples import Verdict
from kvxfer.testing.softrdma.scenario import Observation, Rig, scenario
from kvxfer.testing.softrdma.session import Transfer

SHORT_BACKOFF = {"MORI_IO_SQ_BACKOFF_TIMEOUT_US": "1000"}
DEPTH = 64

SQ_FULL = "SQ full (batch): ep=N depth=D requested=R max=M"
SQ_FULL_NOTIFY = "SQ full (notify): ep=N depth=D requested=1 max=M"
POST_FAILED = "ibv_post_send failed with E: <strerror> (posted P/T WRs)"


def _sq_full(rig: Rig, op: str) -> Observation:
    pair = rig.pair(max_send_wr=DEPTH)
    post = pair.session.read_batch if op == "READ" else pair.session.write_batch
    landed = pair.landed if op == "READ" else pair.landed_there
    if op == "WRITE":
        pair.buffer.fill(2)
    first, second = scattered(DEPTH - 4), scattered(20, first=DEPTH - 4)
    with rig.rdma.hold():
        earlier = post(first, first, [PIECE] * len(first))
        refused = post(second, second, [PIECE] * len(second)).outcome
        landed_at_failure = landed(second)
    earlier_outcome = earlier.wait()
    rig.settle()
    landed_later = landed(second)
    retry = rig.patiently(lambda: post(second, second, [PIECE] * len(second)))
    return rig.status(
        refused,
        op,
        retry=retry,
        retry_landed=landed(second),
        pieces=len(second),
        landed_at_failure=landed_at_failure,
        landed_later=landed_later,
        earlier=earlier_outcome,
        alive=pair.session.alive(),
    )


@scenario(section=1, row=SQ_FULL, verdict=Verdict.TRANSIENT, environment=SHORT_BACKOFF)
def sq_full_batch(rig: Rig) -> Observation:
    """READ of 20 pieces while 60 others fill a send queue of 64; one post batch on one queue pair,
    so nothing of it is posted."""
    return _sq_full(rig, "READ")


@scenario(section=1, row=SQ_FULL, verdict=Verdict.TRANSIENT, environment=SHORT_BACKOFF)
def sq_full_batch_write(rig: Rig) -> Observation:
    """WRITE of 20 pieces while 60 others fill a send queue of 64."""
    return _sq_full(rig, "WRITE")


def _overfull(rig: Rig, op: str) -> Observation:
    pair = rig.pair(max_send_wr=DEPTH)
    offsets = scattered(512)
    post = pair.session.read_batch if op == "READ" else pair.session.write_batch
    landed = pair.landed if op == "READ" else pair.landed_there
    if op == "WRITE":
        pair.buffer.fill(2)
    with rig.rdma.hold():
        refused = post(offsets, offsets, [PIECE] * len(offsets)).outcome
        landed_at_failure = landed(offsets)
    rig.settle()
    landed_later = landed(offsets)
    again = rig.patiently(lambda: post(offsets[:DEPTH], offsets[:DEPTH], [PIECE] * DEPTH))
    return rig.status(
        refused,
        op,
        pieces=len(offsets),
        landed_at_failure=landed_at_failure,
        landed_later=landed_later,
        retry=again,
        alive=pair.session.alive(),
    )


@scenario(section=1, row=SQ_FULL, verdict=Verdict.TRANSIENT, environment=SHORT_BACKOFF)
def sq_full_after_partial_post(rig: Rig) -> Observation:
    """READ of 512 pieces into a send queue of 64 that does not drain: the first 64 were posted and
    land after the failure was reported. The retry is of 64 pieces."""
    return _overfull(rig, "READ")


@scenario(section=1, row=SQ_FULL, verdict=Verdict.TRANSIENT, environment=SHORT_BACKOFF)
def sq_full_after_partial_post_write(rig: Rig) -> Observation:
    """WRITE of 512 pieces into a send queue of 64 that does not drain: the first 64 land in the
    peer's memory after the failure was reported."""
    return _overfull(rig, "WRITE")


@scenario(
    section=1,
    row=SQ_FULL,
    verdict=Verdict.REBUILD,
    environment={"MORI_IO_SQ_BACKOFF_TIMEOUT_US": "20000"},
)
def sq_full_leaked_depth(rig: Rig) -> Observation:
    """READ of 2 pieces after a batch of 40 was refused with post_batch_size 5 and a send queue of
    16: what the first one posted was never signaled, and its depth never comes back."""
    pair = rig.pair(max_send_wr=16, post_batch_size=5)
    offsets = scattered(40)
    with rig.rdma.hold():
        first = pair.session.read_batch(offsets, offsets, [PIECE] * len(offsets)).outcome
    rig.settle()

    def post() -> Transfer:
        return pair.session.read_batch(offsets[:2], offsets[:2], [PIECE] * 2)

    leaked = rig.patiently(post, seconds=0.5)
    retry = rig.patiently(post, seconds=0.5)
    return rig.status(leaked, first=first, retry=retry, alive=pair.session.alive())


def _notifying(rig: Rig, **config: int) -> MoriPair:
    return rig.pair(
        enable_notification=True, peer_config={"enable_notification": True, **config}, **config
    )


@scenario(section=1, row=SQ_FULL_NOTIFY, verdict=Verdict.TRANSIENT, environment=SHORT_BACKOFF)
def sq_full_notify(rig: Rig) -> Observation:
    """READ of 16 pieces that fill a send queue of 16, so that the notification finds no room. The
    data lands all the same."""
    pair = _notifying(rig, max_send_wr=16)
    offsets = scattered(16)
    rig.settle()
    with rig.rdma.hold():
        refused = pair.session.read_batch(offsets, offsets, [PIECE] * len(offsets)).outcome
    rig.settle()
    landed_later = pair.landed(offsets)
    retry = rig.patiently(lambda: pair.session.read(0, 0, PIECE))
    return rig.status(refused, pieces=len(offsets), landed_later=landed_later, retry=retry)


# ---- posting refused by the provider ----


def _post_refused(rig: Rig, error: int) -> Observation:
    pair = rig.pair()
    rig.rdma.refuse_posts(error)
    refused = pair.session.read(0, 0, PIECE).wait()
    landed = pair.landed([0])
    retry = pair.session.read(0, 0, PIECE).wait()
    return rig.status(refused, landed_later=landed, retry=retry, alive=pair.session.alive())


@scenario(section=1, row=POST_FAILED, verdict=Verdict.TRANSIENT)
def post_refused_enomem(rig: Rig) -> Observation:
    """ibv_post_send answers ENOMEM to the first work request of a READ."""
    return _post_refused(rig, errno.ENOMEM)


@scenario(section=1, row=POST_FAILED, verdict=Verdict.PERMANENT)
def post_refused_einval(rig: Rig) -> Observation:
    """ibv_post_send answers EINVAL to the first work request of a READ. Once only: the retry shows
    that the endpoint is still usable."""
    return _post_refused(rig, errno.EINVAL)


@scenario(section=1, row=POST_FAILED, verdict=Verdict.PERMANENT)
def post_refused_eio(rig: Rig) -> Observation:
    """ibv_post_send answers EIO, an errno that mori has no hint for, to the first work request."""
    return _post_refused(rig, errno.EIO)


def _partial_post(rig: Rig, op: str) -> tuple[MoriPair, Observation]:
    pair = rig.pair()
    offsets = scattered(10)
    post = pair.session.read_batch if op == "READ" else pair.session.write_batch
    landed = pair.landed if op == "READ" else pair.landed_there
    if op == "WRITE":
        pair.buffer.fill(2)
    with rig.rdma.hold():
        rig.rdma.refuse_posts(errno.ENOMEM, after=5)
        refused = post(offsets, offsets, [PIECE] * len(offsets)).wait()
        landed_at_failure = landed(offsets)
    rig.settle()
    observation = rig.status(
        refused,
        op,
        pieces=len(offsets),
        landed_at_failure=landed_at_failure,
        landed_later=landed(offsets),
        retry=pair.session.read(0, 0, PIECE).wait(),
        alive=pair.session.alive(),
    )
    return pair, observation


@scenario(section=1, row=POST_FAILED, verdict=Verdict.REBUILD)
def post_partial(rig: Rig) -> Observation:
    """ibv_post_send answers ENOMEM to the sixth of ten work requests of a READ: five land after
    the failure was reported, without a signaled one among them."""
    return _partial_post(rig, "READ")[1]


@scenario(section=1, row=POST_FAILED, verdict=Verdict.REBUILD)
def post_partial_write(rig: Rig) -> Observation:
    """ibv_post_send answers ENOMEM to the sixth of ten work requests of a WRITE: five land in the
    peer's memory after the failure was reported."""
    return _partial_post(rig, "WRITE")[1]


@scenario(section=1, row="EP is degraded, rejecting new submissions", verdict=Verdict.REBUILD)
def degraded(rig: Rig) -> Observation:
    """READ after a partial post."""
    pair, _ = _partial_post(rig, "READ")
    refused = pair.session.read(0, 0, PIECE).wait()
    new_session = pair.engine.session(pair.buffer, pair.peer.memory)
    return rig.status(
        refused,
        retry=pair.session.read(0, 0, PIECE).wait(),
        new_session=new_session.read(0, 0, PIECE).wait(),
        alive=pair.session.alive(),
    )


@scenario(
    section=1,
    row="ibv_post_send (notify) failed with E: <strerror>",
    verdict=Verdict.TRANSIENT,
)
def notify_post_refused(rig: Rig) -> Observation:
    """ibv_post_send answers ENOMEM to the notification after the one work request of a READ."""
    pair = _notifying(rig)
    rig.settle()
    rig.rdma.refuse_posts(errno.ENOMEM, after=1)
    refused = pair.session.read(0, 0, PIECE).wait()
    rig.settle()
    landed = pair.landed([0])
    return rig.status(refused, landed_later=landed, retry=pair.session.read(0, 0, PIECE).wait())
