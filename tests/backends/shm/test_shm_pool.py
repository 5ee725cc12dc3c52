"""The copy threads: fair among peers, bounded, never waited for."""

from __future__ import annotations

import threading

import pytest
from shm_rig import LIMIT, until

from kvxfer.backends.shm.pool import CopyPool


class Recorder:
    """Tasks that note who ran, and can be held."""

    def __init__(self):
        self.ran = []
        self.dropped = []
        self.started = threading.Semaphore(0)

    def task(self, name, hold=None):
        return _Task(self, name, hold)


class _Task:
    def __init__(self, recorder, name, hold):
        self.recorder, self.name, self.hold = recorder, name, hold

    def run(self, scratch):
        self.recorder.started.release()
        if self.hold is not None:
            assert self.hold.wait(LIMIT)
        self.recorder.ran.append(self.name)

    def drop(self):
        self.recorder.dropped.append(self.name)


class FakeTime:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeTime()


@pytest.fixture
def make_pool(clock):
    pools, holds = [], []

    def make(workers=1, workers_max=8):
        pool = CopyPool(
            workers=workers, workers_max=workers_max, stuck_after=1.0, name="test", clock=clock
        )
        pools.append(pool)
        return pool

    make.holds = holds
    yield make
    for hold in holds:
        hold.set()
    for pool in pools:
        assert pool.stop(0.0) >= 0


def held(make_pool):
    make_pool.holds.append(threading.Event())
    return make_pool.holds[-1]


def test_peers_take_turns(make_pool):
    """A peer with many tasks does not make another with few wait for all of them."""
    pool, notes, hold = make_pool(), Recorder(), held(make_pool)
    pool.submit("first", [notes.task("f", hold)])
    assert notes.started.acquire(timeout=LIMIT)
    pool.submit("many", [notes.task(f"m{i}") for i in range(4)])
    pool.submit("few", [notes.task(f"f{i}") for i in range(2)])
    hold.set()
    until(lambda: len(notes.ran) == 7, "all tasks")
    assert notes.ran == ["f", "m0", "f0", "m1", "f1", "m2", "m3"]


def test_one_stuck_peer_leaves_a_thread_to_the_others(make_pool, clock):
    """A peer whose copies do not return occupies at most ``workers`` threads; they are replaced
    after ``stuck_after``, and another peer is served."""
    pool, notes, hold = make_pool(workers=2), Recorder(), held(make_pool)
    pool.submit("stuck", [notes.task(f"s{i}", hold) for i in range(5)])
    for _ in range(2):
        assert notes.started.acquire(timeout=LIMIT)
    pool.submit("healthy", [notes.task("h")])
    pool.relieve()
    assert pool.replaced == 0
    clock.now = 2.0
    pool.relieve()
    assert pool.replaced == 1
    until(lambda: notes.ran == ["h"], "the healthy peer served")
    # The third thread takes none of the stuck peer's tasks.
    pool.submit("healthy", [notes.task("h2")])
    until(lambda: notes.ran == ["h", "h2"], "the healthy peer served again")
    hold.set()
    until(lambda: len(notes.ran) == 7, "all tasks")


def test_replacements_are_bounded(make_pool, clock):
    """However many peers are stuck, there are at most ``workers_max`` threads."""
    pool, notes, hold = make_pool(workers=1, workers_max=3), Recorder(), held(make_pool)
    for peer in range(6):
        pool.submit(peer, [notes.task(peer, hold)])

    def relieved():
        clock.now += 2.0
        pool.relieve()
        return len(pool._began) == 3

    until(relieved, "three threads busy")
    for _ in range(10):
        assert relieved()
    assert pool.replaced == 2
    assert len(pool._threads) == 3
    hold.set()
    until(lambda: len(notes.ran) == 6, "all tasks")
    # Spare threads end once they are not needed.
    until(lambda: len(pool._threads) == 1, "one thread left")


def test_drop_leaves_what_runs(make_pool):
    """``drop`` drops what is queued under that key alone."""
    pool, notes, hold = make_pool(), Recorder(), held(make_pool)
    pool.submit("a", [notes.task("a0", hold), notes.task("a1")])
    assert notes.started.acquire(timeout=LIMIT)
    pool.submit("b", [notes.task("b0")])
    pool.drop("a")
    assert notes.dropped == ["a1"]
    hold.set()
    until(lambda: notes.ran == ["a0", "b0"], "the rest")


def test_when_idle(make_pool):
    """``when_idle`` calls at once if nothing is there, else after the last task of that key."""
    pool, notes, hold = make_pool(), Recorder(), held(make_pool)
    calls = []
    pool.when_idle("a", lambda: calls.append("at once"))
    assert calls == ["at once"]
    pool.submit("a", [notes.task("a0", hold), notes.task("a1")])
    pool.when_idle("a", lambda: calls.append(list(notes.ran)))
    assert len(calls) == 1
    hold.set()
    until(lambda: len(calls) == 2, "the call")
    assert calls[1] == ["a0", "a1"]


def test_work_of_another_thread_counts(make_pool):
    """Between ``enter`` and ``leave`` its key is not idle, and ``stop`` tells that it goes on."""
    pool, calls = make_pool(), []
    assert pool.enter("a")
    pool.when_idle("a", lambda: calls.append("a"))
    pool.when_idle("b", lambda: calls.append("b"))
    assert calls == ["b"]
    assert pool.stop(0.0) == 1
    assert not pool.enter("a")
    assert calls == ["b"]
    pool.leave("a")
    assert calls == ["b", "a"]
    assert pool.stop(0.0) == 0


def test_withdraw(make_pool):
    """Only the task that was queued last under a key can be taken back, while it waits."""
    pool, notes, hold = make_pool(), Recorder(), held(make_pool)
    running, first, second = (notes.task(n, hold) for n in ("running", "first", "second"))
    pool.submit("a", [running])
    assert notes.started.acquire(timeout=LIMIT)
    pool.submit("a", [first, second])
    assert not pool.withdraw("a", running)
    assert not pool.withdraw("a", first)
    assert not pool.withdraw("b", second)
    assert pool.withdraw("a", second)
    assert pool.withdraw("a", first)
    assert not pool.withdraw("a", first)
    hold.set()
    until(lambda: not pool._running, "idle")
    assert notes.ran == ["running"]
    assert not notes.dropped


def test_stop_waits_for_work_of_another_thread(make_pool):
    """Until it has ended, within the time given."""
    pool, found = make_pool(), []
    assert pool.enter("a")
    stopping = threading.Thread(target=lambda: found.append(pool.stop(LIMIT)))
    stopping.start()
    until(lambda: pool._stopped, "stopped")
    pool.leave("a")
    stopping.join(LIMIT)
    assert found == [0]


def test_stop_abandons_a_stuck_thread(make_pool):
    """``stop`` drops what is queued and does not wait for a thread longer than asked."""
    pool, notes, hold = make_pool(), Recorder(), held(make_pool)
    calls = []
    pool.submit("a", [notes.task("a0", hold), notes.task("a1")])
    assert notes.started.acquire(timeout=LIMIT)
    pool.when_idle("a", lambda: calls.append(1))
    assert pool.stop(0.0) == 1
    assert notes.dropped == ["a1"]
    assert not calls
    pool.submit("a", [notes.task("late")])
    assert notes.dropped == ["a1", "late"]
    hold.set()
    until(lambda: calls, "idle in the end")
    until(lambda: not pool._threads, "the thread ended")


def test_a_task_that_raises_does_not_end_the_thread(make_pool, caplog):
    """A bug in one task is logged; the thread serves the next one."""

    class Bad:
        def run(self, scratch):
            raise ValueError("boom")

        def drop(self):
            pass

    pool, notes = make_pool(), Recorder()
    pool.submit("a", [Bad(), notes.task("next")])
    until(lambda: notes.ran == ["next"], "the next task")
    assert "boom" in caplog.text


def test_no_thread_before_there_is_work(make_pool):
    """A transport that never posts has no copy thread."""
    assert not make_pool()._threads
