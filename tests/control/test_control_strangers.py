"""What arrives from outside and is none of ours: counted, dropped, survived."""

from __future__ import annotations

import errno
import random
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import zmq
from control_rig import pump

from kvxfer.core.control import ZmqChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[..., ZmqChannel]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)


@pytest.fixture
def foreign() -> Iterator[Callable[[ZmqChannel, bytes | None], zmq.Socket[bytes]]]:
    """Makes plain DEALER sockets that are connected to a channel."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.BLOCKY, 0)
    sockets = []

    def connect(channel: ZmqChannel, identity: bytes | None = None) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        sockets.append(dealer)
        if identity is not None:
            dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.connect(channel.address)
        return dealer

    yield connect
    for dealer in sockets:
        dealer.close(0)
    context.term()


def still_serves(channel: ZmqChannel, make: Make) -> None:
    """A peer of ours is served as if nothing had happened."""
    peer = make()
    peer.send(peer.dial(channel.address), b"one of ours")
    pump(channel, lambda got: b"one of ours" in [m.data for m in got])


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 1000,
        random.Random(7).randbytes(5000),
        GREETING[:20],
        GREETING + random.Random(8).randbytes(500),
        GREETING + b"\x06" + b"\xff" * 8,
        GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04ROUT",
    ],
    ids=["http", "zeros", "random", "half", "bad command", "endless command", "wrong socket type"],
)
def test_garbage(make: Make, noise: bytes) -> None:
    """Bytes that are no ZMTP of ours end that connection and nothing else. Some of them are valid
    in the first version of that protocol, which had no handshake, and arrive as messages: they
    are for the decoder to refuse."""
    channel = make()
    assert channel.bound.port is not None
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", channel.bound.port)) as raw:
            raw.settimeout(20)
            try:
                raw.sendall(noise)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
            except OSError as error:  # it may hang up on us at any point
                if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                    raise
    pump(channel, lambda _: channel.counters["inbound_closed"] == 5)
    assert channel.counters["inbound_accepted"] == 5
    assert channel.routes["inbound"] == 0
    still_serves(channel, make)


def test_a_silent_connection_is_closed(make: Make) -> None:
    """Whoever connects and says nothing is gone after the handshake time-out."""
    channel = make(handshake_timeout=0.05)
    assert channel.bound.port is not None
    with socket.create_connection(("127.0.0.1", channel.bound.port)) as raw:
        pump(channel, lambda _: channel.counters["inbound_closed"])
        raw.settimeout(20)
        while raw.recv(100):
            pass
    still_serves(channel, make)


@pytest.mark.parametrize("frames", [2, 3, 1000])
def test_multi_frame(make: Make, foreign: Callable[..., zmq.Socket[bytes]], frames: int) -> None:
    """Our messages have one frame. One with more is dropped whole, and counted; the next, from
    the same connection, is read from its beginning."""
    channel = make()
    dealer = foreign(channel)
    dealer.send_multipart([b"f%d" % i for i in range(frames)])
    dealer.send(b"fine")
    assert [m.data for m in pump(channel, len)] == [b"fine"]
    assert channel.counters["dropped_in_multi_frame"] == 1
    still_serves(channel, make)


def test_multi_frame_on_a_dialled_route(make: Make) -> None:
    """The same where we dialled."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        channel = make()
        route = channel.dial(f"127.0.0.1:{port}")
        channel.send(route, b"hello")
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, b"a", b"b"])
        router.send_multipart([identity, b"fine"])
        assert [m.data for m in pump(channel, len)] == [b"fine"]
        assert channel.counters["dropped_in_multi_frame"] == 1
    finally:
        router.close(0)
        context.term()


def test_a_flood_of_dropped_messages_ends(
    make: Make, foreign: Callable[..., zmq.Socket[bytes]]
) -> None:
    """Dropped messages count against the budget of ``receive``, so no flood keeps it."""
    channel = make()
    dealer = foreign(channel)
    for _ in range(200):
        dealer.send_multipart([b"a", b"b"])
    pump(channel, lambda _: channel.counters["dropped_in_multi_frame"] >= 1)
    while channel.counters["dropped_in_multi_frame"] < 200:
        before = channel.counters["dropped_in_multi_frame"]
        channel.wait(5)
        assert channel.receive(budget=10) == []
        assert channel.counters["dropped_in_multi_frame"] - before <= 10


def test_chosen_identities_are_refused(
    make: Make, foreign: Callable[..., zmq.Socket[bytes]]
) -> None:
    """A connection that names itself could take the name of one that has ended: not served."""
    channel = make()
    dealer = foreign(channel, b"a name of my choice")
    dealer.send(b"x")
    pump(channel, lambda _: channel.counters["dropped_in_chosen_identity"])
    assert channel.counters["messages_in"] == 0
    assert channel.routes["inbound"] == 0
    still_serves(channel, make)


def test_identities_cannot_be_predicted() -> None:
    """libzmq would number the connections of every process from the same start, and aborts when
    a stranger claims the next number: each process must start elsewhere."""
    code = """
from kvxfer.core.control import ZmqChannel
with ZmqChannel() as a, ZmqChannel() as b:
    a.send(a.dial(b.address), b"x")
    b.wait(20)
    print(b.receive()[0].route.identity.hex())
"""
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 2


@pytest.mark.parametrize(
    "banner",
    [b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 200, GREETING + b"\x04\x02\x01X", b"\xff" * 100],
    ids=["ssh", "bad command", "bad greeting"],
)
def test_a_stranger_on_the_peers_port(make: Make, banner: bytes) -> None:
    """Something else answers where the peer should be, three times over. libzmq may give up for
    good after that, we do not: when the peer is there at last, the same route reaches it."""
    channel = make(reconnect_min=0.01, reconnect_max=0.05)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.005)
        port = server.getsockname()[1]
        route = channel.dial(f"127.0.0.1:{port}")
        strangers = 0

        def serve(_: object) -> bool:
            nonlocal strangers
            try:
                connection, _ = server.accept()
            except TimeoutError:
                return strangers >= 3
            with connection:
                connection.sendall(banner)
            strangers += 1
            return False

        pump(channel, serve)
    assert channel.lost_routes() == []  # it was never up
    peer = make(port=port)
    pump(channel, lambda _: channel.counters["dialled_connected"])
    assert channel.send(route, b"at last")
    pump(peer, lambda got: b"at last" in [m.data for m in got])
