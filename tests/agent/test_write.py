"""WRITE through the agent: accept, push, seal, in virtual time."""

from __future__ import annotations

import pytest
from agent_rig import Node, Rig, at

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core import pollable
from kvxfer.core.events import Drained, Failed, Quarantined, Received, Role, Sent
from kvxfer.core.transport import Fence, Peer
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport

DEAD = EngineError(backend="moriio", code=13, message="remote access error")


class Ready:
    """What a ``torch.cuda.Event`` says, by hand."""

    def __init__(self) -> None:
        self.done = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done


def push_all(p: Node, c: Node, source: list[int], payload: bytes = b"") -> None:
    p.agent.push("w", at(0, *source), to=c.agent.endpoint)
    p.agent.seal("w", payload)


@pytest.mark.parametrize("accept_first", [True, False])
def test_bytes_and_payload_arrive_in_either_order(rig: Rig, accept_first: bool) -> None:
    """A push before the grant waits for it; the seal's payload comes with the one completion."""
    p, c = rig.node("p"), rig.node("c")
    if accept_first:
        c.agent.accept("w", at(0, 3, 1))
        rig.pass_time(0.1)
        push_all(p, c, [7, 8], b"first token")
    else:
        push_all(p, c, [7, 8], b"first token")
        rig.pass_time(0.5)
        assert not c.events or not c.of(Received)
        c.agent.accept("w", at(0, 3, 1))
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content([3, 1]) == p.content([7, 8])
    assert c.of(Received)[0].payload == b"first token"
    assert p.of(Sent)[0].nbytes == c.of(Received)[0].nbytes == len(p.content([7, 8]))
    rig.pass_time(1)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_grant_can_be_sent_ahead(rig: Rig) -> None:
    """A consumer that knows the producer tells its blocks before anybody asks."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3), producers=[p.agent.endpoint])
    rig.pass_time(0.5)
    push_all(p, c, [7])
    rig.run(lambda: bool(c.of(Received)))
    assert c.content([3]) == p.content([7])


def test_nothing_is_posted_before_the_data_is_ready(rig: Rig) -> None:
    """``ready.query()`` gates each submit; layers go out in order and are sealed once."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.accept("w", at(0, 3))
    ready = [Ready(), Ready()]
    for i, gate in enumerate(ready):
        p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=[f"layer{i}"], ready=gate)
    p.agent.seal("w")
    rig.pass_time(0.5)
    assert p.tables["in_flight_pieces"] == 0
    assert p.counters.get("posts", 0) == 0
    before = c.content([3])
    ready[0].done = True
    rig.pass_time(0.5)
    assert c.memory["layer0"][:, 3].tobytes() == p.memory["layer0"][:, 7].tobytes()
    assert c.content([3]) != before
    assert not c.of(Received)
    ready[1].done = True
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content([3]) == p.content([7])


def test_failed_write_tells_the_consumer(rig: Rig) -> None:
    """Report O04: the sender's failure reaches the receiver over the control channel."""
    gone = EngineError(backend="moriio", code=11, message="length out of range")
    p = rig.node("p", posts=[Fault(kind=FaultKind.REFUSE_VALUE, error=gone)])
    c = rig.node("c")
    c.agent.accept("w", at(0, 3))
    push_all(p, c, [7])
    rig.run(lambda: bool(c.of(Failed)))
    assert p.of(Failed)[0].role is Role.PRODUCER
    assert c.of(Failed)[0].drained
    assert "length out of range" in str(c.of(Failed)[0].error)
    rig.pass_time(1)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_late_write_keeps_destination_pinned(rig: Rig) -> None:
    """Promise 3: a consumer that gave up gets its blocks back after the producer is drained."""
    p = rig.node("p", posts=[Fault(kind=FaultKind.LATE, after=2.5)])
    c = rig.node("c")
    c.agent.accept("w", at(0, 3), deadline=1.0)
    push_all(p, c, [7])
    took = rig.run(lambda: bool(c.of(Failed)))
    assert took == pytest.approx(1.0, abs=0.05)
    assert c.of(Failed)[0].kind is ErrorKind.TIMEOUT
    assert not c.of(Failed)[0].drained
    with pytest.raises(InvalidInputError, match="bytes may still land"):
        c.agent.accept("v", at(0, 3))
    rig.run(lambda: bool(c.of(Drained)))
    before = c.content([3])
    rig.pass_time(10)
    assert c.content([3]) == before, "bytes landed after Drained"
    rig.pass_time(5)
    assert not any(c.tables.values())
    assert not any(p.tables.values())


def test_consumer_abort_stops_the_producer(rig: Rig) -> None:
    """An abort reaches the producer, which stops and proves that it is drained."""
    p, c = rig.node("p"), rig.node("c")
    handle = c.agent.accept("w", at(0, 3))
    gate = Ready()
    p.agent.push("w", at(0, 7), to=c.agent.endpoint, ready=gate)
    rig.pass_time(0.5)
    handle.abort()
    rig.run(lambda: bool(p.of(Failed)) and bool(c.of(Drained)))
    assert p.of(Failed)[0].kind is ErrorKind.ABORTED
    gate.done = True
    rig.pass_time(1)
    assert not any(p.tables.values())


def test_nobody_pushes(rig: Rig) -> None:
    """Report O24: a consumer that hears nothing fails by its own deadline, drained at once."""
    c = rig.node("c")
    handle = c.agent.accept("w", at(0, 8, 9), deadline=1.5)
    assert rig.run(lambda: handle.done) == pytest.approx(1.5, abs=0.02)
    failed = c.of(Failed)[0]
    assert failed.kind is ErrorKind.TIMEOUT
    assert failed.drained
    assert failed.blocks == ((8, 9),)


def test_nobody_accepts(rig: Rig) -> None:
    """A push that gets no grant ends by its queue deadline and leaves nothing behind."""
    p, c = rig.node("p"), rig.node("c")
    push_all(p, c, [7])
    rig.run(lambda: bool(p.of(Failed)))
    assert p.of(Failed)[0].kind is ErrorKind.TIMEOUT
    rig.pass_time(1)
    assert not any(p.tables.values())


def test_lost_messages_do_not_matter() -> None:
    """Promise 6: accept, seal and their confirmations are re-sent, and twice equals once."""
    rig = Rig(lose=0.4, duplicate=0.3)
    p, c = rig.node("p"), rig.node("c")
    for n in range(20):
        c.agent.accept(f"w{n}", at(0, n % 16))
        p.agent.push(f"w{n}", at(0, 7), to=c.agent.endpoint)
        p.agent.seal(f"w{n}")
        rig.run(lambda n=n: bool(p.of(Sent, f"w{n}")) and bool(c.of(Received, f"w{n}")))
    assert len(p.of(Sent)) == len(c.of(Received)) == 20
    for node in rig.nodes:
        node.agent.close(0.0)


def test_sealing_what_is_not_pushed(rig: Rig) -> None:
    """Bad input is refused at once and names the id."""
    p = rig.node("p")
    with pytest.raises(InvalidInputError, match="'w' is being pushed"):
        p.agent.seal("w")
    with pytest.raises(InvalidInputError, match="65537 bytes"):
        p.agent.seal("w", b"x" * 65537)


class SourceOnly(FaultyTransport):
    """An engine whose fence ends its own reading, and cannot say what is still on its way."""

    def _fence(self, peer: Peer) -> pollable.Pollable[Fence]:
        return pollable.Ready(Fence(done=False, reason="one post has left", source_done=True))


def test_a_source_that_nobody_reads_comes_back(rig: Rig) -> None:
    """What a failed WRITE has sent is the receiver's to fence. The sender's blocks come back once
    its engine reads them no more, without quarantine, and the receiver is not told that anything is
    proven: its blocks wait for its own fence."""
    never = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)])
    p = rig.node("p", transport=SourceOnly(LoopbackTransport(), never, clock=rig.clock))
    c = rig.node("c")
    c.agent.accept("w", at(0, 3, 1))
    push_all(p, c, [7, 8])
    rig.run(lambda: bool(p.of(Drained)))
    assert not p.of(Failed)[0].drained
    assert p.of(Drained)[0].blocks == ((7, 8),)
    assert not p.of(Quarantined)
    assert not p.agent.snapshot().quarantine
    rig.run(lambda: bool(c.of(Drained)))
    assert not c.of(Failed)[0].drained
    assert c.of(Drained)[0].drained_by == "fence"
    rig.pass_time(30.0)
    assert not any(p.tables.values())
    assert not any(c.tables.values())
