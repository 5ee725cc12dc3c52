"""The small parts: messages, configuration, protocol, links, the handover loop."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_rig import LIMIT, until

from kvxfer.backends.shm import ShmConfig, messages
from kvxfer.backends.shm.link import MAX_QUEUED, Link
from kvxfer.backends.shm.loop import HandoverLoop
from kvxfer.backends.shm.protocol import (
    MAX_MESSAGE,
    MAX_REGIONS,
    Granted,
    GrantedRegion,
    SegmentInfo,
    Want,
    decode_address,
    decode_from_client,
    decode_from_server,
    encode,
)
from kvxfer.errors import ConfigError, ErrorKind, HandshakeError, TransportError, WireError

# ---- messages -----------------------------------------------------------------------------


def test_messages_can_be_told_apart():
    """No text is the start of another one, so a rule by prefix is unambiguous."""
    texts = [m.text for m in messages.ALL]
    assert len(set(texts)) == len(texts) > 20
    for text in texts:
        assert [t for t in texts if t.startswith(text)] == [text]
    assert all(isinstance(m.kind, ErrorKind) for m in messages.ALL)


def test_messages_keep_their_start():
    """Text first, then detail and next step; the errno is the code; exceptions carry the value."""
    for message in messages.ALL:
        engine = message.engine("some detail", 7)
        assert engine.message.startswith(f"{message.text}: some detail")
        assert message.next_step in engine.message
        assert (engine.backend, engine.code) == ("shm", 7)
        error = message.error(TransportError, "some detail", 7)
        assert error.engine == engine
        assert error.next_step == message.next_step


# ---- configuration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", 0),
        ("workers", True),
        ("workers_max", 65),
        ("stuck_after", 0),
        ("stuck_after", float("nan")),
        ("queue_pieces", 0),
        ("handshake_timeout", -1.0),
        ("fence_timeout", float("inf")),
        ("fence_timeout", "1"),
        ("max_connections", 0),
    ],
)
def test_bad_settings_are_refused(field, value):
    """A wrong setting is refused with its name and value."""
    with pytest.raises(ConfigError, match=field) as caught:
        ShmConfig(**{field: value})
    assert repr(value) in str(caught.value)


def test_settings_must_fit_each_other():
    """``workers_max`` below ``workers`` is refused."""
    with pytest.raises(ConfigError, match="workers_max must be at least workers"):
        ShmConfig(workers=9)


def test_socket_directory_that_cannot_be_used(tmp_path):
    """A missing or too long ``socket_dir`` is a ConfigError of the transport, naming it, and leaves
    neither a thread nor a descriptor behind."""
    from kvxfer.backends.shm import ShmTransport

    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for path in (tmp_path / "missing", deep):
        with pytest.raises(ConfigError, match=path.name):
            ShmTransport(ShmConfig(socket_dir=str(path)))
    assert not list(deep.iterdir())
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_admitting_readers_works_without_yama():
    """``admit_readers`` is harmless on a kernel that restricts nothing."""
    from kvxfer.backends.shm import ShmTransport

    ShmTransport(ShmConfig(admit_readers=True)).close()


# ---- protocol -----------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_noise_is_a_wire_error(data):
    """Whatever arrives, decoding gives a message or a WireError."""
    for decode in (decode_address, decode_from_client, decode_from_server):
        with contextlib.suppress(WireError):
            decode(data)


@settings(max_examples=60, deadline=None)
@given(
    values=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    tag=st.sampled_from(["hello", "want", "granted", "gone", "denied", "bye", "welcome"]),
)
def test_wrong_fields_are_a_wire_error(values, tag):
    """Well-formed msgpack of the wrong shape is refused as well."""
    fields = values if isinstance(values, dict) else {"request": values, "regions": values}
    data = msgspec.msgpack.encode({**fields, "type": tag})
    for decode in (decode_address, decode_from_client, decode_from_server):
        with contextlib.suppress(WireError):
            decode(data)


def test_the_largest_messages_fit():
    """MAX_REGIONS of everything, with the largest numbers, is below MAX_MESSAGE."""
    most = 2**63 - 1
    granted = Granted(
        request=most,
        segments=[SegmentInfo(most, most, True, True)] * MAX_REGIONS,
        regions=[GrantedRegion(most, most, most, most)] * MAX_REGIONS,
    )
    want = Want(request=most, regions=[most] * MAX_REGIONS)
    assert decode_from_server(encode(granted)) == granted
    assert decode_from_client(encode(want)) == want
    assert max(len(encode(m)) for m in (granted, want)) < MAX_MESSAGE // 4


def test_requests_are_bounded():
    """A request for more regions than allowed is refused by the decoder."""
    data = msgspec.msgpack.encode(
        {"type": "want", "request": 1, "regions": [0] * (MAX_REGIONS + 1)}
    )
    with pytest.raises(WireError):
        decode_from_client(data)


# ---- links and the loop -------------------------------------------------------------------


@pytest.fixture
def loop():
    loop = HandoverLoop("test-loop")
    loop.start()
    yield loop
    assert loop.stop(LIMIT)


def on_loop(loop, function):
    """The result of ``function``, run by the loop."""
    done = threading.Event()
    result = []

    def call():
        result.append(function())
        done.set()

    loop.call(call)
    assert done.wait(LIMIT)
    return result[0]


def link_on(loop, sock, received, ended):
    return on_loop(
        loop,
        lambda: Link(
            loop,
            sock,
            on_message=lambda data, fds: received.append((data, list(fds))),
            on_closed=ended.append,
        ),
    )


def test_peer_that_does_not_read_is_dropped(loop):
    """What is queued for a peer is bounded: beyond, the connection ends, descriptors included."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = []
    link = link_on(loop, ours, [], ended)
    before = len(os.listdir("/proc/self/fd"))

    def flood():
        for _ in range(10 * MAX_QUEUED):
            link.send(b"x" * 30_000, (0,))

    on_loop(loop, flood)
    until(lambda: ended, "the end of the connection")
    assert ended == ["it does not read"]
    assert len(os.listdir("/proc/self/fd")) == before - 1
    theirs.close()


def test_queued_messages_arrive_in_order(loop):
    """Messages beyond the socket's buffer follow in order, with their descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = link_on(loop, ours, [], [])

    def many():
        for i in range(MAX_QUEUED):
            link.send(i.to_bytes(4, "little") + bytes(20_000), (1,))

    on_loop(loop, many)
    theirs.settimeout(LIMIT)
    for i in range(MAX_QUEUED):
        data, fds, _, _ = socket.recv_fds(theirs, 30_000, 4)
        assert int.from_bytes(data[:4], "little") == i
        assert len(fds) == 1
        os.close(fds[0])
    on_loop(loop, link.close)
    theirs.close()


def test_last_message_of_a_peer_that_hung_up_is_read(loop):
    """A refusal followed by a close arrives, although our own message cannot be sent any more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    received, ended = [], []

    def begin():
        theirs.send(b"refused")
        theirs.close()
        link = Link(
            loop,
            ours,
            on_message=lambda data, fds: received.append(data),
            on_closed=ended.append,
        )
        link.send(b"hello")

    on_loop(loop, begin)
    until(lambda: ended, "the end")
    assert (received, ended) == ([b"refused"], [""])


def test_an_error_in_a_callback_does_not_end_the_loop(loop, caplog):
    """A bug in one callback is logged and counted; the loop goes on."""

    def bad():
        raise ValueError("boom")

    loop.call(bad)
    assert on_loop(loop, lambda: 5) == 5
    assert loop.failures == 1
    assert "boom" in caplog.text


def test_timers_fire_in_order_and_can_be_cancelled(loop):
    """Timers fire by time, equal ones in the order they were set; a cancelled one does not."""
    fired = []

    def begin():
        loop.later(0.02, lambda: fired.append("c"))
        loop.later(0.0, lambda: fired.append("a"))
        loop.later(0.0, lambda: fired.append("b"))
        loop.later(0.01, lambda: fired.append("never")).cancel()

    on_loop(loop, begin)
    until(lambda: len(fired) == 3, "three timers")
    assert fired == ["a", "b", "c"]


def test_handshake_errors_pickle():
    """Errors of this backend cross processes like all others."""
    import pickle

    error = messages.NOT_SEALED.error(HandshakeError, "it is not a memfd", 22)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.engine) == (str(error), error.engine)
