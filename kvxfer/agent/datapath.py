"""What an agent's backends are checked for before anything begins.

Keys on the control channel say nothing about an engine's own ports: no false sense of safety.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvxfer.core.capabilities import DataPathAuth
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.config import AgentConfig
    from kvxfer.core.control_config import ChannelAuth, ControlConfig
    from kvxfer.core.transport import Transport
    from kvxfer.policies.failover import Failover

__all__ = ["failover_order", "refuse_open_data_path"]

_log = logging.getLogger("kvxfer.agent")


def failover_order(
    failover: Failover | None, transports: Sequence[Transport]
) -> tuple[str, ...] | None:
    """The order in which an agent's backends are used; None without failover.

    Raises:
        ConfigError: there is nothing to move to, or a name that is none of the agent's backends.
    """
    if failover is None:
        return None
    names = [t.name for t in transports]
    unknown = [name for name in failover.order if name not in names]
    if unknown:
        raise ConfigError(
            f"failover.order names {unknown[0]!r}, but the backends of this agent are {names}",
            next_step="give the agent every backend that it may move to: Agent(['nixl', 'shm'])",
        )
    if len(names) < 2:
        raise ConfigError(
            f"failover needs several backends, and this agent has {names} only",
            next_step="Agent(['nixl', 'shm'], ...), or leave failover out",
        )
    return failover.order


def refuse_open_data_path(
    transports: Sequence[Transport],
    config: AgentConfig,
    control: ControlConfig | None,
    auth: ChannelAuth | None,
) -> None:
    """With keys on, a backend that anybody can connect to needs ``data_network_trusted``.

    Raises:
        ConfigError: names the backends and the ports that have to be isolated.
    """
    keys = auth is not None or (control is not None and control.security is not None)
    if not keys:
        return
    open_ones = [t.name for t in transports if t.capabilities.data_path_auth is DataPathAuth.NONE]
    if not open_ones:
        return
    backends = " and ".join(repr(name) for name in open_ones)
    if config.data_network_trusted:
        _log.info("the data network of backend %s is trusted: its ports admit everybody", backends)
        return
    raise ConfigError(
        f"keys are on, but the engine of backend {backends} hands memory keys and addresses to "
        f"whoever connects to its own ports ({_ports()}): keys of the control channel do not close "
        "them",
        next_step="isolate the data network (these TCP ports and the engine's RDMA or UCX traffic) "
        "so that only your workers reach it, then set AgentConfig(data_network_trusted=True); or "
        "use a backend whose data_path_auth is not NONE",
    )


def _ports() -> str:
    from kvxfer.core.control_bind import own_ports

    ports = own_ports()
    if not ports:
        return "opened when a peer connects"
    shown = ", ".join(str(port) for port in ports[:16]) + (", ..." if len(ports) > 16 else "")
    return f"among those that this process listens on: TCP {shown}"
