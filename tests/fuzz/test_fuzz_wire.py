"""Nothing that arrives crashes or confuses us, and with keys on it frees and learns nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from fuzz_rig import Victim, layout, rounds

from kvxfer.core import wire
from kvxfer.core.layout import Blocks
from kvxfer.core.wire import unpack_ids
from kvxfer.errors import WireError
from kvxfer.testing.clock import FakeClock
from kvxfer.testing.hostile_messages import HostileMessages


@pytest.mark.parametrize("seed", range(4))
def test_the_decoder(seed: int) -> None:
    """Whatever the frame: an envelope, or ``WireError``; and what was decoded encodes again."""
    hostile = HostileMessages(seed, keeper="victim-1")
    decoded = 0
    for _ in range(rounds(5000)):
        try:
            envelope = wire.decode(hostile.next())
        except WireError:
            continue
        decoded += 1
        assert wire.encode(envelope.sender, envelope.body, envelope.mid, version=wire.WIRE_MAX)
    assert decoded > rounds(5000) // 5  # else the mutations never reach what lies behind


@pytest.mark.parametrize("seed", range(3))
def test_raw_bytes(seed: int) -> None:
    """Random bytes, with and without our magic, of every small length."""
    rng = random.Random(seed)
    for i in range(rounds(5000)):
        frame = rng.randbytes(i % 64)
        for data in (frame, b"KVX\x01" + frame, b"KVX" + frame):
            with contextlib.suppress(WireError):  # nothing else
                wire.decode(data)
        with contextlib.suppress(WireError):
            unpack_ids(frame)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "no keys"])
@pytest.mark.parametrize("seed", range(3))
def test_an_agent(victim: Callable[..., Victim], seed: int, keys: bool) -> None:
    """Hostile messages, from few or many connections, in their own name or others': no exception,
    tables stay bounded, what is held stays held with keys on, and what is accepted is not done."""
    clock = FakeClock(100.0)
    target = victim(authenticated=keys, clock=clock)
    offers = [target.agent.hold(f"t{i}", Blocks.at(0, [i])) for i in range(4)]
    accepted = target.agent.accept("w", Blocks.at(0, [9, 10]), deadline=1e6)
    hostile = HostileMessages(
        seed,
        keeper="victim-1",
        others=("friend-1", "friend-2", "victim-1"),
        transfers=("t0", "t1", "t2", "t3", "w"),
    )
    rng = random.Random(seed)
    events: list[Any] = []
    for _ in range(rounds(1500)):
        events += target.feed(hostile.next(), route=f"mallory/{rng.randrange(5)}")
        clock.advance(0.001)
    snapshot = target.agent.snapshot()
    assert snapshot.counters["messages.rejected"] > 100
    assert snapshot.accepts == 1
    assert not accepted.done
    if keys:
        assert snapshot.holds == len(offers)
        assert not [e for e in events if getattr(e, "transfer_id", "") in ("t0", "t1", "t2", "t3")]
        assert snapshot.counters["messages.refused.no_ticket"] > 0
    assert len(snapshot.peers) <= 5
    assert target.agent.health().ready, target.agent.health()


def test_nothing_is_learned(victim: Callable[..., Victim]) -> None:
    """With keys on, and without the ticket of an offer, no answer tells whether a transfer exists:
    nothing that is sent back is a grant, a refusal that names it, or an accept of it."""
    clock = FakeClock(100.0)
    target = victim(clock=clock)
    target.agent.hold("t0", Blocks.at(0, [1]))
    hostile = HostileMessages(7, keeper="victim-1", others=("friend-1", "victim-1"))
    told: list[wire.Message] = []
    for _ in range(rounds(2000)):
        target.feed(hostile.next())
        told += [wire.decode(frame).body for frame in target.channel.sent]
        clock.advance(0.001)
    for body in told:
        assert not isinstance(body, (wire.Grant, wire.Accept))


_PER_PEER = 100


def test_floods_of_incarnations(
    victim: Callable[..., Victim], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key that introduces thousands of incarnations fills neither the table of peers nor pushes
    out what others introduced."""
    clock = FakeClock(100.0)
    target = victim(clock=clock)
    hello = target.agent._local.message(answer=False, session=1)
    import msgspec

    friend = msgspec.structs.replace(hello, address="tcp://127.0.0.1:5#friend", transports=[])
    target.feed(wire.encode("friend-1", friend), route="friend/1")
    monkeypatch.setattr("kvxfer.agent.trust._PER_PEER", _PER_PEER)
    for i in range(rounds(1000)):
        mine = msgspec.structs.replace(
            hello, address=f"tcp://127.0.0.1:{i % 60000 + 1}#mallory", transports=[]
        )
        target.feed(wire.encode(f"mallory-{i}", mine), route=f"mallory/{i % 3}")
        clock.advance(0.001)
    trust = target.agent._ctx.trust
    assert len(trust._owner) <= _PER_PEER + 1
    assert trust._owner["friend-1"] == "friend"
    stolen = wire.encode("friend-1", wire.Bye())
    target.feed(stolen)
    assert target.agent.snapshot().counters["messages.refused.impostor"] >= 1
    assert layout().num_blocks  # the rig's layout is what hellos are matched with
