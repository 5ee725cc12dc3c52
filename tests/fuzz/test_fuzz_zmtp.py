"""Raw bytes on the real socket, before and after the handshake, with keys and without."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz_rig import rounds

from kvxfer.core.control import ControlConfig, Security, ZmqChannel
from kvxfer.core.control_curve import generate_key_pair
from kvxfer.core.keyfiles import allow, write_key_pair

PATIENCE = 30.0


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
NULL = greeting(b"NULL")
CURVE = greeting(b"CURVE")
HELLO = b"\x05HELLO\x01\x00" + bytes(72) + bytes(32) + bytes(8) + bytes(80)


def command(body: bytes) -> bytes:
    if len(body) < 256:
        return b"\x04" + bytes([len(body)]) + body
    return b"\x06" + len(body).to_bytes(8, "big") + body


def mutated(rng: random.Random) -> bytes:
    """A conversation's beginning, with some bytes changed, cut, doubled or put between."""
    parts = [rng.choice([NULL, CURVE, greeting(b"PLAIN"), greeting(b"X")])]
    for _ in range(rng.randrange(4)):
        parts.append(
            rng.choice(
                [
                    command(READY),
                    command(HELLO),
                    command(b"\x05ERROR\x03no!"),
                    command(b"\x04PING\x00\x01"),
                    command(b"\x08INITIATE" + rng.randbytes(257)),
                    command(b"\x07MESSAGE" + rng.randbytes(60)),
                    command(rng.randbytes(rng.randrange(300))),
                    b"\x00\x05hello",
                    b"\x01\x01a" * rng.randrange(50),
                    b"\x02"
                    + rng.choice([2**20, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "big"),
                    b"\x06" + (2**63).to_bytes(8, "big"),
                    rng.randbytes(rng.randrange(100)),
                ]
            )
        )
    data = bytearray(b"".join(parts))
    for _ in range(rng.randrange(6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.fixture
def security(tmp_path: Path) -> Callable[[str], Security]:
    def build(name: str) -> Security:
        secret = tmp_path / name
        if not secret.exists():
            _, public = write_key_pair(secret, generate_key_pair(name))
            allow(tmp_path / "allowed", str(public))
        return Security(secret_key_file=str(secret), allowed_keys=str(tmp_path / "allowed"))

    build("friend"), build("victim")
    return build


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "no keys"])
@pytest.mark.parametrize("seed", range(2))
def test_bytes_on_the_socket(security: Callable[[str], Security], seed: int, keys: bool) -> None:
    """Every connection of garbage ends without harm: the process lives, none of them becomes a
    route with keys on, and a friend is served in between and afterwards."""
    rng = random.Random(seed)
    config: dict[str, Any] = {"handshake_timeout": 0.2}
    quick = {"reconnect_min": 0.01, "reconnect_max": 0.05}
    victim = ZmqChannel(ControlConfig(security=security("victim") if keys else None, **config))
    friend = ZmqChannel(ControlConfig(security=security("friend") if keys else None, **quick))
    port = victim.bound.port
    open_: list[socket.socket] = []
    served = 0
    try:
        route = friend.dial(victim.address)
        for i in range(rounds(300)):
            raw = socket.create_connection(("127.0.0.1", port), 10)
            raw.setblocking(False)
            open_.append(raw)
            data = mutated(rng)
            cut = rng.randrange(len(data) + 1)
            for piece in (data[:cut], data[cut:]):
                with contextlib.suppress(OSError):
                    raw.send(piece)
            if len(open_) > 30:
                open_.pop(rng.randrange(len(open_))).close()
            if i % 20 == 0:
                friend.send(route, b"friend %d" % i)
            friend.wait(0.0)
            friend.receive()
            victim.wait(0.001)
            for message in victim.receive():
                served += message.data.startswith(b"friend ")
                if keys:
                    assert message.peer == "friend"
        deadline = time.monotonic() + PATIENCE
        before = served
        while served == before:
            assert time.monotonic() < deadline, victim.counters
            friend.send(route, b"friend at last")
            friend.wait(0.01)
            friend.receive()
            victim.wait(0.01)
            served += sum(m.data.startswith(b"friend ") for m in victim.receive())
        for raw in open_:
            raw.close()
        open_.clear()
        while victim.counters["inbound_accepted"] - victim.counters["inbound_closed"] > 1:
            assert time.monotonic() < deadline, victim.counters
            victim.wait(0.01)
            victim.receive()
            friend.receive()
        assert victim.routes["inbound"] == 1
    finally:
        for raw in open_:
            raw.close()
        friend.close()
        victim.close()
