"""What Mooncake needs of a host, for ``kvxfer doctor``."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from kvxfer.backends._library import library_check
from kvxfer.backends._machine import Machine
from kvxfer.backends.mooncake.binding import DISTRIBUTIONS
from kvxfer.backends.mooncake.config import MooncakeConfig
from kvxfer.backends.mooncake.environment import check, queue_limit
from kvxfer.backends.mooncake.messages import BACKEND
from kvxfer.core.hostcheck import Finding, HostCheck, HostQuery, Level

__all__ = ["CHECKS"]


@attrs.frozen(kw_only=True)
class _Facts:
    config: MooncakeConfig
    environ: Mapping[str, str]
    machine: Machine


def _environment(query: HostQuery) -> _Facts:
    return _Facts(
        config=MooncakeConfig.from_options(query.options),
        environ=dict(os.environ),
        machine=Machine.here(),
    )


def _judge(facts: _Facts) -> list[Finding]:
    found = check(facts.config, facts.environ, facts.machine)
    if found:
        return found
    devices = ", ".join(sorted(facts.machine.rdma_devices)) or "none"
    what = (
        f"the environment is in order; {facts.config.protocol.value}, {queue_limit(facts.environ)} "
        f"pieces per peer; RDMA devices: {devices}"
    )
    return [Finding(backend=BACKEND, level=Level.OK, what=what)]


CHECKS = (
    library_check(
        BACKEND,
        DISTRIBUTIONS,
        "mooncake.engine",
        "pip install mooncake-transfer-engine-non-cuda (or a build for your device)",
        "the system libraries libibverbs1, libnuma1 and libcurl4",
    ),
    HostCheck("environment", _environment, _judge),
)
