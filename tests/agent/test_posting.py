"""Engine calls that do not return: ``Timeouts.post``, threads that are left alone, other peers.

The posting threads are real ones; the clock is not.  A test that lets a thread go waits until that
thread has ended, so that nothing depends on how fast it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs
import pytest
from agent_rig import TIMEOUTS, Node, Rig, at

from kvxfer.agent import TransferHandle
from kvxfer.agent.config import Limits
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.attempt import Attempt
from kvxfer.core.capabilities import Capabilities
from kvxfer.core.events import Drained, Failed, Quarantined, Received
from kvxfer.errors import ErrorKind

PATIENCE = 20.0
"""Real seconds after which a thread that should have ended counts as hanging."""


class Blocking(LoopbackTransport):
    """``post`` may block: towards the peers in ``stuck`` it does, until ``free`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck: set[str] = set()
        self.free = threading.Event()
        self.inside: list[threading.Thread] = []
        self.posted: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return attrs.evolve(super().capabilities, may_block_in_post=True)

    def _post(self, attempt: Attempt) -> None:
        peer = attempt.path.peer.info.incarnation
        self.posted.append(threading.current_thread().name)
        if peer in self.stuck:
            self.inside.append(threading.current_thread())
            self.free.wait(PATIENCE)
        super()._post(attempt)


class Bench:
    """A reader whose engine may block."""

    def __init__(self, rig: Rig, **options: object) -> None:
        self.rig = rig
        self.engine = Blocking()
        self.c: Node = rig.node("c", transport=self.engine, **options)

    def pull(self, p: Node, name: str, block: int = 1) -> TransferHandle:
        return self.c.agent.pull(p.agent.hold(name, at(0, 5)), at(0, block))

    def until_inside(self, count: int) -> None:
        """That many threads are stuck inside the engine."""
        self.real(lambda: len(self.engine.inside) >= count)

    def real(self, reached: Callable[[], bool]) -> None:
        """Step without letting virtual time run away from the threads."""
        end = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < end, "not reached in time"
            self.rig.network.deliver(self.rig.clock.now())
            for node in self.rig.nodes:
                node.events += node.agent.poll()
            at_ = self.rig.network.next_at()
            if at_ is not None:
                self.rig.clock.advance(max(0.0, at_ - self.rig.clock.now()))
            time.sleep(0.0005)

    def let_go(self) -> None:
        """Every call returns, and the agent has heard of it."""
        self.engine.free.set()
        agent = self.c.agent
        links = agent._engine.links
        if self.c in self.rig.nodes:
            self.real(
                lambda: (
                    not len(agent._ctx.stuck)
                    and all(link.poster._posting is None for link in links)
                )
            )


@pytest.fixture
def bench(rig: Rig) -> Bench:
    return Bench(rig)


def peer(rig: Rig, name: str) -> Node:
    return rig.node(name, transport=LoopbackTransport())


def test_posts_run_on_a_thread_of_their_own(rig: Rig, bench: Bench) -> None:
    """``may_block_in_post``: never on the progress thread, one thread per peer."""
    p = peer(rig, "p")
    handle = bench.pull(p, "t")
    bench.real(lambda: handle.done)
    assert handle.error is None
    assert set(bench.engine.posted) == {f"kvxfer-post-{p.agent.incarnation}"}
    assert bench.c.content([1]) == p.content([5])


def test_a_stuck_post_fails_its_part_in_time(rig: Rig, bench: Bench) -> None:
    """``Timeouts.post``: the part fails by then; its blocks stay pinned until the call returns,
    because it may still post; nothing lands afterwards that nobody knows of."""
    p = peer(rig, "p")
    bench.engine.stuck.add(p.transport.incarnation)
    handle = bench.pull(p, "t")
    bench.until_inside(1)
    assert rig.run(lambda: handle.done) == pytest.approx(TIMEOUTS.post, abs=0.05)
    (failed,) = bench.c.of(Failed)
    assert (failed.kind, failed.drained) == (ErrorKind.TIMEOUT, False)
    assert "Timeouts.post is over" in str(failed.error)
    assert bench.c.counters["posting_threads.abandoned"] == 1
    assert bench.c.agent.snapshot().stuck_threads == {p.agent.incarnation: 1}
    assert "1 engine calls towards peer" in bench.c.agent.health().warnings[0]
    rig.run(lambda: bool(bench.c.of(Quarantined)))  # no fence covers a call that did not return
    assert bench.c.tables["pinned_blocks"] == 1
    bench.let_go()
    rig.run(lambda: bool(bench.c.of(Drained)))
    rig.run(lambda: not any(bench.c.tables.values()))
    assert bench.c.counters["posting_threads.returned"] == 1
    assert bench.c.agent.snapshot().stuck_threads == {}
    assert bench.c.agent.health().warnings == ()


@pytest.mark.parametrize("returns", [True, False])
def test_a_process_that_was_held_up_waits_a_little_longer(
    rig: Rig, bench: Bench, returns: bool
) -> None:
    """It looks long after ``Timeouts.post``: nothing of it ran meanwhile, the posting thread
    neither. A call that returns then has succeeded; one that does not is given up soon."""
    p = peer(rig, "p")
    bench.engine.stuck.add(p.transport.incarnation)
    handle = bench.pull(p, "t")
    bench.until_inside(1)
    rig.clock.advance(TIMEOUTS.post + 0.8)
    bench.real(lambda: bench.c.counters.get("posts.held_up") == 1)
    assert not handle.done
    if returns:
        bench.engine.free.set()
        bench.real(lambda: handle.done)
        assert handle.error is None
        assert bench.c.of(Received)
    else:
        assert rig.run(lambda: handle.done) == pytest.approx(0.5, abs=0.05)
        assert "Timeouts.post is over" in str(handle.error)
        bench.let_go()


def test_another_thread_goes_on(rig: Rig, bench: Bench) -> None:
    """After one stuck call the peer gets another thread, and a new path: one thread per path."""
    p = peer(rig, "p")
    bench.engine.stuck.add(p.transport.incarnation)
    first = bench.pull(p, "first")
    bench.until_inside(1)
    bench.engine.stuck.clear()
    rig.run(lambda: first.done)
    second = bench.pull(p, "second", block=2)
    bench.real(lambda: second.done)
    assert second.error is None
    assert bench.c.counters["paths.rebuilt"] == 1
    bench.let_go()


def test_other_peers_are_not_delayed(rig: Rig, bench: Bench) -> None:
    """Promise 7: while a call towards one peer hangs, others are served at once."""
    bad, good = peer(rig, "bad"), peer(rig, "good")
    bench.engine.stuck.add(bad.transport.incarnation)
    stuck = bench.pull(bad, "stuck")
    bench.until_inside(1)
    began = rig.clock.now()
    handle = bench.pull(good, "t", block=2)
    bench.real(lambda: handle.done)
    assert handle.error is None
    assert rig.clock.now() - began < 0.1
    assert not stuck.done
    bench.let_go()


def test_stuck_threads_are_bounded(rig: Rig) -> None:
    """After so many nothing more is posted to that peer: RESOURCE at once, and health says so."""
    bench = Bench(rig, limits=Limits(stuck_threads=2), breaker=None)
    p, good = peer(rig, "p"), peer(rig, "good")
    bench.engine.stuck.add(p.transport.incarnation)
    for i in range(2):
        handle = bench.pull(p, f"t{i}", block=i)
        bench.until_inside(i + 1)
        rig.run(lambda handle=handle: handle.done)
    refused = bench.pull(p, "refused", block=3)
    assert rig.run(lambda: refused.done) < 0.2
    assert refused.error is not None
    assert refused.error.kind is ErrorKind.RESOURCE
    assert refused.drained
    assert bench.c.counters["posting_threads.refused"] == 1
    assert any("nothing more is posted" in w for w in bench.c.agent.health().warnings)
    other = bench.pull(good, "other", block=4)
    bench.real(lambda: other.done)
    assert other.error is None
    bench.let_go()
    rig.run(lambda: bench.c.agent.snapshot().stuck_threads == {})
    again = bench.pull(p, "again", block=5)
    bench.real(lambda: again.done)
    assert again.error is None


def test_a_stuck_post_is_a_fault_of_the_peer(rig: Rig) -> None:
    """A peer in whose calls threads vanish is left alone like any other that fails."""
    patient = attrs.evolve(TIMEOUTS, drain=9.0)  # no fence comes in between
    bench = Bench(rig, limits=Limits(stuck_threads=9), timeouts=patient)
    p = peer(rig, "p")
    bench.engine.stuck.add(p.transport.incarnation)
    for i in range(4):
        handle = bench.pull(p, f"t{i}", block=i)
        bench.until_inside(i + 1)
        rig.run(lambda handle=handle: handle.done)
    assert bench.c.counters["breakers.faults"] == 4
    bench.let_go()


def test_close_does_not_wait_for_a_stuck_thread(rig: Rig, bench: Bench) -> None:
    """``close`` returns within its deadline although a call hangs inside the engine."""
    p = peer(rig, "p")
    bench.engine.stuck.add(p.transport.incarnation)
    handle = bench.pull(p, "t")
    bench.until_inside(1)
    began = time.monotonic()
    bench.c.agent.close(0.1)
    assert time.monotonic() - began < PATIENCE / 2
    assert handle.done
    rig.nodes.remove(bench.c)
    bench.engine.free.set()
    for thread in bench.engine.inside:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_idle_threads_end_with_the_agent(rig: Rig, bench: Bench) -> None:
    """No posting thread outlives ``close``."""
    p = peer(rig, "p")
    handle = bench.pull(p, "t")
    bench.real(lambda: handle.done)
    name = f"kvxfer-post-{p.agent.incarnation}"
    (thread,) = [t for t in threading.enumerate() if t.name == name]
    bench.c.agent.close(0.0)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_aborted_while_its_post_hangs(rig: Rig, bench: Bench) -> None:
    """An abort does not wait for the engine either; the blocks come back with the call."""
    p = peer(rig, "p")
    bench.engine.stuck.add(p.transport.incarnation)
    handle = bench.pull(p, "t")
    bench.until_inside(1)
    handle.abort()
    assert rig.run(lambda: handle.done) < 0.2
    assert not bench.c.of(Failed)[0].drained
    bench.let_go()
    rig.run(lambda: bool(bench.c.of(Drained)))
    assert not bench.c.of(Received)
    rig.run(lambda: not any(bench.c.tables.values()))
