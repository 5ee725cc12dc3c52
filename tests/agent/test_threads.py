"""Manual progress from several threads: rounds never overlap, and nobody waits for himself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from agent_rig import HEAD_NBYTES, HEADS, TOKENS, at, layout

from kvxfer.agent import Agent, AgentConfig, TransferHandle
from kvxfer.agent.config import Progress
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.events import Event
from kvxfer.errors import InvalidInputError
from kvxfer.policies.timeouts import Timeouts


class Manual:
    """An agent with manual progress that notices two threads in one round."""

    def __init__(self, name: str, **options: object) -> None:
        self.memory = np.random.default_rng(len(name)).integers(
            0, 256, size=(2, 16, TOKENS, HEADS, HEAD_NBYTES), dtype=np.uint8
        )
        self.agent = Agent(
            LoopbackTransport(),
            config=AgentConfig(name=name, progress=Progress.MANUAL),
            timeouts=Timeouts(connect=5, queue=5, transfer=5),
            **options,  # type: ignore[arg-type]
        )
        self.agent.register_kv_caches({"layer": self.memory}, layout(16))
        self.overlaps = 0
        self._inside = threading.Lock()
        inner, wait = self.agent._engine.round, self.agent._channel.wait

        def alone(call, *args):  # type: ignore[no-untyped-def]
            if not self._inside.acquire(blocking=False):
                self.overlaps += 1
                return call(*args)
            try:
                threading.Event().wait(0.0005)  # makes an overlap likely, nothing depends on it
                return call(*args)
            finally:
                self._inside.release()

        self.agent._engine.round = lambda now: alone(inner, now)  # type: ignore[method-assign]
        self.agent._channel.wait = lambda timeout: alone(wait, timeout)  # type: ignore[method-assign]


@pytest.fixture
def sides() -> Iterator[tuple[Manual, Manual]]:
    p, c = Manual("prefill"), Manual("decode")
    yield p, c
    p.agent.close()
    c.agent.close()


def test_rounds_of_two_threads_never_overlap(sides: tuple[Manual, Manual]) -> None:
    """Eight threads wait and poll; the tables are touched by one of them at a time."""
    p, c = sides
    stop = threading.Event()

    def poll(agent: Agent) -> None:
        while not stop.is_set():
            agent.poll()

    pollers = [threading.Thread(target=poll, args=(s.agent,)) for s in (p, p, c)]
    for thread in pollers:
        thread.start()
    done: list[bool] = []
    offers = [p.agent.hold(f"t{n}", at(0, n)) for n in range(4)]

    def pull(n: int) -> None:
        done.append(c.agent.wait(c.agent.pull(offers[n], at(0, n)), timeout=20))

    pullers = [threading.Thread(target=pull, args=(n,)) for n in range(4)]
    for thread in pullers:
        thread.start()
    for thread in pullers:
        thread.join()
    stop.set()
    for thread in pollers:
        thread.join()
    assert done == [True] * 4
    assert p.overlaps == c.overlaps == 0
    assert (c.memory[:, :4] == p.memory[:, :4]).all()


def test_poll_does_not_wait_for_who_sleeps(sides: tuple[Manual, Manual]) -> None:
    """Promise 2: while one thread sleeps in ``wait``, ``poll`` and submits return at once."""
    _, c = sides
    handle = c.agent.accept("w", at(0, 1), deadline=4.0)
    waiter = threading.Thread(target=c.agent.wait, args=(handle, 10.0))
    waiter.start()
    began = time.monotonic()
    for _ in range(20):
        c.agent.poll()
    assert time.monotonic() - began < 1.0
    handle.abort()  # seen by the thread that sleeps: nobody polls any more
    waiter.join(10)
    assert handle.done


def test_waiting_inside_a_round_is_refused() -> None:
    """It would wait for itself: refused, with the reason; polling there only collects."""
    errors: list[str] = []
    polled: list[list[Event]] = []
    handles: list[TransferHandle] = []

    def observe(_: Event) -> None:
        polled.append(side.agent.poll())
        for verb in (lambda: side.agent.wait(handles), lambda: side.agent.drain(1.0)):
            try:
                verb()
            except InvalidInputError as error:
                errors.append(str(error))

    side = Manual("decode", on_event=observe)
    handles.append(side.agent.accept("w", at(0, 1)))
    handles[0].abort()
    assert side.agent.wait(handles, timeout=5)
    assert ["wait" in errors[0], "drain" in errors[1]] == [True, True]
    assert "observer" in errors[0]
    assert [len(events) for events in polled] == [1]
    side.agent.close()


def test_closing_while_another_thread_drives(sides: tuple[Manual, Manual]) -> None:
    """``close`` waits for the other thread's round, not for its sleep, and ends its wait."""
    _, c = sides
    handle = c.agent.accept("w", at(0, 1), deadline=4.0)
    waiter = threading.Thread(target=c.agent.wait, args=(handle, 10.0))
    waiter.start()
    while not c.agent._driver.busy:
        threading.Event().wait(0.001)
    began = time.monotonic()
    c.agent.close()
    assert time.monotonic() - began < 2.0
    waiter.join(10)
    assert handle.done
    assert c.overlaps == 0


@pytest.mark.parametrize("progress", ["thread", "manual"])
def test_drained_agents_can_be_closed(progress: str) -> None:
    """``drain`` means that the other side knows as well: after it nobody misses a word."""
    from kvxfer.core.events import Declined, Sent

    sides = []
    for name in ("prefill", "decode"):
        agent = Agent(
            LoopbackTransport(),
            config=AgentConfig(name=name, progress=Progress(progress), lease=60.0),
            timeouts=Timeouts(connect=5, queue=5, transfer=5),
        )
        memory = np.zeros((2, 16, TOKENS, HEADS, HEAD_NBYTES), dtype=np.uint8)
        agent.register_kv_caches({"layer": memory}, layout(16))
        sides.append(agent)
    p, c = sides
    stop = threading.Event()

    def serve() -> None:
        while not stop.wait(0.001):
            p.poll_kept = [*getattr(p, "poll_kept", []), *p.poll()]  # type: ignore[attr-defined]

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        c.pull(p.hold("t", at(0, 5)), at(0, 1))
        c.decline(p.hold("u", at(0, 6)))
        assert c.drain(10.0)
        assert c.snapshot().unconfirmed == 0
        c.close()
        assert p.drain(10.0)
    finally:
        stop.set()
        thread.join()
    kept = [*p.poll_kept, *p.poll()]  # type: ignore[attr-defined]
    assert {type(e) for e in kept if e.transfer_id} == {Sent, Declined}
    p.close()
