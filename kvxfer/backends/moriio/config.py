"""How the MoRI-IO engine is set up: every setting of its backends, and ours."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.backends._options import config_from
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MoriioConfig", "PollMode"]


class PollMode(enum.Enum):
    """How the engine's own thread looks for completions. It keeps a core busy either way."""

    POLLING = "polling"
    EVENT = "event"


def _is_int(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} must be an integer, not {value!r}"
        )


def _number(default: int | None, least: int, most: int) -> Any:
    def in_range(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and default is None:
            return
        _is_int(instance, attribute, value)
        if not least <= value <= most:
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be {least} to {most}, not {value}"
            )

    return attrs.field(default=default, validator=in_range)


def _flag(default: bool) -> Any:
    def is_bool(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, bool):
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be True or False, not {value!r}"
            )

    return attrs.field(default=default, validator=is_bool)


def _seconds(default: float) -> Any:
    def in_range(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 3600:
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be a number of seconds above 0 "
                f"and below 3600, not {value!r}"
            )

    return attrs.field(default=default, validator=in_range)


def _choice(default: str | None, choices: tuple[str, ...]) -> Any:
    def is_one(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None and value not in choices:
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be one of {', '.join(choices)}, "
                f"not {value!r}"
            )

    return attrs.field(default=default, validator=is_one)


_MOST = 2**31 - 1


@attrs.frozen(kw_only=True)
class MoriioConfig:
    """Settings of one ``MoriioTransport``. Sizes are bytes; times carry their unit in the name.

    Raises:
        ConfigError: a value of another type or out of range; names field, expectation and value.
    """

    host: str = attrs.field(default="127.0.0.1", validator=v.and_(v.instance_of(str), v.min_len(1)))
    """The address of this machine that peers dial: a name or an IPv4 address, resolved by us.

    The engine's control port listens on it and answers whoever connects.
    """
    port: int = _number(0, 0, 65534)
    """The engine's control port; 0 lets the system choose one, which is what you want.

    The engine ends the process when a port is taken, so a fixed one is tried in a child process
    first.  Engine generations take turns on it and the next higher port: open both.
    """

    # ---- the engine's RdmaBackendConfig

    qp_per_transfer: int = _number(1, 1, 64)
    """Queue pairs per peer and device pair. Each engine call uses one of them."""
    max_send_wr: int = _number(4096, 1, 65535)
    """Depth of a send queue, in work requests. Below the 4351 of a common NIC, so that the engine
    gets what we count with; more than this never goes into one engine call."""
    max_msg_sge: int = _number(4, 1, 64)
    """Pieces that follow each other at the peer but not here, in one work request (engine: 4).

    A device that can do less is not noticed by us, and our count of what fits its queue is then
    too generous.
    """
    max_cqe_num: int = _number(0, 0, _MOST)
    """Entries of a completion queue; 0 and what is too small mean: as many as the queues need."""
    post_batch_size: int | None = _number(None, -1, _MOST)
    """Work requests per post; None: what keeps a call on one queue pair and its refusal atomic."""
    num_worker_threads: int = _number(1, 1, 256)
    """The engine's own posting threads; 1: the calling thread posts. More make refusals partial."""
    poll_cq_mode: PollMode = attrs.field(
        default=PollMode.POLLING, validator=v.instance_of(PollMode)
    )
    """How the engine's own thread looks for completions."""
    enable_notification: bool = _flag(False)
    """The engine's own notifications. kvxfer does not read them, they take room in the send queue,
    and a failed one poisons the status of good data: off."""
    notif_per_qp: int = _number(1024, 1, 65535)
    """Entries for notifications per queue pair, where they are enabled."""
    enable_transfer_chunking: bool = _flag(False)
    """Cut what is larger than ``chunk_bytes`` and spread it over queue pairs and NICs: makes
    refusals partial."""
    chunk_bytes: int = _number(65536, 4096, _MOST)
    """Bytes of a chunk, where chunking is enabled."""
    max_chunks_per_transfer: int = _number(64, 1, _MOST)
    """Chunks of one transfer at most, where chunking is enabled."""
    num_nics_per_transfer: int = _number(1, 1, 64)
    """NICs that share each transfer. More than one makes refusals partial."""

    # ---- XGMI and FABRIC, between GPUs. Never run on hardware.

    xgmi: bool = _flag(False)
    """Also make the engine's XGMI backend, for GPUs of one node. Never run on hardware."""
    xgmi_num_streams: int = _number(64, 1, 4096)
    """GPU streams of that backend."""
    xgmi_num_events: int = _number(64, 1, 4096)
    """GPU events of that backend."""
    fabric: bool = _flag(False)
    """Also make the engine's FABRIC backend, for GPUs of one pod. Never run on hardware."""
    fabric_num_streams: int = _number(64, 1, 4096)
    """GPU streams of that backend."""
    fabric_num_events: int = _number(64, 1, 4096)
    """GPU events of that backend."""

    # ---- ours

    max_post_nbytes: int = _number(1 << 30, 1, 2**32 - 1)
    """Most bytes of one post.

    The engine merges neighbouring pieces into one work request and refuses one that is larger than
    the port's ``max_msg_sz`` (1 GiB and more on RDMA NICs, 8 MiB under Soft-RoCE).
    """
    own_admission: bool = _flag(True)
    """Refuse a post that the send queues have no room for before the engine sees it.

    With False the engine waits up to ``sq_backoff_us`` and then refuses.
    """
    rehearse: bool = _flag(True)
    """Try the first registration of each memory kind in a child process: one that fails would end
    this one."""
    connect_timeout_s: float = _seconds(5.0)
    """For the TCP connection to a peer's control port, before the engine is let near it."""
    generation_linger_s: float = _seconds(3.0)
    """How long an engine whose queue pair has failed still serves its peers beside its successor,
    so that they can be told the new addresses. Below ``Timeouts.drain``: a fence takes as long."""
    generation_drain_s: float = _seconds(10.0)
    """How long it waits beyond that for calls of healthy peers to end."""

    # ---- what the engine takes from the environment only

    sq_backoff_us: int | None = _number(1000, 1, _MOST)
    """``MORI_IO_SQ_BACKOFF_TIMEOUT_US`` unless set: how long a post waits in the engine for room.

    The engine's default is 5 s. It reads the variable once per process. None leaves it alone.
    """
    control_timeout_ms: int | None = _number(None, 1, _MOST)
    """``MORI_IO_CP_TIMEOUT_MS`` unless set: how long a handshake waits for a silent peer (5 s).

    The engine reads it once per process.
    """
    qp_timeout: int | None = _number(None, 1, 31)
    """``MORI_IO_QP_TIMEOUT`` unless set: exponent of the transport's ACK timeout (engine: 14)."""
    qp_retry_count: int | None = _number(None, 0, 7)
    """``MORI_IO_QP_RETRY_CNT`` unless set (engine: 7, which some devices take for infinite)."""
    log_level: str | None = _choice(
        "critical", ("trace", "debug", "info", "warn", "error", "critical", "off")
    )
    """``MORI_IO_LOG_LEVEL`` and ``MORI_APP_LOG_LEVEL`` unless they or ``MORI_GLOBAL_LOG_LEVEL`` are
    set.

    The engine logs to standard output; what it reports as an error arrives as a value here. It
    reads the variables when its library is loaded.
    """

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MoriioConfig:
        """From JSON values, as a configuration file has them.

        Raises:
            ConfigError: an unknown key, with the nearest one as a hint, or a value that does not
                fit.
        """
        return config_from(cls, options)

    @property
    def engine_post_batch_size(self) -> int:
        """``post_batch_size``, chosen where it is None.

        With several queue pairs the engine spreads a call over them unless it fits one post batch.
        """
        if self.post_batch_size is not None:
            return self.post_batch_size
        return -1 if self.qp_per_transfer == 1 else self.max_send_wr

    @property
    def one_queue_pair_per_call(self) -> bool:
        """Whether an engine call is one post batch on one queue pair: then a refusal is atomic."""
        batch = self.engine_post_batch_size
        whole = batch >= self.max_send_wr or (batch == -1 and self.qp_per_transfer == 1)
        return (
            whole
            and self.num_worker_threads == 1
            and not self.enable_transfer_chunking
            and self.num_nics_per_transfer == 1
        )
