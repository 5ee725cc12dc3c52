"""The control channel with keys: who gets in, who is thrown out, and what rotation does."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from security_rig import QUICK, Keyring, until

from kvxfer.core.control import ControlConfig, Security, ZmqChannel
from kvxfer.core.control_curve import generate_key_pair
from kvxfer.core.keyfiles import write_key_pair
from kvxfer.errors import ConfigError, InvalidInputError, MissingDependencyError

Make = Callable[..., ZmqChannel]


def talk(a: ZmqChannel, b: ZmqChannel, text: bytes = b"hello") -> tuple[Any, Any]:
    """``a`` dials ``b`` and says something; both routes, after an answer came back."""
    there = a.dial(b.address)
    assert a.send(there, text)
    got: list[Any] = []
    until(
        lambda: got.extend(b.receive()) or got, "the message", lambda: (a.receive(), b.wait(0.01))
    )
    assert got[-1].data == text
    back = got[-1].route
    assert b.send(back, b"yes")
    answers: list[Any] = []
    until(
        lambda: answers.extend(a.receive()) or answers,
        "the answer",
        lambda: (b.receive(), a.wait(0.01)),
    )
    assert answers[-1].data == b"yes"
    return there, back


def test_both_sides_know_each_other(keys: Keyring, channel: Make) -> None:
    """A message carries the name behind the key it came under, on either side of a connection."""
    keys.make("a"), keys.make("b")
    a, b = channel("a"), channel("b")
    assert b.address.endswith("#b")
    there = a.dial(b.address)
    a.send(there, b"x")
    got: list[Any] = []
    until(lambda: got.extend(b.receive()) or got, step=lambda: (a.receive(), b.wait(0.01)))
    assert got[0].peer == "a"
    assert b.peer_of(got[0].route) == "a"
    b.send(got[0].route, b"y")
    until(lambda: got.extend(a.receive()) or len(got) > 1, step=lambda: (b.receive(), a.wait(0.01)))
    assert got[1].peer == "b"
    assert a.peer_of(there) == "b"
    assert a.authenticated
    assert b.authenticated


def test_without_a_name_in_the_address_any_allowed_peer_is_met(
    keys: Keyring, channel: Make
) -> None:
    """A plain address is tried under one allowed key after the other, until one fits."""
    for name in ("zoe", "adam", "b", "a"):
        keys.make(name)
    a, b = channel("a"), channel("b")
    there = a.dial(b.address.partition("#")[0])
    a.send(there, b"x")
    got: list[Any] = []
    until(lambda: got.extend(b.receive()) or got, step=lambda: (a.receive(), b.wait(0.01)))
    b.send(got[0].route, b"y")
    until(a.receive, step=lambda: (b.receive(), a.wait(0.01)))
    assert a.peer_of(there) == "b"


def test_another_allowed_peer_is_not_taken_for_the_one_meant(keys: Keyring, channel: Make) -> None:
    """Dialling ``#b`` where ``c`` listens: c's key is as good as ours, but it is not b's."""
    for name in "abc":
        keys.make(name)
    a, c = channel("a"), channel("c")
    there = a.dial(c.address.partition("#")[0] + "#b")
    a.send(there, b"for b only")
    until(lambda: c.counters["inbound_handshakes_failed"], step=lambda: (a.receive(), c.wait(0.01)))
    assert c.counters["messages_in"] == 0
    assert a.counters["dialled_connected"] == 0


def test_a_peer_without_a_key_in_our_list_cannot_be_dialled(keys: Keyring, channel: Make) -> None:
    """An address that names a stranger is refused at once, with the name and the next step."""
    a = channel("a")
    with pytest.raises(InvalidInputError, match=r"no key of nobody.*kvxfer keys allow"):
        a.dial("127.0.0.1:1#nobody")
    with ZmqChannel() as plain, pytest.raises(InvalidInputError, match="has no keys"):
        plain.dial(a.address)


def refused(server: ZmqChannel, client: ZmqChannel, counter: str) -> None:
    """The client tries at least twice, and not one message of it arrives."""
    until(
        lambda: server.counters[counter] >= 2,
        counter,
        lambda: (client.receive(), client.wait(0.005), server.receive(), server.wait(0.005)),
    )
    assert server.counters["messages_in"] == 0
    assert server.routes["inbound"] == 0


def test_wrong_key(keys: Keyring, channel: Make) -> None:
    """A key that is not in the allow-list gets no message through; it is counted."""
    keys.make("b")
    b = channel("b")
    keys.make("stranger")  # the stranger's own list allows b, but b does not know the stranger
    stranger = channel("stranger")
    stranger.send(stranger.dial(b.address), b"let me in")
    refused(b, stranger, "keys_refused")
    assert b.counters["keys_admitted"] == 0


def test_no_key(keys: Keyring, channel: Make) -> None:
    """A plain peer of ours against a listener with keys: not one message, in either direction."""
    b = channel("b")
    plain = ZmqChannel(ControlConfig(**QUICK))
    try:
        plain.send(plain.dial(b.address.partition("#")[0]), b"let me in")
        refused(b, plain, "inbound_handshakes_failed")
    finally:
        plain.close()


def test_a_keyed_peer_does_not_talk_to_a_plain_listener(keys: Keyring, channel: Make) -> None:
    """With keys on nothing leaves towards somebody who shows none."""
    a = channel("a")
    plain = ZmqChannel()
    try:
        route = a.dial(plain.address)
        a.send(route, b"secret")
        until(
            lambda: a.counters["dialled_handshakes_failed"],
            step=lambda: (a.receive(), a.wait(0.01), plain.receive(), plain.wait(0.01)),
        )
        assert plain.counters["messages_in"] == 0
        assert a.counters["dialled_connected"] == 0
    finally:
        plain.close()


# ---- the start --------------------------------------------------------------------------------


def test_curve_missing(keys: Keyring, channel: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and a libzmq without CURVE: an error that says so, not an open door."""
    security = keys.security("a")
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(MissingDependencyError, match="without CURVE"):
        channel("a", security=security)


def test_no_allow_list_no_start(keys: Keyring, channel: Make) -> None:
    """Without an allow-list, or with an empty one, the channel does not come up."""
    keys.make("a", allowed=False)
    with pytest.raises(ConfigError, match=r"allow-list .* cannot be read.*kvxfer keys"):
        channel("a")
    keys.list.mkdir()
    with pytest.raises(ConfigError, match="empty"):
        channel("a")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o666])
def test_the_secret_must_be_ours_alone(keys: Keyring, channel: Make, mode: int) -> None:
    """A secret that others may read is refused, with its mode and the command that mends it."""
    secret = keys.make("a")
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod"):
        channel("a")
    secret.chmod(0o600)
    channel("a").close()


@pytest.mark.parametrize("what", ["directory", "file"])
def test_the_allow_list_must_be_ours_to_change(keys: Keyring, channel: Make, what: str) -> None:
    """An allow-list that others may write would let anybody in: refused."""
    keys.make("a")
    target = keys.list if what == "directory" else next(iter(keys.list.iterdir()))
    target.chmod(target.stat().st_mode | 0o022)
    with pytest.raises(ConfigError, match="could be changed by others"):
        channel("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="changing an owner needs root")
def test_the_secret_must_not_belong_to_somebody_else(keys: Keyring) -> None:
    """A file of another user is not taken, whatever its mode."""
    from kvxfer.core.keys import read_key_pair

    secret = keys.make("a")
    os.chown(secret, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        read_key_pair(secret)


def test_security_pickles_and_holds_no_key(keys: Keyring) -> None:
    """What is handed to other processes are paths."""
    security = keys.security("a")
    config = ControlConfig(security=security)
    assert pickle.loads(pickle.dumps(config)) == config
    secret = (keys.directory / "a").read_text().split("secret-key = ")[1].strip()
    assert secret.encode() not in pickle.dumps(config)
    assert secret not in repr(config)
    as_text = {"secret_key_file": security.secret_key_file, "allowed_keys": security.allowed_keys}
    assert ControlConfig(security=as_text).security == Security(**as_text)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_needs_keys(
    keys: Keyring, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without keys the bind is refused; ``insecure`` allows it and is logged; keys allow it."""
    config: dict[str, Any] = {"bind_host": host, "advertise_host": "127.0.0.1"}
    with pytest.raises(ConfigError, match=r"without keys.*insecure=True"):
        ZmqChannel(ControlConfig(**config))
    with caplog.at_level("INFO", "kvxfer.control"):
        ZmqChannel(ControlConfig(**config, insecure=True)).close()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "without authentication" in caplog.text
    caplog.clear()
    ZmqChannel(ControlConfig(**config, security=keys.security("a"))).close()
    assert caplog.records == []


# ---- rotation ---------------------------------------------------------------------------------


def test_a_new_key_is_admitted_without_a_restart(keys: Keyring, channel: Make) -> None:
    """A key added to the allow-list is let in after a reload, on the route that was refused."""
    b = channel("b")
    keys.make("late")
    late = channel("late")
    late.send(late.dial(b.address), b"at last")
    refused(b, late, "keys_refused")
    b.reload_keys()
    got: list[Any] = []
    until(lambda: got.extend(b.receive()) or got, step=lambda: (late.receive(), b.wait(0.01)))
    assert (got[0].data, got[0].peer) == (b"at last", "late")


def test_a_removed_key_is_cut_off(keys: Keyring, channel: Make) -> None:
    """The connection of a key that was removed ends at once, in both directions, and stays out."""
    keys.make("a"), keys.make("b")
    a, b = channel("a"), channel("b")
    there, back = talk(a, b)
    keys.forbid("a")
    b.reload_keys()
    assert not b.send(back, b"not for you")
    assert b.lost_routes() == [back]
    assert b.counters["inbound_cut_keys"] == 1
    before = b.counters["messages_in"]
    until(a.lost_routes, "its end", lambda: (a.receive(), a.wait(0.01), b.receive()))
    a.send(there, b"let me in")
    until(
        lambda: b.counters["keys_refused"] >= 2,
        "refusals",
        lambda: (a.receive(), a.wait(0.01), b.receive(), b.wait(0.01)),
    )
    assert b.counters["messages_in"] == before


def test_a_removed_key_is_cut_off_where_we_dialled(keys: Keyring, channel: Make) -> None:
    """The same where the connection is ours; added again, the same route comes back."""
    keys.make("a"), keys.make("b")
    a, b = channel("a"), channel("b")
    there, _ = talk(a, b)
    public = keys.directory / "b.pub"
    keys.forbid("b")
    a.reload_keys()
    assert a.lost_routes() == [there]
    assert not a.send(there, b"not for you")
    assert a.counters["dialled_cut_keys"] == 1
    from kvxfer.core.keyfiles import allow

    allow(keys.list, str(public))
    a.reload_keys()
    assert a.send(there, b"welcome back")
    got: list[Any] = []
    until(lambda: got.extend(b.receive()) or got, step=lambda: (a.receive(), b.wait(0.01)))
    assert got[-1].data == b"welcome back"


def test_others_keep_their_connections(keys: Keyring, channel: Make) -> None:
    """Neither an added nor a removed key disturbs the connections of anybody else."""
    for name in "abc":
        keys.make(name)
    a, b, c = channel("a"), channel("b"), channel("c")
    there, back = talk(a, b)
    talk(c, b)
    keys.make("d")
    keys.forbid("c")
    a.reload_keys(), b.reload_keys()
    assert a.send(there, b"still here")
    got: list[Any] = []
    until(lambda: got.extend(b.receive()) or got, step=lambda: (a.receive(), b.wait(0.01)))
    assert got[0].route == back
    assert a.lost_routes() == []


def test_our_own_pair_changes(keys: Keyring, channel: Make) -> None:
    """The steps of a rotation: the new public key to all, the new pair into place, the old public
    key out.  The route that was there before comes back under the new key, in both directions."""
    keys.make("a"), keys.make("b")
    a, b = channel("a"), channel("b")
    there, _ = talk(a, b)
    old = (keys.directory / "b.pub").read_text().split("public-key = ")[1].strip()
    keys.make("b", file="b.new")
    a.reload_keys()
    os.replace(keys.directory / "b.new", keys.directory / "b")
    b.reload_keys()
    until(
        a.lost_routes,
        "the old connection's end",
        lambda: (a.receive(), a.wait(0.01), b.receive()),
    )
    got: list[Any] = []

    def again() -> None:
        a.send(there, b"under the new key")
        a.receive(), a.wait(0.005), b.wait(0.005)

    until(lambda: got.extend(b.receive()) or got, "a message under the new key", again)
    keys.forbid(old)
    a.reload_keys(), b.reload_keys()
    assert a.lost_routes() == []
    # And as the side that dials: what b opens from now on shows the new key.
    talk(b, a)
    assert a.counters["keys_refused"] == 0


def test_a_broken_file_changes_nothing(keys: Keyring, channel: Make) -> None:
    """A reload that fails says why and leaves the keys of before; nobody is cut off by a typing
    error, and the next look takes the mended file."""
    keys.make("a"), keys.make("b")
    a, b = channel("a"), channel("b")
    there, _ = talk(a, b)
    broken = keys.list / "c.pub"
    broken.write_text("public-key = 123\n")
    with pytest.raises(ConfigError, match="64 hexadecimal"):
        b.reload_keys()
    assert b.counters["keys_not_reloaded"] == 1
    assert a.send(there, b"still here")
    until(b.receive, step=lambda: (a.receive(), b.wait(0.01)))
    broken.unlink()
    b.reload_keys()


def test_another_name_is_no_rotation(keys: Keyring, channel: Make) -> None:
    """Peers know us by our name: a pair with another one is refused while we run."""
    b = channel("b")
    keys.make("c")
    os.replace(keys.directory / "c", keys.directory / "b")
    with pytest.raises(ConfigError, match="named 'c'"):
        b.reload_keys()


def test_files_are_looked_at_by_themselves(keys: Keyring, channel: Make) -> None:
    """With a ``reload_interval`` nobody has to call anything: engines give no chance to."""
    keys.make("a"), keys.make("b")
    a = channel("a")
    b = channel("b", security=keys.security("b", reload_interval=0.01))
    _, back = talk(a, b)
    keys.forbid("a")
    until(lambda: b.counters["keys_reloaded"], "a reload", lambda: (b.receive(), b.wait(0.02)))
    assert not b.send(back, b"x")
    (keys.list / "x.pub").write_text("nothing\n")
    until(lambda: b.counters["keys_not_reloaded"], "a look", lambda: (b.receive(), b.wait(0.02)))
    b.receive()


# ---- bounds -----------------------------------------------------------------------------------


def test_silent_connections_are_bounded(keys: Keyring, channel: Make) -> None:
    """More than ``max_pending`` connections that never speak push the oldest out, and a friend
    gets in meanwhile."""
    keys.make("a"), keys.make("b")
    b = channel("b", max_pending=4, max_routes=8)
    assert b.bound.port is not None
    raw = []
    try:
        for _ in range(40):
            raw.append(socket.create_connection(("127.0.0.1", b.bound.port)))
            b.receive()
        until(lambda: b.counters["inbound_accepted"] == 40, step=b.receive)
        until(
            lambda: b.counters["inbound_cut_pending"] >= 36,
            "cuts",
            lambda: (b.wait(0.05), b.receive()),
        )
        talk(channel("a"), b)
        assert b._listener._guard.pending <= 12
    finally:
        for each in raw:
            each.close()


def test_slow_greeting(keys: Keyring, channel: Make) -> None:
    """A greeting that trickles in does not live longer than the handshake time-out."""
    b = channel("b", handshake_timeout=0.2)
    assert b.bound.port is not None
    with socket.create_connection(("127.0.0.1", b.bound.port)) as raw:
        began = time.monotonic()
        raw.setblocking(False)
        sent = 0
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)

        def trickle() -> None:
            nonlocal sent
            b.wait(0.01)
            b.receive()
            if sent < len(greeting) - 1:
                try:
                    raw.send(greeting[sent : sent + 1])
                except OSError:
                    return
                sent += 1

        until(lambda: b.counters["inbound_closed"], "its end", trickle)
        assert time.monotonic() - began < 10
    assert b.routes["inbound"] == 0


def test_memory_before_the_handshake_is_bounded(keys: Keyring, channel: Make) -> None:
    """Strangers cannot have us keep what they send before they showed a key: beyond the bound the
    largest are hung up on."""
    b = channel("b", max_unread_nbytes=1 << 16, max_message_nbytes=1 << 20)
    assert b.bound.port is not None
    raw = []
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)
    try:
        for _ in range(4):
            each = socket.create_connection(("127.0.0.1", b.bound.port))
            each.sendall(greeting + b"\x06" + (2 << 20).to_bytes(8, "big") + bytes(200_000))
            raw.append(each)
        until(
            lambda: b.counters["inbound_cut_unread"] >= 3,
            "cuts",
            lambda: (b.wait(0.05), b.receive()),
        )
    finally:
        for each in raw:
            each.close()


def test_endless_frames_are_bounded() -> None:
    """libzmq keeps the frames of a message until the last one. Whoever sends frames without end is
    hung up on, also after it sent a proper message.  (Without keys, because a client of libzmq
    sends whole messages only; behind the handshake the rule is the same.)"""
    with ZmqChannel(ControlConfig(max_unread_nbytes=1 << 20)) as b:
        assert b.bound.port is not None
        with socket.create_connection(("127.0.0.1", b.bound.port)) as raw:
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
            ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
            raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            raw.settimeout(20)
            answer = b""
            while b"READY" not in answer:
                answer += raw.recv(4096)
            raw.sendall(b"\x00\x01x")
            got: list[Any] = []
            until(lambda: got.extend(b.receive()) or got, step=lambda: b.wait(0.01))
            assert got[0].data == b"x"
            assert b.routes["inbound"] == 1
            raw.setblocking(False)

            def endless() -> None:
                try:
                    raw.send(b"\x03" + (50_000).to_bytes(8, "big") + bytes(50_000))
                except BlockingIOError:
                    pass
                except OSError:
                    return
                b.wait(0.005)
                b.receive()

            until(lambda: b.counters["inbound_cut_unread"], "the cut", endless)
            until(lambda: b.routes["inbound"] == 0, "its end", lambda: (b.wait(0.01), b.receive()))


def test_generated_keys_are_distinct() -> None:
    """Each pair is new, and named if it was not given a name."""
    pairs = [generate_key_pair() for _ in range(3)]
    assert len({p.public for p in pairs}) == len({p.secret for p in pairs}) == 3
    assert all(p.name.startswith("key-") for p in pairs)
    assert pairs[0].secret.hex() not in repr(pairs[0])


def test_a_key_file_is_not_written_over(keys: Keyring) -> None:
    """Generating into an existing file would lose a key: refused."""
    secret = keys.make("a")
    with pytest.raises(ConfigError, match="exists"):
        write_key_pair(secret, generate_key_pair("a"))
