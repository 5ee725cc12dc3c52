"""What kvxfer itself finds on this host. Looks, and judges nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

__all__ = ["HostFacts", "gather"]

REQUIRED = ("attrs", "entrypoints", "msgspec", "numpy", "pyzmq", "tenacity")
_GPUS = {"/dev/kfd": "AMD", "/dev/nvidiactl": "NVIDIA"}


@attrs.frozen(kw_only=True)
class HostFacts:
    """Sizes are bytes; a limit of None is no limit."""

    python: tuple[int, int]
    system: str
    kernel: str
    distributions: Mapping[str, str]
    """Versions of what kvxfer requires, empty where it is not installed."""
    curve: str
    """Why keys cannot be used; empty if they can."""
    cache_nbytes: int
    memlock: int | None
    memlock_hard: int | None
    locked: bool
    """The kernel let us lock ``cache_nbytes``, perhaps by privilege."""
    files: int | None
    rdma_devices: frozenset[str]
    gpus: tuple[str, ...]
    cpus: int


def gather(cache_nbytes: int) -> HostFacts:
    """Of this process and host."""
    from kvxfer.backends._machine import Machine, locks_memory

    soft, hard = (_limit(x) for x in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    return HostFacts(
        python=sys.version_info[:2],
        system=platform.system(),
        kernel=platform.release(),
        distributions={name: _version(name) for name in REQUIRED},
        curve=_curve(),
        cache_nbytes=cache_nbytes,
        memlock=soft,
        memlock_hard=hard,
        locked=locks_memory(cache_nbytes),
        files=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        rdma_devices=Machine.here().rdma_devices,
        gpus=tuple(name for path, name in _GPUS.items() if Path(path).exists()),
        cpus=len(os.sched_getaffinity(0)),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _curve() -> str:
    try:
        from kvxfer.core.control_curve import require_curve

        require_curve()
    except ImportError as error:  # MissingDependencyError is one
        return str(error)
    return ""
