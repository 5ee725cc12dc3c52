"""The channel itself: messages, bounds, waking, closing. Real sockets, one process."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from control_rig import PATIENCE, descriptors, pump, tasks

from kvxfer.core.control import Address, ControlConfig, InboundRoute, ZmqChannel
from kvxfer.errors import CapacityError, ClosedError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.core.channel import Inbound

    Make = Callable[..., ZmqChannel]


def talk(a: ZmqChannel, b: ZmqChannel) -> tuple[Any, Any]:
    """Connect a to b; returns a's route and b's route of that connection."""
    there = a.dial(b.address)
    assert a.send(there, b"hello")
    (message,) = pump(b, len)
    assert message.data == b"hello"
    return there, message.route


def test_address_is_known_and_local(make: Make) -> None:
    """The address is published after the bind, with the real port; loopback by default."""
    channel = make()
    address = Address.parse(channel.address)
    assert address.is_loopback
    assert address.port
    assert channel.bound == address


def test_both_ways(make: Make) -> None:
    """A message arrives whole on the other side, which answers on the route it came by."""
    a, b = make(), make()
    there, back = talk(a, b)
    payload = os.urandom(70_000)
    assert b.send(back, payload)
    (answer,) = pump(a, len)
    assert answer.route == there
    assert answer.data == payload
    assert a.counters["messages_out"] == b.counters["messages_in"] == 1
    assert a.counters["bytes_in"] == b.counters["bytes_out"] == 70_000
    assert a.routes == {"dialled": 1, "inbound": 0}
    assert b.routes == {"dialled": 0, "inbound": 1}


def test_empty_message(make: Make) -> None:
    """A message of no bytes is a message."""
    a, b = make(), make()
    a.send(a.dial(b.address), b"")
    assert [m.data for m in pump(b, len)] == [b""]


def test_ipv6(make: Make) -> None:
    """The same over IPv6 loopback, through the same parser."""
    a, b = make(bind_host="::1"), make(bind_host="::1")
    assert b.address == f"tcp://[::1]:{b.bound.port}"
    _, back = talk(a, b)
    assert b.send(back, b"x")
    assert [m.data for m in pump(a, len)] == [b"x"]


def test_dialling_by_name(make: Make) -> None:
    """A name is resolved off both threads; what was sent meanwhile arrives."""
    a, b = make(), make()
    route = a.dial(f"tcp://localhost:{b.bound.port}")
    assert a.send(route, b"one")
    assert a.send(route, b"two")
    assert [m.data for m in pump(b, lambda got: len(got) == 2, others=(a,))] == [b"one", b"two"]


def test_advertised_host(make: Make) -> None:
    """Peers are told the advertised host with the port that was bound."""
    channel = make(advertise_host="Node-A")
    assert channel.address == f"tcp://node-a:{channel.bound.port}"


@pytest.mark.parametrize(
    "text", ["", "1:2:3", "10.0.0.5", "[::1]", "0.0.0.0:5", "[::]:5", "ipc://x"]
)
def test_dial_refuses(make: Make, text: str) -> None:
    """What cannot be dialled is refused before anything is opened."""
    channel = make()
    before = descriptors()
    with pytest.raises(InvalidInputError):
        channel.dial(text)
    assert descriptors() == before
    assert channel.routes["dialled"] == 0


def test_two_dials_are_two_routes(make: Make) -> None:
    """Dialling one address twice gives two routes; hanging up one leaves the other."""
    a, b = make(), make()
    first, second = a.dial(b.address), a.dial(b.address)
    assert first != second
    a.hang_up(first)
    assert not a.send(first, b"x")
    assert a.send(second, b"y")
    assert [m.data for m in pump(b, len)] == [b"y"]
    a.hang_up(first)  # unknown routes are ignored
    a.hang_up("nonsense")


def test_hanging_up_while_connecting_harms_nobody(make: Make) -> None:
    """libzmq's thread reports on a connection just when its route is hung up: it must not be
    left waiting for somebody to read that report, for it serves all other routes too."""
    a, b = make(), make()
    for i in range(200):
        given_up = [a.dial(b.address) for _ in range(3)]
        route = a.dial(b.address)
        for other in given_up:
            a.hang_up(other)
        assert a.send(route, b"%d" % i)
        assert [m.data for m in pump(b, len)] == [b"%d" % i]
        a.hang_up(route)


def test_unknown_routes(make: Make) -> None:
    """A route of nobody, or of another channel, is no route: False, and counted."""
    a, b, c = make(), make(), make()
    there, back = talk(a, b)
    for channel, route in ((b, there), (c, there), (c, back), (a, back), (a, "nonsense")):
        assert not channel.send(route, b"x")
    assert c.counters["dropped_out_no_route"] == 2
    assert a.counters["dropped_out_no_route"] == 2


def test_max_routes(make: Make) -> None:
    """The table of dialled routes is bounded; hanging up makes room."""
    a, b = make(max_routes=2), make()
    first = a.dial(b.address)
    a.dial(b.address)
    with pytest.raises(CapacityError, match="all 2 routes"):
        a.dial(b.address)
    a.hang_up(first)
    a.dial(b.address)


def test_max_inbound_routes(make: Make) -> None:
    """The table of inbound routes is bounded: what is beyond is dropped and counted."""
    a, b = make(), make(max_routes=1)
    talk(a, b)
    a.send(a.dial(b.address), b"x")
    pump(b, lambda _: b.counters["dropped_in_too_many_routes"])
    assert b.routes["inbound"] == 1


def test_send_queue_is_bounded(make: Make) -> None:
    """Nobody listens: exactly the bound is queued, then send says False at once, and counts."""
    a, b = make(send_queue_messages=5), make()
    address = b.address
    b.close()
    route = a.dial(address)
    assert [a.send(route, b"x") for _ in range(8)] == [True] * 5 + [False] * 3
    assert a.counters["dropped_out_queue_full"] == 3
    assert a.counters["messages_out"] == 5


def test_queue_of_a_name_is_bounded(make: Make) -> None:
    """So it is while a name is looked up that does not exist."""
    a = make(send_queue_messages=5)
    route = a.dial("no-such-host.invalid:5")
    assert [a.send(route, b"x") for _ in range(8)] == [True] * 5 + [False] * 3


def test_a_peer_that_does_not_read_holds_up_nobody(make: Make) -> None:
    """Queues to one peer fill up; sends to it fail at once, another peer is served."""
    a = make(send_queue_messages=4, receive_queue_messages=4)
    lazy, busy = make(send_queue_messages=4, receive_queue_messages=4), make()
    to_lazy, to_busy = a.dial(lazy.address), a.dial(busy.address)
    data = bytes(1 << 20)  # well beyond what TCP and both queues hold after a few messages
    pump(a, lambda _: a.counters["dialled_connected"] == 2)
    for _ in range(1000):
        if not a.send(to_lazy, data):
            break
    else:
        pytest.fail("the queue has no end")
    assert a.send(to_busy, b"x")
    assert [m.data for m in pump(busy, len)] == [b"x"]
    # And the other way round: the answers of a listener.
    deadline = time.monotonic() + PATIENCE
    while not (got := lazy.receive(budget=1)):  # one only: the rest stays in the queues
        assert time.monotonic() < deadline
        lazy.wait(0.005)
    for _ in range(1000):
        if not lazy.send(got[0].route, data):
            break
    else:
        pytest.fail("the queue has no end")
    assert lazy.counters["dropped_out_queue_full"] == 1


def test_room_is_seen_at_once(make: Make) -> None:
    """A queue that was full and has been read takes messages again."""
    a, b = make(send_queue_messages=2), make()
    there, _ = talk(a, b)
    sent = got = 0
    deadline = time.monotonic() + 20
    while sent < 200 and time.monotonic() < deadline:
        sent += a.send(there, b"x" * 100_000)
        got += len(b.receive())
    assert sent == 200
    pump(b, lambda more: got + len(more) == 200)


def test_oversize_out(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A message beyond the limit is not sent, counted, and logged once."""
    a, b = make(max_message_nbytes=1000), make(max_message_nbytes=1000)
    there, _ = talk(a, b)
    with caplog.at_level(logging.WARNING, "kvxfer.control"):
        assert not a.send(there, bytes(1001))
        assert not a.send(there, bytes(1001))
    assert a.counters["dropped_out_oversize"] == 2
    assert [r.getMessage()[:26] for r in caplog.records] == ["a message of 1001 bytes is"]
    assert a.send(there, bytes(1000))
    assert len(pump(b, len)[0].data) == 1000


def test_oversize_in(make: Make) -> None:
    """One too large is dropped and counted; the connection and the loop live."""
    a, b = make(), make(max_message_nbytes=1000)
    there, back = talk(a, b)
    assert a.send(there, bytes(1001))
    assert a.send(there, b"fine")
    assert [m.data for m in pump(b, len)] == [b"fine"]
    assert b.counters["dropped_in_oversize"] == 1
    assert b.send(back, b"x")
    pump(a, len)


def test_far_too_large(make: Make) -> None:
    """One far too large is never held in memory: that connection ends, the others do not."""
    a, b, c = make(reconnect_min=0.01), make(max_message_nbytes=1000), make()
    there, _ = talk(a, b)
    talk(c, b)
    assert a.send(there, bytes(1 << 20))
    pump(a, lambda _: a.lost_routes() == [there])
    assert c.send(c.dial(b.address), b"fine")
    assert [m.data for m in pump(b, len)] == [b"fine"]
    # The sender comes back on the same route.
    pump(a, lambda _: a.counters["dialled_connected"] == 2)
    assert a.send(there, b"again")
    assert [m.data for m in pump(b, len)] == [b"again"]


def test_too_large_for_the_dialling_side(make: Make) -> None:
    """libzmq gives a dialled connection up for good after such a message; we dial it anew."""
    a, b = make(max_message_nbytes=1000, reconnect_min=0.01), make()
    there, back = talk(a, b)
    assert b.send(back, bytes(1 << 20))
    pump(a, lambda _: a.lost_routes() == [there])
    pump(a, lambda _: a.counters["dialled_connected"] == 2)
    assert a.counters["dialled_redials"] == 1
    assert a.send(there, b"again")
    assert [m.data for m in pump(b, len)] == [b"again"]


def test_nothing_is_lost_between_wakes(make: Make) -> None:
    """The readiness of zmq sockets is edge-triggered: all of many messages arrive nevertheless,
    also while the same sockets are used for sending."""
    a, b = make(send_queue_messages=5000), make(send_queue_messages=5000)
    there, back = talk(a, b)
    for i in range(2000):
        assert a.send(there, b"%d" % i)
        assert b.send(back, b"%d" % i)
    expected = [b"%d" % i for i in range(2000)]
    for channel in (a, b):
        assert [m.data for m in pump(channel, lambda got: len(got) >= 2000)] == expected


def test_a_send_does_not_swallow_the_signal(make: Make) -> None:
    """A send takes back the signal that a message has arrived; the next wait sees it anyway."""
    a, b = make(), make()
    there, back = talk(a, b)
    pump(a, lambda _: a.counters["dialled_connected"])
    dialled = a._dialler.find(there)
    assert dialled is not None
    assert b.send(back, b"x")
    descriptor = dialled.socket.getsockopt(zmq.FD)
    assert select.select([descriptor], [], [], 20)[0]
    deadline = time.monotonic() + 20
    while select.select([descriptor], [], [], 0)[0]:
        a.send(there, b"y")
        b.receive()
        assert time.monotonic() < deadline
    start = time.monotonic()
    a.wait(30)
    assert time.monotonic() - start < 10
    assert [m.data for m in a.receive()] == [b"x"]


def test_budget_and_turns(make: Make) -> None:
    """``receive`` keeps to its budget, and a flood on one route lets the other have its turn."""
    a, quiet, loud = make(send_queue_messages=1000), make(), make(send_queue_messages=1000)
    _, from_loud = talk(a, loud)
    _, from_quiet = talk(a, quiet)
    for _ in range(500):
        assert loud.send(from_loud, b"loud")
    assert quiet.send(from_quiet, b"quiet")
    deadline = time.monotonic() + 20
    while len(a._hub.ready) < 2:  # both have something now
        assert time.monotonic() < deadline
        a.wait(0.01)
    first = [m.data for m in a.receive(budget=64)]
    assert len(first) <= 64
    assert b"quiet" in first
    rest = pump(a, lambda got: len(first) + len(got) == 501)
    assert [m.data for m in rest] == [b"loud"] * len(rest)


def test_wait_times_out(make: Make) -> None:
    """With nothing to do, ``wait`` takes its time and no more; a negative one returns at once."""
    channel = make()
    for timeout, least in ((0.05, 0.05), (0.0, 0.0), (-1.0, 0.0)):
        start = time.monotonic()
        channel.wait(timeout)
        assert least <= time.monotonic() - start < 5
    channel.wake()
    channel.wait(float("inf"))  # endless would be, without the wake


def test_wake_from_another_thread(make: Make) -> None:
    """A thread ends a wait; many wakes are one."""
    channel = make()
    entered = threading.Event()

    def wake() -> None:
        entered.wait()
        for _ in range(1000):
            channel.wake()

    thread = threading.Thread(target=wake)
    thread.start()
    start = time.monotonic()
    entered.set()
    channel.wait(30)
    assert time.monotonic() - start < 10
    thread.join()
    channel.wait(0)  # may have been woken again by the rest of the thousand
    start = time.monotonic()
    channel.wait(0.05)
    assert time.monotonic() - start >= 0.05


def test_wake_before_wait(make: Make) -> None:
    """A wake that comes before the wait is not lost, not even if ``receive`` lies between."""
    channel = make()
    channel.wake()
    channel.receive()
    start = time.monotonic()
    channel.wait(30)
    assert time.monotonic() - start < 10


def test_wakes_are_never_lost(make: Make) -> None:
    """Ping-pong between two threads: every single wake is noticed."""
    channel = make()
    turns = 2000
    ours, theirs = [0], [0]

    def other() -> None:
        for turn in range(1, turns + 1):
            theirs[0] = turn
            channel.wake()
            while ours[0] < turn:
                time.sleep(0)

    thread = threading.Thread(target=other)
    thread.start()
    for turn in range(1, turns + 1):
        deadline = time.monotonic() + 20
        while theirs[0] < turn:
            channel.wait(20)
            assert time.monotonic() < deadline, "a wake was lost"
        ours[0] = turn
    thread.join()


def test_a_message_ends_a_wait(make: Make) -> None:
    """``wait`` returns as soon as something can be received, long before its time is up."""
    a, b = make(), make()
    there, _ = talk(a, b)
    timer = threading.Timer(0.02, a.send, (there, b"x"))
    timer.start()
    start = time.monotonic()
    b.wait(30)
    timer.join()
    assert time.monotonic() - start < 10
    assert [m.data for m in b.receive()] == [b"x"]


def test_vanished_peer(make: Make) -> None:
    """When a peer closes: its inbound route is reported, sending there says False, and counts."""
    a, b, c = make(), make(), make()
    _, back = talk(a, b)
    _, other = talk(c, b)
    a.close()
    pump(b, lambda _: b.counters["inbound_lost"])
    assert b.lost_routes() == [back]
    assert b.lost_routes() == []
    assert b.routes["inbound"] == 1
    assert not b.send(back, b"x")
    assert b.counters["dropped_out_unroutable"] == 1
    assert b.send(other, b"y")
    assert [m.data for m in pump(c, len)] == [b"y"]


def test_loss_ends_a_wait_once(make: Make) -> None:
    """A lost route ends one wait; whoever does not ask for lost routes does not spin."""
    a, b = make(), make()
    talk(a, b)
    a.close()
    start = time.monotonic()
    b.wait(30)
    assert time.monotonic() - start < 10
    start = time.monotonic()
    b.wait(0.05)
    assert time.monotonic() - start >= 0.05
    assert len(b.lost_routes()) == 1


def test_last_words_are_received(make: Make) -> None:
    """Messages that were under way when the connection ended are received all the same, and the
    table is empty afterwards: routes of ended connections are not kept."""
    b = make()
    for _ in range(50):
        a = ZmqChannel()
        route = a.dial(b.address)
        pump(a, lambda _, a=a: a.counters["dialled_connected"])  # type: ignore[misc]
        a.send(route, b"last words")
        # libzmq hands the message over on its own thread; the peer must have it before we close.
        b.wait(20)
        a.close()
    got = pump(b, lambda got: len(got) == 50)
    pump(b, lambda _: b.counters["inbound_closed"] == 50)
    assert b.routes["inbound"] == 0
    lost = b.lost_routes()
    assert {m.route for m in got} == set(lost)
    assert b._listener._identities == {}
    assert b._listener._open == set()


def arrived(channel: ZmqChannel) -> None:
    """Wait until the listener has a message, without reading anything."""
    deadline = time.monotonic() + 20
    while not channel._listener.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_messages_before_reports(make: Make) -> None:
    """A message that is read before libzmq's report of its connection belongs to a living route."""
    a, b = make(), make()
    a.send(a.dial(b.address), b"x")
    arrived(b)
    got: list[Inbound] = []
    b._listener.take(10, got)
    assert b.lost_routes() == []
    assert b.send(got[0].route, b"y")
    assert [m.data for m in pump(a, len)] == [b"y"]


def test_reports_before_messages(make: Make) -> None:
    """A message that is read after its connection ended, with another one on the same descriptor
    meanwhile, is delivered, and its route is lost; the other one is not."""
    first, second, b = make(), make(), make()
    first.send(first.dial(b.address), b"first")
    arrived(b)
    first.close()
    deadline = time.monotonic() + 20
    while not b.counters["inbound_closed"]:
        b._listener._on_monitor()
        assert time.monotonic() < deadline
    second.send(second.dial(b.address), b"second")
    while b.counters["inbound_accepted"] != 2:
        b._listener._on_monitor()
        assert time.monotonic() < deadline
    one, two = pump(b, lambda got: len(got) == 2)
    assert (one.data, two.data) == (b"first", b"second")
    assert b.lost_routes() == [one.route]
    assert not b.send(one.route, b"x")
    assert b.send(two.route, b"y")
    assert [m.data for m in pump(second, len)] == [b"y"]


def test_one_descriptor_one_route(make: Make) -> None:
    """If a late message was taken for one of a later connection on the same descriptor, the first
    message of that connection puts it right."""
    channel = make()
    listener = channel._listener
    late, living = (InboundRoute(listener._serial, bytes([0, 0, 0, 0, i])) for i in (1, 2))
    listener._open.add(9999)
    listener._learn(late, 9999)
    assert channel.lost_routes() == []
    listener._learn(living, 9999)
    assert channel.lost_routes() == [late]
    assert channel.routes["inbound"] == 1
    assert not channel.send(late, b"x")


def test_living_routes_are_not_reported(make: Make) -> None:
    """Descriptors are reused all the time; a route whose connection lives is never lost."""
    a, b = make(), make()
    _, living = talk(a, b)
    for _ in range(100):
        passing = ZmqChannel()
        passing.send(passing.dial(b.address), b"x")
        pump(b, len)
        passing.close()
    pump(b, lambda _: b.counters["inbound_closed"] == 100)
    assert living not in b.lost_routes()
    assert b.send(living, b"y")
    pump(a, len)


def test_close_leaves_nothing() -> None:
    """No thread, no socket, no descriptor is left, with peers gone or living, names or not."""
    for round_ in range(3):
        before, running = descriptors(), tasks()
        a, b = ZmqChannel(), ZmqChannel()
        there, back = talk(a, b)
        a.dial("127.0.0.1:1")
        a.dial(f"localhost:{b.bound.port}")
        gone = a.dial(b.address)
        a.hang_up(gone)
        pump(b, lambda _, b=b: b.counters["inbound_accepted"] >= 2, others=(a,))  # type: ignore[misc]
        for _ in range(100):
            a.send(there, b"unread")
            b.send(back, b"unread")
        b.close()
        a.close()
        assert descriptors() == before, f"round {round_}"
        assert tasks() == running, f"round {round_}"


def test_after_close(make: Make) -> None:
    """A closed channel says so; closing and waking it again is harmless."""
    channel = make()
    address = channel.address
    channel.close()
    channel.close()
    channel.wake()
    assert channel.address == address
    assert channel.counters["messages_in"] == 0
    for call in (
        lambda: channel.dial("127.0.0.1:1"),
        lambda: channel.send("x", b""),
        channel.receive,
        lambda: channel.wait(0),
        lambda: channel.hang_up("x"),
        channel.lost_routes,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_waking_while_closing() -> None:
    """Threads that wake a channel while it is closed neither crash nor write elsewhere."""
    for _ in range(20):
        channel = ZmqChannel()
        stop = threading.Event()

        def wake(channel: ZmqChannel = channel, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                channel.wake()

        threads = [threading.Thread(target=wake) for _ in range(2)]
        for thread in threads:
            thread.start()
        channel.wait(1)
        channel.close()
        stop.set()
        for thread in threads:
            thread.join()


def test_after_a_fork() -> None:
    """In a forked child the channel refuses; closing it there leaves the parent's alone."""
    code = """
import os, sys
from kvxfer.core.control import ZmqChannel
from kvxfer.errors import ClosedError
a, b = ZmqChannel(), ZmqChannel()
route = a.dial(b.address)
child = os.fork()
if child == 0:
    refused = 0
    for call in (a.receive, a.wake, lambda: a.wait(0), lambda: a.send(route, b""),
                 lambda: a.dial(b.address), lambda: a.hang_up(route), a.lost_routes):
        try:
            call()
        except ClosedError as error:
            refused += "forked" in str(error)
    a.close(); b.close()
    ZmqChannel().close()
    sys.exit(refused)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
a.send(route, b"still here")
b.wait(10)
print(status, b.receive()[0].data.decode())
a.close(); b.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "7 still here"), done.stderr


def test_out_of_descriptors() -> None:
    """When the process may open no more files, dialling says what to raise, and what is open
    goes on working; so does opening a channel."""
    code = """
import os, resource
from kvxfer.core.control import ZmqChannel
from kvxfer.errors import CapacityError
a, b = ZmqChannel(), ZmqChannel()
first = a.dial(b.address)
a.send(first, b"1")
while not b.receive():
    b.wait(10)
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
routes = []
try:
    while True:
        routes.append(a.dial(b.address))
except CapacityError as error:
    print(error)
try:
    while True:
        routes.append(ZmqChannel())
except CapacityError as error:
    print(error)
a.send(first, b"2")
while not (got := b.receive()):
    b.wait(10)
print(got[0].data)
for route in routes:
    a.hang_up(route) if not isinstance(route, ZmqChannel) else route.close()
while True:
    try:
        route = a.dial(b.address)
        break
    except CapacityError:
        b.receive()  # libzmq closes descriptors on a thread of its own
a.send(route, b"3")
while not (got := b.receive()):
    b.wait(10)
print(got[0].data)
a.close(); b.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "ulimit -n" in lines[0]
    assert "ulimit -n" in lines[1]
    assert lines[2:] == ["b'2'", "b'3'"]


class Recorder:
    """An ``auth`` that notes what it is given."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fail = fail

    def _note(self, name: str, what: Any = None) -> None:
        self.calls.append((name, what))
        if name == self.fail:
            raise InvalidInputError(f"{name} failed")

    def start(self, context: Any) -> None:
        self._note("start")

    def configure_listener(self, socket: Any) -> None:
        self._note("listener", socket.last_endpoint)

    def configure_dialled(self, socket: Any, address: Address) -> None:
        self._note("dialled", (socket.last_endpoint, address))

    def stop(self) -> None:
        self._note("stop")


def test_auth_configures_every_socket(make: Make) -> None:
    """The seam for keys: called before the bind, before each connect, and at the end."""
    auth = Recorder()
    a, b = make(auth=auth), make()
    talk(a, b)
    a.close()
    assert auth.calls == [
        ("start", None),
        ("listener", b""),
        ("dialled", (b"", Address.parse(b.address))),
        ("stop", None),
    ]


@pytest.mark.parametrize(
    ("step", "calls"), [("start", ["start"]), ("listener", ["start", "listener", "stop"])]
)
def test_auth_that_fails_at_the_start(step: str, calls: list[str]) -> None:
    """An error of ``auth`` ends the construction; nothing stays open."""
    before, running = descriptors(), tasks()
    auth = Recorder(fail=step)
    with pytest.raises(InvalidInputError, match=f"{step} failed"):
        ZmqChannel(auth=auth)
    assert [name for name, _ in auth.calls] == calls
    assert descriptors() == before
    assert tasks() == running


def test_auth_that_refuses_a_dial(make: Make) -> None:
    """An error of ``auth`` ends the dial; no route and no socket of it stay."""
    channel = make(auth=Recorder(fail="dialled"))
    before = descriptors()
    with pytest.raises(InvalidInputError, match="dialled failed"):
        channel.dial("127.0.0.1:1")
    assert channel.routes["dialled"] == 0
    assert descriptors() == before


def test_open_door_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Listening for others without authentication is allowed and logged; loopback is silent."""
    with caplog.at_level(logging.WARNING, "kvxfer.control"):
        make()
        make(bind_host="0.0.0.0", advertise_host="127.0.0.1", auth=Recorder())
        assert caplog.records == []
        make(bind_host="0.0.0.0", advertise_host="127.0.0.1", insecure=True)
    assert "every interface without authentication" in caplog.text


def test_routes_are_small_values(make: Make) -> None:
    """Routes hash and compare as values; one connection always has the same one."""
    a, b = make(), make()
    there, back = talk(a, b)
    a.send(there, b"x")
    (again,) = pump(b, len)
    assert again.route == back
    assert hash(again.route) == hash(back)
    assert isinstance(back, InboundRoute)
    assert ControlConfig() == a.config
