"""Two real processes: killed, stopped, restarted; and many that start at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from control_rig import Peer, pump

from kvxfer.core.control import ControlConfig, ZmqChannel

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., ZmqChannel]
    Peers = Callable[..., Peer]


def test_echo(make: Make, peers: Peers) -> None:
    """Messages cross to another process and back."""
    channel, peer = make(), peers()
    route = channel.dial(peer.address)
    for i in range(100):
        assert channel.send(route, b"%d" % i)
    assert [m.data for m in pump(channel, lambda got: len(got) == 100)] == [
        b"%d" % i for i in range(100)
    ]


def test_kill_9_and_restart(make: Make, peers: Peers) -> None:
    """A killed peer is reported at once; a new one on the same address is reached on the same
    route, without a new dial, and another peer never notices."""
    channel, first, other = make(reconnect_min=0.02), peers(), peers()
    route, healthy = channel.dial(first.address), channel.dial(other.address)
    channel.send(route, b"x")
    pump(channel, len)
    first.kill()
    pump(channel, lambda _: channel.counters["dialled_lost"])
    assert channel.lost_routes() == [route]
    assert channel.send(healthy, b"y")
    assert [(m.route, m.data) for m in pump(channel, len)] == [(healthy, b"y")]
    again = peers(first.port)
    assert again.address == first.address
    pump(channel, lambda _: channel.counters["dialled_connected"] == 3)
    assert channel.send(route, b"z")
    assert [(m.route, m.data) for m in pump(channel, len)] == [(route, b"z")]
    assert channel.lost_routes() == []


def test_a_killed_peer_that_dialled_us(make: Make) -> None:
    """The listener's side: the inbound route is reported, and sending there says False."""
    channel = make()
    code = f"""
from kvxfer.core.control import ZmqChannel
channel = ZmqChannel()
channel.send(channel.dial({channel.address!r}), b"x")
channel.wait(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        (message,) = pump(channel, len)
    finally:
        process.kill()
        process.wait()
    pump(channel, lambda _: channel.counters["inbound_lost"])
    assert channel.lost_routes() == [message.route]
    assert not channel.send(message.route, b"y")
    assert channel.counters["dropped_out_unroutable"] == 1


def test_a_stopped_peer_is_noticed(make: Make, peers: Peers) -> None:
    """A process that is stopped keeps its connections open: the heartbeat finds out, on both
    sides, and what is queued for it stays within the bound."""
    channel = make(
        heartbeat_interval=0.05, heartbeat_timeout=0.2, send_queue_messages=10, connect_timeout=0.2
    )
    peer = peers()
    route = channel.dial(peer.address)
    channel.send(route, b"x")
    pump(channel, len)
    peer.signal(signal.SIGSTOP)
    try:
        pump(channel, lambda _: channel.counters["dialled_lost"])
        assert channel.lost_routes() == [route]
        sent = [channel.send(route, b"y") for _ in range(20)]
        assert sent.count(False) >= 10
    finally:
        peer.signal(signal.SIGCONT)
    assert len(pump(channel, lambda got: len(got) >= sent.count(True))) == sent.count(True)


def test_a_stopped_peer_that_dialled_us_is_noticed(make: Make) -> None:
    """The listener's side finds out by probes of its own: what it heard last was a message, after
    which libzmq forgets how long the peer's probes said to wait for it."""
    channel = make(heartbeat_interval=0.05, heartbeat_timeout=0.2)
    code = f"""
from kvxfer.core.control import ZmqChannel
channel = ZmqChannel()
route = channel.dial({channel.address!r})
while channel.send(route, b"x"):
    channel.wait(0.01)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        first = pump(channel, lambda got: len(got) >= 20)[0]
        process.send_signal(signal.SIGSTOP)
        pump(channel, lambda _: channel.counters["inbound_lost"])
        assert channel.lost_routes() == [first.route]
    finally:
        process.kill()
        process.wait()


def test_a_living_peer_is_not_lost_while_python_is_busy(make: Make, peers: Peers) -> None:
    """Heartbeats are answered by libzmq's thread: a process whose Python code does nothing for
    many times the time-out keeps its connections."""
    channel = make(heartbeat_interval=0.02, heartbeat_timeout=0.1)
    busy = make()
    route = channel.dial(busy.address)  # this process answers itself; nobody calls receive on it
    channel.send(route, b"x")
    pump(busy, len)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        sum(range(100_000))  # holds the GIL
    channel.receive()
    assert channel.lost_routes() == []
    assert channel.counters["dialled_lost"] == 0


def test_sixteen_start_at_once() -> None:
    """Report O57: sixteen processes that open a channel together get sixteen ports."""
    code = """
import os, sys
from kvxfer.core.control import ZmqChannel
go, start = os.pipe()
done, finish = os.pipe()
for _ in range(16):
    if os.fork() == 0:
        os.close(start), os.close(finish)
        os.read(go, 1)
        with ZmqChannel() as channel:
            os.write(1, channel.address.encode() + b"\\n")
            os.read(done, 1)  # ends when the parent does
        os._exit(0)
os.close(start)
for _ in range(16):
    sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    addresses = [process.stdout.readline().strip() for _ in range(16)]
    process.communicate("\n" * 16, timeout=60)
    assert len(set(addresses)) == 16
    assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)


def test_many_share_a_range() -> None:
    """Eight channels on a range of eight ports take all of it; the ninth says that it is full."""
    base = ZmqChannel()
    start = base.bound.port
    base.close()
    assert start is not None
    last = min(start + 60, 65535)
    span = f"{last - 60}-{last}"
    channels = []
    try:
        for _ in range(8):
            channels.append(ZmqChannel(ControlConfig(port_range=span)))
        assert len({channel.address for channel in channels}) == 8
    finally:
        for channel in channels:
            channel.close()
