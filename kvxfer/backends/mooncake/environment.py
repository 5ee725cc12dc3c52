"""The environment variables that the Mooncake engine reads: what we set, and what is wrong.

They hold for the whole process, and the engine's threads read some of them at every transfer.
Adding a name while another thread reads can crash the process: so names are added before the first
engine of the process starts, and never later.  A variable that the user has set is not changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, MutableMapping

from kvxfer.backends._machine import Finding, Level, Machine
from kvxfer.backends.mooncake.config import DEFAULT_QUEUE, MooncakeConfig, Protocol
from kvxfer.backends.mooncake.messages import BACKEND
from kvxfer.errors import ConfigError

__all__ = ["ProcessEnvironment", "check", "queue_limit", "this_process"]

_WITHOUT_EFFECT = frozenset({"MC_LOG_LEVEL"})
"""Read once per process: a later transport takes what there is."""
_OFF = ("0", "false", "no")


def wanted(config: MooncakeConfig, *, rdma: bool) -> dict[str, str]:
    """What ``config`` says in the engine's variables. ``rdma``: this machine has such a device."""
    values = {
        "MC_LOG_LEVEL": config.log_level,
        "MC_TCP_STATUS_TIMEOUT_SEC": config.status_timeout,
        "MC_TCP_LANES_PER_PEER": config.lanes_per_peer,
        "MC_USE_IPV6": "1" if config.address.version == 6 else None,
        # It takes RDMA wherever it finds a device, whatever it is asked for.
        "MC_FORCE_TCP": "1" if rdma and config.protocol is Protocol.TCP else None,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


class ProcessEnvironment:
    """The variables of one process. Any thread."""

    def __init__(self) -> None:
        self._set: dict[str, str] | None = None
        """By us, once the first engine has been prepared."""
        self._lock = threading.Lock()

    def prepare(
        self, config: MooncakeConfig, environ: MutableMapping[str, str], *, rdma: bool
    ) -> None:
        """Set what the engine reads from the environment only, where the user has not set it.

        Raises:
            ConfigError: a variable takes away what the capabilities promise; or a setting comes
                too late, or differs from what an earlier transport set for the whole process.
        """
        for finding in _broken_promises(config, environ):
            raise ConfigError(finding.what, next_step=finding.next_step)
        with self._lock:
            if self._set is None:
                self._set = {}
                for name, value in wanted(config, rdma=rdma).items():
                    if not environ.get(name):
                        self._set[name] = environ[name] = value
                return
            for name, value in wanted(config, rdma=rdma).items():
                known = self._set.get(name)
                users = known is None and bool(environ.get(name))
                if name in _WITHOUT_EFFECT or users or known == value:
                    continue
                had = "was not set" if known is None else f"was set to {known}"
                raise ConfigError(
                    f"{name} {had} when the first Mooncake engine of this process started, and "
                    f"cannot become {value}: it holds for the whole process",
                    next_step="give all transports of a process the same settings",
                )


this_process = ProcessEnvironment()


def check(
    config: MooncakeConfig | None = None,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> list[Finding]:
    """What would keep a ``MooncakeTransport(config)`` from working here.

    Loads nothing and changes nothing. Left out, ``environ`` is that of the process, and
    ``machine`` this one.
    """
    config = config or MooncakeConfig()
    environ = os.environ if environ is None else environ
    machine = Machine.here() if machine is None else machine
    found = _broken_promises(config, environ)
    if config.protocol is Protocol.RDMA and not machine.rdma_devices:
        found.append(
            _error(
                "the protocol is rdma, but there is no InfiniBand or RoCE device: the engine would "
                "take tcp",
                "configure tcp, or give the process a device",
            )
        )
    return found


def _broken_promises(config: MooncakeConfig, environ: Mapping[str, str]) -> list[Finding]:
    found = []
    if environ.get("MC_TCP_PROTO") == "1":
        found.append(
            _error(
                "the environment sets MC_TCP_PROTO=1, with which the engine calls a WRITE complete "
                "when the local socket took it",
                "unset it",
            )
        )
    pool = environ.get("MC_TCP_ENABLE_CONNECTION_POOL", "")
    if pool.lower() in _OFF:
        found.append(
            _error(
                f"the environment sets MC_TCP_ENABLE_CONNECTION_POOL={pool}, with which every "
                "piece dials the peer and waits for it",
                "unset it",
            )
        )
    if config.protocol is Protocol.RDMA and environ.get("MC_FORCE_TCP"):
        found.append(
            _error(
                "MC_FORCE_TCP is set, but the protocol is rdma",
                "unset it; in one process, all Mooncake transports use one protocol",
            )
        )
    return found


def _error(what: str, next_step: str) -> Finding:
    return Finding(backend=BACKEND, level=Level.ERROR, what=what, next_step=next_step)


def queue_limit(environ: Mapping[str, str]) -> int:
    """Pieces that the engine queues per peer. It ignores what is no number from 1 to 65535."""
    value = environ.get("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "")
    valid = value.isascii() and value.isdecimal() and 1 <= int(value) <= 65535
    return int(value) if valid else DEFAULT_QUEUE
