"""What vLLM 0.33 pins in its own unit tests, as far as waiting, acks, pushes and routing go.

The numbers that belong to layout and topology are in ``tests/layout`` and ``tests/topology``, those
of acks without a rank in the tests of ``LegacyCountingAcks``.  Where vLLM raises out of a step,
kvxfer returns a failed value or an event with the same text.
"""

from __future__ import annotations

import attrs
import pytest
from agent_rig import TIMEOUTS, Node, at

from kvxfer.agent.handles import TransferState
from kvxfer.backends.loopback import LoopbackConfig, LoopbackTransport
from kvxfer.core import wire
from kvxfer.core.attempt import Attempt
from kvxfer.core.control_sockets import _ms
from kvxfer.core.events import Declined, Drained, Failed, PeerUp, Received, Role, Sent
from kvxfer.core.offer import Offer
from kvxfer.core.topology import Ranks, fixed_port
from kvxfer.core.topology import Role as RankRole
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import ErrorKind, InvalidInputError, TransferError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport
from reports.report_rig import HELD, INVALID, Instance, ReportRig, end, late, refused

LONG = attrs.evolve(TIMEOUTS, transfer=60.0, ack=60.0)


def piecewise(rig: ReportRig, name: str, posts: list[Fault | None], **options: object) -> Node:
    """A node whose every piece is a post of its own."""
    inner = LoopbackTransport(LoopbackConfig(max_pieces=1))
    transport = FaultyTransport(inner, FaultPlan(posts=posts), clock=rig.clock)
    return rig.node(name, transport=transport, **options)


class Gate:
    """``ready.query()``, by hand."""

    def __init__(self) -> None:
        self.open = False

    def query(self) -> bool:
        return self.open


# ---- 12 to 15: reads and their one release ---------------------------------------------------


def test_12_one_release_with_the_readers_size(rig: ReportRig) -> None:
    """Behaviour 12: both posted parts of a layer are read: exactly one release, with decode's size
    8, to the address in the offer; all tables are empty."""
    prefill = Instance(rig, "p", 8, heads=8, layers=1)
    decode = Instance(rig, "d", 8, heads=8, layers=1)
    offer = prefill.scheduler.hold("t", at(0, 5, 6))
    prefill.hand_down()
    reader = decode.nodes[2]
    handle = reader.agent.pull(offer, at(0, 1, 2))
    rig.run(lambda: handle.done)
    rig.settle()
    (release,) = rig.sent(wire.Release)
    assert not release.ranks  # those of the reader's hello
    link = prefill.nodes[2].agent._engine.links.of(reader.agent.incarnation)
    assert link.hello.ranks.tp_size == 8
    assert release.ok
    assert rig.sent(wire.Release, to=prefill.nodes[2]) == [release]
    assert not any(reader.tables.values())


def test_13_empty_list_only_releases(rig: ReportRig) -> None:
    """Behaviour 13: a read of an empty list (abort) posts nothing; only the release is sent, to
    base 7000 plus the chosen rank 2: 7002."""
    nodes = []
    for rank in range(4):
        port = fixed_port(7000, Ranks(tp_size=4, tp_rank=rank, total_kv_heads=4), RankRole.PRODUCER)
        rig.at_address(f"tcp://10.0.0.9:{port}")
        ranks = Ranks(tp_size=4, tp_rank=rank, total_kv_heads=4)
        nodes.append(rig.node(f"p{rank}", ranks=ranks, heads=1))
    from kvxfer.agent import SchedulerAgent

    scheduler = SchedulerAgent([node.agent.info for node in nodes])
    offer = scheduler.hold("t", at(0, 5))
    for node in nodes:
        node.agent.execute(scheduler._orders)
    reader = Instance(rig, "d", 4, heads=4).nodes[2]
    handle = reader.agent.pull(offer, at(0))
    rig.run(lambda: bool(nodes[2].of(Sent)))
    assert handle.done
    assert {c.to for c in rig.carried if c.sender == reader.agent.incarnation} == {
        "tcp://10.0.0.9:7002"
    }
    assert reader.transport.counters == {}
    assert [len(node.of(Sent)) for node in nodes] == [0, 0, 1, 0]


def test_14_one_of_two_reads_pending(rig: ReportRig) -> None:
    """Behaviour 14: one of two posted reads is pending: the request stays, and no release."""
    p, c = rig.node("p", layers=1), piecewise(rig, "c", [HELD, HELD], layers=1, timeouts=LONG)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: len(c.transport.held) == 2)
    first, second = c.transport.held
    end(c, first)
    rig.settle(2.0)
    assert not handle.done
    assert c.tables["pulls"] == 1
    assert not rig.sent(wire.Release)
    end(c, second)
    rig.settle()
    assert handle.state is TransferState.DONE
    assert len(rig.sent(wire.Release)) == 1


@pytest.mark.parametrize("layers", [1, 2], ids=["one layer", "several layers"])
def test_15_failed_read_names_its_blocks(rig: ReportRig, layers: int) -> None:
    """Behaviour 15: a failed read of blocks 1, 2 names both; it is a value, whatever the model."""
    p, c = rig.node("p", layers=layers), rig.node("c", layers=layers, posts=[refused()])
    c.agent.pull(p.agent.hold("t", at(0, 5, 6)), at(0, 1, 2))
    rig.run(lambda: bool(c.of(Failed)))
    assert c.of(Failed)[0].blocks == ((1, 2),)
    assert c.of(Failed)[0].drained


# ---- 16 to 18, 23 to 26: waiting -------------------------------------------------------------


def test_16_step_barrier(rig: ReportRig) -> None:
    """Behaviour 16: the barrier waits for all reads of the step once; a second call waits for
    nothing, and with no reads the engine is not even looked at."""
    p, c = rig.node("p"), rig.node("c", posts=[late(0.2), late(0.5)])
    pauses = rig.make_waits_virtual(c)
    assert c.agent.wait([])
    assert pauses == []
    assert c.transport.counters == {}
    handles = [c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, n)) for n in range(2)]
    rig.run(lambda: c.transport.counters.get("post", 0) == 2)
    rig.begin()
    assert c.agent.wait(handles, timeout=5.0)
    assert 0.5 <= rig.now < 0.6
    assert all(handle.state is TransferState.DONE for handle in handles)
    waited = len(pauses)
    assert c.agent.wait(handles, timeout=5.0)
    assert len(pauses) == waited


def test_17_barrier_goes_on_after_a_failure(rig: ReportRig) -> None:
    """Behaviour 17: A failed, B lands at its fifth look: the barrier waits for B; received is B,
    invalid are A's blocks. A's failure can be seen at once."""
    p, c = rig.node("p"), rig.node("c", posts=[refused(), HELD], timeouts=LONG)
    a = c.agent.pull(p.agent.hold("A", at(0, 5)), at(0, 1))
    b = c.agent.pull(p.agent.hold("B", at(0, 6)), at(0, 2))
    rig.run(lambda: a.done and bool(c.transport.held))
    pauses = rig.make_waits_virtual(c)
    wait = c.agent._channel.wait

    def fifth(timeout: float) -> None:
        wait(timeout)
        if len(pauses) == 5:
            c.transport.release()

    c.agent._channel.wait = fifth  # type: ignore[method-assign]
    assert c.agent.wait([a, b], timeout=5.0)
    assert len(pauses) == 5
    c.events += c.agent.poll()
    assert [e.transfer_id for e in c.of(Received)] == ["B"]
    assert [(e.transfer_id, e.blocks) for e in c.of(Failed)] == [("A", ((1,),))]


@pytest.mark.parametrize("op", ["read", "write"])
def test_18_barrier_times_out(rig: ReportRig, op: str) -> None:
    """Behaviour 18: 0.05 s with two reads, or two writes, in flight: told that time is up, in both
    modes, and both go on."""
    p, c = rig.node("p", timeouts=LONG), rig.node("c", posts=[HELD, HELD], timeouts=LONG)
    if op == "read":
        handles = [c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, n)) for n in range(2)]
    else:
        for n in range(2):
            p.agent.accept(f"t{n}", at(0, n))
        handles = [c.agent.push(f"t{n}", at(0, 5), to=p.agent.endpoint) for n in range(2)]
        for n in range(2):
            c.agent.seal(f"t{n}")
    rig.run(lambda: len(c.transport.held) == 2)
    rig.make_waits_virtual(c)
    rig.begin()
    assert not c.agent.wait(handles, timeout=0.05)
    assert rig.now == pytest.approx(0.05, abs=0.001)
    assert not any(handle.done for handle in handles)
    with pytest.raises(TransferError, match="pending"):
        handles[0].result()
    c.transport.release()
    assert c.agent.wait(handles, timeout=5.0)


def test_19_who_posts_what(rig: ReportRig) -> None:
    """Behaviour 19: in push mode no read is ever posted; in pull mode the producer posts none."""
    posted: list[tuple[str, Op]] = []

    def watch(node: Node) -> Node:
        post = node.transport.post

        def recorded(op: Op, *args: object, **kwargs: object) -> Attempt:
            posted.append((node.name, op))
            return post(op, *args, **kwargs)  # type: ignore[arg-type]

        node.transport.post = recorded  # type: ignore[method-assign]
        return node

    p, c = watch(rig.node("p")), watch(rig.node("c"))
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(c.of(Received, "w")))
    assert posted == [("p", Op.WRITE)]
    posted.clear()
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(p.of(Sent, "t")))
    assert posted == [("c", Op.READ)]


@pytest.mark.parametrize(
    ("members", "verdict", "known"),
    [
        ("", "done", False),
        ("SS", "done", False),
        ("FS", "failed", True),
        ("SF", "failed", True),
        ("PS", "pending", False),
        ("PFS", "pending", True),
        ("SFP", "pending", True),
    ],
)
def test_22_batch_verdict(rig: ReportRig, members: str, verdict: str, known: bool) -> None:
    """Behaviour 22: nothing to do and all ok are done; a failure wins over ok whatever the order.
    With a member pending the failure is known at once, and published when all are terminal."""
    p = rig.node("p", layers=1)
    c = piecewise(rig, "c", [HELD] * 3, layers=1, timeouts=LONG)
    offer = p.agent.hold("t", at(0, 5, 7))
    # Blocks without their neighbours: two pieces each. The fourth piece ends by itself.
    blocks = at(0, 1, 3) if members else at(0)
    handle = c.agent.pull(offer, blocks)
    rig.run(lambda: handle.done if not members else len(c.transport.held) == 3)
    held = list(c.transport.held)
    for attempt, state in zip(held, members.ljust(3, "S"), strict=False):
        if state != "P":
            end(c, attempt, INVALID if state == "F" else None)
    rig.settle(0.5)
    assert (handle.state.value if handle.done else "pending") == verdict
    assert (handle.error is not None) == known
    if verdict == "pending":
        assert not c.of(Failed)
        for attempt, state in zip(held, members.ljust(3, "S"), strict=False):
            if state == "P":
                end(c, attempt)
        rig.settle(0.5)
        assert handle.state is (TransferState.FAILED if known else TransferState.DONE)


def test_23_waiting_for_members(rig: ReportRig) -> None:
    """Behaviour 23: a failed member's ``result`` raises with the engine's text; one that never ends
    lets the wait time out; none or all done returns at once; one that ends after 0.2 s makes the
    wait last that long."""
    never = Fault(kind=FaultKind.NEVER)
    p, c = rig.node("p"), rig.node("c", posts=[refused(), never, None, late(0.2)], timeouts=LONG)
    handles = []
    for n in range(3):
        handles.append(c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, n)))
        rig.run(lambda n=n: c.transport.counters.get("post", 0) == n + 1)
    failed, endless, done = handles
    rig.run(lambda: failed.done and done.done)
    rig.make_waits_virtual(c)
    rig.begin()
    assert c.agent.wait([failed, done], timeout=1.0)
    assert c.agent.wait([])
    assert rig.now == 0.0
    with pytest.raises(TransferError, match="length out of range"):
        failed.result()
    assert not c.agent.wait([done, endless], timeout=0.3)
    assert rig.now == pytest.approx(0.3)
    last = c.agent.pull(p.agent.hold("t3", at(0, 5)), at(0, 3))
    rig.begin()
    assert c.agent.wait(last, timeout=5.0)
    assert 0.2 <= rig.now < 0.3


def test_24_milliseconds_are_never_none() -> None:
    """Behaviour 24: 0.05 s are 50 ms for the operating system, 0.0001 s are 1 and never 0, which
    would mean "for ever" or "do not wait"."""
    assert (_ms(0.05), _ms(0.0001)) == (50, 1)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (13, "Work Request Flushed Error", None),
        (13, "remote access error", ErrorKind.STALE),
        (11, "length out of range", ErrorKind.INVALID),
        (99, "something new", ErrorKind.UNKNOWN),
    ],
)
def test_25_the_engines_words_and_code(
    rig: ReportRig, code: int, text: str, kind: ErrorKind | None
) -> None:
    """Behaviour 25: a failed member's error has the engine's text and code; a code without a name
    is no crash. Looking without waiting never waits in the engine."""
    error = EngineError(backend="moriio", code=code, message=text)
    fault = Fault(kind=FaultKind.FAIL_DRAINED, error=error)
    p, c = rig.node("p"), rig.node("c", posts=[fault] * 99)
    pauses = rig.make_waits_virtual(c)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: handle.done)
    assert handle.error is not None
    assert text in str(handle.error)
    assert handle.error.engine is not None
    assert handle.error.engine.code == code
    assert kind is None or handle.error.kind is kind
    assert pauses == [], "poll never waits"


def test_25_in_progress_is_no_error(rig: ReportRig) -> None:
    """Behaviour 25: the engine still says "in progress": the wait times out, nothing failed."""
    p, c = rig.node("p"), rig.node("c", posts=[HELD], timeouts=LONG)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.make_waits_virtual(c)
    assert not c.agent.wait(handle, timeout=1.0)
    assert handle.error is None
    assert c.tables["pulls"] == 1


def test_26_scoped_and_unscoped_wait(rig: ReportRig) -> None:
    """Behaviour 26: waiting for one touches only that one, its event stays for ``poll``; ``drain``
    waits for all there are."""
    p, c = rig.node("p"), rig.node("c", posts=[late(0.1), late(0.4)])
    first, second = (c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, n + 1)) for n in range(2))
    rig.make_waits_virtual(c)
    assert c.agent.wait(first, timeout=5.0)
    assert not second.done
    assert c.tables["pulls"] == 1
    assert [type(e) for e in c.agent.poll() if not isinstance(e, PeerUp)] == [Received]
    rig.begin()
    assert c.agent.drain(5.0)
    assert second.done
    assert rig.now < 0.7
    assert [e.transfer_id for e in c.agent.poll() if isinstance(e, Received)] == ["t1"]


# ---- 38 to 40: pushes and their one seal -----------------------------------------------------


def test_38_a_layer_pushed_twice_counts_once(rig: ReportRig) -> None:
    """Behaviour 38: one layer submitted twice is one layer: the seal does not stand for another
    that nobody pushed; with both layers it does, and the bytes are counted once."""
    p, c = rig.node("p"), rig.node("c")
    for name, layers in (("short", ["layer0", "layer0"]), ("full", ["layer0", "layer0", "layer1"])):
        c.agent.accept(name, at(0, 3))
        for layer in layers:
            p.agent.push(name, at(0, 7), to=c.agent.endpoint, layers=[layer])
        p.agent.seal(name)
        rig.settle(1.0)
    assert "sealed with 128 bytes" in str(c.of(Failed, "short")[0].error)
    assert [(e.transfer_id, e.nbytes) for e in c.of(Received)] == [("full", 256)]
    assert c.content([3]) == p.content([7])


def test_39_write_done_is_said_once(rig: ReportRig) -> None:
    """Behaviour 39: of two writes the first is done: no message; the second: one seal to the
    address that was given, port 7002; sealing again adds none; tables empty, id terminal."""
    rig.at_address("tcp://10.0.0.9:7002")
    c = rig.node("c")
    p = rig.node("p", posts=[None, HELD], timeouts=LONG)
    c.agent.accept("w", at(0, 3))
    for layer in ("layer0", "layer1"):
        handle = p.agent.push("w", at(0, 7), to="10.0.0.9:7002", layers=[layer])
    p.agent.seal("w")
    rig.run(lambda: bool(p.transport.held))
    rig.settle()
    assert not rig.sent(wire.Seal)
    end(p, p.transport.held[0])
    rig.settle()
    assert [c.to for c in rig.carried if isinstance(c.body, wire.Seal)] == ["tcp://10.0.0.9:7002"]
    assert handle.state is TransferState.DONE
    with pytest.raises(InvalidInputError, match="no transfer 'w' is being pushed"):
        p.agent.seal("w")
    rig.settle(5.0)
    assert len(rig.sent(wire.Seal)) == 1
    assert len(p.of(Sent)) == len(c.of(Received)) == 1
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_40_after_a_failure(rig: ReportRig) -> None:
    """Behaviour 40: after the failure another layer is refused without effect, and the consumer's
    late block list is ignored."""
    p, c = rig.node("p", posts=[refused()]), rig.node("c")
    c.agent.accept("w", at(0, 3))
    push = p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=["layer0"])
    rig.run(lambda: push.done and bool(c.of(Failed)))
    posts = p.transport.counters["post"]
    assert p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=["layer1"]) is push
    ref = wire.Ref("w", c.agent.incarnation, 99)
    group = wire.BlocksWire(wire.pack_ids(at(0, 3).ids))
    rig.inject(p, wire.Accept(ref, [group], 5.0), sender=c.agent.incarnation, mid=-1)
    rig.settle(5.0)
    assert p.transport.counters["post"] == posts
    assert len(p.of(Failed)) == 1
    assert p.tables["pushes"] == 0
    assert any(m.ref == ref and not m.began for m in rig.sent(wire.PushFailed, by=p))


# ---- 53 to 59: whom a push speaks to ---------------------------------------------------------


def latent_pair(rig: ReportRig, p: int, d: int, **options: object) -> tuple[Instance, Instance]:
    return (
        Instance(rig, "p", p, latent=True, **options),
        Instance(rig, "d", d, latent=True),
    )


def test_55_fan_out_is_complete_together(rig: ReportRig) -> None:
    """Behaviour 55: a latent cache goes to ranks 2 and 3; the transfer is received only after both
    writes ended, and each rank is told once."""
    prefill, decode = latent_pair(rig, 2, 4, posts=[HELD, HELD], timeouts=LONG)
    writer, two, three = prefill.nodes[1], *decode.nodes[2:]
    decode.scheduler.accept("w", at(0, 3), deadline=50.0)
    decode.hand_down()
    push = writer.agent.push("w", at(0, 7), to=[two.agent.endpoint, three.agent.endpoint])
    writer.agent.seal("w")
    first = prefill.nodes[0]  # writes the other two ranks
    first.transport.plan = FaultPlan()
    first.agent.push("w", at(0, 7), to=[n.agent.endpoint for n in decode.nodes[:2]])
    first.agent.seal("w")
    rig.run(lambda: len(writer.transport.held) == 2 and bool(first.of(Sent)))
    for n, attempt in enumerate(list(writer.transport.held)):
        assert not push.done
        assert not decode.of(Received)
        end(writer, attempt)
        rig.settle()
        assert len(rig.sent(wire.Seal, by=writer)) == n + 1
    (received,) = decode.of(Received)
    assert received.nbytes == sum(e.nbytes for node in decode.nodes for e in node.of(Received))
    assert push.state is TransferState.DONE


def test_56_one_of_two_targets_is_missing(rig: ReportRig) -> None:
    """Behaviour 56: fan-out to two ranks of which one does not answer yet: the handshake is
    repeated and nothing is written; when it is there, both are written."""
    prefill, decode = latent_pair(rig, 1, 2)
    (p,) = prefill.nodes
    here, missing = decode.nodes
    for node in decode.nodes:
        node.agent.accept("w", at(0, 3))
    rig.settle(0.1)
    rig.nodes.remove(missing)
    push = p.agent.push("w", at(0, 7), to=[here.agent.endpoint, missing.agent.endpoint])
    p.agent.seal("w")
    rig.settle(1.0)
    assert p.of(PeerUp)
    assert len(rig.sent(wire.Hello, by=p)) > 2
    assert p.transport.counters.get("post", 0) == 0
    rig.nodes.append(missing)
    rig.run(lambda: push.done)
    assert push.state is TransferState.DONE
    assert here.content([3]) == missing.content([3]) == p.content([7])


def test_56_nothing_to_write_does_not_wait(rig: ReportRig) -> None:
    """Behaviour 56: a rank with nothing to write (latent, P4 to D2) seals at once; with a time-out
    of 30 s it is finished in far less than 5 s, and the consumer is complete."""
    timeouts = attrs.evolve(TIMEOUTS, transfer=30.0)
    prefill, decode = latent_pair(rig, 4, 2, timeouts=timeouts)
    decode.scheduler.accept("w", at(0, 3))
    decode.hand_down()
    rig.begin()
    for rank, node in enumerate(prefill.nodes):
        node.agent.push("w", at(0, 7), to=decode.nodes[rank // 2].agent.endpoint)
        node.agent.seal("w")
    rig.run(lambda: all(node.of(Sent) for node in prefill.nodes) and bool(decode.of(Received)))
    assert rig.now < 1.0
    writers = [node.transport.counters.get("post", 0) for node in prefill.nodes]
    assert sorted(writers) == [0, 0, 1, 1]
    assert {node.content([3]) for node in decode.nodes} <= {n.content([7]) for n in prefill.nodes}


def test_57_past_its_deadline(rig: ReportRig) -> None:
    """Behaviour 57: a push whose data never comes ends by its deadline: freed here, "failed" to the
    four ranks (2 DP x 2 TP) that had granted, once each; a late block list is ignored."""
    prefill = Instance(rig, "p", 1, latent=True)
    pods = [Instance(rig, f"d{dp}_", 2, latent=True, dp=(2, dp)) for dp in range(2)]
    (p,) = prefill.nodes
    consumers = [node for pod in pods for node in pod.nodes]
    for node in consumers:
        node.agent.accept("w", at(0, 3), deadline=20.0)
    push = p.agent.push("w", at(0, 7), to=[n.agent.endpoint for n in consumers], ready=Gate())
    rig.run(lambda: push.done)
    assert push.error is not None
    assert push.error.kind is ErrorKind.TIMEOUT
    assert push.drained
    rig.run(lambda: all(node.of(Failed) for node in consumers))
    told = {(c.mid, c.to) for c in rig.carried if isinstance(c.body, wire.PushFailed)}
    assert sorted(to for _, to in told) == sorted(node.agent.address for node in consumers)
    assert p.tables["pushes"] == 0
    ref = wire.Ref("w", consumers[0].agent.incarnation, 1)
    group = wire.BlocksWire(wire.pack_ids(at(0, 3).ids))
    rig.inject(p, wire.Accept(ref, [group], 5.0), sender=consumers[0].agent.incarnation, mid=-1)
    rig.settle(2.0)
    assert p.transport.counters.get("post", 0) == 0
    assert len(p.of(Failed)) == 1


@pytest.mark.parametrize(("peers", "released"), [(2, {0, 1}), (8, set(range(8)))])
def test_58_early_finish_releases_each_rank_once(
    rig: ReportRig, peers: int, released: set[int]
) -> None:
    """Behaviour 58: decode of TP 4 gives a request up before it read: each producer rank is
    released once, 0 and 1 of 2, 0 to 7 of 8."""
    prefill, decode = Instance(rig, "p", peers), Instance(rig, "d", 4)
    offer = prefill.scheduler.hold("t", at(0, 5))
    prefill.hand_down()
    decode.scheduler.decline(offer)
    decode.nodes[0].agent.execute(decode.scheduler.take_orders())
    rig.run(lambda: bool(prefill.of(Declined)))
    rig.settle()
    told = [c.to for c in rig.carried if isinstance(c.body, wire.Decline)]
    assert sorted(told) == sorted(prefill.nodes[rank].agent.address for rank in released)
    assert all(len(node.of(Declined)) == 1 for node in prefill.nodes)


def test_59_held_until_the_workers_ack(rig: ReportRig) -> None:
    """Behaviour 59: a push past its deadline stays held until the worker says that nothing of it
    is under way any more; then it is freed."""
    prefill = Instance(rig, "p", 1, latent=True, posts=[late(7.0)])
    (p,) = prefill.nodes
    c = Instance(rig, "d", 1, latent=True).nodes[0]
    c.agent.accept("w", at(0, 3), deadline=20.0)
    prefill.scheduler.follow_push("w")
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(prefill.of(Failed)))
    assert not prefill.of(Failed)[0].drained
    assert len(prefill.scheduler) == 1
    assert not prefill.of(Drained)
    rig.run(lambda: bool(prefill.of(Drained)))
    assert prefill.of(Drained)[0].role is Role.PRODUCER
    assert len(prefill.scheduler) == 0


# ---- 61: who prefill is ----------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rank"), [(16, 11), (8, 4)])
def test_61_own_data_parallel_rank_verbatim(rig: ReportRig, size: int, rank: int) -> None:
    """Behaviour 61: prefill's own DP rank travels in its offer as it is, 11 of 16 and 4 of 8; and
    nothing that has no offer says anything."""
    prefill = Instance(rig, "p", 1, dp=(size, rank))
    offer = Offer.from_json(prefill.scheduler.hold("t", at(0, 5)).to_json())
    assert (offer.sizes["dp_size"], offer.sizes["dp_rank"]) == (size, rank)
    assert offer.endpoints == (prefill.nodes[0].agent.endpoint,)
    assert not rig.carried
