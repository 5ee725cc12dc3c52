"""How the MoRI-IO engine is set up, and which of its environment variables matter to us."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

__all__ = ["MoriioConfig", "PollMode", "apply_environment", "effective"]


class PollMode(enum.Enum):
    """How the engine's own thread looks for completions. It keeps a core busy either way."""

    POLLING = "polling"
    EVENT = "event"


def _between(least: int, most: int) -> Any:
    return v.and_(v.instance_of(int), v.ge(least), v.le(most))


def _none_or(validator: Any) -> Any:
    return v.optional(validator)


@attrs.frozen(kw_only=True)
class MoriioConfig:
    """Settings of one ``MoriioTransport``. Sizes are bytes; times carry their unit in the name.

    The engine's choices that decide whether a refusal is atomic are not fields: ``post_batch_size``
    follows from ``qp_per_transfer``, one worker posts, and chunking is off.
    """

    host: str = attrs.field(default="127.0.0.1", validator=v.and_(v.instance_of(str), v.min_len(1)))
    """The address of this machine that peers dial: a name or an IPv4 address, resolved by us.

    The engine's control port listens on it and answers whoever connects.
    """
    qp_per_transfer: int = attrs.field(default=1, validator=_between(1, 64))
    """Queue pairs per peer and device pair. Each post uses one of them."""
    max_send_wr: int = attrs.field(default=4096, validator=_between(1, 65535))
    """Depth of a send queue. Below the 4351 of a common NIC, so that the engine gets what we count
    with; more pieces than this never go into one post."""
    max_post_nbytes: int = attrs.field(default=1 << 30, validator=_between(1, 2**32 - 1))
    """Most bytes of one post.

    The engine merges neighbouring pieces into one work request and refuses one that is larger than
    the port's ``max_msg_sz`` (1 GiB and more on RDMA NICs, 8 MiB under Soft-RoCE).
    """
    poll_cq_mode: PollMode = attrs.field(
        default=PollMode.POLLING, validator=v.instance_of(PollMode)
    )
    enable_notification: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """The engine's own notifications. kvxfer does not read them, they take room in the send queue,
    and a failed one poisons the status of good data: off."""
    notif_per_qp: int = attrs.field(default=1024, validator=_between(1, 65535))
    own_admission: bool = attrs.field(default=True, validator=v.instance_of(bool))
    """Refuse a post that the send queue has no room for before the engine sees it.

    With False the engine waits up to ``sq_backoff_us`` and then refuses.
    """
    connect_timeout_s: float = attrs.field(
        default=5.0, converter=float, validator=v.and_(v.gt(0.0), v.lt(3600.0))
    )
    """For the TCP connection to a peer's control port, before the engine is let near it."""
    sq_backoff_us: int | None = attrs.field(
        default=1000, validator=_none_or(_between(1, 2**31 - 1))
    )
    """``MORI_IO_SQ_BACKOFF_TIMEOUT_US`` unless set: how long a post waits in the engine for room.

    The engine's default is 5 s. It reads the variable once per process.
    """
    control_timeout_ms: int | None = attrs.field(
        default=None, validator=_none_or(_between(1, 2**31 - 1))
    )
    """``MORI_IO_CP_TIMEOUT_MS`` unless set: how long a handshake waits for a silent peer (5 s)."""
    qp_timeout: int | None = attrs.field(default=None, validator=_none_or(_between(1, 31)))
    """``MORI_IO_QP_TIMEOUT`` unless set: exponent of the transport's ACK timeout (engine: 14)."""
    qp_retry_count: int | None = attrs.field(default=None, validator=_none_or(_between(0, 7)))
    """``MORI_IO_QP_RETRY_CNT`` unless set (engine: 7, which some devices take for infinite)."""
    log_level: str | None = attrs.field(
        default="critical",
        validator=_none_or(v.in_(("trace", "debug", "info", "warn", "error", "critical"))),
    )
    """``MORI_IO_LOG_LEVEL`` and ``MORI_APP_LOG_LEVEL`` unless they or ``MORI_GLOBAL_LOG_LEVEL`` are
    set.

    The engine logs to standard output; what it reports as an error arrives as a value here. It
    reads the variable when its library is loaded.
    """

    @property
    def post_batch_size(self) -> int:
        """What keeps a post of at most ``max_send_wr`` pieces on one queue pair, as one call."""
        return -1 if self.qp_per_transfer == 1 else self.max_send_wr


_REFUSED = {
    "MORI_IO_POST_BATCH_SIZE": "-1",
    "MORI_IO_NUM_WORKER_THREADS": "1",
    "MORI_IO_ENABLE_CHUNKING": "0",
    "MORI_IO_NUM_NICS_PER_TRANSFER": "1",
}
"""Variables that override what atomic refusals rest on, and the one harmless value of each."""


def effective(config: MoriioConfig, environ: Mapping[str, str]) -> MoriioConfig:
    """``config`` as the engine will see it: its environment variables win over its arguments.

    Raises:
        ConfigError: a variable would make refusals non-atomic, or has a value the engine ignores.
    """
    for name, harmless in _REFUSED.items():
        value = environ.get(name, "")
        if value not in ("", harmless):
            raise ConfigError(
                f"the environment sets {name}={value}, so that a refused post may be half posted",
                next_step="unset it",
            )
    changes: dict[str, Any] = {}
    for name, field in (
        ("MORI_IO_QP_MAX_SEND_WR", "max_send_wr"),
        ("MORI_IO_QP_PER_TRANSFER", "qp_per_transfer"),
    ):
        value = environ.get(name, "")
        if value:
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"the environment sets {name}={value}: not a positive number")
            changes[field] = int(value)
    mode = environ.get("MORI_IO_POLL_CQ_MODE", "").lower()
    if mode:
        if mode not in ("0", "1", "polling", "event"):
            raise ConfigError(f"the environment sets MORI_IO_POLL_CQ_MODE={mode}: polling or event")
        changes["poll_cq_mode"] = PollMode.EVENT if mode in ("1", "event") else PollMode.POLLING
    notify = environ.get("MORI_IO_ENABLE_NOTIFICATION", "").lower()
    if notify:
        changes["enable_notification"] = notify in ("1", "true", "yes", "on")
    return attrs.evolve(config, **changes) if changes else config


def apply_environment(config: MoriioConfig, environ: MutableMapping[str, str]) -> None:
    """Set what the engine reads from the environment only, where the user has not set it."""
    log_level = None if "MORI_GLOBAL_LOG_LEVEL" in environ else config.log_level
    wanted = {
        "MORI_IO_SQ_BACKOFF_TIMEOUT_US": config.sq_backoff_us,
        "MORI_IO_CP_TIMEOUT_MS": config.control_timeout_ms,
        "MORI_IO_QP_TIMEOUT": config.qp_timeout,
        "MORI_IO_QP_RETRY_CNT": config.qp_retry_count,
        "MORI_IO_LOG_LEVEL": log_level,
        "MORI_APP_LOG_LEVEL": log_level,
    }
    for name, value in wanted.items():
        if value is not None:
            environ.setdefault(name, str(value))
