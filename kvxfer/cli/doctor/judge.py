"""From facts to findings. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.hostcheck import Finding, Level, size_text
from kvxfer.core.keys import split_peer
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.cli.doctor.facts import HostFacts
    from kvxfer.cli.doctor.keyfacts import KeyFacts, PeerFacts
    from kvxfer.cli.doctor.portfacts import PortFacts

__all__ = ["host", "keys", "ports"]

HOST = "host"
"""What stands for a backend in findings that concern all of them."""
PYTHONS = ((3, 10), (3, 13))
"""Oldest and newest CPython that kvxfer is tested on."""
FILES = 4096
"""Open files that a worker with some hundred peers needs: four per dialled route, and engines'."""
PORTS_PER_WORKER = 2
"""The agent's and its keeper's."""

_MEMLOCK = "in a container --ulimit memlock=-1; in systemd LimitMEMLOCK=infinity"


def _finding(check: str, level: Level, what: str, next_step: str = "") -> Finding:
    return Finding(backend=HOST, check=check, level=level, what=what, next_step=next_step)


# ---- the host ------------------------------------------------------------------------------


def host(facts: HostFacts) -> list[Finding]:
    """Python, libraries, limits, devices."""
    return [*_python(facts), *_libraries(facts), *_memlock(facts), *_files(facts), *_devices(facts)]


def _python(facts: HostFacts) -> list[Finding]:
    version = ".".join(map(str, facts.python))
    what = f"CPython {version}, {facts.system} {facts.kernel}, {facts.cpus} CPUs"
    if facts.system != "Linux":
        return [_finding("python", Level.ERROR, what, "kvxfer runs on Linux only")]
    low, high = PYTHONS
    if not low <= facts.python <= high:
        step = f"use CPython {low[0]}.{low[1]} to {high[0]}.{high[1]}"
        return [_finding("python", Level.WARNING, f"{what}: not tested", step)]
    return [_finding("python", Level.OK, what)]


def _libraries(facts: HostFacts) -> list[Finding]:
    missing = [name for name, version in facts.distributions.items() if not version]
    found = [
        _finding(
            "libraries",
            Level.ERROR,
            f"{name} is not installed, which kvxfer requires",
            f"pip install {name}",
        )
        for name in missing
    ]
    if facts.curve and "pyzmq" not in missing:
        step = "keys cannot be used; install a pyzmq wheel from PyPI"
        found.append(_finding("libraries", Level.WARNING, facts.curve, step))
    if not found:
        there = ", ".join(f"{name} {version}" for name, version in facts.distributions.items())
        found.append(_finding("libraries", Level.OK, there))
    return found


def _memlock(facts: HostFacts) -> list[Finding]:
    limit = "no limit" if facts.memlock is None else f"RLIMIT_MEMLOCK is {size_text(facts.memlock)}"
    if facts.locked:
        what = f"{size_text(facts.cache_nbytes)} can be pinned ({limit})"
        return [_finding("memlock", Level.OK, what)]
    hard = facts.memlock_hard
    if hard is None or hard >= facts.cache_nbytes:
        step = f"ulimit -l {'unlimited' if hard is None else hard // 1024}; {_MEMLOCK}"
    else:
        needs = f"which needs root (the hard limit is {size_text(hard)})"
        step = f"ulimit -l unlimited, {needs}; {_MEMLOCK}"
    devices = bool(facts.rdma_devices)
    return [
        _finding(
            "memlock",
            Level.ERROR if devices else Level.WARNING,
            f"{limit}: {size_text(facts.cache_nbytes)} of KV cache cannot be pinned for RDMA"
            + ("" if devices else " (there is no RDMA device here)"),
            step,
        )
    ]


def _files(facts: HostFacts) -> list[Finding]:
    if facts.files is None or facts.files >= FILES:
        limit = "unlimited" if facts.files is None else str(facts.files)
        return [_finding("open files", Level.OK, f"the limit of open files is {limit}")]
    return [
        _finding(
            "open files",
            Level.WARNING,
            f"the limit of open files is {facts.files}: enough for some {facts.files // 8} peers",
            f"ulimit -n {FILES} or more",
        )
    ]


def _devices(facts: HostFacts) -> list[Finding]:
    rdma = ", ".join(sorted(facts.rdma_devices)) or "none"
    gpus = ", ".join(facts.gpus) or "none"
    return [_finding("devices", Level.NOTE, f"RDMA devices: {rdma}; GPU drivers: {gpus}")]


# ---- ports ---------------------------------------------------------------------------------


def ports(facts: PortFacts) -> list[Finding]:
    """Can workers listen, and who could reach them?"""
    return [*_exposure(facts), *_listening(facts)]


def _exposure(facts: PortFacts) -> list[Finding]:
    if facts.loopback or facts.keyed:
        return []
    return [
        _finding(
            "control port",
            Level.ERROR,
            f"on {facts.host} whoever reaches the control port could free transfers: without keys "
            "a worker refuses to listen there",
            "give --secret-key-file and --allowed-keys (`kvxfer keys generate`), listen on "
            "127.0.0.1, or set ControlConfig(insecure=True) if the network admits nobody else",
        )
    ]


def _listening(facts: PortFacts) -> list[Finding]:
    found = [
        _finding(
            "control port",
            Level.ERROR,
            f"cannot listen on {facts.host}" + (f" port {port}" if port else "") + f": {why}",
            "ports below 1024 need a privilege"
            if 0 < port < 1024
            else f"correct --bind-host: {facts.host} must be an address of this machine",
        )
        for port, why in list(facts.refused.items())[:1]
    ]
    taken = "; ".join(f"{port} is held by {who}" for port, who in list(facts.busy.items())[:4])
    if facts.busy and len(facts.free) < min(PORTS_PER_WORKER, facts.wanted):
        step = "end what holds it, choose another port, or port 0: the system then finds a free one"
        what = f"port in use on {facts.host}: {taken}"
        if facts.free:
            what += f"; {len(facts.free)} is free, and a worker takes {PORTS_PER_WORKER}"
        found.append(_finding("control port", Level.ERROR, what, step))
    elif facts.busy:
        what = f"{len(facts.free)} of {facts.wanted} ports are free on {facts.host}; {taken}"
        found.append(_finding("control port", Level.NOTE, what))
    if not found:
        what = f"{len(facts.free)} of {facts.wanted} ports are free" if facts.wanted else "works"
        found.append(_finding("control port", Level.OK, f"listening on {facts.host}: {what}"))
    return found


# ---- keys ----------------------------------------------------------------------------------


def keys(facts: KeyFacts) -> list[Finding]:
    """Do the files fit each other, and do peers take our key?"""
    if facts.secret_key_file is None and facts.allowed_keys is None:
        off = _finding(
            "keys",
            Level.NOTE,
            "no keys were named: whoever reaches a control port is believed",
            "see docs/security.md; check them with --secret-key-file and --allowed-keys",
        )
        return [off, *_peers(facts)]
    found = [_finding("keys", Level.ERROR, what, step) for what, step in facts.errors.values()]
    found += _halves(facts) + _own(facts) + _allowed(facts)
    if not found and facts.own is not None and facts.allowed is not None:
        names = sorted(set(facts.allowed.names.values()))
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        what = f"the pair of {facts.own.name!r} is whole; {len(facts.allowed)} keys are allowed"
        found.append(_finding("keys", Level.OK, f"{what}: {shown}"))
    return found + _peers(facts)


def _halves(facts: KeyFacts) -> list[Finding]:
    if facts.secret_key_file is not None and facts.allowed_keys is not None:
        return []
    missing = "--secret-key-file" if facts.secret_key_file is None else "--allowed-keys"
    return [
        _finding("keys", Level.ERROR, "a worker with keys needs both files", f"name {missing}, too")
    ]


def _own(facts: KeyFacts) -> list[Finding]:
    own = facts.own
    if own is None:
        return []
    found = []
    if facts.derived is not None and facts.derived != own.public:
        found.append(
            _finding(
                "keys",
                Level.ERROR,
                f"wrong key: the public key in {facts.secret_key_file} does not belong to its "
                "secret key, so no peer will let us in",
                "put the file back as it was made, or make a new pair with `kvxfer keys generate`",
            )
        )
    if facts.beside is not None and facts.beside != (own.name, own.public):
        found.append(
            _finding(
                "keys",
                Level.ERROR,
                f"wrong key: {facts.secret_key_file}.pub, which peers are given, is that of "
                f"{facts.beside[0]!r}, not the one of this secret key",
                f"write it again from `kvxfer keys show {facts.secret_key_file}`, and have the "
                "peers allow that",
            )
        )
    if facts.allowed is not None:
        whose = facts.allowed.name(own.public)
        if whose not in (None, own.name):
            found.append(
                _finding(
                    "keys",
                    Level.ERROR,
                    f"the allow-list gives our key the name {whose!r}, its own file {own.name!r}",
                    "a key has one name, in its own file and in every allow-list",
                )
            )
    return found


def _allowed(facts: KeyFacts) -> list[Finding]:
    if facts.allowed is None or len(facts.allowed):
        return []
    return [
        _finding(
            "keys",
            Level.ERROR,
            f"the allow-list {facts.allowed_keys} is empty: nobody would be let in",
            f"add the peers' public keys: kvxfer keys allow {facts.allowed_keys} PEER.pub",
        )
    ]


# ---- peers ---------------------------------------------------------------------------------


def _peers(facts: KeyFacts) -> list[Finding]:
    return [_peer(facts, address, peer) for address, peer in facts.peers.items()]


def _peer(facts: KeyFacts, address: str, peer: PeerFacts) -> Finding:
    if peer.error:
        return _finding("peer", Level.ERROR, f"{address}: {peer.error}")
    if peer.connected:
        return _finding("peer", Level.OK, f"{address}: connected")
    if not peer.refused:
        return _finding(
            "peer",
            Level.ERROR,
            f"{address}: nobody answers",
            "is the worker up, is that its address, does a firewall let the port through?",
        )
    if facts.own is None:
        return _finding(
            "peer",
            Level.ERROR,
            f"{address}: it answers, and does not speak with us",
            "it may have keys on: name ours with --secret-key-file and --allowed-keys",
        )
    try:
        name = split_peer(address)[1] or "it"
    except InvalidInputError:  # then it would not have been dialled
        name = "it"
    return _finding(
        "peer",
        Level.ERROR,
        f"{address}: wrong key: the peer does not allow our key ({facts.own.name!r}), or its own "
        f"is not the one that our allow-list has for {name!r}",
        "compare `kvxfer keys show` of each side with `kvxfer keys list` of the other",
    )
