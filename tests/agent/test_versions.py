"""A rolling upgrade: old and new speak the highest version that both have, and say so if there is
none. ``wire_v1`` is the older release's own encoder and decoder, ``v1_frames`` what it once sent.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import wire_v1
from agent_rig import Node, Rig, at
from interception import intercept
from v1_frames import FRAMES, SENDER

from kvxfer.agent import AgentConfig
from kvxfer.core import wire
from kvxfer.core.channel import Inbound
from kvxfer.core.events import Declined, Failed, PeerDown, Received, Sent
from kvxfer.errors import ConfigError, ErrorKind, WireError

REF = wire.Ref("t-1", "00112233445566aa", 7)


class Traffic:
    """What an old agent sends and gets, checked by the old release's decoder."""

    def __init__(self, node: Node) -> None:
        self.sent: list[Any] = []
        self.got: list[Any] = []
        channel = node.agent._channel
        send, receive = channel.send, channel.receive

        def sending(route: Any, data: bytes) -> bool:
            self.sent.append(wire_v1.decode(data))
            return send(route, data)

        def receiving(budget: int = 256) -> list[Inbound]:
            inbound = receive(budget)
            self.got.extend(wire_v1.decode(message.data) for message in inbound)
            return inbound

        channel.send, channel.receive = sending, receiving  # type: ignore[method-assign]

    def got_types(self) -> set[str]:
        return {type(envelope.body).__name__ for envelope in self.got}


def old_node(rig: Rig, name: str, **options: Any) -> tuple[Node, Traffic]:
    """An agent limited to version 1 by its configuration."""
    node = rig.node(name, wire_versions=(1, 1), **options)
    return node, Traffic(node)


def link(node: Node, peer: Node) -> Any:
    return node.agent._engine.links.of(peer.agent.incarnation)


# ---- frames ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_recorded_frames_of_version_1_are_understood(name: str) -> None:
    """Every message the older release sent still means the same, whatever was added since."""
    envelope = wire.decode(FRAMES[name])
    old = wire_v1.decode(FRAMES[name])
    assert envelope.sender == old.sender == SENDER
    assert envelope.mid == old.mid
    assert type(envelope.body).__name__ == type(old.body).__name__
    for field in type(old.body).__struct_fields__:
        ours, theirs = getattr(envelope.body, field), getattr(old.body, field)
        assert msgspec.to_builtins(ours) == msgspec.to_builtins(theirs), field


def test_values_of_a_recorded_frame() -> None:
    """Not only equal to the old decoder: equal to what was meant when they were recorded."""
    release = wire.decode(FRAMES["release_failed"]).body
    assert isinstance(release, wire.Release)
    assert (release.ref, release.ok, release.kind, release.final) == (REF, False, "", False)
    accept = wire.decode(FRAMES["accept"]).body
    assert isinstance(accept, wire.Accept)
    assert wire.unpack_ids(accept.groups[0].ids).tolist() == [3, 1, 4]
    assert wire.decode(FRAMES["bye"]).body == wire.Bye()


@pytest.mark.parametrize("name", sorted(set(FRAMES) - {"hello"}))
def test_what_goes_to_version_1_is_byte_for_byte_the_same(name: str) -> None:
    """An old peer gets what it always got."""
    envelope = wire.decode(FRAMES[name])
    again = wire.encode(envelope.sender, envelope.body, envelope.mid, version=1)
    assert again == FRAMES[name]


def test_what_version_2_added_is_skipped_by_version_1() -> None:
    """A failed release with its reason reaches an old producer as the release it knows."""
    body = wire.Release(REF, {"tp_size": 1}, False, "timeout", "late", True, 9)
    old = wire_v1.decode(wire.encode("me", body, 3, version=1))
    ref = wire_v1.Ref(REF.transfer, REF.keeper, REF.epoch)
    assert old.body == wire_v1.Release(ref, {"tp_size": 1}, False)


def test_newer_types_are_never_sent_as_older() -> None:
    """``Sealed`` came with version 2: neither encoded nor accepted in version 1."""
    sealed = wire.Sealed(REF, True)
    with pytest.raises(WireError, match="Sealed needs wire version 2"):
        wire.encode("me", sealed, version=1)
    frame = bytearray(wire.encode("me", sealed))
    frame[3] = 1
    with pytest.raises(WireError, match="Sealed came in wire version 1"):
        wire.decode(bytes(frame))


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        ((1, 2), (1, 1), 1),
        ((1, 2), (1, 2), 2),
        ((1, 2), (2, 9), 2),
        ((1, 1), (2, 2), None),
        ((1, 2), (3, 9), None),
        ((1, 2), (9, 1), None),
    ],
)
def test_common_version(ours: tuple[int, int], theirs: tuple[int, int], common: int | None) -> None:
    """The highest version within both ranges, whoever asks."""
    assert wire.common_version(ours, theirs) == common
    assert wire.common_version(theirs, ours) == common


def test_hellos_travel_in_version_1_for_ever() -> None:
    """So that any two releases can tell each other why they do not get along."""
    for body in (wire.HelloRefused((3, 9), "no"), wire.Who()):
        frame = wire.encode("me", body, version=2)
        assert frame[3] == 1
        assert wire.decode(frame, (2, 2)).body == body
    with pytest.raises(WireError, match="wire version 1 is not within 2 to 2"):
        wire.decode(FRAMES["ask"], (2, 2))


# ---- agents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("producer_is_old", [True, False])
def test_old_and_new_read_and_write(rig: Rig, producer_is_old: bool) -> None:
    """One side was upgraded: every frame to and from the old one is of the old release's kind."""
    if producer_is_old:
        p, traffic = old_node(rig, "p")
        c = rig.node("c")
    else:
        p = rig.node("p")
        c, traffic = old_node(rig, "c")
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    c.agent.decline(p.agent.hold("u", at(0, 6)))
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w", b"token")
    rig.run(lambda: bool(p.of(Sent, "t") and p.of(Declined, "u") and p.of(Sent, "w")))
    assert c.content([1, 3]) == p.content([5, 7])
    assert c.of(Received, "w")[0].payload == b"token"
    assert link(p, c).version == link(c, p).version == 1
    handle = c.agent.accept("v", at(0, 4), deadline=1.0)
    p.agent.push("v", at(0, 7), to=c.agent.endpoint)
    rig.run(lambda: handle.done and bool(p.of(Failed, "v")))
    for node in (p, c):
        assert not node.counters.get("messages.rejected")
    c.agent.close(0.0)
    rig.nodes.remove(c)
    rig.run(lambda: bool(p.of(PeerDown)))
    assert {"Confirm", "Hello"} <= traffic.got_types()
    rig.pass_time(9)
    assert not any(p.tables.values())


def test_two_new_ones_use_the_new_version(rig: Rig) -> None:
    """What both have is used: frames after the hello are of version 2."""
    p, c = rig.node("p"), rig.node("c")
    versions: set[tuple[str, int]] = set()
    send = c.agent._channel.send

    def record(route: Any, data: bytes) -> bool:
        versions.add((type(wire.decode(data).body).__name__, data[3]))
        return send(route, data)

    c.agent._channel.send = record  # type: ignore[method-assign]
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(p.of(Sent)))
    assert {("Hello", 1), ("Open", 2), ("Release", 2)} <= versions
    assert link(p, c).version == 2


def test_old_producer_is_not_told_that_a_vain_seal_arrived(rig: Rig) -> None:
    """Version 1 takes a confirmation for success: after a failure it gets none, but a cancel."""
    p, _ = old_node(rig, "p")
    c = rig.node("c")
    handle = c.agent.accept("w", at(0, 3))
    seal = intercept(p, wire.Seal)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.pass_time(0.5)
    cancel = intercept(c, wire.Cancel)
    handle.abort()
    rig.run(lambda: handle.drained)
    cancel.active = False
    seal.deliver()
    rig.run(lambda: bool(p.of(Sent) or p.of(Failed)))
    assert p.of(Failed)
    rig.pass_time(20)
    assert not p.of(Sent)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_old_consumer_confirms_and_that_is_all(rig: Rig) -> None:
    """An old consumer only confirms a seal: to the new producer that is success, as it was."""
    p = rig.node("p")
    c, traffic = old_node(rig, "c")
    c.agent.accept("w", at(0, 3))
    p.agent.push("w", at(0, 7), to=c.agent.endpoint)
    p.agent.seal("w")
    rig.run(lambda: bool(p.of(Sent)))
    assert c.of(Received)
    assert "Seal" in traffic.got_types()


def test_old_reader_that_failed(rig: Rig) -> None:
    """It gives no reason, so the kind is UNKNOWN; the hold is not Sent all the same."""
    import attrs

    from kvxfer.core.layout import Blocks

    p = rig.node("p", retry_window=0.5)
    c, traffic = old_node(rig, "c")
    broken = attrs.evolve(p.agent.hold("t", at(0, 5)), groups=(Blocks.at(0, [99]),))
    c.agent.pull(broken, at(0, 1))
    # The old release sends no reason: take out what this one adds.
    send = c.agent._channel.send

    def strip(route: Any, data: bytes) -> bool:
        envelope = wire.decode(data)
        if isinstance(envelope.body, wire.Release):
            old = wire_v1.decode(data)
            data = wire_v1.encode(old.sender, old.body, old.mid)
        return send(route, data)

    c.agent._channel.send = strip  # type: ignore[method-assign]
    rig.run(lambda: bool(p.of(Failed)))
    assert p.of(Failed)[0].kind is ErrorKind.UNKNOWN
    assert "did not say why" in str(p.of(Failed)[0].error)
    assert traffic.got


def test_ranges_that_do_not_meet_are_refused_by_both_numbers(rig: Rig) -> None:
    """Promise 9: the one that notices says both ranges, and the other side learns them."""
    p, c = rig.node("p", wire_versions=(2, 2)), rig.node("c", wire_versions=(1, 1))
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    took = rig.run(lambda: handle.done)
    assert took < 1.0
    assert c.of(Failed)[0].kind is ErrorKind.HANDSHAKE
    text = str(c.of(Failed)[0].error)
    assert "2 to 2" in text
    assert "1 to 1" in text


def test_much_newer_peer_is_told_why(rig: Rig) -> None:
    """A hello of versions 3 to 9, with fields we do not know, gets an answer that it can read."""
    p = rig.node("p")
    own = p.agent._local.message(answer=False, session=1)
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(own))
    hello.update(versions=[3, 9], colour="blue")
    frame = b"KVX\x01" + msgspec.msgpack.encode({"sender": "newer", "mid": 0, "body": hello})
    sent: list[bytes] = []
    p.agent._channel.send = lambda route, data: bool(sent.append(data)) or True  # type: ignore[method-assign]
    p.agent._channel.inbox.append(Inbound(("tcp://10.9.9.9:1", 0, 0, "x"), frame))  # type: ignore[attr-defined]
    rig.step()
    refusals = [b for f in sent if isinstance(b := wire.decode(f).body, wire.HelloRefused)]
    assert refusals[0].versions == (1, 2)
    assert "3 to 9" in refusals[0].message
    assert "1 to 2" in refusals[0].message


def test_unknown_types_and_fields_of_a_newer_revision(rig: Rig) -> None:
    """Unknown fields are skipped, unknown types counted; the transfer goes on."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.connect([p.agent.endpoint])
    rig.pass_time(0.3)
    route = link(c, p).mailbox.route
    body = {"type": "sparkle", "n": 3}
    unknown = b"KVX\x02" + msgspec.msgpack.encode(
        {"sender": c.agent.incarnation, "mid": 9001, "body": body}
    )
    c.agent._channel.send(route, unknown)
    send = c.agent._channel.send

    def embellish(route: Any, data: bytes) -> bool:
        envelope = msgspec.msgpack.decode(data[4:])
        envelope["body"]["mood"] = ["new", 1]
        envelope["hops"] = 3
        return send(route, data[:4] + msgspec.msgpack.encode(envelope))

    c.agent._channel.send = embellish  # type: ignore[method-assign]
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(p.of(Sent)))
    assert p.counters["messages.unknown_type"] == 1
    assert p.counters["messages.rejected"] == 1


def test_limited_agent_does_not_listen_to_newer_frames(rig: Rig) -> None:
    """What an agent limited to version 1 gets in version 2 is rejected, as by an old release."""
    p, _ = rig.node("p", wire_versions=(1, 1)), rig.node("c")
    frame = wire.encode("somebody", wire.Cancel(REF, "aborted", ""), 5)
    p.agent._channel.inbox.append(Inbound(("tcp://10.9.9.9:1", 0, 0, "x"), frame))  # type: ignore[attr-defined]
    rig.step()
    assert p.counters["messages.rejected"] == 1


def test_upgrade_and_rollback_of_one_side(rig: Rig) -> None:
    """One address, three lives: old, new, old again; each is spoken to in its own version."""
    c = rig.node("c")
    channel = rig.network.channel
    address = None
    for n, versions in enumerate([(1, 1), (1, 2), (1, 1)]):
        if address is not None:
            rig.network.channel = lambda _=None, a=address: channel(a)  # type: ignore[method-assign]
        p = rig.node(f"p{n}", wire_versions=versions)
        rig.network.channel = channel  # type: ignore[method-assign]
        address = p.agent.address
        if versions == (1, 1):
            Traffic(p)
        c.agent.pull(p.agent.hold(f"t{n}", at(0, 5)), at(0, 1))
        rig.run(lambda p=p: bool(p.of(Sent)))
        assert link(c, p).version == versions[1]
        assert c.content([1]) == p.content([5])
        rig.pass_time(0.5)
        rig.nodes.remove(p)
        p.agent.close(0.0)
    assert not c.counters.get("messages.rejected")


@pytest.mark.parametrize("versions", [(0, 1), (1, 3), (2, 1), (1,), [1, 2], (1, True), "12"])
def test_versions_outside_what_this_release_speaks(versions: Any) -> None:
    """A bad range is refused when it is configured, with the value."""
    with pytest.raises(ConfigError, match="wire_versions must be"):
        AgentConfig(wire_versions=versions)
