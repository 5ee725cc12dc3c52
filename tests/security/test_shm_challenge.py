"""A local process that was not told the token over the control channel gets nothing out of shm."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec
import pytest
from security_rig import Keyring, Node, at, until

from kvxfer.agent.handles import TransferState
from kvxfer.backends.shm import ShmTransport, messages
from kvxfer.backends.shm.link import socket_name
from kvxfer.backends.shm.protocol import (
    PROTOCOL,
    Address,
    Challenge,
    Granted,
    Hello,
    Proof,
    Refused,
    Want,
    Welcome,
    decode_address,
    decode_from_server,
    encode,
    encode_address,
    nonce,
    proof_of,
)
from kvxfer.errors import HandshakeError


@pytest.fixture
def owner() -> Iterator[ShmTransport]:
    transport = ShmTransport()
    transport.register(transport.allocate_bytes(4096))
    yield transport
    transport.close()


class Stranger:
    """A process-local socket to the handover server, with nothing but what is public."""

    def __init__(self, owner: ShmTransport) -> None:
        self.address: Address = decode_address(owner.local_info().data)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        self.sock.connect(socket_name(self.address.socket))
        self.hello = Hello(
            lowest=PROTOCOL,
            highest=PROTOCOL,
            nonce=nonce(),
            incarnation="stranger",
            wanted=owner.incarnation,
        )

    def send(self, message: Any) -> None:
        self.sock.send(encode(message))

    def receive(self) -> tuple[Any, list[int]]:
        data, fds, _, _ = socket.recv_fds(self.sock, 65536, 16)
        return (decode_from_server(data) if data else None), fds

    def challenge(self) -> Challenge:
        self.send(self.hello)
        challenge, fds = self.receive()
        assert isinstance(challenge, Challenge)
        assert fds == []
        return challenge


@pytest.fixture
def stranger(owner: ShmTransport) -> Iterator[Callable[[], Stranger]]:
    made: list[Stranger] = []

    def build() -> Stranger:
        made.append(Stranger(owner))
        return made[-1]

    yield build
    for each in made:
        each.sock.close()


WANT = Want(request=1, regions=[0])


def test_with_the_token(owner: ShmTransport, stranger: Callable[[], Stranger]) -> None:
    """The way in, so that the refusals below mean something."""
    friend = stranger()
    challenge = friend.challenge()
    token = friend.address.token
    friend.send(Proof(mac=proof_of(token, server=False, hello=friend.hello, challenge=challenge)))
    welcome, _ = friend.receive()
    assert isinstance(welcome, Welcome)
    assert welcome.mac == proof_of(token, server=True, hello=friend.hello, challenge=challenge)
    friend.send(WANT)
    granted, fds = friend.receive()
    assert isinstance(granted, Granted)
    assert len(fds) == 1
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "at_once", [True, False], ids=["instead of a hello", "after the challenge"]
)
def test_without_a_proof(
    owner: ShmTransport, stranger: Callable[[], Stranger], at_once: bool
) -> None:
    """Asking for regions before the proof hangs up; no descriptor leaves."""
    local = stranger()
    if not at_once:
        local.challenge()
    local.send(WANT)
    assert local.receive() == (None, [])
    until(lambda: owner.counters.get("malformed") == 1)


@pytest.mark.parametrize("wrong", ["guess", "other token", "server's", "other nonce", "reflected"])
def test_a_wrong_proof(owner: ShmTransport, stranger: Callable[[], Stranger], wrong: str) -> None:
    """Guesses, proofs under another token, for the other side or for another conversation: refused
    and counted, and the connection ends."""
    local = stranger()
    challenge = local.challenge()
    token = local.address.token
    mac = {
        "guess": bytes(32),
        "other token": proof_of(bytes(32), server=False, hello=local.hello, challenge=challenge),
        "server's": proof_of(token, server=True, hello=local.hello, challenge=challenge),
        "other nonce": proof_of(
            token, server=False, hello=local.hello, challenge=Challenge(nonce=bytes(32))
        ),
        "reflected": challenge.nonce,
    }[wrong]
    local.send(Proof(mac=mac))
    refused, fds = local.receive()
    assert isinstance(refused, Refused)
    assert (refused.reason, fds) == ("token", [])
    assert local.receive() == (None, [])
    assert owner.counters["refused_token"] == 1


def test_a_replayed_proof(owner: ShmTransport, stranger: Callable[[], Stranger]) -> None:
    """What a friend said yesterday opens nothing today: every challenge is new."""
    friend = stranger()
    challenge = friend.challenge()
    proof = Proof(
        mac=proof_of(friend.address.token, server=False, hello=friend.hello, challenge=challenge)
    )
    friend.send(proof)
    assert isinstance(friend.receive()[0], Welcome)
    replay = stranger()
    replay.hello = friend.hello
    assert replay.challenge().nonce != challenge.nonce
    replay.send(proof)
    assert isinstance(replay.receive()[0], Refused)


def test_one_try_per_connection(owner: ShmTransport, stranger: Callable[[], Stranger]) -> None:
    """A second hello, or a proof that nobody asked for, ends the connection."""
    twice = stranger()
    twice.challenge()
    twice.send(twice.hello)
    assert twice.receive() == (None, [])
    unasked = stranger()
    unasked.send(Proof(mac=bytes(32)))
    assert unasked.receive() == (None, [])


@pytest.mark.parametrize("welcome", ["no proof", "wrong proof"])
def test_an_impostor_listens(owner: ShmTransport, welcome: str) -> None:
    """Somebody who took the peer's place on the socket learns no token, and is not believed."""
    name = f"@kvxfer-impostor-{os.getpid()}-{welcome.replace(' ', '-')}"
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(socket_name(name))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(20)
                heard.append(connection.recv(65536))
                if welcome == "wrong proof":
                    connection.send(encode(Challenge(nonce=nonce())))
                    heard.append(connection.recv(65536))
                connection.send(encode(Welcome(version=PROTOCOL, mac=bytes(32))))
                while data := connection.recv(65536):
                    heard.append(data)

        thread = threading.Thread(target=serve)
        thread.start()
        address = msgspec.structs.replace(decode_address(owner.local_info().data), socket=name)
        info = attrs.evolve(owner.local_info(), data=encode_address(address))
        other = ShmTransport()
        try:
            answer = other.connect(info)
            until(lambda: answer.poll() != (None, None), "the answer")
            peer, error = answer.poll()
        finally:
            other.close()
        thread.join(20)
    assert peer is None
    assert isinstance(error, HandshakeError)
    assert error.message.startswith(messages.BROKEN_PROTOCOL.text)
    assert not any(address.token in data for data in heard)


def test_silence_is_bounded(owner: ShmTransport, stranger: Callable[[], Stranger]) -> None:
    """Who does not answer the challenge is hung up on after the hello time-out, not kept."""
    local = stranger()
    local.challenge()
    (holder,) = owner._server._holders
    assert holder.hello_timer is not None
    assert not holder.hello_timer.cancelled
    assert not holder.incarnation


def test_agents_with_keys_over_shm(keys: Keyring, node: Callable[..., Node]) -> None:
    """The token travels over the authenticated channel: a pull over shm works with keys on."""
    for name in ("prefill", "decode"):
        keys.make(name)
    producer, consumer = (node(name, transport=ShmTransport()) for name in ("prefill", "decode"))
    offer = producer.agent.hold("t", at(1, 2))
    handle = consumer.agent.pull(offer, at(3, 4))
    assert consumer.agent.wait(handle, 30)
    assert handle.state is TransferState.DONE, handle.error
    assert consumer.content([3, 4]) == producer.content([1, 2])
