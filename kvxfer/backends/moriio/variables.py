"""The environment variables that the MoRI-IO engine reads, found in amd-mori 1.2.4 by tracing
``getenv``."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UNRELATED", "VARIABLES", "Moment", "Variable"]


class Moment(enum.Enum):
    """When the engine reads a variable."""

    FIRST_ENGINE = "when the first engine of the process is made"
    ENGINE = "whenever an engine is made"
    FIRST_HANDSHAKE = "at the first handshake of the process"
    CONNECTION = "whenever two devices are connected, by either side"
    FIRST_FULL_QUEUE = "when a send queue is full for the first time in the process"
    FIRST_TRANSFER = "at the first transfer of the process"
    GPU = "by the XGMI and FABRIC backends"


_FLAG = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_MODES = {"0": "polling", "polling": "polling", "1": "event", "event": "event"}
_LEVELS = {x: x for x in ("trace", "debug", "info", "warn", "error", "critical", "off")}


@attrs.frozen(kw_only=True)
class Variable:
    """``values``: the texts that are accepted and what they mean, or a range of integers, or None
    for any text.  ``field`` is the field of ``MoriioConfig`` that it overrides."""

    name: str
    moment: Moment
    values: Mapping[str, Any] | tuple[int, int] | None = None
    field: str = ""
    note: str = ""

    def parse(self, text: str) -> Any:
        """What ``text`` means to the engine.

        Raises:
            ConfigError: the engine would ignore it, or take it for something else.
        """
        if self.values is None:
            return text
        if isinstance(self.values, tuple):
            low, high = self.values
            try:
                number = int(text)
            except ValueError:
                number = low - 1
            if low <= number <= high:
                return number
            expected = f"an integer from {low} to {high}"
        else:
            if text.lower() in self.values:
                return self.values[text.lower()]
            expected = "one of " + ", ".join(self.values)
        raise ConfigError(
            f"the environment sets {self.name}={text!r}, which must be {expected}",
            next_step="correct it, or unset it: the engine would ignore it",
        )


def _engine(name: str, values: Any, field: str = "", note: str = "") -> Variable:
    return Variable(name=name, moment=Moment.ENGINE, values=values, field=field, note=note)


def _connection(name: str, values: Any, field: str = "", note: str = "") -> Variable:
    return Variable(name=name, moment=Moment.CONNECTION, values=values, field=field, note=note)


_MOST = 2**31 - 1

VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="MORI_GLOBAL_LOG_LEVEL",
        moment=Moment.FIRST_ENGINE,
        values=_LEVELS,
        note="log level of everything",
    ),
    Variable(
        name="MORI_APP_LOG_LEVEL",
        moment=Moment.FIRST_ENGINE,
        values=_LEVELS,
        field="log_level",
        note="log level of the layer that talks to the devices",
    ),
    Variable(
        name="MORI_IO_LOG_LEVEL",
        moment=Moment.FIRST_ENGINE,
        values=_LEVELS,
        field="log_level",
        note="log level of the engine",
    ),
    _engine("MORI_NODE_ID", None, note="name of this host; equal names mean XGMI can be used"),
    _engine("MORI_RDMA_DEVICES", None, note="which RDMA devices are used, by name"),
    _engine("MORI_IO_ENABLE_NOTIFICATION", _FLAG, "enable_notification"),
    _engine("MORI_IO_ENABLE_CHUNKING", _FLAG, "enable_transfer_chunking"),
    _engine("MORI_IO_CHUNK_BYTES", (4096, _MOST), "chunk_bytes"),
    _engine("MORI_IO_MAX_CHUNKS", (1, _MOST), "max_chunks_per_transfer"),
    _engine("MORI_IO_NUM_NICS_PER_TRANSFER", (1, 64), "num_nics_per_transfer"),
    _engine("MORI_IO_QP_PER_TRANSFER", (1, 64), "qp_per_transfer"),
    _engine("MORI_IO_POST_BATCH_SIZE", (-1, _MOST), "post_batch_size"),
    _engine("MORI_IO_NUM_WORKER_THREADS", (1, 256), "num_worker_threads"),
    _engine("MORI_IO_POLL_CQ_MODE", _MODES, "poll_cq_mode"),
    _engine("MORI_ROCM_SMI_PATH", None, note="where librocm_smi64 is"),
    _engine(
        "MORI_IO_ENABLE_ASYNC_EVENTS",
        _FLAG,
        note="listen to the devices' events (on); off, their failures are not heard of",
    ),
    _engine(
        "MORI_IO_FAIL_ON_ASYNC_EVENT",
        _FLAG,
        note="fail what is in flight when a fatal event comes (on)",
    ),
    _engine(
        "MORI_DISABLE_AUTO_XGMI",
        _FLAG,
        note="0: also make an XGMI backend, and go on without any RDMA device",
    ),
    Variable(
        name="MORI_IO_CP_TIMEOUT_MS",
        moment=Moment.FIRST_HANDSHAKE,
        values=(1, _MOST),
        field="control_timeout_ms",
        note="how long a handshake waits for a silent peer (5000)",
    ),
    _connection("MORI_IO_RDMA_NIC_IDX", (0, 64), note="use this device only"),
    _connection("MORI_IO_RAIL_AFFINITY", None, note="which device reaches which, with several"),
    _connection("MORI_ENABLE_DMABUF_REG", _FLAG, note="register GPU memory through dmabuf"),
    _connection("MORI_IB_ENABLE_RELAXED_ORDERING", _FLAG, note="relaxed ordering of memory"),
    _connection("MORI_MLX5_DMABUF", None, note="dmabuf on mlx5"),
    _connection("MORI_IB_GID_INDEX", (0, 255), note="the GID to connect with"),
    _connection("MORI_IB_PATH_MTU", None, note="largest packet"),
    _connection("MORI_IO_QP_MAX_SEND_WR", (1, 65535), "max_send_wr"),
    _connection("MORI_IO_QP_MAX_RECV_WR", (1, 65535), note="receive slots, for notifications"),
    _connection("MORI_IO_QP_MAX_CQE", (1, _MOST), "max_cqe_num"),
    _connection("MORI_IO_QP_MAX_MSG_SGE", (1, 64), "max_msg_sge"),
    _connection("MORI_IO_QP_MAX_SGE", (1, 64), "max_msg_sge", note="older name of the one above"),
    _connection("MORI_IO_QP_MAX_INLINE_DATA", (0, 65535)),
    _connection("MORI_IO_QP_TIMEOUT", (1, 31), "qp_timeout", note="exponent of the ACK time-out"),
    _connection("MORI_RDMA_QP_TIMEOUT", (1, 31), note="the same, where the one above is not set"),
    _connection("MORI_IO_QP_RETRY_CNT", (0, 7), "qp_retry_count", note="tries before giving up"),
    _connection("MORI_RDMA_QP_RETRY_CNT", (0, 7), note="the same, where the one above is not set"),
    _connection("MORI_IO_QP_RNR_RETRY", (0, 7), note="tries while the receiver is not ready"),
    _connection("MORI_RDMA_QP_RNR_RETRY", (0, 7)),
    _connection("MORI_IO_QP_MIN_RNR_TIMER", (0, 31)),
    _connection("MORI_RDMA_QP_MIN_RNR_TIMER", (0, 31)),
    _connection("MORI_IO_SL", (0, 15), note="service level"),
    _connection("MORI_RDMA_SL", (0, 15)),
    _connection("MORI_IO_TC", (0, 255), note="traffic class"),
    _connection("MORI_RDMA_TC", (0, 255)),
    _connection("MORI_IO_TC_DISABLE", _FLAG),
    _connection("MORI_GOR_PORT", None, note="source ports; also with 1 to 4 appended"),
    Variable(
        name="MORI_IO_SQ_BACKOFF_TIMEOUT_US",
        moment=Moment.FIRST_FULL_QUEUE,
        values=(1, _MOST),
        field="sq_backoff_us",
        note="how long a post waits for room in a full send queue (5 s)",
    ),
    Variable(name="MORI_ROCTX", moment=Moment.FIRST_TRANSFER, values=_FLAG, note="profiler marks"),
    Variable(name="MORI_ROCTX_TRANSFER", moment=Moment.FIRST_TRANSFER, values=_FLAG),
    Variable(
        name="MORI_IO_XGMI_SCATTER_GATHER_THRESHOLD",
        moment=Moment.GPU,
        values=(0, _MOST),
        note="from so many pieces on a copy kernel is used (off)",
    ),
    Variable(name="MORI_IO_FABRIC_DISABLE", moment=Moment.GPU, values=_FLAG),
    Variable(name="MORI_IO_FABRIC_VPOD_ID", moment=Moment.GPU),
)
"""Every variable of the transfer engine in amd-mori 1.2.4."""

UNRELATED = frozenset(
    {
        "MORI_BNXT_ENABLE_UDP_SPORT",
        "MORI_BOOTSTRAP_TIMEOUT",
        "MORI_CORE_LOG_LEVEL",
        "MORI_CORE_OFFSET",
        "MORI_DISABLE_IONIC_CCQE",
        "MORI_DISABLE_P2P",
        "MORI_DISABLE_TOPO",
        "MORI_ENABLE_HOST_PROXY",
        "MORI_ENABLE_RAIL",
        "MORI_ENABLE_RAIL_ONLY",
        "MORI_ENABLE_SDMA",
        "MORI_METRICS_LOG_LEVEL",
        "MORI_MLX5_ENABLE_UDP_SPORT",
        "MORI_NUM_QP_PER_PE",
        "MORI_OPS_LOG_LEVEL",
        "MORI_SDMA_NUM_CHANNELS",
        "MORI_SHMEM_HEAP_SIZE",
        "MORI_SHMEM_LOG_LEVEL",
        "MORI_SOCKET_IFNAME",
        "MORI_UMBP_LOG_LEVEL",
    }
)
"""In the wheel's libraries too, for its other parts: collectives, shared memory, UMBP."""
