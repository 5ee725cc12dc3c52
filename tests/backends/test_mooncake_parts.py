"""The parts of the mooncake backend that need no engine."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.backends._machine import Machine
from kvxfer.backends.mooncake import MooncakeConfig, Protocol, messages
from kvxfer.backends.mooncake.config import DEFAULT_QUEUE
from kvxfer.backends.mooncake.environment import ProcessEnvironment, check, queue_limit
from kvxfer.backends.mooncake.handshake import describe, parse
from kvxfer.backends.mooncake.identity import NBYTES, Tokens, token_of
from kvxfer.backends.mooncake.registry import Registry
from kvxfer.backends.mooncake.wire import EngineAddress, pack_region, unpack_region
from kvxfer.core.address import Address
from kvxfer.errors import ConfigError, InvalidInputError, TransportError, WireError
from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.policies.rules import builtin_rules

DESCRIPTION: dict[str, Any] = {
    "protocol": "tcp",
    "tcp_data_port": 15383,
    "tcp_proto_version": 2,
    "buffers": [{"addr": 4096, "length": 100, "name": "127.0.0.1:16335"}],
}


# ---- environment -----------------------------------------------------------------------------


def test_environment_is_set_where_the_user_left_it() -> None:
    """What the engine reads from the environment only comes from the config, and a variable that
    the user set wins."""
    environ = {"MC_LOG_LEVEL": "INFO"}
    config = MooncakeConfig(status_timeout=3, lanes_per_peer=2, host="::1")
    ProcessEnvironment().prepare(config, environ, rdma=False)
    assert environ == {
        "MC_LOG_LEVEL": "INFO",
        "MC_TCP_STATUS_TIMEOUT_SEC": "3",
        "MC_TCP_LANES_PER_PEER": "2",
        "MC_USE_IPV6": "1",
    }


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({"MC_TCP_PROTO": "1"}, Protocol.TCP),
        ({"MC_TCP_ENABLE_CONNECTION_POOL": "False"}, Protocol.TCP),
        ({"MC_FORCE_TCP": "1"}, Protocol.RDMA),
    ],
)
def test_environment_that_breaks_a_promise_is_refused(
    environ: dict[str, str], protocol: Protocol
) -> None:
    """WRITEs that complete in the local socket, posts that dial, another protocol: named at the
    start, with the variable."""
    config = MooncakeConfig(protocol=protocol)
    with pytest.raises(ConfigError, match=next(iter(environ))):
        ProcessEnvironment().prepare(config, environ, rdma=True)
    machine = Machine(rdma_devices=frozenset({"mlx5_0"}))
    assert [next(iter(environ)) in f.what for f in check(config, environ, machine)] == [True]


def test_tcp_is_forced_where_the_engine_would_take_rdma() -> None:
    """The engine takes RDMA wherever it finds a device, whatever it is asked for."""
    environ: dict[str, str] = {}
    ProcessEnvironment().prepare(MooncakeConfig(log_level=None), environ, rdma=True)
    assert environ == {"MC_FORCE_TCP": "1"}
    rdma: dict[str, str] = {}
    config = MooncakeConfig(log_level=None, protocol=Protocol.RDMA)
    ProcessEnvironment().prepare(config, rdma, rdma=True)
    assert rdma == {}
    assert check(config, {}, Machine(rdma_devices=frozenset({"mlx5_0"}))) == []
    assert len(check(config, {}, Machine())) == 1


def test_names_are_added_before_the_first_engine_only() -> None:
    """Engine threads read variables at every transfer; adding one then can crash the process. What
    would have to be added, or to be another, is refused; equal settings are fine."""
    process, environ = ProcessEnvironment(), {"MC_TCP_STATUS_TIMEOUT_SEC": "9"}
    process.prepare(MooncakeConfig(), environ, rdma=False)
    before = dict(environ)
    process.prepare(MooncakeConfig(), environ, rdma=False)
    process.prepare(MooncakeConfig(status_timeout=3, log_level="INFO"), environ, rdma=False)
    with pytest.raises(ConfigError, match="MC_TCP_LANES_PER_PEER was not set"):
        process.prepare(MooncakeConfig(lanes_per_peer=2), environ, rdma=False)
    assert environ == before
    other: dict[str, str] = {}
    second = ProcessEnvironment()
    second.prepare(MooncakeConfig(lanes_per_peer=2), other, rdma=False)
    with pytest.raises(ConfigError, match="was set to 2 "):
        second.prepare(MooncakeConfig(lanes_per_peer=3), other, rdma=False)


@pytest.mark.parametrize(
    ("value", "limit"),
    [("", DEFAULT_QUEUE), ("64", 64), ("0", DEFAULT_QUEUE), ("x", DEFAULT_QUEUE), ("²", 1024)],
)
def test_queue_limit(value: str, limit: int) -> None:
    """The engine's own reading of its variable: nonsense is the default."""
    assert queue_limit({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": value}) == limit


# ---- the description of an engine ------------------------------------------------------------


def test_a_description_is_read() -> None:
    """Protocol, ports and buffers, as an engine of 0.3.13 tells them; ``covers`` counts bytes."""
    found = parse(json.dumps(DESCRIPTION).encode())
    assert (found.protocol, found.data_port, found.tcp_version) == ("tcp", 15383, 2)
    assert found.covers(4096, 100)
    assert found.covers(4195, 1)
    assert not found.covers(4095, 2)
    assert not found.covers(4096, 101)
    assert found.first_uncovered([(4096, 100), (4196, 1), (0, 1)]) == (4196, 1)
    assert parse(b'{"protocol": "rdma", "buffers": null}').tcp_version == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": None},
        {"protocol": 3},
        {"tcp_data_port": -1},
        {"tcp_proto_version": "2"},
        {"buffers": {}},
        {"buffers": [3]},
        {"buffers": [{"addr": 1}]},
        {"buffers": [{"addr": 1.5, "length": 2}]},
        {"buffers": [{"addr": 2**64, "length": 2}]},
    ],
)
def test_a_wrong_description_is_refused(changes: dict[str, Any]) -> None:
    """Whoever answers on a peer's port cannot confuse us: each field is checked."""
    with pytest.raises(WireError):
        parse(json.dumps({**DESCRIPTION, **changes}).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"3", b"[" * 100_000])
def test_no_description_at_all(text: bytes) -> None:
    """Bytes that are no JSON object are a ``WireError`` and nothing else."""
    with pytest.raises(WireError):
        parse(text)


class Server:
    """Answers one connection with ``reply``, then holds or closes it."""

    def __init__(self, reply: bytes, *, hold: bool) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listening.getsockname()[1])
        self.asked = b""
        self._reply, self._hold = reply, hold
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        link, _ = self._listening.accept()
        with link:
            self.asked = link.recv(1024)
            link.sendall(self._reply)
            if self._hold:
                self._over.wait(30.0)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listening.close()


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def make(reply: bytes, *, hold: bool = False) -> Server:
        servers.append(Server(reply, hold=hold))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def framed(kind: int, body: bytes) -> bytes:
    return struct.pack("<QB", len(body) + 1, kind) + body


def test_asking(serve: Any) -> None:
    """One question of kind 1, one answer."""
    server = serve(framed(1, json.dumps(DESCRIPTION).encode()))
    assert describe(server.address, 10.0).data_port == 15383
    assert server.asked == framed(1, b"{}")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\x05\x00",
        framed(2, b"{}"),
        framed(1, b""),
        struct.pack("<QB", 2**40, 1),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_an_odd_answer(serve: Any, reply: bytes) -> None:
    """Truncated, of another kind, endless, or of another protocol: ``WireError``."""
    with pytest.raises(WireError):
        describe(serve(reply).address, 10.0)


def test_an_answer_too_long_to_be_read(serve: Any) -> None:
    """JSON is read with the GIL held, and who answers says how much there is of it."""
    with pytest.raises(WireError, match="4194305 bytes is no description"):
        describe(serve(struct.pack("<QB", (4 << 20) + 1, 1), hold=True).address, 10.0)


@pytest.mark.parametrize("reply", [b"", struct.pack("<QB", 1000, 1) + b"{"])
def test_no_whole_answer_in_time(serve: Any, reply: bytes) -> None:
    """A stopped process accepts connections and answers nothing: the time-out is ours."""
    server = serve(reply, hold=True)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        describe(server.address, 0.2)
    assert time.monotonic() - start < 5.0


def test_nobody_there() -> None:
    """A refused connection is told apart from silence."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address("127.0.0.1", listening.getsockname()[1])
    with pytest.raises(ConnectionRefusedError):
        describe(address, 1.0)


# ---- what travels between transports ---------------------------------------------------------

WHERE = EngineAddress(version=1, host="2001:db8::7", port=16335, protocol="tcp", token=4096)


def test_addresses_travel_whole() -> None:
    """Host, port, protocol and place of the identity come back; the engine's name has brackets."""
    assert EngineAddress.decode(WHERE.encode()) == WHERE
    assert str(WHERE.address) == "[2001:db8::7]:16335"
    assert unpack_region(pack_region(2**47 - 4096)) == 2**47 - 4096


@pytest.mark.parametrize(
    "data",
    [
        b"",
        WHERE.encode()[:-1],
        b'[2,"::1",1,"tcp",4096]',
        b'[1,"",1,"tcp",4096]',
        b'[1,"not a host!",1,"tcp",4096]',
        b'[1,"::1",0,"tcp",4096]',
        b'[1,"::1",65536,"tcp",4096]',
        b'[1,"::1",1,"tcp",0]',
        b'[1,"::1",1,"tcp",1e300]',
        b'{"host":"::1"}',
        bytes(b ^ 0x5A for b in WHERE.encode()),
    ],
)
def test_damaged_addresses(data: bytes) -> None:
    """What was damaged on its way is a ``WireError``."""
    with pytest.raises(WireError):
        EngineAddress.decode(data)


# ---- identity --------------------------------------------------------------------------------


def test_places_for_identities() -> None:
    """A place is empty when it is taken, one of its own, and counted; ours is the first."""
    tokens = Tokens("one", 2)
    a, b = tokens.take(), tokens.take()
    assert a is not None
    assert b is not None
    assert tokens.take() is None
    assert tokens.address_of(a) - tokens.address == a * NBYTES > 0
    tokens._memory[a] = tokens._memory[0]  # as if our own identity had been read into it
    assert tokens.holds(a, token_of("one"))
    assert not tokens.holds(a, token_of("two"))
    assert not tokens.holds(b, token_of("one"))
    tokens.give_back(a)
    again = tokens.take()
    assert again == a
    assert not tokens.holds(again, token_of("one"))


# ---- registrations ---------------------------------------------------------------------------


class Recorder:
    """The engine's calls about memory."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self.code = code

    def register(self, address: int, nbytes: int) -> int:
        self.calls.append(("register", address))
        return self.code

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.code


def registry(engine: Recorder) -> Registry:
    return Registry(engine)  # type: ignore[arg-type]


def test_one_registration_for_regions_inside_one_another() -> None:
    """The engine hears of the outermost range, once, and of its end when the last one is gone."""
    engine = Recorder()
    known = registry(engine)
    outer = known.add(1000, 500)
    inner = [known.add(1000, 500), known.add(1100, 10), known.add(1499, 1)]
    assert inner == [outer] * 3
    for one in (outer, *inner[:2]):
        known.remove(one)
    assert engine.calls == [("register", 1000)]
    known.remove(inner[2])
    assert engine.calls == [("register", 1000), ("unregister", 1000)]
    known.add(1100, 10)


@pytest.mark.parametrize(("address", "nbytes"), [(999, 2), (1499, 2), (900, 700)])
def test_other_overlaps_are_refused(address: int, nbytes: int) -> None:
    """Both ranges are named; the engine is not asked. Touching ranges are two."""
    engine = Recorder()
    known = registry(engine)
    known.add(1000, 500)
    with pytest.raises(InvalidInputError, match="0x3e8 to 0x5dc"):
        known.add(address, nbytes)
    assert len(engine.calls) == 1
    known.add(1500, 1)


@pytest.mark.parametrize(("code", "kind"), [(-7, InvalidInputError), (-1, TransportError)])
def test_the_engines_refusal(code: int, kind: type[Exception]) -> None:
    """A range that the engine refused is not remembered."""
    engine = Recorder(code)
    known = registry(engine)
    with pytest.raises(kind):
        known.add(1000, 500)
    engine.code = 0
    known.add(900, 500)


# ---- rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("message", messages.ALL, ids=lambda m: m.text)
def test_every_text_has_one_rule(message: messages.Message) -> None:
    """Of the kind its author meant, with and without detail."""
    rules = ClassifierRegistry(builtin_rules())
    for said in (message.engine(), message.engine("127.0.0.1:15000", None)):
        found = rules.matching(said)
        assert [rule.backend for rule in found] == ["mooncake"]
        assert rules.classify(said).kind is message.kind
