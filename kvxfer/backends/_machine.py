"""What this machine has, as far as engines ask for it, and what is found wrong with it."""

from __future__ import annotations

import enum
import importlib.metadata
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

__all__ = ["Finding", "Level", "Machine", "has_rdma_device"]

_INFINIBAND = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")


class Level(enum.Enum):
    """How bad a finding is."""

    ERROR = "error"
    """It does not work, or not to the end."""
    WARNING = "warning"
    """It works, but not as it could or as somebody may expect."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that is wrong, and what to do about it."""

    backend: str
    level: Level
    what: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.level.value}: {self.what}. {self.next_step}"


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
            distributions=_versions(distributions),
        )


def _names(folder: Path) -> frozenset[str]:
    return frozenset(p.name for p in folder.iterdir()) if folder.is_dir() else frozenset()


def _versions(names: Iterable[str]) -> dict[str, str]:
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
