"""What MoRI-IO needs of a host, for ``kvxfer doctor``.

The engine ends its process where memory cannot be pinned: that is asked of the kernel first, and
then rehearsed, as the transport itself does before its first registration.
"""

from __future__ import annotations

import os
import resource

import attrs

from kvxfer.backends._library import library_check
from kvxfer.backends._machine import Machine, locks_memory
from kvxfer.backends.moriio.binding import BACKEND
from kvxfer.backends.moriio.config import MoriioConfig
from kvxfer.backends.moriio.environment import effective
from kvxfer.backends.moriio.rehearsal import rehearse_registration
from kvxfer.core.hostcheck import Finding, HostCheck, HostQuery, Level, size_text
from kvxfer.core.memory import Span
from kvxfer.errors import KvxferError

__all__ = ["CHECKS", "MemlockFacts"]

_UNLIMITED = (
    "ulimit -l unlimited; in a container --ulimit memlock=-1; in systemd LimitMEMLOCK=infinity"
)


def _environment(query: HostQuery) -> tuple[MoriioConfig, Machine]:
    config = effective(MoriioConfig.from_options(query.options), os.environ)
    return config, Machine.here()


def _judge_environment(facts: tuple[MoriioConfig, Machine]) -> list[Finding]:
    config, machine = facts
    queue = f"a send queue takes {config.max_send_wr} work requests"
    if config.max_send_wr > _COMMON_NIC:
        return [
            _finding(
                Level.WARNING,
                f"{queue}, more than the {_COMMON_NIC} of a common NIC: posts may be refused",
                "lower MoriioConfig.max_send_wr to what ibv_devinfo -v says (max_qp_wr)",
            )
        ]
    devices = ", ".join(sorted(machine.rdma_devices)) or "the kernel lists none"
    return [_finding(Level.OK, f"the environment is in order; {queue}; RDMA devices: {devices}")]


_COMMON_NIC = 4351
"""Entries of a send queue on one common NIC; deeper ones exist."""


@attrs.frozen(kw_only=True)
class MemlockFacts:
    """``limit``: RLIMIT_MEMLOCK in bytes, None for no limit. ``locked``: the kernel said yes."""

    limit: int | None
    wanted: int
    locked: bool


def _memlock(query: HostQuery) -> MemlockFacts:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MemlockFacts(
        limit=None if soft == resource.RLIM_INFINITY else soft,
        wanted=query.cache_nbytes,
        locked=locks_memory(query.cache_nbytes),
    )


def judge_memlock(facts: MemlockFacts) -> list[Finding]:
    if facts.locked:
        return [_finding(Level.OK, f"{size_text(facts.wanted)} can be pinned")]
    limit = "no limit is set"
    if facts.limit is not None:
        limit = f"RLIMIT_MEMLOCK is {size_text(facts.limit)}"
    return [
        _finding(
            Level.ERROR,
            f"{size_text(facts.wanted)} of KV cache cannot be pinned ({limit}): the engine would "
            "end the process",
            _UNLIMITED,
        )
    ]


def _rehearsal(query: HostQuery) -> KvxferError | None:
    if not locks_memory(query.cache_nbytes):
        return None  # said already
    config = MoriioConfig.from_options(query.options)
    try:
        rehearse_registration(config.host, Span(address=1, nbytes=query.cache_nbytes), config)
    except KvxferError as error:
        return error
    return None


def judge_rehearsal(facts: KvxferError | None) -> list[Finding]:
    if facts is None:
        return []
    return [_finding(Level.ERROR, facts.message, facts.next_step)]


def _finding(level: Level, what: str, next_step: str = "") -> Finding:
    return Finding(backend=BACKEND, level=level, what=what, next_step=next_step)


CHECKS = (
    library_check(
        BACKEND,
        ("amd-mori",),
        "mori.cpp",
        "pip install amd-mori (wheels: CPython 3.10; 3.12 with glibc 2.38)",
        "libibverbs1",
    ),
    HostCheck("environment", _environment, _judge_environment),
    HostCheck("memlock", _memlock, judge_memlock),
    HostCheck("registration", _rehearsal, judge_rehearsal),
)
