"""How the NIXL agent is set up, and what UCX reads from the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.backends._machine import has_rdma_device
from kvxfer.backends._options import config_from
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

__all__ = ["NixlConfig", "apply_environment", "check_transports"]

_SHARED_MEMORY = frozenset({"cma", "knem", "mm", "posix", "sysv", "xpmem", "shm", "sm", "self"})
"""UCX transports that cannot set up a connection by themselves."""


def _none_or(validator: Any) -> Any:
    return v.optional(validator)


@attrs.frozen(kw_only=True)
class NixlConfig:
    """Settings of one ``NixlTransport``."""

    enable_prog_thread: bool = attrs.field(default=True, validator=v.instance_of(bool))
    """NIXL's own progress thread. It costs about a third of a core when idle.

    Over transports that are emulated in software (tcp) a peer can READ from us only while
    something drives our side: this thread, or frequent calls of ``progress``.
    """
    num_threads: int = attrs.field(default=0, validator=v.and_(v.instance_of(int), v.ge(0)))
    """UCX workers of the agent, 0 for NIXL's default."""
    max_pieces: int = attrs.field(
        default=16384, validator=v.and_(v.instance_of(int), v.ge(1), v.lt(2**31))
    )
    """Most pieces of one post. NIXL sets no limit; one post holds up the others of the agent."""
    ucx_tls: str | None = attrs.field(default=None, validator=v.optional(v.instance_of(str)))
    """``UCX_TLS`` unless set: which UCX transports to use, such as ``tcp`` or ``sm,tcp``."""
    log_level: str | None = attrs.field(
        default="FATAL",
        validator=_none_or(v.in_(("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL"))),
    )
    """``NIXL_LOG_LEVEL`` unless set. What NIXL logs as an error arrives as a value here.

    It is read when NIXL is loaded.
    """

    @ucx_tls.validator
    def _can_connect(self, _attribute: object, value: str | None) -> None:
        if value is not None:
            check_transports("ucx_tls", value)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> NixlConfig:
        """From JSON values, as a configuration file has them.

        Raises:
            ConfigError: an unknown key, with the nearest one as a hint, or a value that does not
                fit.
        """
        return config_from(cls, options)


def check_transports(name: str, value: str) -> None:
    """Refuse a list with which UCX cannot connect.

    Raises:
        ConfigError: every transport in it moves bytes inside one machine only.
    """
    chosen = {t.strip() for t in value.split(",")}
    if not value.startswith("^") and chosen <= _SHARED_MEMORY:
        raise ConfigError(
            f"{name} is {value!r}, with which UCX cannot open a connection",
            next_step=f"add a network transport, such as {value},tcp",
        )


def apply_environment(config: NixlConfig, environ: MutableMapping[str, str]) -> None:
    """Set what NIXL and UCX read from the environment only, where the user has not set it.

    ``UCX_MODULES=^ib`` is set where the kernel has no InfiniBand or RoCE device: with UCX's ib
    module loaded there, the process dies by SIGSEGV when it exits.

    Raises:
        ConfigError: ``UCX_TLS`` in the environment names nothing that can connect.
    """
    if environ.get("UCX_TLS"):
        check_transports("the environment's UCX_TLS", environ["UCX_TLS"])
    elif config.ucx_tls is not None:
        environ["UCX_TLS"] = config.ucx_tls
    if not has_rdma_device():
        environ.setdefault("UCX_MODULES", "^ib")
    if config.log_level is not None:
        environ.setdefault("NIXL_LOG_LEVEL", config.log_level)
