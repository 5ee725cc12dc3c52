"""The real mori engine over software RDMA: bytes, faults, fences and the isolation of runs."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.errors import ClosedError, InvalidInputError, KvxferError
from kvxfer.testing.softrdma import AsyncEvent, MoriPeer, SetupCall, SoftRdma, WcStatus
from kvxfer.testing.softrdma.buffer import pattern
from kvxfer.testing.softrdma.pair import PIECE, scattered
from kvxfer.testing.softrdma.pytest_plugin import MakeEngine, MakePair, MakePeer
from kvxfer.testing.softrdma.tables import DIRECTORY, ENVIRONMENT_VARIABLE, new_name, sweep

MIB = 1 << 20


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait until something that another process does has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


# ---- bytes ----


def test_read_between_two_processes(mori_pair: MakePair) -> None:
    """A READ of the whole buffer brings every byte of the other process, and reports success."""
    pair = mori_pair(seed=3)
    assert pair.peer.pid != os.getpid()
    assert pair.session.read(0, 0, pair.buffer.nbytes).wait().ok
    assert pair.buffer.read() == pattern(3, pair.buffer.nbytes)


def test_write_between_two_processes(mori_pair: MakePair) -> None:
    """A WRITE of the whole buffer brings every byte into the other process."""
    pair = mori_pair()
    content = pair.buffer.fill(4)
    assert pair.session.write(0, 0, pair.buffer.nbytes).wait().ok
    assert pair.peer.read() == content


@pytest.mark.parametrize("notifications", [False, True])
@pytest.mark.parametrize("mode", ["POLLING", "EVENT"])
@pytest.mark.parametrize("queue_pairs", [1, 4])
def test_batches(mori_pair: MakePair, queue_pairs: int, mode: str, notifications: bool) -> None:
    """Batches whose pieces change places arrive byte by byte, READ and WRITE, with 1 and 4 queue
    pairs, polling and event mode, notifications on and off."""
    config = {
        "qp_per_transfer": queue_pairs,
        "poll_cq_mode": mode,
        "enable_notification": notifications,
    }
    pair = mori_pair(nbytes=MIB, peer_config=config, **config)
    remote = scattered(100)
    local = random.Random(5).sample(remote, len(remote))
    sizes = [PIECE] * len(remote)

    reading = pair.session.read_batch(local, remote, sizes)
    assert reading.wait().ok
    expected = bytearray(MIB)
    for to, start in zip(local, remote, strict=True):
        expected[to : to + PIECE] = pair.source[start : start + PIECE]
    assert pair.buffer.read() == bytes(expected)

    content = pair.buffer.fill(6)
    writing = pair.session.write_batch(local, remote, sizes)
    assert writing.wait().ok
    expected = bytearray(pair.source)
    for start, to in zip(local, remote, strict=True):
        expected[to : to + PIECE] = content[start : start + PIECE]
    assert pair.peer.read() == bytes(expected)

    if notifications:
        for transfer in (reading, writing):
            until(lambda uid=transfer.uid: pair.peer.take_notification(pair.engine.key, uid))


pieces = st.lists(
    st.tuples(st.integers(0, 63), st.integers(0, 63), st.integers(1, 1024)), min_size=1, max_size=24
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pieces=pieces, seed=st.integers(0, 1000))
def test_any_batch_is_exact(
    shared_pair: MakePair, pieces: list[tuple[int, int, int]], seed: int
) -> None:
    """Any READ batch leaves exactly what copying the pieces one by one would, whatever mori merges:
    adjacent pieces, unequal sizes, the same source twice."""
    pair = shared_pair
    placed = {to: (start, size) for to, start, size in pieces}  # each destination once
    local = [to * 1024 for to in placed]
    remote = [start * 1024 for start, _ in placed.values()]
    sizes = [size for _, size in placed.values()]
    before = bytearray(pair.buffer.fill(seed))
    assert pair.session.read_batch(local, remote, sizes).wait().ok
    for to, start, size in zip(local, remote, sizes, strict=True):
        before[to : to + size] = pair.source[start : start + size]
    assert pair.buffer.read() == bytes(before)


@pytest.fixture
def shared_pair(mori_pair: MakePair):
    """One pair for all examples of a property."""
    return mori_pair(nbytes=64 * 1024)


def test_a_transfer_over_two_devices(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """With two devices and two NICs per transfer the bytes are still exact."""
    softrdma.device(count=2)
    pair = mori_pair(num_nics_per_transfer=2)
    offsets = scattered(512)
    assert pair.session.read_batch(offsets, offsets, [PIECE] * 512).wait().ok
    assert pair.landed(offsets) == 512


# ---- faults ----


def test_hold_keeps_every_byte_back(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """While work is held no byte moves and the transfer stays in progress; then it is exact."""
    pair = mori_pair()
    offsets = scattered(8)
    with softrdma.hold():
        transfer = pair.session.read_batch(offsets, offsets, [PIECE] * 8)
        softrdma.wait_for(lambda seen: seen.held == 1)
        assert not transfer.done
        assert pair.landed(offsets) == 0
    assert transfer.wait().ok
    assert pair.landed(offsets) == 8


def test_let_through_counts(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """Of held work exactly as many requests pass as were let through, in order."""
    pair = mori_pair()
    offsets = scattered(8)
    before = softrdma.counters().executed
    with softrdma.hold():
        transfer = pair.session.read_batch(offsets, offsets, [PIECE] * 8)
        softrdma.let_through(3)
        softrdma.wait_for(lambda seen: seen.executed == before + 3 and seen.held == 1)
        assert pair.landed(offsets) == pair.landed(offsets[:3]) == 3
        assert not transfer.done
    assert transfer.wait().ok


def test_delay_is_per_work_request(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """Four requests on one queue pair take at least four times the delay."""
    pair = mori_pair()
    offsets = scattered(4)
    softrdma.delay(0.02)
    start = time.monotonic()
    assert pair.session.read_batch(offsets, offsets, [PIECE] * 4).wait().ok
    assert time.monotonic() - start >= 0.08


def test_fail_next_breaks_one_queue_pair(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """The failure hits the request it was armed for; its queue pair is dead, another peer's is
    not."""
    broken, healthy = mori_pair(), mori_pair()
    softrdma.fail_next(WcStatus.GENERAL, after=2)
    assert broken.session.read(0, 0, PIECE).wait().ok
    assert broken.session.read(0, 0, PIECE).wait().ok
    assert broken.session.read(0, 0, PIECE).wait().message == "general error"
    assert broken.session.read(0, 0, PIECE).wait().message == "Work Request Flushed Error"
    assert healthy.session.read(0, 0, healthy.buffer.nbytes).wait().ok


def test_refuse_posts_counts(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """As many calls are refused as asked for, then posting works again on the same session."""
    pair = mori_pair()
    softrdma.refuse_posts(errno.ENOMEM, times=2)
    refused = [pair.session.read(0, 0, PIECE).wait() for _ in range(2)]
    assert [outcome.message.startswith("ibv_post_send failed with 12") for outcome in refused] == [
        True,
        True,
    ]
    assert pair.session.read(0, 0, PIECE).wait().ok


def test_port_down_and_up(softrdma: SoftRdma, mori_engine: MakeEngine) -> None:
    """Where the port is down no backend can be created; once it is up again one can."""
    softrdma.port_down()
    with pytest.raises(RuntimeError, match="no active RDMA device on this host"):
        mori_engine()
    softrdma.port_up()
    mori_engine()


def test_async_event_reaches_the_engine(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """A fatal event for the queue pair is delivered once, and the engine notes a failure."""
    pair = mori_pair()
    assert pair.session.read(0, 0, PIECE).wait().ok
    assert softrdma.async_event(AsyncEvent.QP_FATAL) == 1
    failures: list[str] = []
    until(lambda: bool(failures.extend(f.reason for f in pair.engine.failures()) or failures))
    assert failures == ["LOCAL_QP_ERROR"]


def test_setup_calls_fail_until_reset(
    softrdma: SoftRdma, mori_engine: MakeEngine, mori_peer: MakePeer
) -> None:
    """A setup call that was made to fail works again after reset, on the same engine."""
    engine, peer = mori_engine(), mori_peer()
    buffer = engine.buffer(PIECE)
    engine.add_peer(peer.description)
    softrdma.fail_setup(SetupCall.CREATE_QP, errno.ENOMEM)
    with pytest.raises(RuntimeError, match="ibv_create_qp failed: Cannot allocate memory"):
        engine.session(buffer, peer.memory)
    softrdma.reset()
    assert engine.session(buffer, peer.memory).read(0, 0, PIECE).wait().ok


def test_faults_belong_to_one_process(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """A fault set in the peer's process does not touch our transfers, and is seen there."""
    pair = mori_pair()
    pair.peer.faults.hold()
    assert pair.session.read(0, 0, PIECE).wait().ok
    assert pair.peer.faults.counters().queue_pairs == 1
    assert pair.peer.faults.counters().executed == 0
    assert softrdma.counters().held == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rdma: rdma.delay(-1), "seconds must be 0 or more"),
        (lambda rdma: rdma.fail_next(WcStatus.SUCCESS), "SUCCESS is no failure"),
        (lambda rdma: rdma.fail_next(WcStatus.FATAL, after=-1), "after must be 0 or more"),
        (lambda rdma: rdma.refuse_posts(99999), "is no errno"),
        (lambda rdma: rdma.refuse_posts(times=0), "times must be 1 or more"),
        (lambda rdma: rdma.device(count=9), "count must be 0 to 4"),
        (lambda rdma: rdma.transport_retry(-1), "seconds must be 0 or more"),
    ],
)
def test_bad_faults_are_refused(
    softrdma: SoftRdma, call: Callable[[SoftRdma], None], words: str
) -> None:
    """A fault that makes no sense is refused with what is wrong, before it is set."""
    with pytest.raises(InvalidInputError, match=words):
        call(softrdma)


# ---- peers that die or stop ----


def test_a_stopped_peer_can_be_read(mori_pair: MakePair) -> None:
    """READ is one-sided: it succeeds although the peer's process is stopped."""
    pair = mori_pair()
    pair.peer.stop()
    assert pair.session.read(0, 0, pair.buffer.nbytes).wait().ok
    assert pair.buffer.read() == pair.source


def test_a_killed_peer_costs_the_transport_budget(mori_pair: MakePair) -> None:
    """After the peer was killed a READ fails, and not before the time that the queue pair was
    configured for: 8 tries of 67 ms with mori's default time-out of 14."""
    pair = mori_pair()
    pair.peer.kill()
    start = time.monotonic()
    outcome = pair.session.read(0, 0, PIECE).wait()
    assert outcome.message.startswith("transport retry counter exceeded")
    assert time.monotonic() - start >= 0.53


def test_transport_retry_shortens_the_budget(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """With the budget forced to nothing the same failure comes at once."""
    pair = mori_pair()
    softrdma.transport_retry(0)
    pair.peer.kill()
    start = time.monotonic()
    assert not pair.session.read(0, 0, PIECE).wait().ok
    assert time.monotonic() - start < 0.5


# ---- fences ----


@pytest.mark.parametrize("fence", ["deregister", "close_engine"])
def test_the_receiver_can_fence(softrdma: SoftRdma, mori_pair: MakePair, fence: str) -> None:
    """Once the receiver has deregistered its memory, or destroyed its endpoint, nothing of a WRITE
    lands any more: bytes that were on their way have arrived by then, later ones are refused."""
    pair = mori_pair()
    assert pair.session.read(0, 0, PIECE).wait().ok
    softrdma.transport_retry(0.05)
    softrdma.flight(0.2)
    flying = pair.session.write(PIECE, 0, PIECE)
    softrdma.wait_for(lambda seen: seen.flying == 1)
    getattr(pair.peer, fence)()
    assert pair.peer.read(0, PIECE) == bytes(PIECE)
    pair.peer.fill(9)
    flying.wait()
    assert not pair.session.write(PIECE, 0, PIECE).wait().ok
    assert pair.peer.read() == pattern(9, pair.buffer.nbytes)


def test_deregistering_here_is_a_fence(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """The same holds for a READ into memory that is deregistered here."""
    pair = mori_pair()
    assert pair.session.read(0, 0, PIECE).wait().ok
    softrdma.flight(0.2)
    flying = pair.session.read(0, 0, PIECE)
    softrdma.wait_for(lambda seen: seen.flying == 1)
    pair.engine.deregister(pair.buffer)
    assert pair.buffer.read(0, PIECE) == pair.source[:PIECE]
    pair.buffer.write(0, bytes(PIECE))
    flying.wait()
    assert not pair.session.read(0, 0, PIECE).wait().ok
    assert pair.buffer.read(0, PIECE) == bytes(PIECE)


def test_closing_the_engine_drains_a_read(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """When the reader's engine has ended, a READ that was held never lands."""
    pair = mori_pair()
    softrdma.hold()
    pair.session.read(0, 0, pair.buffer.nbytes)
    softrdma.wait_for(lambda seen: seen.held == 1)
    pair.engine.close()
    softrdma.release()
    assert pair.buffer.read() == bytes(pair.buffer.nbytes)


def test_a_closed_engine_leaves_nothing_of_ours(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """A closed engine leaves no queue pair and none of the user's memory registered. mori itself
    forgets two small buffers of its own per queue pair."""
    before = softrdma.counters()
    pair = mori_pair(qp_per_transfer=2)
    assert pair.session.read(0, 0, PIECE).wait().ok
    assert softrdma.counters().queue_pairs == before.queue_pairs + 2
    pair.engine.close()
    after = softrdma.counters()
    assert after.queue_pairs == before.queue_pairs
    assert after.regions <= before.regions + 4
    with pytest.raises(ClosedError):
        pair.session.read(0, 0, PIECE)


# ---- runs ----


def test_runs_do_not_meet(softrdma: SoftRdma, mori_engine: MakeEngine) -> None:
    """A peer of another run is not reachable, although its engine's control plane answers."""
    softrdma.transport_retry(0.05)
    engine = mori_engine()
    buffer = engine.buffer(PIECE)
    name = new_name()
    with MoriPeer(environment={ENVIRONMENT_VARIABLE: name}) as stranger:
        outcome = engine.connect(buffer, stranger).read(0, 0, PIECE).wait()
    sweep()
    assert outcome.message.startswith("transport retry counter exceeded")
    assert buffer.read() == bytes(PIECE)


IN_A_RUN = """
import os, signal, sys
from kvxfer.testing.softrdma import SoftRdma
with SoftRdma() as rdma:
    print(rdma.name, flush=True)
    sys.stdin.readline()
    {end}
"""


def start_run(end: str) -> tuple[subprocess.Popen[str], str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    del environment[ENVIRONMENT_VARIABLE]
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_RUN.format(end=end)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "os._exit"])
def test_a_run_removes_its_table(softrdma: SoftRdma, end: str) -> None:
    """Every run has its own table, which is gone after the run, however Python ended it."""
    process, name = start_run("rdma.close()" if end == "os._exit" else end)
    with process:
        assert name != softrdma.name
        assert (DIRECTORY / name).exists()
        process.communicate("\n")
    assert not (DIRECTORY / name).exists()


def test_a_killed_run_is_swept(softrdma: SoftRdma) -> None:
    """The table of a run that was killed is removed by the next sweep; one in use is not."""
    killed, left_over = start_run("os.kill(os.getpid(), signal.SIGKILL)")
    living, in_use = start_run("pass")
    with killed, living:
        killed.communicate("\n")
        assert (DIRECTORY / left_over).exists()
        assert left_over in sweep()
        assert not (DIRECTORY / left_over).exists()
        assert (DIRECTORY / in_use).exists()
        assert (DIRECTORY / softrdma.name).exists()
        living.communicate("\n")


def test_a_second_run_in_one_process_must_wait(softrdma: SoftRdma, mori_pair: MakePair) -> None:
    """While engines of one run exist, another cannot begin in the same process: the error counts
    what is left, and the table that was made for it is gone."""
    pair = mori_pair()
    assert pair.session.read(0, 0, PIECE).wait().ok
    name = new_name()
    with pytest.raises(KvxferError, match="still has 1 queue pairs of another table"):
        SoftRdma(name=name).__enter__()
    assert not (DIRECTORY / name).exists()
    assert pair.session.read(0, 0, PIECE).wait().ok


def test_a_table_of_another_version_is_refused(
    softrdma: SoftRdma, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process does not join a table that another version of the library made, and leaves it as
    it is."""
    name = new_name()
    table = DIRECTORY / name
    table.write_bytes(b"other" * 100)
    try:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
        with pytest.raises(KvxferError, match="another version of the software verbs library"):
            SoftRdma().__enter__()
        assert table.read_bytes() == b"other" * 100
    finally:
        table.unlink()


IN_TWO_RUNS = """
from kvxfer.testing.softrdma.check import check
check()
check()
"""


def test_runs_in_one_process_one_after_the_other() -> None:
    """Once the engines of a run are closed, another run can begin in the same process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop(ENVIRONMENT_VARIABLE, None)
    subprocess.run([sys.executable, "-c", IN_TWO_RUNS], env=environment, check=True)


def test_torch_is_not_needed(mori_pair: MakePair) -> None:
    """All of this works without torch."""
    mori_pair()
    assert "torch" not in sys.modules


def test_importing_loads_no_engine() -> None:
    """The package can be imported without mori being loaded."""
    code = "import sys, kvxfer.testing.softrdma; sys.exit('mori' in sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=True)
