"""Promise 9: nothing from outside can crash or confuse an agent."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
from agent_rig import Rig, at, layout

from kvxfer.agent.hello import PeerHello
from kvxfer.core import wire
from kvxfer.core.channel import Inbound
from kvxfer.core.events import Received, Sent
from kvxfer.core.layout import StateLayout, StatePart
from kvxfer.errors import WireError

REF = wire.Ref("t", "k", 1)
HOSTILE = ("tcp://10.9.9.9:1", 0, "nowhere")


def test_unknown_and_malformed_messages_are_counted(rig: Rig) -> None:
    """Report O28: unknown type, random bytes, an empty frame, then an ACK: 3 rejected."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    rig.pass_time(0.1)
    unknown = b"KVX\x01" + msgspec.msgpack.encode(
        {"sender": "x", "mid": 1, "body": {"type": "FOO"}}
    )
    channel = p.agent._channel
    for frame in (unknown, b"\x01\x02\x03", b""):
        channel.inbox.append(Inbound(HOSTILE, frame))  # type: ignore[attr-defined]
    c.agent.pull(offer, at(0, 1))
    rig.run(lambda: bool(p.of(Sent)))
    assert p.counters["messages.rejected"] == 3


@pytest.mark.parametrize(
    "body",
    [
        wire.Grant(1, [wire.Granted(REF, float("nan"))], []),
        wire.Grant(1, [wire.Granted(REF, float("inf"))], []),
        wire.Grant(1, [wire.Granted(REF, -1.0)], []),
        wire.Open(2**63, []),
        wire.Open(-1, []),
        wire.Seal(REF, {}, 0, b"x" * (wire.MAX_PAYLOAD_NBYTES + 1)),
        wire.Ask("x" * 513),
        wire.Ask(""),
    ],
)
def test_values_out_of_range_are_refused(body: wire.Message) -> None:
    """Every field has a bound, and the error says which one was broken."""
    with pytest.raises(WireError, match="malformed message"):
        wire.decode(wire.encode("me", body))


def test_every_message_survives_the_wire() -> None:
    """Encoding and decoding are inverse for each type."""
    ids = wire.BlocksWire(b"\x04", None)
    ranks = {"tp_size": 1}
    bodies: list[wire.Message] = [
        wire.Hello((1, 1), False, 1, 1, "n", "", ranks, "", [], []),
        wire.HelloRefused((1, 1), "no"),
        wire.Who(),
        wire.Open(1, [REF]),
        wire.Grant(1, [wire.Granted(REF, 1.0)], [wire.Refused(REF, "stale", "")]),
        wire.Release(REF, ranks, True),
        wire.Decline(REF, ranks),
        wire.Gone(REF, "expired", ""),
        wire.Ask("t"),
        wire.Accept(REF, [ids], 1.0),
        wire.Seal(REF, ranks, 5, b"p"),
        wire.Sealed(REF, False, "timeout", "late"),
        wire.PushFailed(REF, "timeout", "", True, True),
        wire.Cancel(REF, "aborted", ""),
        wire.Beat(True),
        wire.Bye([1, 2], [b"frame"]),
        wire.Confirm([1, 2]),
    ]
    assert {type(b) for b in bodies} == set(wire.Message.__args__)  # type: ignore[attr-defined]
    for body in bodies:
        assert wire.decode(wire.encode("me", body, 7)) == wire.Envelope("me", 7, body)


def test_wire_version_is_checked() -> None:
    """Promise 9: messages are versioned; another version is refused by number."""
    frame = bytearray(wire.encode("me", wire.Who()))
    frame[3] = 9
    with pytest.raises(WireError, match="version 9"):
        wire.decode(bytes(frame))


def test_mutated_messages_never_stop_the_agent(rig: Rig) -> None:
    """Four thousand damaged frames later the agent still serves, and nothing was freed."""
    rng = random.Random(5)
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.pull(p.agent.hold("warm", at(0, 6)), at(0, 2))
    rig.run(lambda: bool(p.of(Sent, "warm")))
    ref = wire.Ref("t", p.agent.incarnation, offer.epoch)
    seeds = [
        wire.encode(c.agent.incarnation, body, mid)
        for mid, body in enumerate(
            [
                wire.Open(1, [ref]),
                wire.Accept(ref, [wire.BlocksWire(wire.pack_ids(at(0, 1).ids))], 1.0),
                wire.Cancel(ref, "aborted", ""),
                wire.Gone(ref, "expired", ""),
                wire.Seal(ref, {"tp_size": 1}, 1, b""),
                wire.PushFailed(ref, "timeout", "", True, True),
                p.agent._local.message(answer=True, session=1),
                wire.Confirm([1, 2, 3]),
            ],
            start=1000,
        )
    ]
    channel = p.agent._channel
    for _ in range(4_000):
        frame = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        channel.inbox.append(Inbound(HOSTILE, bytes(frame[: rng.randint(0, len(frame))])))  # type: ignore[attr-defined]
        if len(channel.inbox) > 500:  # type: ignore[attr-defined]
            rig.step()
    rig.pass_time(0.2)
    handle = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: handle.done)
    assert c.of(Received, "t")
    assert p.counters["messages.rejected"] > 2000


@pytest.mark.parametrize(
    ("layers", "parts", "text"),
    [
        (2049, 0, "2049 layers, over 2048"),
        (129, 64, "8256 layouts, those of all parts of its states included, over 8192"),
    ],
)
def test_hellos_of_more_layers_than_can_be_matched(layers: int, parts: int, text: str) -> None:
    """Refused before a layout is made of each: that takes 40 us, and a hello of 8 MiB had room for
    a second of it and more."""
    cache: dict[str, Any] = layout(4).to_wire()
    if parts:
        pieces = [StatePart(name=f"{i}", slot_stride=1, unit_nbytes=1, dtype="uint8")
                  for i in range(parts)]  # fmt: skip
        cache = StateLayout(num_slots=1, parts=pieces).to_wire()
    named = [wire.LayerWire(f"layer{i}", 0, 0, cache) for i in range(layers)]
    hello = wire.Hello((1, 1), False, 1, 1, "n", "", {"tp_size": 1}, "", [], named)
    began = time.process_time()
    with pytest.raises(WireError, match=text):
        PeerHello.from_wire("peer", hello)
    assert time.process_time() - began < 0.05


def test_strangers_are_asked_who_they_are(rig: Rig) -> None:
    """A message from somebody whose hello is unknown is neither obeyed nor confirmed."""
    p = rig.node("p")
    frame = wire.encode("stranger", wire.Cancel(REF, "aborted", ""), 5)
    p.agent._channel.inbox.append(Inbound(HOSTILE, frame))  # type: ignore[attr-defined]
    sent: list[bytes] = []
    p.agent._channel.send = lambda route, data: bool(sent.append(data)) or True  # type: ignore[method-assign]
    rig.step()
    assert [type(wire.decode(f).body) for f in sent] == [wire.Who]
    assert p.counters["messages.from_strangers"] == 1
