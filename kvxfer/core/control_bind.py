"""Binding a listener: try the ports in order, and say who holds them when none is free."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvxfer.core.address import Address
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Listener", "bind_first_free", "listeners", "own_ports", "port_holder"]

_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h
_NAMED = 4  # holders named in one message; looking one up walks through all of /proc


def bind_first_free(
    bind: Callable[[str], None],
    host: str,
    ports: Iterable[int],
    *,
    holder: Callable[[int], str | None] | None = None,
) -> None:
    """Bind the first port that is free.

    Nothing is probed beforehand: the bind itself decides, so there is no moment in between in
    which somebody else could take the port.

    Args:
        bind: takes ``tcp://host:port`` (port ``*`` for the operating system's choice) and raises
            ``OSError`` when it cannot.
        host: an IP literal.
        ports: in the order in which they are tried.
        holder: names the process that listens on a port; for the error message.

    Raises:
        ConfigError: all ports are taken, or the host cannot be bound at all.
    """
    holder = port_holder if holder is None else holder
    busy: list[int] = []
    for port in ports:
        endpoint = Address(host, port).tcp() if port else f"{Address(host, 1).tcp()[:-1]}*"
        try:
            bind(endpoint)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                busy.append(port)
                continue
            raise _refused(endpoint, host, error) from error
        return
    named = "; ".join(f"{port} is held by {holder(port) or 'unknown'}" for port in busy[:_NAMED])
    more = f"; and {len(busy) - _NAMED} more" if len(busy) > _NAMED else ""
    which = f"port {busy[0]} is" if len(busy) == 1 else f"all ports {busy[0]}-{busy[-1]} are"
    raise ConfigError(
        f"{which} in use on {host}: {named}{more}",
        next_step="Choose another port or a wider port_range, or port 0 to let the system choose",
    )


def _refused(endpoint: str, host: str, error: OSError) -> ConfigError:
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        step = f"{host} is no address of this machine: correct bind_host"
    elif error.errno == errno.EACCES:
        step = "Ports below 1024 need a privilege: choose another"
    else:
        step = "Correct bind_host or port"
    return ConfigError(f"cannot listen on {endpoint}: {error.strerror}", next_step=step)


@attrs.frozen
class Listener:
    """One listening TCP socket, as the kernel lists it."""

    port: int
    uid: int
    inode: int


def listeners(table: str) -> list[Listener]:
    """The listening sockets in the text of ``/proc/net/tcp`` or ``tcp6``; other lines are skipped.

    Columns by number: 1 local address (hexadecimal ``address:port``), 3 state, 7 uid, 9 inode.
    """
    found = []
    for line in table.splitlines()[1:]:
        columns = line.split()
        if len(columns) < 10 or columns[3] != _LISTEN:
            continue
        try:
            port = int(columns[1].rpartition(":")[2], 16)
            found.append(Listener(port, int(columns[7]), int(columns[9])))
        except ValueError:
            continue
    return found


def port_holder(port: int, proc: Path = Path("/proc")) -> str | None:
    """Who listens on ``port``, such as ``pid 4711 (python3), uid 1000``; None if unknown.

    Processes of other users cannot be looked into without privilege; then only the uid is known.
    Reads all of ``/proc``: for error messages.
    """
    for name in ("tcp", "tcp6"):
        try:
            table = (proc / "net" / name).read_text()
        except OSError:
            continue
        for listener in listeners(table):
            if listener.port == port:
                process = _process_of(listener.inode, proc)
                prefix = f"pid {process}, " if process else "a process of "
                return f"{prefix}uid {listener.uid}"
    return None


def own_ports(proc: Path = Path("/proc")) -> list[int]:
    """TCP ports that this process listens on, in order; empty where ``/proc`` cannot be read."""
    inodes = set()
    try:
        for entry in (proc / "self" / "fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    except OSError:
        return []
    ports = set()
    for name in ("tcp", "tcp6"):
        try:
            table = (proc / "net" / name).read_text()
        except OSError:
            continue
        ports |= {x.port for x in listeners(table) if x.inode in inodes}
    return sorted(ports)


def _process_of(inode: int, proc: Path) -> str | None:
    wanted = f"socket:[{inode}]"
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            for fd in (entry / "fd").iterdir():
                if os.readlink(fd) == wanted:
                    return f"{entry.name} ({(entry / 'comm').read_text().strip()})"
        except OSError:
            continue  # gone meanwhile, or not ours to look into
    return None
