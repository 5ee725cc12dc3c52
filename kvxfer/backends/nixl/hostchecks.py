"""What NIXL needs of a host, for ``kvxfer doctor``."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

import attrs

from kvxfer.backends._library import library_check
from kvxfer.backends._machine import Machine
from kvxfer.backends.nixl.binding import BACKEND
from kvxfer.backends.nixl.config import NixlConfig, apply_environment
from kvxfer.backends.nixl.environment import check, this_machine
from kvxfer.core.hostcheck import Finding, HostCheck, HostQuery, Level
from kvxfer.errors import ConfigError

__all__ = ["CHECKS"]


@attrs.frozen(kw_only=True)
class _Facts:
    config: NixlConfig
    environ: Mapping[str, str]
    machine: Machine


def _environment(query: HostQuery) -> _Facts:
    """As the process is, and then prepared, before anything loads UCX."""
    config = NixlConfig.from_options(query.options)
    facts = _Facts(config=config, environ=dict(os.environ), machine=this_machine())
    _prepare(config, os.environ)
    return facts


def _prepare(config: NixlConfig, environ: MutableMapping[str, str]) -> None:
    try:
        apply_environment(config, environ)
    except ConfigError:
        return  # ``check`` finds the same, and says it in order with the rest


def _judge(facts: _Facts) -> list[Finding]:
    found = check(facts.config, facts.environ, facts.machine)
    if found:
        return found
    devices = ", ".join(sorted(facts.machine.rdma_devices)) or "none: UCX uses tcp"
    what = f"the environment is in order; RDMA devices: {devices}"
    return [Finding(backend=BACKEND, level=Level.OK, what=what)]


CHECKS = (
    HostCheck("environment", _environment, _judge),
    library_check(
        BACKEND,
        ("nixl", "nixl-cu12", "nixl-cu13"),
        "nixl._bindings",
        "pip install nixl; without torch: pip install --no-deps nixl nixl-cu12 nixl-cu13",
    ),
)
