"""``KvxferConnector``: vLLM's hooks, each handed to the half that lives in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)

from kvxfer.integrations.vllm.caches import (
    fingerprint_of,
    full_attention_spec,
    layer_caches,
    ranks_of,
)
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Handshake, Reports, Step
from kvxfer.integrations.vllm.scheduler import SchedulerHalf
from kvxfer.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KvxferConnector"]


class KvxferConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """READ, asynchronous: decode pulls what prefill holds.

    Raises:
        ConfigError: ``kv_connector_extra_config`` is wrong, or the model has KV caches that are
            not supported.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.from_extra(transfer.kv_connector_extra_config)
        spec = full_attention_spec(kv_cache_config)
        # Each process has one of the two.
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(
                config, block_size=spec.block_size, produces=transfer.is_kv_producer
            )
            return
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tp_rank, pp_rank = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        self.worker = WorkerHalf(
            config,
            ranks=ranks_of(vllm_config, tp_rank=tp_rank, pp_rank=pp_rank),
            fingerprint=fingerprint_of(vllm_config, kv_cache_config, model=config.model),
        )

    # ---- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.worker.agent.register_kv_caches(layer_caches(kv_caches, self._kv_cache_config))

    def get_handshake_metadata(self) -> Handshake:
        return Handshake(self.worker.agent.info)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.execute(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self.worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Reports | None:
        return self.worker.take_reports()

    # Nothing is loaded or saved layer by layer: bytes move between steps.

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    # ---- scheduler -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:
        self.scheduler.agent.set_workers(handshake.info for handshake in metadata.values())

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self.scheduler.step()

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Reports):
            self.scheduler.apply(meta.reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    # ---- either --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self.worker.agent.close()
