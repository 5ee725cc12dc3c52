"""``MoriioConfig`` as the engine takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.backends.moriio.config import MoriioConfig

__all__ = ["gpu_backends", "rdma_settings"]


def rdma_settings(mori: Any, config: MoriioConfig) -> Any:
    """The engine's ``RdmaBackendConfig``, of its module ``mori``."""
    settings = mori.RdmaBackendConfig(
        qp_per_transfer=config.qp_per_transfer,
        post_batch_size=config.engine_post_batch_size,
        num_worker_threads=config.num_worker_threads,
        poll_cq_mode=mori.PollCqMode.__members__[config.poll_cq_mode.name],
        enable_notification=config.enable_notification,
        notif_per_qp=config.notif_per_qp,
        enable_transfer_chunking=config.enable_transfer_chunking,
        chunk_bytes=config.chunk_bytes,
        max_chunks_per_transfer=config.max_chunks_per_transfer,
        num_nics_per_transfer=config.num_nics_per_transfer,
    )
    settings.max_send_wr = config.max_send_wr
    settings.max_msg_sge = config.max_msg_sge
    settings.max_cqe_num = config.max_cqe_num
    return settings


def gpu_backends(config: MoriioConfig) -> list[tuple[str, int, int]]:
    """``(name, streams, events)`` of the backends between GPUs that are wanted."""
    return [
        (name, streams, events)
        for name, wanted, streams, events in (
            ("FABRIC", config.fabric, config.fabric_num_streams, config.fabric_num_events),
            ("XGMI", config.xgmi, config.xgmi_num_streams, config.xgmi_num_events),
        )
        if wanted
    ]
