"""The moriio backend's decisions, without the engine: what errors prove, how batches are cut into
calls, what is refused before the engine could end the process."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from kvxfer.backends.moriio.address import local_ipv4, probe, resolve_ipv4
from kvxfer.backends.moriio.calls import Call, Group, SendQueue, by_pair
from kvxfer.backends.moriio.config import MoriioConfig, PollMode, apply_environment, effective
from kvxfer.backends.moriio.fate import COMPLETION_ERRORS, judge
from kvxfer.core.attempt import Accepted
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import ConfigError, HandshakeError, InvalidInputError, PeerLostError

HINT = " Hint: try increasing MORI_IO_QP_MAX_SEND_WR."


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(
    ("code", "message", "dead"),
    [
        (13, "SQ full (batch): ep=0 depth=60 requested=20 max=64" + HINT, False),
        (13, "ibv_post_send failed with 12: Cannot allocate memory (posted 0/20 WRs)", False),
        (13, "EP is degraded, rejecting new submissions", True),
        (11, "length out of range", False),
        (11, "merged RDMA WR 0 length 16384 exceeds local max_msg_sz 8192; enable ...", False),
        (14, "RDMA endpoint local max_msg_sz is unavailable for ep 0", False),
    ],
)
def test_refusals_have_posted_nothing(op, code, message, dead):
    """What the engine refuses before its first work request is proof by itself, for both ops."""
    fate = judge(op, code, message, 20)
    assert (fate.accepted, fate.proof, fate.queue_dead) == (Accepted.NONE, "nothing posted", dead)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(
    ("message", "accepted", "dead"),
    [
        ("SQ full (batch): ep=0 depth=16 requested=4 max=16" + HINT, Accepted.UNKNOWN, False),
        ("SQ full (batch)", Accepted.UNKNOWN, False),
        ("SQ full (notify): ep=0 depth=16 requested=1 max=16", Accepted.ALL, False),
        ("ibv_post_send (notify) failed with 12: Cannot allocate memory", Accepted.ALL, False),
        (
            "ibv_post_send failed with 12: Cannot allocate memory (posted 5/20 WRs)",
            Accepted.UNKNOWN,
            True,
        ),
        ("verbs async event IBV_EVENT_QP_FATAL: queue pair ...", Accepted.ALL, True),
        ("verbs async event IBV_EVENT_CQ_ERR: completion queue ...", Accepted.ALL, True),
        ("verbs async event IBV_EVENT_DEVICE_FATAL: device ...", Accepted.ALL, True),
        ("a text that nobody has seen", Accepted.UNKNOWN, False),
        ("", Accepted.UNKNOWN, False),
    ],
)
def test_what_may_still_land_is_not_proven(op, message, accepted, dead):
    """Half posted, wholly posted with a failed notification, failed by an event, unknown: none of
    it says that nothing lands."""
    fate = judge(op, 13, message, 20)
    assert (fate.accepted, fate.proof, fate.queue_dead) == (accepted, "", dead)


@pytest.mark.parametrize("text", COMPLETION_ERRORS)
@pytest.mark.parametrize("tail", ["", HINT])
def test_completion_errors_drain_reads_only(text, tail):
    """A completion error means that our queue pair is in error: proof for a READ, none for a WRITE,
    whose packets may be under way."""
    read, write = (judge(op, 13, text + tail, 1) for op in (Op.READ, Op.WRITE))
    assert read.proof == "local queue pair in error"
    assert write.proof == ""
    assert read.accepted is write.accepted is Accepted.ALL
    assert read.queue_dead
    assert write.queue_dead


def test_by_pair_keeps_every_piece_in_order():
    """One call per pair that the batch names, with its pieces in their order."""
    rng = np.random.default_rng(3)
    pair = rng.integers(0, 5, 200)
    pair[pair == 3] = 4
    batch = Batch(pair, np.arange(200), np.arange(200) * 7, np.arange(200) + 1)
    plan = by_pair(batch, 5)
    assert [p for p, *_ in plan] == [0, 1, 2, 4]
    for number, local, remote, size in plan:
        assert local == np.flatnonzero(pair == number).tolist()
        assert remote == [7 * i for i in local]
        assert size == [i + 1 for i in local]
        assert all(type(i) is int for i in local + remote + size)


def test_by_pair_of_one_pair_uses_the_cached_lists():
    """The common case costs no sorting: the batch's own lists are handed on, also on a retry."""
    batch = Batch([2, 2], [0, 8], [8, 0], [8, 8])
    ((pair, local, remote, size),) = by_pair(batch, 4)
    assert pair == 2
    assert local is batch.lists()[1]
    assert remote is batch.lists()[2]
    assert size is batch.lists()[3]
    assert by_pair(Batch([0], [4], [5], [6]), 1) == [(0, [4], [5], [6])]


def test_send_queue_counts_pieces():
    """Room is taken whole or not at all, comes back, and ``force`` goes beyond it."""
    queue = SendQueue(16, ordered=True)
    assert queue.reserve(12)
    assert not queue.reserve(5)
    assert queue.in_flight == 12
    assert queue.reserve(5, force=True)
    queue.release(5)
    assert queue.reserve(4)
    assert not queue.reserve(1)


def _call(queue, *, posted=True):
    call = Call(Group(None), queue, 1, None)
    if posted:
        queue.posted(call)
    return call


def test_only_a_later_success_proves():
    """A success proves doubtful calls that had returned before it began: not itself, not a call
    that overlapped with it, and nothing where calls spread over several queue pairs."""
    queue = SendQueue(16, ordered=True)
    first = _call(queue)
    overlapping = _call(queue, posted=False)
    second = _call(queue)
    queue.posted(overlapping)
    for doubtful in (first, overlapping):
        queue.doubt(doubtful)
    assert queue.proven_by(second) == [first]
    assert queue.proven_by(overlapping) == []
    third = _call(queue)
    assert queue.proven_by(third) == [overlapping]
    assert queue.proven_by(third) == []
    unordered = SendQueue(16, ordered=False)
    unordered.doubt(_call(unordered))
    assert unordered.proven_by(_call(unordered)) == []


def test_environment_wins_over_the_configuration():
    """The engine lets its variables override its arguments; we count with what it will use."""
    config = effective(
        MoriioConfig(max_send_wr=100),
        {
            "MORI_IO_QP_MAX_SEND_WR": "64",
            "MORI_IO_QP_PER_TRANSFER": "2",
            "MORI_IO_POLL_CQ_MODE": "Event",
            "MORI_IO_ENABLE_NOTIFICATION": "1",
            "MORI_IO_POST_BATCH_SIZE": "-1",
        },
    )
    assert (config.max_send_wr, config.qp_per_transfer) == (64, 2)
    assert config.poll_cq_mode is PollMode.EVENT
    assert config.enable_notification
    assert config.post_batch_size == 64, "with several queue pairs each call must stay on one"
    assert MoriioConfig().post_batch_size == -1
    assert effective(MoriioConfig(), {}) == MoriioConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MORI_IO_POST_BATCH_SIZE", "5"),
        ("MORI_IO_NUM_WORKER_THREADS", "4"),
        ("MORI_IO_ENABLE_CHUNKING", "1"),
        ("MORI_IO_NUM_NICS_PER_TRANSFER", "2"),
        ("MORI_IO_QP_MAX_SEND_WR", "many"),
        ("MORI_IO_QP_MAX_SEND_WR", "0"),
        ("MORI_IO_POLL_CQ_MODE", "sometimes"),
    ],
)
def test_environment_that_breaks_the_rules_is_refused(name, value):
    """A variable that makes refusals non-atomic, or that the engine would ignore, is an error that
    names it."""
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        effective(MoriioConfig(), {name: value})


def test_what_the_user_set_is_left_alone():
    """Variables are set only where they are not."""
    environ = {"MORI_IO_SQ_BACKOFF_TIMEOUT_US": "7", "MORI_GLOBAL_LOG_LEVEL": "info"}
    apply_environment(MoriioConfig(qp_timeout=16), environ)
    assert environ == {
        "MORI_IO_SQ_BACKOFF_TIMEOUT_US": "7",
        "MORI_GLOBAL_LOG_LEVEL": "info",
        "MORI_IO_QP_TIMEOUT": "16",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("qp_per_transfer", 0),
        ("max_send_wr", 1 << 20),
        ("max_post_nbytes", 1 << 32),
        ("connect_timeout_s", float("nan")),
        ("connect_timeout_s", 0.0),
        ("qp_retry_count", 8),
        ("log_level", "loud"),
        ("poll_cq_mode", "polling"),
    ],
)
def test_configuration_is_checked(field, value):
    """A wrong value is refused with the field's name."""
    with pytest.raises((ValueError, TypeError), match=field):
        MoriioConfig(**{field: value})
    assert attrs.evolve(MoriioConfig(), max_send_wr=64).max_send_wr == 64


def test_addresses_are_ipv4():
    """Names are resolved here, and IPv6 is refused with the reason, brackets and zones included."""
    assert resolve_ipv4("127.0.0.1") == "127.0.0.1"
    assert resolve_ipv4("localhost").startswith("127.")
    for host in ("::1", "[::1]", "fe80::1%eth0", "2001:db8::7"):
        with pytest.raises(InvalidInputError, match="IPv4 sockets only"):
            resolve_ipv4(host)
    with pytest.raises(InvalidInputError, match=r"no-such-host\.invalid"):
        resolve_ipv4("no-such-host.invalid")


@pytest.mark.parametrize(
    ("host", "reason"),
    [("0.0.0.0", "cannot dial"), ("192.0.2.77", "no address of this machine"), ("::1", "IPv4")],
)
def test_hosts_that_would_end_the_process_are_refused(host, reason):
    """The engine exits when it cannot bind: the address is tried before it is asked."""
    with pytest.raises(ConfigError, match=reason):
        local_ipv4(host)
    assert local_ipv4("127.0.0.1") == "127.0.0.1"


def test_probe_tells_nobody_from_no_answer(monkeypatch):
    """A refused connection is a lost peer, one that is not answered a handshake error."""
    import socket

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLostError) as caught:
            probe("127.0.0.1", unused.getsockname()[1], 5.0)
    assert caught.value.engine.exception[0] == "builtins.ConnectionRefusedError"

    def unanswered(*_):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", unanswered)
    with pytest.raises(HandshakeError, match=r"within 0\.5 s"):
        probe("127.0.0.1", 9, 0.5)
