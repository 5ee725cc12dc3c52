"""One address parser for everybody."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.core.address import Address, PortRange
from kvxfer.errors import InvalidInputError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("2001:db8::7", "2001:db8::7", 6000),
        ("[2001:db8::7]:6301", "2001:db8::7", 6301),
        ("10.0.0.5:6301", "10.0.0.5", 6301),
        ("node-a:6301", "node-a", 6301),
        ("::1", "::1", 6000),
        ("fe80::1%eth0", "fe80::1%eth0", 6000),
        ("[fe80::1%eth0]:6301", "fe80::1%eth0", 6301),
        ("[::1]", "::1", 6000),
        ("2605:340:cd51:1000::5", "2605:340:cd51:1000::5", 6000),
        ("node-a", "node-a", 6000),
        ("10.0.0.5", "10.0.0.5", 6000),
        ("tcp://node-a:6301", "node-a", 6301),
        ("tcp://[2001:db8::7]:6301", "2001:db8::7", 6301),
        ("prefill-0.prefill.ns.svc.cluster.local:1", "prefill-0.prefill.ns.svc.cluster.local", 1),
        ("with_underscore:1", "with_underscore", 1),
        ("node-a.:65535", "node-a.", 65535),
    ],
)
def test_parses(text: str, host: str, port: int) -> None:
    """Report O35: no literal is cut at a colon; the default port is taken where none is named."""
    assert Address.parse(text, default_port=6000) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1:2:3", "more than one colon"),
        ("", "empty"),
        (":6301", "empty"),
        ("tcp://", "empty"),
        ("udp://10.0.0.5:1", "only tcp://"),
        ("node-a:", "port"),
        ("node-a:0", "port"),
        ("node-a:65536", "port"),
        ("node-a:+1", "port"),
        ("node-a: 1", "port"),
        ("node-a:６３０１", "port"),
        ("10.0.0.5:6301/x", "port"),
        ("10.0.0.300:1", "IPv4"),
        ("10.0.5:1", "IPv4"),
        ("6301", "IPv4"),
        ("*:6301", "0.0.0.0"),
        ("a b:1", "name"),
        ("-a:1", "name"),
        ("a..b:1", "name"),
        ("nöde:1", "name"),
        ("a" * 64 + ":1", "name"),
        ("[node-a]:1", "brackets"),
        ("[10.0.0.5]:1", "brackets"),
        ("[::1", "never closed"),
        ("[::1]6301", 'after "]"'),
        ("[::1]:", "port"),
        ("[[::1]]:1", "brackets"),
        ("fe80::1%", "colon"),
        ("fe80::1%a%b", "colon"),
        ("::1::2", "colon"),
        ("10.0.0.5%eth0:1", "IP"),
    ],
)
def test_refuses(text: str, reason: str) -> None:
    """What is no address is refused, with the text itself and the reason."""
    with pytest.raises(InvalidInputError) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", [None, 6301, b"10.0.0.5:1"])
def test_refuses_what_is_no_text(text: object) -> None:
    """A wrong type is an error of ours, not an AttributeError from the depths."""
    with pytest.raises(InvalidInputError, match="must be text"):
        Address.parse(text)  # type: ignore[arg-type]


def test_long_input_is_cut_in_the_message() -> None:
    """An address may come from a peer: the error does not repeat a megabyte of it."""
    with pytest.raises(InvalidInputError) as caught:
        Address.parse("a" * 1_000_000)
    assert len(str(caught.value)) < 500
    assert "1000000 characters" in str(caught.value)


def test_formats() -> None:
    """Report O35: brackets exactly where an IPv6 literal meets a port."""
    assert Address("2001:db8::7", 6301).tcp() == "tcp://[2001:db8::7]:6301"
    assert Address("10.0.0.5", 6301).tcp() == "tcp://10.0.0.5:6301"
    assert str(Address("fe80::1%eth0", 1)) == "[fe80::1%eth0]:1"
    assert str(Address("2001:db8::7")) == "2001:db8::7"
    with pytest.raises(InvalidInputError, match="names no port"):
        Address("10.0.0.5").tcp()


def test_one_spelling() -> None:
    """Spellings of one literal or name are equal, whatever Python version writes them."""
    assert Address.parse("2001:DB8:0:0::0007") == Address("2001:db8::7")
    assert Address.parse("Node-A:1") == Address("node-a", 1)
    assert str(Address("::ffff:a00:5", 1)) == "[::ffff:10.0.0.5]:1"
    assert len({Address("::1", 1), Address("0:0:0:0:0:0:0:1", 1)}) == 1


def test_kinds() -> None:
    """Version, loopback and wildcard follow from the literal; a name is none of them."""
    assert [Address(h).version for h in ("10.0.0.5", "::1", "node-a", "fe80::1%2")] == [
        4,
        6,
        None,
        6,
    ]
    assert all(
        Address(h).is_loopback for h in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")
    )
    assert not any(Address(h).is_loopback for h in ("10.0.0.5", "::", "localhost", "fe80::1%lo"))
    assert all(Address(h).is_wildcard for h in ("0.0.0.0", "::", "::ffff:0.0.0.0"))
    assert not any(Address(h).is_wildcard for h in ("10.0.0.5", "::1", "node-a"))


@pytest.mark.parametrize("port", [0, -1, 65536, True, "1", 1.0])
def test_port_is_checked(port: object) -> None:
    """Ports are integers from 1 to 65535, also in the constructor."""
    with pytest.raises(InvalidInputError, match="port must be an integer from 1 to 65535"):
        Address("node-a", port)  # type: ignore[arg-type]


_names = st.from_regex(r"\A[a-z]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z]{1,5}){0,2}\Z")
_hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda a: f"{a}%eth0"),
    _names,
)


@settings(deadline=None)
@given(host=_hosts, port=st.one_of(st.none(), st.integers(1, 65535)))
def test_what_is_written_is_read_back(host: str, port: int | None) -> None:
    """Formatting and parsing are inverse; so is pickling."""
    address = Address(host, port)
    assert Address.parse(str(address)) == address
    assert pickle.loads(pickle.dumps(address)) == address
    if port is not None:
        assert Address.parse(address.tcp()) == address


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No input ends in anything but an address or an InvalidInputError."""
    try:
        address = Address.parse(text)
    except InvalidInputError:
        return
    assert Address.parse(str(address)) == address


def test_port_range() -> None:
    """A range has both ends, a length, and reads back."""
    span = PortRange.parse("41000-41003")
    assert list(span) == [41000, 41001, 41002, 41003]
    assert len(span) == 4
    assert 41003 in span
    assert 41004 not in span
    assert PortRange.parse(str(span)) == span
    assert list(PortRange.parse("41000")) == [41000]


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1-2-3", "0-5", "5-4", "65535-65536", None])
def test_port_range_refuses(text: object) -> None:
    """What is no range of ports is refused."""
    with pytest.raises(InvalidInputError, match=r"(?i)port"):
        PortRange.parse(text)  # type: ignore[arg-type]
