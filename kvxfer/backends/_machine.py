"""What this machine has, as far as engines ask for it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from kvxfer.core.hostcheck import Finding, Level

__all__ = ["Finding", "Level", "Machine", "has_rdma_device", "locks_memory", "versions"]

_INFINIBAND = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")


@attrs.frozen(kw_only=True)
class Machine:
    """Names of devices; ``memlock`` in bytes, None for no limit; versions by distribution."""

    rdma_devices: frozenset[str] = frozenset()
    net_devices: frozenset[str] = frozenset()
    memlock: int | None = None
    distributions: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def here(cls, distributions: Iterable[str] = ()) -> Machine:
        """This machine; ``distributions`` are those to look for."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(
            rdma_devices=_names(_INFINIBAND),
            net_devices=_names(_NET),
            memlock=None if soft == resource.RLIM_INFINITY else soft,
            distributions=versions(distributions),
        )


def _names(folder: Path) -> frozenset[str]:
    return frozenset(p.name for p in folder.iterdir()) if folder.is_dir() else frozenset()


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def has_rdma_device(root: Path = _INFINIBAND) -> bool:
    """Whether the kernel knows an InfiniBand or RoCE device."""
    return root.is_dir() and any(root.iterdir())


_MLOCK_ONFAULT = 1
"""linux/mman.h: counts against the limit, and takes no page until it is touched."""
_MAP_NORESERVE = 0x4000


def locks_memory(nbytes: int) -> bool:
    """Whether this process may lock ``nbytes`` more bytes, asked of the kernel.

    RDMA engines pin what they register, which the same limit bounds. Takes no memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    with mmap.mmap(-1, nbytes, flags=flags) as area:
        start = (ctypes.c_char * nbytes).from_buffer(area)
        try:
            address = ctypes.c_void_p(ctypes.addressof(start))
            return bool(libc.mlock2(address, ctypes.c_size_t(nbytes), _MLOCK_ONFAULT) == 0)
        finally:
            del start  # unmapping it unlocks it
