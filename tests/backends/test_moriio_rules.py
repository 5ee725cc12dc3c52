"""The moriio backend's decisions, without the engine: what errors prove, how batches are cut into
calls, what is refused before the engine could end the process."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.backends.moriio import peers
from kvxfer.backends.moriio.address import local_ipv4, probe, resolve_ipv4
from kvxfer.backends.moriio.calls import Call, Group
from kvxfer.backends.moriio.config import MoriioConfig, PollMode
from kvxfer.backends.moriio.environment import effective, environment_for
from kvxfer.backends.moriio.fate import COMPLETION_ERRORS, judge
from kvxfer.backends.moriio.merging import work_requests
from kvxfer.backends.moriio.peers import pack_memory
from kvxfer.backends.moriio.plan import Counting, plan_of
from kvxfer.backends.moriio.queues import Connection
from kvxfer.core.attempt import Accepted
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import (
    ConfigError,
    HandshakeError,
    InvalidInputError,
    PeerLostError,
    WireError,
)

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


class Lanes:
    """Stands for the lanes of a path: the plan only looks up what it posts through."""

    def __init__(self, number, shifted=(), most=4096):
        self.most = most
        self.whole = f"lane {number}"
        self.number, self.shifted = number, shifted

    def at(self, local, remote):
        if (local, remote) == (0, 0):
            return self.whole
        return (
            f"lane {self.number} at {local}, {remote}" if (local, remote) in self.shifted else None
        )


COUNTING = Counting(entries=4, chunk_bytes=0, extra=0)


def test_plan_keeps_every_piece_in_order():
    """One call per pair that the batch names, with its pieces in their order."""
    rng = np.random.default_rng(3)
    pair = rng.integers(0, 5, 200)
    pair[pair == 3] = 4
    batch = Batch(pair, np.arange(200), np.arange(200) * 7, np.full(200, 3))
    plan = plan_of(batch, [Lanes(i) for i in range(5)], COUNTING)
    assert [lane for lane, *_ in plan] == [f"lane {i}" for i in (0, 1, 2, 4)]
    for lane, local, remote, size, count in plan:
        assert local == np.flatnonzero(pair == int(lane[-1])).tolist()
        assert remote == [7 * i for i in local]
        assert size == [3] * len(local)
        assert count == len(local)
        assert all(type(i) is int for i in local + remote + size)


def test_plan_of_one_pair_uses_the_cached_lists():
    """The common case costs no sorting: the batch's own lists are handed on, also on a retry."""
    batch = Batch([2, 2], [0, 8], [9, 0], [8, 8])
    ((lane, local, remote, size, count),) = plan_of(batch, [Lanes(i) for i in range(4)], COUNTING)
    assert (lane, count) == ("lane 2", 2)
    assert local is batch.lists()[1]
    assert remote is batch.lists()[2]
    assert size is batch.lists()[3]
    assert plan_of(Batch([0], [4], [5], [6]), [Lanes(0)], COUNTING) == [
        ("lane 0", [4], [5], [6], 1)
    ]


def test_plan_shares_lists_between_layers():
    """Layers of equal geometry take one set of lists, from the base of each; a base without a
    session of its own gets lists of its own, and the same bytes are named."""
    batch = Batch.repeated([0, 0, 1], [0, 100, 300], [0, 200, 300], [0, 20], [8, 30], [4, 4])
    lanes = [Lanes(0, shifted={(100, 200)}), Lanes(1)]
    first, second, third = plan_of(batch, lanes, COUNTING)
    assert (first[0], second[0], third[0]) == ("lane 0", "lane 0 at 100, 200", "lane 1")
    assert all(a is b for a, b in zip(first[1:4], second[1:4], strict=True))
    assert third[1:] == ([300, 320], [308, 330], [4, 4], 2)


def test_calls_fit_a_send_queue():
    """No call has more work requests than the queue takes; what the engine merges counts once, so
    that many neighbours stay one call."""
    apart = Batch(np.zeros(50, int), np.arange(50) * 9, np.arange(50) * 9, np.full(50, 4))
    plan = plan_of(apart, [Lanes(0, most=16)], COUNTING)
    assert [len(p[1]) for p in plan] == [p[4] for p in plan]
    assert all(p[4] <= 16 for p in plan)
    assert [x for p in plan for x in p[1]] == apart.lists()[1]
    together = Batch(np.zeros(50, int), np.arange(50) * 4, np.arange(50) * 4, np.full(50, 4))
    ((_, local, _, _, count),) = plan_of(together, [Lanes(0, most=16)], COUNTING)
    assert (len(local), count) == (50, 1)


def merged(local, remote, size, entries):
    """The engine's merging, spelt out."""
    count = used = 0
    end = here = None
    for i in sorted(range(len(size)), key=lambda i: remote[i]):
        if end == remote[i]:
            if here == local[i]:
                pass
            elif used < entries:
                used += 1
            else:
                count, used = count + 1, 1
        else:
            count, used = count + 1, 1
        end, here = remote[i] + size[i], local[i] + size[i]
    return count


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 8]), st.sampled_from([0, 8]), st.sampled_from([8, 16])),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([1, 2, 4]),
    st.randoms(use_true_random=False),
)
def test_merging_is_counted_as_the_engine_does(steps, entries, rng):
    """Work requests of any batch, in any order, equal those of the rule that was read off the
    engine (tests/mori/test_admission.py holds the rule to the engine itself)."""
    local, remote, size, a, b = [], [], [], 0, 0
    for far_gap, gap, nbytes in steps:
        a, b = a + gap, b + far_gap
        local.append(a)
        remote.append(b)
        size.append(nbytes)
        a, b = a + nbytes, b + nbytes
    order = list(range(len(size)))
    rng.shuffle(order)
    vectors = [[v[i] for i in order] for v in (local, remote, size)]
    expected = merged(*vectors, entries)
    assert work_requests(*map(np.array, vectors), entries) == expected
    counting = attrs.evolve(COUNTING, entries=entries)
    assert counting.count_batch(Batch([0] * len(size), *vectors)) == expected


@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("turned", [False, True], ids=["rising", "falling"])
def test_long_batches_are_counted_as_short_ones(gap, turned):
    """Above the size up to which lists are looked at, the count is still the engine's."""
    size = np.where(np.arange(200) % 3, 8, 16)
    remote = np.cumsum(size + gap) - size - gap
    local = remote * 2
    if turned:
        local, remote, size = local[::-1], remote[::-1], size[::-1]
    batch = Batch(np.zeros(200, int), local, remote, size)
    expected = merged(local.tolist(), remote.tolist(), size.tolist(), 4)
    assert COUNTING.count_batch(batch) == expected
    assert expected == (50 if gap == 0 else 200)


def test_a_retry_counts_nothing_again(monkeypatch):
    """The batch of a retry keeps its count, as it keeps its lists."""
    counted = []
    real = Counting.count_batch

    def listening(self, batch):
        counted.append(batch)
        return real(self, batch)

    monkeypatch.setattr(Counting, "count_batch", listening)
    batch = Batch([0, 0], [0, 8], [9, 0], [8, 8])
    plans = [plan_of(batch, [Lanes(0)], COUNTING) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2]
    assert counted == [batch]


def _connection(queues=1, depth=16, *, ordered=True):
    return Connection(None, "peer", name="queue", queue_pairs=queues, depth=depth, ordered=ordered)


def test_send_queue_counts_work_requests():
    """Room is taken whole or not at all, comes back, and ``force`` goes beyond it."""
    connection = _connection()
    (queue,) = connection.queues
    assert connection.reserve(12) is queue
    assert connection.reserve(5) is None
    assert connection.room == (12, 16)
    assert connection.reserve(5, force=True) is queue
    queue.release(5)
    assert connection.reserve(4) is queue
    assert connection.reserve(1) is None


def test_the_emptiest_live_queue_pair_is_taken():
    """Each queue pair has credits of its own; a dead one gets nothing while another lives, and the
    connection is dead when all are."""
    connection = _connection(4)
    taken = [connection.reserve(10) for _ in range(4)]
    assert set(taken) == set(connection.queues)
    assert connection.reserve(10) is None
    taken[1].release(10)
    assert connection.reserve(10) is taken[1]
    taken[1].release(7)
    assert connection.reserve_parts(30, 1) == []
    parts = connection.reserve_parts(20, 1)
    assert [n for _, n in parts] == [12, 5, 3]
    assert sum(q.in_flight for q in connection.queues) == 33 + 23
    for queue, pieces in parts:
        queue.release(pieces + 1)
    taken[1].in_flight += 7
    error = EngineError(backend="moriio", message="it broke")
    for queue in connection.queues:
        queue.release(10)
    connection.queues[2].dead = error
    assert (connection.dead, connection.degraded) == (None, error)
    assert connection.queues[2] not in {connection.reserve(1) for _ in range(30)}
    for queue in connection.queues:
        queue.dead = error
    assert connection.dead is error
    assert len(_connection(4, ordered=False).queues) == 1


def _call(connection, *, posted=True):
    call = Call(Group(None), connection, connection.queues[0], 1, None)
    if posted:
        connection.queues[0].posted(call)
    return call


def test_only_a_later_success_proves():
    """A success proves doubtful calls that had returned before it began: not itself, not a call
    that overlapped with it, and nothing where calls spread over several queue pairs."""
    connection = _connection()
    (queue,) = connection.queues
    first = _call(connection)
    overlapping = _call(connection, posted=False)
    second = _call(connection)
    queue.posted(overlapping)
    for doubtful in (first, overlapping):
        queue.doubt(doubtful)
    assert queue.proven_by(second) == [first]
    assert queue.proven_by(overlapping) == []
    third = _call(connection)
    assert queue.proven_by(third) == [overlapping]
    assert queue.proven_by(third) == []
    unordered = _connection(ordered=False)
    unordered.queues[0].doubt(_call(unordered))
    assert unordered.queues[0].proven_by(_call(unordered)) == []


def test_calls_over_several_queue_pairs_prove_less():
    """Where the engine spreads a call, a refusal may come after a part was posted, and one queue
    pair in error says nothing of the others."""
    for message in (
        "SQ full (batch): ep=0 depth=60 requested=20 max=64",
        "ibv_post_send failed with 12: Cannot allocate memory (posted 0/20 WRs)",
        "length out of range",
        "Work Request Flushed Error",
    ):
        code = 11 if message.startswith("length") else 13
        fate = judge(Op.READ, code, message, 20, atomic=False)
        assert fate.proof == ""
        assert fate.accepted is not Accepted.NONE


def test_environment_wins_over_the_configuration():
    """The engine lets its variables override its arguments; we count with what it will use."""
    config = effective(
        MoriioConfig(max_send_wr=100),
        {
            "MORI_IO_QP_MAX_SEND_WR": "64",
            "MORI_IO_QP_PER_TRANSFER": "2",
            "MORI_IO_POLL_CQ_MODE": "Event",
            "MORI_IO_ENABLE_NOTIFICATION": "1",
            "MORI_IO_CHUNK_BYTES": "8192",
        },
    )
    assert (config.max_send_wr, config.qp_per_transfer, config.chunk_bytes) == (64, 2, 8192)
    assert config.poll_cq_mode is PollMode.EVENT
    assert config.enable_notification
    assert config.engine_post_batch_size == 64, "of several queue pairs each call stays on one"
    assert config.one_queue_pair_per_call
    assert effective(MoriioConfig(), {}) == MoriioConfig()


@pytest.mark.parametrize(
    "environ",
    [
        {"MORI_IO_POST_BATCH_SIZE": "5"},
        {"MORI_IO_POST_BATCH_SIZE": "-1", "MORI_IO_QP_PER_TRANSFER": "2"},
        {"MORI_IO_NUM_WORKER_THREADS": "4"},
        {"MORI_IO_ENABLE_CHUNKING": "1"},
        {"MORI_IO_NUM_NICS_PER_TRANSFER": "2"},
    ],
)
def test_environment_that_makes_refusals_partial_is_known(environ):
    """Settings with which the engine spreads a call are taken, and it is known that refusals are no
    longer atomic."""
    assert MoriioConfig().one_queue_pair_per_call
    assert not effective(MoriioConfig(), environ).one_queue_pair_per_call


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MORI_IO_QP_MAX_SEND_WR", "many"),
        ("MORI_IO_QP_MAX_SEND_WR", "0"),
        ("MORI_IO_POLL_CQ_MODE", "sometimes"),
        ("MORI_IO_QP_RETRY_CNT", "8"),
        ("MORI_IO_ENABLE_ASYNC_EVENTS", "perhaps"),
        ("MORI_IO_CHUNK_BYTES", "1024"),
    ],
)
def test_variables_that_the_engine_would_ignore_are_refused(name, value):
    """A variable whose value the engine ignores in silence is an error that names it."""
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        effective(MoriioConfig(), {name: value})


def test_what_the_user_set_is_left_alone():
    """Variables are set only where they are not. What the engine reads while it is made is put back
    afterwards, what its threads read later stays."""
    environ = {"MORI_IO_SQ_BACKOFF_TIMEOUT_US": "7", "MORI_IO_LOG_LEVEL": "info", "OTHER": "x"}
    before = dict(environ)
    with environment_for(MoriioConfig(qp_timeout=16), environ, first=True):
        assert environ["MORI_APP_LOG_LEVEL"] == "critical"
        assert environ["MORI_IO_LOG_LEVEL"] == "info"
    later = {
        "MORI_IO_QP_TIMEOUT": "16",
        "MORI_IO_QP_RETRY_CNT": "7",
        "MORI_IO_CP_TIMEOUT_MS": "5000",
    }
    assert environ == {**before, **later}
    with environment_for(MoriioConfig(qp_timeout=18), environ, first=False):
        pass
    assert environ == {**before, **later, "MORI_IO_QP_TIMEOUT": "18"}
    environ = {"MORI_GLOBAL_LOG_LEVEL": "info", "MORI_RDMA_QP_TIMEOUT": "20"}
    with environment_for(MoriioConfig(), environ, first=True):
        assert "MORI_IO_LOG_LEVEL" not in environ
        assert "MORI_IO_QP_TIMEOUT" not in environ, "it would hide the other one"


def test_no_name_is_added_beside_a_running_engine(caplog):
    """``setenv`` of a new name can crash a thread of the engine that is inside ``getenv``: later
    engines change values only, and it is said what has no effect any more."""
    environ = {}
    with environment_for(MoriioConfig(), environ, first=False):
        assert environ == {}
    with environment_for(MoriioConfig(control_timeout_ms=900), environ, first=True):
        pass
    with environment_for(MoriioConfig(control_timeout_ms=1500), environ, first=False):
        pass
    assert environ["MORI_IO_CP_TIMEOUT_MS"] == "900"
    assert "MORI_IO_CP_TIMEOUT_MS stays 900" in caplog.text


def test_options():
    """A configuration can come from JSON; an unknown key is refused with the nearest one."""
    config = MoriioConfig.from_options(
        {"qp_per_transfer": 4, "poll_cq_mode": "event", "post_batch_size": None, "host": "::1"}
    )
    assert (config.qp_per_transfer, config.poll_cq_mode) == (4, PollMode.EVENT)
    with pytest.raises(ConfigError, match="did you mean 'max_send_wr'"):
        MoriioConfig.from_options({"max_send_wrs": 4})
    with pytest.raises(ConfigError, match="qp_per_transfer must be an integer"):
        MoriioConfig.from_options({"qp_per_transfer": "4"})


@pytest.mark.parametrize("views", [{}, {64: b"view", 4096: b"another"}])
def test_memory_travels_packed(views):
    """What a descriptor carries is one piece of bytes, and damage to it is noticed."""
    packed = pack_memory(b"engine", b"memory", views)
    assert peers._unpack(packed) == (b"engine", b"memory", list(views.items()))
    for damaged in (packed[:-1], packed + b"x", packed[:3], b"", b"KVM2" + packed[4:]):
        with pytest.raises(WireError):
            peers._unpack(damaged)


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
