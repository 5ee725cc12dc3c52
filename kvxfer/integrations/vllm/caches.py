"""vLLM's configuration in kvxfer's terms: layouts, ranks and the fingerprint. Usable alone."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from kvxfer.agent.caches import LayerCache
from kvxfer.core.layout import Fingerprint, KVLayout, KVSpec, TokenOrder
from kvxfer.core.topology import Ranks
from kvxfer.errors import ConfigError

__all__ = ["fingerprint_of", "full_attention_spec", "layer_caches", "ranks_of"]


def full_attention_spec(kv_cache_config: Any) -> Any:
    """The spec of the only group of KV caches.

    Raises:
        ConfigError: there are several groups, or it is no full attention.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise ConfigError(
            f"the model's KV cache groups are {kinds}: one group of FullAttentionSpec is supported"
        )
    return groups[0].kv_cache_spec


def layer_caches(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> list[LayerCache]:
    """The tensors that vLLM registers, with their layouts.

    On CPU the inside of one page (one block of one head) depends on the instruction set: it is
    moved whole, as opaque bytes.

    Raises:
        ConfigError: the model has other groups than one of full attention, or a layer is missing.
        GeometryError: a tensor's shape fits no cache of the group's spec.
    """
    spec = full_attention_spec(kv_cache_config)
    names = kv_cache_config.kv_cache_groups[0].layer_names
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise ConfigError(f"vLLM registered no KV cache for the layers {missing[:5]}")
    layers = []
    for name in names:
        tensor = kv_caches[name]
        opaque = tensor.device.type == "cpu"
        layout = KVLayout.from_tensor(
            tensor,
            KVSpec(
                tokens_per_block=spec.block_size,
                heads=spec.num_kv_heads,
                head_size=spec.head_size,
                num_blocks=kv_cache_config.num_blocks,
                order=TokenOrder.HEAD_MAJOR if opaque else None,
                opaque=opaque,
            ),
        )
        layers.append(LayerCache(name=name, buffer=tensor, layout=layout))
    return layers


def ranks_of(vllm_config: Any, *, tp_rank: int, pp_rank: int) -> Ranks:
    """This worker among the ranks of its instance.

    Raises:
        ConfigError: decode context parallelism is on.
        InvalidInputError: heads do not divide over the ranks.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.decode_context_parallel_size > 1:
        raise ConfigError(
            "decode_context_parallel_size is "
            f"{parallel.decode_context_parallel_size}: only 1 is supported"
        )
    return Ranks(
        tp_size=parallel.tensor_parallel_size,
        tp_rank=tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=pp_rank,
        total_kv_heads=None if model.use_mla else model.get_total_num_kv_heads(),
        latent=model.use_mla,
    )


def fingerprint_of(vllm_config: Any, kv_cache_config: Any, *, model: str | None) -> str:
    """What must be equal on both sides, as one line: a readable part and a digest over everything.

    Args:
        model: names the weights instead of vLLM's model name and revision.
    """
    config, cache = vllm_config.model_config, vllm_config.cache_config
    name = model or f"{config.model}@{config.revision or ''}"
    kv_dtype = str(full_attention_spec(kv_cache_config).dtype).removeprefix("torch.")
    found = Fingerprint(
        model=name,
        dtype=str(config.dtype).removeprefix("torch."),
        kv_dtype=kv_dtype,
        kv_quantization="" if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        attention_backends=_page_formats(),
    )
    formats = ",".join(found.attention_backends)
    return f"{name[-200:]} {found.dtype} kv={found.kv_dtype} {formats} {found.digest[:16]}"


def _page_formats() -> tuple[str, ...]:
    """What the inside of a page depends on, where pages are opaque."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ()
    import torch

    return (f"cpu:{platform.machine()}:{torch.backends.cpu.get_cpu_capability()}",)
