"""Which ports workers could listen on here. Binds each for a moment, and judges nothing."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import attrs

from kvxfer.core.address import Address, PortRange
from kvxfer.core.control_bind import port_holder

__all__ = ["PortFacts", "gather"]

_MOST = 1024
"""Ports that are tried of a range."""


@attrs.frozen(kw_only=True)
class PortFacts:
    """``busy``: who holds each taken port. ``refused``: what the kernel says to the others."""

    host: str
    loopback: bool
    keyed: bool
    wanted: int
    """How many ports were named; 0: the system chooses."""
    free: tuple[int, ...]
    busy: dict[int, str]
    refused: dict[int, str]


def gather(host: str, ports: str | None, *, keyed: bool) -> PortFacts:
    """Try to listen on ``ports``, a port or a range; None: on one of the system's choice.

    Raises:
        InvalidInputError: no host or no ports.
    """
    chosen = list(PortRange.parse(ports))[:_MOST] if ports else []
    literal = Address.parse(host).host
    free: list[int] = []
    busy: dict[int, str] = {}
    refused: dict[int, str] = {}
    loopback = False
    for port in chosen or [0]:
        try:
            loopback = _listen(literal, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                busy[port] = port_holder(port) or "unknown"
            else:
                refused[port] = error.strerror or str(error)
            continue
        free.append(port)
    return PortFacts(
        host=literal,
        loopback=loopback or _is_loopback(literal),
        keyed=keyed,
        wanted=len(chosen),
        free=tuple(free),
        busy=busy,
        refused=refused,
    )


def _listen(host: str, port: int) -> bool:
    """Listen for a moment; whether that is loopback. Raises ``OSError``."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        # As libzmq does: what lingers in TIME_WAIT does not take a port, a listener does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(address)
            listener.listen(1)
        except OverflowError as error:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from error
        return _is_loopback(str(address[0]))


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False
