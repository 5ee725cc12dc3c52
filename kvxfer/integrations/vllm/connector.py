"""``KvxferConnector``: vLLM's hooks, each handed to the half that lives in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvxfer.integrations.vllm.caches import (
    attention_groups,
    fingerprint_of,
    layer_caches,
    ranks_of,
    ready_of,
    refuse_host_buffer,
)
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Handshake, Reports, Step
from kvxfer.integrations.vllm.scheduler import SchedulerHalf
from kvxfer.integrations.vllm.stats import PromMetrics, Stats
from kvxfer.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KvxferConnector"]


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """READ, asynchronous: decode pulls what prefill holds. WRITE: prefill pushes as it computes.

    Raises:
        ConfigError: ``kv_connector_extra_config`` is wrong, or the model has KV caches that are
            not supported.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.from_extra(transfer.kv_connector_extra_config)
        groups = attention_groups(kv_cache_config)
        refuse_host_buffer(vllm_config)
        # Each process has one of the two.
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(
                config,
                block_size=groups[0].kv_cache_spec.block_size,
                produces=transfer.is_kv_producer,
                groups=len(groups),
                caching=vllm_config.cache_config.enable_prefix_caching,
            )
            return
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tp_rank, pp_rank = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        self.worker = WorkerHalf(
            config,
            ranks=ranks_of(vllm_config, tp_rank=tp_rank, pp_rank=pp_rank),
            fingerprint=fingerprint_of(vllm_config, kv_cache_config, model=config.model),
            groups=len(groups),
        )
        self._kv_caches: dict[str, Tensor] = {}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("write"))  # a replayed graph would not call save_kv_layer

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> PromMetrics:
        return PromMetrics(*arguments)

    # ---- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._kv_caches = kv_caches
        self.worker.register(layer_caches(kv_caches, self._kv_cache_config))

    def unregister_kv_caches(self, *_: Any, **__: Any) -> None:
        """Sleep mode: wait for transfers, then let go of the caches."""
        self.worker.unregister()

    def restore_kv_caches(self, kv_caches: dict[str, Tensor] | None = None, **_: Any) -> None:
        """Wake up: register the caches, wherever they lie now, and tell the peers."""
        self.register_kv_caches(kv_caches or self._kv_caches)

    def get_handshake_metadata(self) -> Handshake:
        return Handshake(self.worker.agent.info)

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        self.worker.preempted(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.execute(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads happen between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        chunks = self._get_connector_metadata().chunks
        if chunks:
            self.worker.save(chunks, layer_name, ready_of(kv_layer))

    def wait_for_save(self) -> None:
        self.worker.seal(self._get_connector_metadata().chunks)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Reports | None:
        return self.worker.take_reports()

    # ---- scheduler -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:
        self.scheduler.agent.set_workers(handshake.info for handshake in metadata.values())

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.kv_cache_manager = kv_cache_manager

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def on_new_request(self, request: Any) -> None:
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self.scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Reports):
            self.scheduler.apply(meta.reports)

    def has_pending_push_work(self) -> bool:
        return self.scheduler.busy

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    # ---- either --------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        return self.worker.tally.take() if self.role is KVConnectorRole.WORKER else None

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self.worker.agent.close()
