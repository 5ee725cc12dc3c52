"""The doctor's judgement: pure functions of facts."""

from __future__ import annotations

import errno
from typing import Any

import attrs
import pytest

from kvxfer.backends._library import LibraryFacts, judge_library
from kvxfer.backends.moriio.hostchecks import MemlockFacts, judge_memlock
from kvxfer.backends.shm.hostchecks import (
    MemoryFacts,
    NamespaceFacts,
    PtraceFacts,
    judge_memory,
    judge_namespaces,
    judge_ptrace,
)
from kvxfer.cli.doctor import judge
from kvxfer.cli.doctor.command import nbytes_of
from kvxfer.cli.doctor.facts import HostFacts
from kvxfer.cli.doctor.keyfacts import KeyFacts, PeerFacts
from kvxfer.cli.doctor.portfacts import PortFacts
from kvxfer.core.hostcheck import Finding, Level, size_text
from kvxfer.errors import ConfigError

GOOD = HostFacts(
    python=(3, 11),
    system="Linux",
    kernel="6.1",
    distributions={"numpy": "2.0", "pyzmq": "27.0"},
    curve="",
    cache_nbytes=64 << 30,
    memlock=None,
    memlock_hard=None,
    locked=True,
    files=65536,
    rdma_devices=frozenset({"mlx5_0"}),
    gpus=("AMD",),
    cpus=64,
)
PORTS = PortFacts(
    host="127.0.0.1", loopback=True, keyed=False, wanted=0, free=(0,), busy={}, refused={}
)


def worst(findings: list[Finding]) -> list[Finding]:
    """Those that need somebody to act; every one of them has a next step."""
    found = [f for f in findings if f.level not in (Level.OK, Level.NOTE)]
    assert all(f.next_step for f in found)
    return found


def test_a_good_host() -> None:
    assert not worst(judge.host(GOOD))


@pytest.mark.parametrize(
    ("change", "check", "level", "words"),
    [
        ({"system": "Darwin"}, "python", Level.ERROR, "Linux only"),
        ({"python": (3, 9)}, "python", Level.WARNING, "3.10 to 3.13"),
        ({"python": (3, 14)}, "python", Level.WARNING, "3.10 to 3.13"),
        ({"distributions": {"numpy": ""}}, "libraries", Level.ERROR, "pip install numpy"),
        ({"curve": "libzmq has none"}, "libraries", Level.WARNING, "libzmq has none"),
        ({"files": 1024}, "open files", Level.WARNING, "ulimit -n"),
        ({"locked": False, "memlock": 65536}, "memlock", Level.ERROR, "ulimit -l unlimited"),
        (
            {"locked": False, "memlock": 65536, "memlock_hard": 8 << 20},
            "memlock",
            Level.ERROR,
            "needs root (the hard limit is 8 MiB)",
        ),
        (
            {"locked": False, "memlock": 65536, "memlock_hard": 1 << 40},
            "memlock",
            Level.ERROR,
            "ulimit -l 1073741824",
        ),
        (
            {"locked": False, "memlock": 65536, "rdma_devices": frozenset()},
            "memlock",
            Level.WARNING,
            "there is no RDMA device here",
        ),
    ],
)
def test_host(change: dict[str, Any], check: str, level: Level, words: str) -> None:
    """Each fact by itself: what is named, how bad it is, what to do."""
    (found,) = worst(judge.host(attrs.evolve(GOOD, **change)))
    assert (found.check, found.level) == (check, level)
    assert words in str(found)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, Level.OK, "listening on 127.0.0.1"),
        ({"wanted": 1, "free": (), "busy": {7: "pid 9 (x)"}}, Level.ERROR, "7 is held by pid 9"),
        # One free port is what somebody asked for, and enough without a keeper's own.
        ({"wanted": 1, "free": (7,)}, Level.OK, "1 of 1 ports are free"),
        ({"wanted": 3, "free": (7,), "busy": {8: "a", 9: "b"}}, Level.ERROR, "takes 2"),
        ({"wanted": 3, "free": (7, 8), "busy": {9: "b"}}, Level.NOTE, "2 of 3 ports"),
        ({"free": (), "refused": {0: "no such address"}}, Level.ERROR, "correct --bind-host"),
        ({"free": (), "refused": {80: "denied"}, "wanted": 1}, Level.ERROR, "need a privilege"),
        ({"loopback": False, "host": "0.0.0.0"}, Level.ERROR, "kvxfer keys generate"),
        ({"loopback": False, "host": "0.0.0.0", "keyed": True}, Level.OK, "0.0.0.0"),
    ],
)
def test_ports(change: dict[str, Any], level: Level, words: str) -> None:
    """The first finding about the control port."""
    found = judge.ports(attrs.evolve(PORTS, **change))
    worst(found)
    assert found[0].level is level
    assert words in str(found[0])


def test_no_keys_is_said() -> None:
    facts = KeyFacts(secret_key_file=None, allowed_keys=None, errors={})
    (found,) = judge.keys(facts)
    assert found.level is Level.NOTE


def test_half_of_the_keys() -> None:
    facts = KeyFacts(secret_key_file="a", allowed_keys=None, errors={})
    (found,) = worst(judge.keys(facts))
    assert "--allowed-keys" in found.next_step


def test_a_peer_with_keys_where_we_have_none() -> None:
    """It answers and refuses: the keys are what is missing on our side."""
    facts = KeyFacts(
        secret_key_file=None,
        allowed_keys=None,
        errors={},
        peers={"tcp://h:1": PeerFacts(refused=2)},
    )
    (found,) = worst(judge.keys(facts))
    assert "--secret-key-file" in found.next_step


# ---- backends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (PtraceFacts(scope=None, code=0), Level.OK, "can be read"),
        (PtraceFacts(scope=0, code=0), Level.OK, "can be read"),
        (PtraceFacts(scope=1, code=errno.EPERM), Level.WARNING, "admit_readers"),
        (PtraceFacts(scope=1, code=errno.EPERM, admits=True), Level.OK, "admit_readers"),
        (PtraceFacts(scope=2, code=errno.EPERM, admits=True), Level.WARNING, "allocate"),
        (PtraceFacts(scope=None, code=errno.ENOSYS), Level.WARNING, "seccomp"),
    ],
)
def test_ptrace_scope(facts: PtraceFacts, level: Level, words: str) -> None:
    """Under each of Yama's scopes, and where a container forbids the call."""
    (found,) = judge_ptrace(facts)
    assert found.level is level
    assert words in str(found)
    assert found.next_step or level is Level.OK


@pytest.mark.parametrize(
    ("own", "initial", "level"),
    [(True, True, Level.OK), (True, False, Level.NOTE), (False, False, Level.ERROR)],
)
def test_namespaces(own: bool, initial: bool, level: Level) -> None:
    (found,) = judge_namespaces(NamespaceFacts(own_proc=own, initial=initial))
    assert found.level is level


@pytest.mark.parametrize(
    ("error", "available", "level"),
    [("", 2, Level.OK), ("", 0, Level.ERROR), ("no seals", 2, Level.ERROR)],
)
def test_memory_files(error: str, available: int, level: Level) -> None:
    facts = MemoryFacts(error=error, next_step="", available=available, wanted=1)
    (found,) = judge_memory(facts)
    assert found.level is level
    assert found.next_step or level is Level.OK


def test_pinned_memory_of_an_engine() -> None:
    """For an engine that must pin, a limit is an error whatever devices there are."""
    (found,) = judge_memlock(MemlockFacts(limit=65536, wanted=1 << 30, locked=False))
    assert found.level is Level.ERROR
    assert "64 KiB" in found.what
    assert "LimitMEMLOCK" in found.next_step
    (found,) = judge_memlock(MemlockFacts(limit=65536, wanted=1 << 30, locked=True))
    assert found.level is Level.OK


@pytest.mark.parametrize(
    ("found", "error", "level"),
    [
        ({}, "ModuleNotFoundError", Level.MISSING),
        ({"engine": "1.0"}, "ImportError: libnuma.so.1: no such file", Level.ERROR),
        ({"engine": "1.0"}, "", Level.OK),
        ({}, "", Level.OK),
    ],
)
def test_libraries(found: dict[str, str], error: str, level: Level) -> None:
    """Not installed is told from installed and broken."""
    facts = LibraryFacts(
        backend="b",
        module="m",
        install="pip install engine",
        needs="libnuma1",
        found=found,
        error=error,
    )
    (told,) = judge_library(facts)
    assert told.level is level
    if level is Level.ERROR:
        assert "libnuma.so.1" in told.what
        assert "libnuma1" in told.next_step


def test_sizes() -> None:
    assert [nbytes_of(x) for x in ("1", "64K", "2m", "1G")] == [1, 65536, 2 << 20, 1 << 30]
    for wrong in ("", "0", "1.5G", "G", "-1"):
        with pytest.raises(ConfigError, match="--cache-bytes"):
            nbytes_of(wrong)
    texts = [size_text(x) for x in (100, 4096, 8 << 20, 3 << 29, 1 << 40)]
    assert texts == ["100 bytes", "4 KiB", "8 MiB", "1.5 GiB", "1 TiB"]
