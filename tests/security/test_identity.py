"""With keys on, a peer that has a key can neither free nor learn what is another's."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from security_rig import Keyring, Mallory, Node, at, hello_of, until

from kvxfer.agent import SchedulerAgent
from kvxfer.agent.handles import TransferState
from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.core import wire
from kvxfer.core.offer import Offer

MakeNode = Callable[..., Node]
MakeMallory = Callable[..., Mallory]


@pytest.fixture
def trio(keys: Keyring, node: MakeNode, mallory: MakeMallory) -> tuple[Node, Node, Mallory]:
    """A producer, its consumer, and a peer that has a key of its own and lies."""
    for name in ("prefill", "decode", "mallory"):
        keys.make(name)
    return node("prefill"), node("decode"), mallory()


def meet(producer: Node, consumer: Node) -> None:
    """One transfer, so that both know each other."""
    offer = producer.agent.hold("before", at(1, 2))
    handle = consumer.agent.pull(offer, at(3, 4))
    assert consumer.agent.wait(handle, 30), producer.counters
    assert handle.state is TransferState.DONE, handle.error
    assert consumer.content([3, 4]) == producer.content([1, 2])
    until(lambda: "before" not in producer.agent._engine.producer.leases, "the release")


def ranks_of(node: Node) -> dict[str, int]:
    return ranks_to_wire(node.agent.ranks)


def refused(producer: Node, why: str, count: int = 1) -> None:
    name = f"messages.refused.{why}"
    until(lambda: producer.counters.get(name, 0) >= count, name)


def test_a_friend_is_served(trio: tuple[Node, Node, Mallory]) -> None:
    """Keys change nothing between those who have them; no message of theirs is refused."""
    producer, consumer, _ = trio
    meet(producer, consumer)
    for each in (producer, consumer):
        assert not [n for n in each.counters if n.startswith("messages.refused")]


@pytest.mark.parametrize("body", [wire.Release, wire.Decline])
@pytest.mark.parametrize("met", [True, False], ids=["met", "unmet"])
def test_stolen_incarnation(trio: tuple[Node, Node, Mallory], body: Any, met: bool) -> None:
    """A peer with a key releases or declines another's hold in that one's name: refused, counted,
    not confirmed, and the hold goes on until its reader releases it.  If the producer has not met
    the reader yet, the liar lacks the ticket of the offer."""
    producer, consumer, liar = trio
    if met:
        meet(producer, consumer)
    offer = producer.agent.hold("t", at(1, 2))
    ref = attrs.evolve(offer.endpoints[0], ticket="")
    arguments = (offer.ref(ref), ranks_of(consumer)) + ((True,) if body is wire.Release else ())
    route = liar.dial(producer.agent.address)
    liar.say(route, consumer.agent.incarnation, body(*arguments), mid=7)
    liar.until(
        lambda: producer.counters.get(f"messages.refused.{'impostor' if met else 'no_ticket'}")
    )
    assert producer.holds == 1
    assert liar.bodies(wire.Confirm) == []
    handle = consumer.agent.pull(offer, at(3, 4))
    assert consumer.agent.wait(handle, 30)
    assert handle.state is TransferState.DONE, handle.error
    until(lambda: producer.holds == 0, "the real release")


@pytest.mark.parametrize("ticket", ["", "0" * 32, "x" * 64, "é" * 32])
def test_no_ticket(trio: tuple[Node, Node, Mallory], ticket: str) -> None:
    """A peer that was not handed the offer cannot open, release or decline under its own name
    either, however well it guesses transfer ids and epochs."""
    producer, consumer, liar = trio
    offer = producer.agent.hold("t", at(1, 2))
    ref = wire.Ref("t", producer.agent.incarnation, offer.epoch, ticket)
    route = liar.dial(producer.agent.address)
    me = "mallory-1"
    own = hello_of(consumer, address=liar.channel.address, transports=[], keeper=None)
    liar.say(route, me, wire.Release(ref, ranks_of(consumer), True), mid=1)
    liar.say(route, me, wire.Decline(ref, ranks_of(consumer)), mid=2)
    liar.until(lambda: producer.counters.get("messages.refused.no_ticket") == 2)
    liar.say(route, me, own)
    liar.say(route, me, wire.Open(1, [ref]))
    liar.until(
        lambda: (
            producer.counters.get("messages.refused.no_ticket") == 3
            or producer.counters.get("messages.from_strangers")
        )
    )
    assert producer.holds == 1
    assert liar.bodies(wire.Grant) == []


def test_a_decline_needs_no_hello(trio: tuple[Node, Node, Mallory]) -> None:
    """Whoever was handed the offer may decline or release without ever having met the producer:
    that is the normal case of a request that is served from a cache."""
    producer, consumer, _ = trio
    offer = producer.agent.hold("t", at(1, 2))
    consumer.agent.decline(offer)
    until(lambda: producer.holds == 0, "the decline")
    offer = producer.agent.hold("u", at(1, 2))
    handle = consumer.agent.pull(offer, at())
    assert consumer.agent.wait(handle, 30)
    until(lambda: producer.holds == 0, "the release")


@pytest.mark.parametrize(
    "lie", ["incarnation", "address", "keeper", "engine"], ids=lambda x: f"of the {x}"
)
def test_a_hello_in_anothers_name(trio: tuple[Node, Node, Mallory], lie: str) -> None:
    """A hello that claims another's incarnation, place, keeper or engine is refused; the one it
    belongs to is served as before."""
    producer, consumer, liar = trio
    meet(producer, consumer)
    theirs = hello_of(consumer)
    mine = {"address": liar.channel.address, "transports": [], "keeper": None}
    if lie == "address":
        mine["address"] = consumer.agent.address
    elif lie == "keeper":
        mine["keeper"] = wire.KeeperWire(consumer.agent.address, 1)
    elif lie == "engine":
        mine["transports"] = theirs.transports
    sender = consumer.agent.incarnation if lie == "incarnation" else "mallory-1"
    before = len(producer.agent.snapshot().peers)
    liar.say(liar.dial(producer.agent.address), sender, hello_of(consumer, **mine))
    liar.until(lambda: producer.counters.get("messages.refused.impostor"))
    assert len(producer.agent.snapshot().peers) == before
    assert liar.bodies(wire.Hello) == []
    meet(producer, consumer)


def test_a_good_bye_in_anothers_name(trio: tuple[Node, Node, Mallory]) -> None:
    """A good-bye does not end another's link, nor do the last words it carries free anything."""
    producer, consumer, liar = trio
    meet(producer, consumer)
    offer = producer.agent.hold("t", at(1))
    release = wire.Release(offer.ref(offer.endpoints[0]), ranks_of(consumer), True)
    last = wire.encode(consumer.agent.incarnation, release, 5, version=2)
    frame = wire.encode(consumer.agent.incarnation, wire.Bye([], [last]), version=2)
    assert liar.channel.send(liar.dial(producer.agent.address), frame)
    liar.until(lambda: producer.counters.get("messages.refused.impostor"))
    assert producer.holds == 1
    assert consumer.agent.incarnation in producer.agent.snapshot().peers


def test_only_its_keeper_speaks_of_an_accept(trio: tuple[Node, Node, Mallory]) -> None:
    """Cancel, accept and gone about something that another keeps are refused: they would make the
    producer forget a grant, or write elsewhere."""
    producer, consumer, liar = trio
    meet(producer, consumer)
    me, route = "mallory-1", liar.dial(producer.agent.address)
    liar.say(
        route,
        me,
        hello_of(consumer, address=liar.channel.address, transports=[], layers=[], keeper=None),
    )
    ref = wire.Ref("w", consumer.agent.incarnation, 1)
    for body in (
        wire.Cancel(ref, "stale", "no"),
        wire.Accept(ref, [], 1.0),
        wire.Gone(ref, "stale", "no"),
    ):
        liar.say(route, me, body, mid=9)
    liar.until(
        lambda: (
            producer.counters.get("messages.refused.not_the_keeper", 0)
            + producer.counters.get("messages.from_strangers", 0)
            >= 3
        )
    )
    accepted = consumer.agent.accept("w", at(5, 6))
    producer.agent.push("w", at(1, 2), to=consumer.agent.endpoint)
    producer.agent.seal("w", b"token")
    assert consumer.agent.wait(accepted, 30)
    assert accepted.state is TransferState.DONE, accepted.error
    assert consumer.content([5, 6]) == producer.content([1, 2])


def test_a_seal_in_the_producers_name(trio: tuple[Node, Node, Mallory]) -> None:
    """What a producer has not sealed is not complete because somebody else says so."""
    producer, consumer, liar = trio
    meet(producer, consumer)
    accepted = consumer.agent.accept("w", at(5, 6))
    producer.agent.push("w", at(1, 2), to=consumer.agent.endpoint)
    ref = wire.Ref("w", consumer.agent.incarnation, 1)
    route = liar.dial(consumer.agent.address)
    liar.say(
        route, producer.agent.incarnation, wire.Seal(ref, ranks_of(producer), 2**40, b"lie"), 3
    )
    liar.say(route, producer.agent.incarnation, wire.PushFailed(ref, "unknown", "", True, True), 4)
    liar.until(lambda: consumer.counters.get("messages.refused.impostor") == 2)
    assert not accepted.done
    producer.agent.seal("w", b"truth")
    assert consumer.agent.wait(accepted, 30)
    assert accepted.payload == b"truth"


def test_frames_that_a_peer_repeats(trio: tuple[Node, Node, Mallory]) -> None:
    """A release that is sent again and again by its own sender counts once, and does not free the
    next hold of that id."""
    producer, consumer, liar = trio
    offer = producer.agent.hold("t", at(1, 2))
    frame = liar.say(
        route := liar.dial(producer.agent.address),
        "mallory-1",
        wire.Release(offer.ref(offer.endpoints[0]), ranks_of(consumer), True),
        mid=11,
    )
    liar.until(lambda: producer.holds == 0)  # it was handed the offer, so it may
    assert producer.agent.drain(30)
    producer.agent.hold("t", at(1, 2))
    for _ in range(20):
        liar.channel.send(route, frame)
    liar.until(lambda: producer.counters.get("messages.duplicate", 0) >= 20)
    assert producer.holds == 1


class Tap:
    """A TCP proxy that keeps what went through towards the listener."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.recorded = b""
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._open: list[socket.socket] = [self._server]
        self._threads[0].start()

    def _run(self) -> None:
        try:
            client, _ = self._server.accept()
        except OSError:
            return
        inner = socket.create_connection(("127.0.0.1", self._port))
        self._open += [client, inner]
        back = threading.Thread(target=self._pipe, args=(inner, client, False), daemon=True)
        self._threads.append(back)
        back.start()
        self._pipe(client, inner, True)

    def _pipe(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        while True:
            try:
                data = source.recv(65536)
                if not data:
                    return
                if keep:
                    self.recorded += data
                sink.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def tap() -> Iterator[Callable[[int], Tap]]:
    made: list[Tap] = []

    def build(port: int) -> Tap:
        made.append(Tap(port))
        return made[-1]

    yield build
    for each in made:
        each.close()


def test_replayed_bytes_of_a_friend(
    trio: tuple[Node, Node, Mallory], tap: Callable[[int], Tap]
) -> None:
    """Somebody on the network who recorded a friend's connection, its release included, gets
    nothing by playing it again: the handshake is never twice the same."""
    producer, consumer, _ = trio
    port = int(producer.agent.address.partition("#")[0].rpartition(":")[2])
    wire_tap = tap(port)
    offer = producer.agent.hold("t", at(1, 2))
    through = attrs.evolve(offer.endpoints[0], address=f"tcp://127.0.0.1:{wire_tap.port}#prefill")
    consumer.agent.decline(attrs.evolve(offer, endpoints=(through,)))
    assert producer.agent.drain(30)
    assert b"kvxfer" not in wire_tap.recorded
    assert offer.endpoints[0].ticket.encode() not in wire_tap.recorded
    producer.agent.hold("t", at(1, 2))
    before = producer.counters["channel.messages_in"]
    failed = producer.counters["channel.inbound_handshakes_failed"]
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.settimeout(20)
        with contextlib.suppress(OSError):  # it may hang up on us at any point
            raw.sendall(wire_tap.recorded)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(65536):
                pass
    until(lambda: producer.counters["channel.inbound_handshakes_failed"] > failed, "the refusal")
    assert producer.counters["channel.messages_in"] == before
    assert producer.holds == 1


def test_a_removed_peer_is_cut_off_by_the_agent(keys: Keyring, node: MakeNode) -> None:
    """``Agent.reload_keys`` after a key was removed: that peer neither releases nor opens any more,
    and its link ends; others go on."""
    for name in ("prefill", "decode", "other"):
        keys.make(name)
    producer, consumer, other = node("prefill"), node("decode"), node("other")
    meet(producer, consumer)
    offer = producer.agent.hold("t", at(1, 2))
    keys.forbid("decode")
    producer.agent.reload_keys()
    refusals = producer.counters["channel.keys_refused"]
    handle = consumer.agent.pull(offer, at(3, 4))
    until(lambda: producer.counters["channel.keys_refused"] > refusals, "a refusal")
    assert producer.holds == 1
    assert not handle.done or handle.state is TransferState.FAILED
    meet(producer, other)


def test_rotation_while_transfers_run(keys: Keyring, node: MakeNode) -> None:
    """Both sides get new pairs, one after the other, while transfers run: every one of them is
    received, byte for byte, and at the end nobody knows the old keys any more."""
    for name in ("prefill", "decode"):
        keys.make(name)
    producer, consumer = node("prefill"), node("decode")
    meet(producer, consumer)

    def transfers(start: int, count: int) -> None:
        handles = []
        for i in range(start, start + count):
            offer = producer.agent.hold(f"t{i}", at(1, 2, 3))
            first = 4 + 3 * (i % 4)
            handles.append(
                (consumer.agent.pull(offer, at(first, first + 1, first + 2)), offer, first)
            )
            if len(handles) == 4 or i == start + count - 1:
                for handle, _, place in handles:
                    assert consumer.agent.wait(handle, 30)
                    assert handle.state is TransferState.DONE, handle.error
                    assert consumer.content([place, place + 1, place + 2]) == producer.content(
                        [1, 2, 3]
                    )
                handles.clear()

    done = threading.Event()
    failures: list[BaseException] = []
    moved = [0]

    def work() -> None:
        try:
            while not done.is_set():
                transfers(moved[0], 4)
                moved[0] += 4
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for name in ("prefill", "decode"):
            old = (keys.directory / f"{name}.pub").read_text().split("public-key = ")[1].strip()
            keys.make(name, file=f"{name}.new")
            producer.agent.reload_keys(), consumer.agent.reload_keys()
            (keys.directory / f"{name}.new").replace(keys.directory / name)
            (producer if name == "prefill" else consumer).agent.reload_keys()
            goal = moved[0] + 8
            until(lambda goal=goal: moved[0] >= goal or failures, "transfers under the new key")
            keys.forbid(old)
            producer.agent.reload_keys(), consumer.agent.reload_keys()
            goal = moved[0] + 8
            until(lambda goal=goal: moved[0] >= goal or failures, "transfers without the old key")
    finally:
        done.set()
        worker.join(60)
    assert not failures, failures
    until(lambda: producer.holds == 0, "the last releases")


def test_offers_of_the_scheduler_half(trio: tuple[Node, Node, Mallory]) -> None:
    """With several processes per instance the scheduler makes the offer: it carries the tickets of
    its workers, and the key to make them stays out of what the offer and its makers show."""
    producer, consumer, _ = trio
    info = pickle.loads(pickle.dumps(producer.agent.info))
    assert info.tickets is not None
    assert repr(info.tickets.key)[2:-1] not in repr(info)
    scheduler = SchedulerAgent([info])
    offer = scheduler.hold("t", at(1, 2))
    assert offer.endpoints[0].ticket
    assert offer.endpoints[0].ticket not in repr(offer)
    producer.agent.execute(scheduler.take_orders())
    handle = consumer.agent.pull(Offer.from_json(offer.to_json()), at(3, 4))
    assert consumer.agent.wait(handle, 30)
    assert handle.state is TransferState.DONE, handle.error
    until(lambda: producer.holds == 0, "the release")


def test_a_keeper_asks_for_the_same(trio: tuple[Node, Node, Mallory]) -> None:
    """The process that answers for a stopped agent grants to the reader's key and ticket only."""
    producer, consumer, liar = trio
    meet(producer, consumer)
    keeping = producer.agent._engine.ctx.keeping
    until(lambda: keeping.address, "the keeper")
    offer = producer.agent.hold("t", at(1, 2))
    good = offer.ref(offer.endpoints[0])
    bare = wire.Ref(good.transfer, good.keeper, good.epoch)
    route = liar.dial(keeping.address)
    for ref in (good, bare):
        liar.say(route, consumer.agent.incarnation, wire.Open(1, [ref]))
        liar.say(route, "mallory-1", wire.Open(1, [ref]))
    # The same address with the reader's own key: the answers show that the others were dealt with.
    friend = Mallory(consumer.agent._channel.config)  # type: ignore[attr-defined]
    try:
        there = friend.dial(keeping.address)
        friend.say(there, consumer.agent.incarnation, wire.Open(2, [bare]))
        until(
            lambda: (
                friend.bodies(wire.Grant)
                or (friend.say(there, consumer.agent.incarnation, wire.Open(3, [good])) and False)
            ),
            "a grant",
            lambda: (friend.pump(), liar.pump()),
        )
        assert {grant.seq for grant in friend.bodies(wire.Grant)} == {3}
    finally:
        friend.channel.close()
    assert liar.bodies(wire.Grant) == []
