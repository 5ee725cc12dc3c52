"""The faces of an agent over real time and the real control channel: thread, blocking, asyncio."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from agent_rig import HEAD_NBYTES, HEADS, TOKENS, at, layout

from kvxfer.agent import Agent, AgentConfig
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.events import Event, Received, Sent
from kvxfer.core.transport import Transport
from kvxfer.errors import ClosedError, ErrorKind, TransferError
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.faults import FaultPlan
from kvxfer.testing.faulty import FaultyTransport

BLOCKS = 16


class Side:
    def __init__(self, name: str, progress: str, transport: Transport | None = None) -> None:
        self.memory = np.random.default_rng(len(name)).integers(
            0, 256, size=(2, BLOCKS, TOKENS, HEADS, HEAD_NBYTES), dtype=np.uint8
        )
        self.agent = Agent(
            transport or LoopbackTransport(),
            config=AgentConfig(name=name, progress=progress),  # type: ignore[arg-type]
            timeouts=Timeouts(connect=5, queue=5, transfer=5),
        )
        self.agent.register_kv_caches({"layer": self.memory}, layout(BLOCKS))


@pytest.fixture(params=["thread", "manual"])
def progress(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sides(progress: str) -> Iterator[tuple[Side, Side]]:
    p, c = Side("prefill", progress), Side("decode", progress)
    yield p, c
    p.agent.close()
    c.agent.close()


def serve(agent: Agent, stop: threading.Event) -> threading.Thread:
    """Somebody polls the other side, as its engine would."""

    def run() -> None:
        while not stop.wait(0.0005):
            agent.poll()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_blocking_face(sides: tuple[Side, Side]) -> None:
    """``wait`` returns when the transfer is terminal, and its events stay for ``poll``."""
    p, c = sides
    stop = threading.Event()
    thread = serve(p.agent, stop)
    try:
        handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
        assert c.agent.wait(handle, timeout=10)
        assert handle.result().nbytes == 2 * TOKENS * HEADS * HEAD_NBYTES
        assert any(isinstance(e, Received) for e in c.agent.poll())
    finally:
        stop.set()
        thread.join()
    assert (c.memory[:, 1] == p.memory[:, 5]).all()


def test_wait_returns_pending_on_timeout(sides: tuple[Side, Side]) -> None:
    """Report O26: a wait that times out changes nothing."""
    _, c = sides
    handle = c.agent.accept("w", at(0, 1), deadline=4.0)
    began = time.monotonic()
    assert not c.agent.wait(handle, timeout=0.05)
    assert 0.05 <= time.monotonic() - began < 1.0
    assert not handle.done
    handle.abort()
    assert c.agent.wait(handle, timeout=10)
    with pytest.raises(TransferError, match="aborted") as caught:
        handle.result()
    assert caught.value.kind is ErrorKind.ABORTED


def test_asyncio_face(sides: tuple[Side, Side]) -> None:
    """Handles can be awaited and events iterated inside an event loop, nothing polled by hand."""
    p, c = sides

    async def first(agent: Agent, kind: type[Event], found: list[Event]) -> None:
        async for event in agent.events():
            found.append(event)
            if isinstance(event, kind):
                return

    async def main() -> None:
        sent: list[Event] = []
        received: list[Event] = []
        watchers = [
            asyncio.ensure_future(first(p.agent, Sent, sent)),
            asyncio.ensure_future(first(c.agent, Received, received)),
        ]
        handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
        assert (await handle) is handle
        await asyncio.wait_for(asyncio.gather(*watchers), 10)
        assert isinstance(received[-1], Received)
        assert (await handle) is handle  # done already

    asyncio.run(main())
    assert (c.memory[:, 1] == p.memory[:, 5]).all()


def test_idle_costs_almost_nothing() -> None:
    """An idle agent with a connected peer uses under 1% of a core."""
    p, c = Side("prefill", "thread"), Side("decode", "thread")
    try:
        handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
        assert c.agent.wait(handle, timeout=10)
        assert p.agent.drain(10)
        gc.collect()
        used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.monotonic()
        threading.Event().wait(2.0)  # measures a duration; nothing depends on it being right
        now = resource.getrusage(resource.RUSAGE_SELF)
        cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        assert cpu / (time.monotonic() - began) < 2 * 0.01, "two agents, under 1% each"
    finally:
        p.agent.close()
        c.agent.close()


class BlockingTransport(FaultyTransport):
    """Whose ``post`` waits inside the engine until it is let go, as mori's may for 5 s."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, FaultPlan())
        self.entered, self.go = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    @property
    def capabilities(self):  # type: ignore[no-untyped-def]
        import attrs

        return attrs.evolve(super().capabilities, may_block_in_post=True)

    def _post(self, attempt):  # type: ignore[no-untyped-def]
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        assert self.go.wait(30)
        super()._post(attempt)


def test_post_that_blocks_holds_nobody_up() -> None:
    """Promise 2: a post stuck inside the engine delays neither submit, poll nor another peer."""
    transport = BlockingTransport(LoopbackTransport())
    stuck, other = Side("prefill", "thread"), Side("prefill2", "thread")
    c = Side("decode", "thread", transport)
    try:
        slow = c.agent.pull(stuck.agent.hold("t", at(0, 5)), at(0, 1))
        assert transport.entered.wait(10)
        began = time.monotonic()
        quick = c.agent.decline(other.agent.hold("u", at(0, 6)))
        c.agent.poll()
        assert time.monotonic() - began < 0.5
        assert quick is None
        assert other.agent.drain(5), "the decline did not get through"
        assert not slow.done
        slow.abort()
        assert c.agent.wait(slow, timeout=5)
        assert not slow.drained, "a post that has not returned may still post"
        transport.go.set()
        assert c.agent.drain(10)
        assert slow.drained
        assert all(name.startswith("kvxfer-post") for name in transport.threads)
    finally:
        transport.go.set()
        for side in (c, stuck, other):
            side.agent.close()


def test_closed_agent_refuses(sides: tuple[Side, Side]) -> None:
    """After close every verb raises ClosedError, and what was under way is failed."""
    p, c = sides
    handle = c.agent.accept("w", at(0, 1))
    c.agent.close()
    c.agent.close()
    assert handle.done
    with pytest.raises(ClosedError):
        c.agent.decline(p.agent.hold("t", at(0, 5)))
    assert not c.agent.health().ready


def test_errors_and_events_pickle(sides: tuple[Side, Side]) -> None:
    """Events cross process boundaries, their errors and histories included."""
    import pickle

    _, c = sides
    handle = c.agent.accept("w", at(0, 1))
    handle.abort()
    c.agent.wait(handle, timeout=10)
    events = c.agent.poll()
    again = pickle.loads(pickle.dumps(events))
    assert [type(e) for e in again] == [type(e) for e in events]
    assert str(again[-1].error) == str(events[-1].error)
