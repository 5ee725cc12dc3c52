"""Host names and addresses, for an engine that knows IPv4 only and exits on a bad one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

from kvxfer.core.verdict import EngineError
from kvxfer.errors import ConfigError, HandshakeError, InvalidInputError, PeerLostError

__all__ = ["hang_up", "local_ipv4", "probe", "resolve_ipv4"]

_NO_IPV6 = "MoRI-IO opens IPv4 sockets only"


def resolve_ipv4(host: str) -> str:
    """``host`` as a dotted IPv4 address. May ask a name server.

    Raises:
        InvalidInputError: an IPv6 address, or a name without an IPv4 address.
    """
    bare = host.strip("[]").partition("%")[0]
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(bare)
        if address.version == 6:
            raise InvalidInputError(
                f"{host} is an IPv6 address: {_NO_IPV6}", next_step="use the host's IPv4 address"
            )
        return str(address)
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(
            f"{host!r} does not resolve to an IPv4 address ({error}): {_NO_IPV6}",
            next_step="check the name, or give the host's IPv4 address",
        ) from error
    return str(found[0][4][0])


def local_ipv4(host: str) -> str:
    """``host`` resolved, and proven to belong to this machine by binding a port on it.

    The engine ends the process when it cannot bind.

    Raises:
        ConfigError: it cannot be resolved, is no address peers can dial, or is not local.
    """
    try:
        address = resolve_ipv4(host)
    except InvalidInputError as error:
        raise ConfigError(f"host: {error.message}", next_step=error.next_step) from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(
            f"host is {host}, which peers cannot dial",
            next_step="name the address of the interface that peers reach",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError as error:
            raise ConfigError(
                f"host {host} ({address}) is no address of this machine: {error.strerror}",
                next_step="use the address of a local interface",
            ) from error
    return address


def probe(address: str, port: int, timeout: float) -> None:
    """Open and close a TCP connection, waiting at most ``timeout`` seconds.

    While the engine dials a host that does not answer it holds a lock that every other call needs,
    the interpreter's too: it is only let near a port that has just accepted us.

    Raises:
        PeerLostError: nobody listens there.
        HandshakeError: no answer in time, or no route.
    """
    where = f"the control port {address}:{port}"
    try:
        socket.create_connection((address, port), timeout).close()
    except ConnectionRefusedError as error:
        raise PeerLostError(
            f"nobody listens on {where}",
            next_step="check that the peer process lives",
            engine=EngineError.of("moriio", error),
        ) from error
    except OSError as error:
        raise HandshakeError(
            f"{where} cannot be reached within {timeout:g} s: {error}",
            next_step="check routes and firewalls between the hosts",
            engine=EngineError.of("moriio", error),
        ) from error


def hang_up(port: int) -> None:
    """Take no more connections on ``port``, and end those that this process has accepted there.

    The engine's end waits for whoever is in the middle of a handshake with it, and then for whoever
    is next in line, each up to ``MORI_IO_CP_TIMEOUT_MS`` and with the interpreter lock held: a peer
    that was stopped, or a stranger who sent one byte, would stop every thread of this process.
    """
    for state in (_LISTEN, _ESTABLISHED):  # in this order: nobody comes in between
        _shut(_sockets(port, state))


_ESTABLISHED, _LISTEN = "01", "0A"


def _sockets(port: int, state: str) -> set[str]:
    """What ``/proc/self/fd`` calls the sockets at ``port`` that are in this state."""
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    # Columns: number, local address, remote address, state, ..., inode.
    return {
        f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == state
    }


def _shut(sockets: set[str]) -> None:
    for name in os.listdir("/proc/self/fd") if sockets else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") in sockets:
                with socket.socket(fileno=os.dup(int(name))) as one:
                    one.shutdown(socket.SHUT_RDWR)
