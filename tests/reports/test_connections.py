"""Reports O29 to O36: peers that restart, stale handles, handshakes, ports, addresses."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from agent_rig import Node, at

from kvxfer.agent import Agent, AgentConfig
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core import wire
from kvxfer.core.batch import Batch
from kvxfer.core.control import ZmqChannel
from kvxfer.core.control_bind import bind_first_free
from kvxfer.core.control_config import ControlConfig, PortRange
from kvxfer.core.events import Failed, PeerUp, Received, Sent
from kvxfer.core.memory import span_of
from kvxfer.core.transport import Path
from kvxfer.core.verdict import Op
from kvxfer.errors import ConfigError, ErrorKind, PeerLostError, StaleError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport
from reports.report_rig import Instance, ReportRig

# ---- O29: a peer that restarted --------------------------------------------------------------


def restart(rig: ReportRig, old: Node) -> Node:
    """Killed; another life answers at the same address."""
    rig.kill(old)
    rig.at_address(old.agent.address)
    return rig.node(old.name)


def pulled(rig: ReportRig, p: Node, c: Node, name: str, block: int) -> None:
    handle = c.agent.pull(p.agent.hold(name, at(0, 5)), at(0, block))
    rig.run(lambda: handle.done)
    assert handle.error is None
    assert c.content([block]) == p.content([5])


def test_o29_failure_of_the_old_life_keeps_the_new_one(rig: ReportRig) -> None:
    """Report O29: generation 2 is installed when generation 1's failure is noticed: 2 is kept."""
    first, c = rig.node("p"), rig.node("c")
    pulled(rig, first, c, "a", 1)
    second = restart(rig, first)
    assert second.agent.address == first.agent.address
    pulled(rig, second, c, "b", 2)
    links = c.agent._engine.links
    old, new = links.of(first.agent.incarnation), links.of(second.agent.incarnation)
    assert new is not None
    hellos = len(rig.sent(wire.Hello, by=c))
    if old is not None:
        old.fail(PeerLostError("send failed"), rig.clock.now())
    assert links.of(first.agent.incarnation) is None
    assert links.of(second.agent.incarnation) is new
    assert new.up
    pulled(rig, second, c, "d", 3)
    assert len(rig.sent(wire.Hello, by=c)) == hellos


def test_o29_next_use_fetches_anew_once(rig: ReportRig) -> None:
    """Report O29: with no generation 2 yet, the next use introduces itself exactly once."""
    first, c = rig.node("p"), rig.node("c")
    pulled(rig, first, c, "a", 1)
    second = restart(rig, first)
    old = c.agent._engine.links.of(first.agent.incarnation)
    assert old is not None
    old.fail(PeerLostError("send failed"), rig.clock.now())
    hellos = len(rig.sent(wire.Hello, by=c))
    offers = [second.agent.hold(f"t{n}", at(0, 5)) for n in range(3)]
    handles = [c.agent.pull(offer, at(0, n)) for n, offer in enumerate(offers)]
    rig.run(lambda: all(h.done for h in handles))
    assert all(h.error is None for h in handles)
    assert len(rig.sent(wire.Hello, by=c)) == hellos + 1
    assert c.transport.counters["connect"] == 2


def test_o29_path_of_an_older_generation_is_not_dropped(rig: ReportRig) -> None:
    """Report O29: a late failure of path 1 does not drop path 2."""
    p, c = rig.node("p"), rig.node("c")
    pulled(rig, p, c, "a", 1)
    link = c.agent._engine.links.of(p.agent.incarnation)
    assert link is not None
    assert link.paths.generation == 1
    error = PeerLostError("a write failed")
    link.path_failed(rig.clock.now(), 1, error)
    assert link.path is None
    pulled(rig, p, c, "b", 2)
    assert link.paths.generation == 2
    path = link.path
    link.path_failed(rig.clock.now(), 1, error)
    rig.settle()
    assert link.path is path
    assert c.counters["paths.rebuilt"] == 1


# ---- O30: handles of an older generation -----------------------------------------------------


class Pair:
    """A transport, a peer, and one region on each side."""

    def __init__(self) -> None:
        self.near = FaultyTransport(LoopbackTransport(), FaultPlan())
        self.far = LoopbackTransport()
        self.memory = np.zeros(8, dtype=np.uint8)
        self.region = self.near.register(span_of(self.memory))
        self.remote = self.far.register(span_of(np.full(8, 7, dtype=np.uint8)))

    def connect(self) -> Path:
        peer, _ = self.near.connect(self.far.local_info()).poll()
        assert peer is not None
        path, _ = self.near.prepare(peer, [(self.region, self.remote.descriptor)]).poll()
        assert path is not None
        return path


def test_o30_posting_a_stale_handle() -> None:
    """Report O30: prepared before a disconnect, posted after the reconnect: refused as stale, the
    engine is not called; preparing again works."""
    pair = Pair()
    stale = pair.connect()
    pair.near.disconnect(stale.peer)
    fresh = pair.connect()
    with pytest.raises(StaleError, match="prepare a new one"):
        pair.near.post(Op.READ, stale, Batch([0], [0], [0], [8]))
    assert pair.near.counters.get("post", 0) == 0
    assert not pair.memory.any()
    pair.near.post(Op.READ, fresh, Batch([0], [0], [0], [8]))
    assert pair.memory.all()
    pair.near.close(0.0)


# ---- O31: a handshake that fails -------------------------------------------------------------


def test_o31_failed_handshake_touches_nothing(rig: ReportRig) -> None:
    """Report O31: the handshake raises: r1 failed with its blocks, nothing succeeded, nothing was
    planned or posted, and the table of peers is empty."""
    p = rig.node("p")
    c = rig.node("c", plan=FaultPlan(connects=[Fault(kind=FaultKind.FAIL)]))
    handle = c.agent.pull(p.agent.hold("r1", at(0, 5, 6)), at(0, 1, 2))
    rig.run(lambda: handle.done)
    (failed,) = c.of(Failed)
    assert (failed.transfer_id, failed.kind) == ("r1", ErrorKind.HANDSHAKE)
    assert failed.blocks == ((1, 2),)
    assert failed.drained
    assert not c.of(Received)
    assert c.transport.counters == {"connect": 1, "connect.fail": 1}
    assert c.agent.snapshot().peers == ()
    rig.settle(6.0)
    assert not any(c.tables.values())
    assert not p.tables["holds"], "the producer is told all the same"


# ---- O32: whose rank -------------------------------------------------------------------------


def test_o32_read_and_ack_go_to_the_owner(rig: ReportRig) -> None:
    """Report O32: peer dp 4, tp 2, owner dp 3: all eight pairs can be connected ahead, and grant,
    read and release go to the owner's ranks alone."""
    replicas = [Instance(rig, f"p{dp}_", 2, heads=2, dp=(4, dp)) for dp in range(4)]
    (c,) = Instance(rig, "c", 1, heads=2).nodes
    c.agent.connect([node.agent.endpoint for r in replicas for node in r.nodes])
    rig.settle(0.2)
    assert len(c.of(PeerUp)) == 8
    hellos = len(rig.sent(wire.Hello))
    offer = replicas[3].scheduler.hold("t", at(0, 5))
    replicas[3].hand_down()
    handle = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: bool(replicas[3].of(Sent)))
    assert handle.error is None
    assert len(rig.sent(wire.Hello)) == hellos, "no handshake inside the request"
    for replica in replicas:
        owner = replica is replicas[3]
        for node in replica.nodes:
            assert len(rig.sent(wire.Open, to=node)) == owner
            assert len(rig.sent(wire.Release, to=node)) == owner


# ---- O34: bound first, then published --------------------------------------------------------


def test_o34_bound_first_then_published() -> None:
    """Report O34: p and p+1 are in use: the address that is published is that of p+2."""
    tried: list[int] = []

    def bind(endpoint: str) -> None:
        tried.append(int(endpoint.rpartition(":")[2]))
        if len(tried) < 3:
            raise OSError(98, "Address already in use")

    bind_first_free(bind, "127.0.0.1", PortRange(20013, 20016))
    assert tried == [20013, 20014, 20015]


def test_o34_all_busy_is_a_startup_error() -> None:
    """Report O34: all four are busy: the agent does not start, and nothing stays open."""
    channels: list[ZmqChannel] = []
    try:
        channels.append(ZmqChannel())
        port = int(channels[0].address.rpartition(":")[2])
        before = {thread.name for thread in threading.enumerate()}
        transport = LoopbackTransport()
        with pytest.raises(ConfigError, match="in use"):
            Agent(
                transport,
                control=ControlConfig(port_range=PortRange(port, port)),
                config=AgentConfig(name="late"),
            )
        assert transport.closed
        assert {thread.name for thread in threading.enumerate()} == before
    finally:
        for channel in channels:
            channel.close()


# ---- what a handshake must say ---------------------------------------------------------------


def without(field: str, node: Node) -> None:
    """``node``'s hellos lack one of its sizes, as an older peer's might."""
    channel = node.agent._channel
    send = channel.send

    def shorter(route: Any, data: bytes) -> bool:
        envelope = wire.decode(data)
        if isinstance(envelope.body, wire.Hello):
            ranks = {k: v for k, v in envelope.body.ranks.items() if k != field}
            hello = msgspec.structs.replace(envelope.body, ranks=ranks)
            data = wire.encode(envelope.sender, hello, envelope.mid)
        return send(route, data)

    channel.send = shorter  # type: ignore[method-assign]


@pytest.mark.parametrize("dials", ["consumer", "producer"])
def test_o12_size_that_the_peer_does_not_say(rig: ReportRig, dials: str) -> None:
    """Report O12: a hello without its TP size is a handshake error that names the field, at once
    and on both sides; no size is guessed."""
    p, c = rig.node("p"), rig.node("c")
    without("tp_size", p)
    if dials == "consumer":
        handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
        rig.run(lambda: handle.done)
    else:
        c.agent.accept("w", at(0, 1))
        handle = p.agent.push("w", at(0, 5), to=c.agent.endpoint)
        rig.run(lambda: handle.done)
    assert rig.now < 0.2
    assert handle.error is not None
    assert handle.error.kind is ErrorKind.HANDSHAKE
    assert "did not say its tp_size" in str(handle.error)
    assert not c.of(PeerUp)
