"""vLLM's configuration in kvxfer's terms: layouts, ranks and the fingerprint. Usable alone."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.agent.caches import LayerCache
from kvxfer.core.layout import Fingerprint, KVLayout, KVSpec, TokenOrder
from kvxfer.core.topology import Ranks
from kvxfer.errors import ConfigError

__all__ = [
    "attention_groups",
    "fingerprint_of",
    "layer_caches",
    "ranks_of",
    "ready_of",
    "refuse_host_buffer",
]


def attention_groups(kv_cache_config: Any) -> Sequence[Any]:
    """The groups of KV caches: full attention and sliding windows, of one block size.

    Raises:
        ConfigError: a group is of another kind, or block sizes differ.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    known = all(isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) for spec in specs)
    if not specs or not known or len({spec.block_size for spec in specs}) > 1:
        kinds = [f"{type(s).__name__} of {getattr(s, 'block_size', '?')} tokens" for s in specs]
        raise ConfigError(
            f"the model's KV cache groups are {kinds}: full attention and sliding windows, all "
            "with blocks of one size, are supported"
        )
    return groups


def layer_caches(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> list[LayerCache]:
    """The tensors that vLLM registers, with their layouts and groups.

    On CPU the inside of one page (one block of one head) depends on the instruction set: it is
    moved whole, as opaque bytes.

    Raises:
        ConfigError: the model has groups that are not supported, or a layer is missing.
        GeometryError: a tensor's shape fits no cache of the group's spec.
    """
    layers = []
    for index, group in enumerate(attention_groups(kv_cache_config)):
        spec = group.kv_cache_spec
        missing = [name for name in group.layer_names if name not in kv_caches]
        if missing:
            raise ConfigError(f"vLLM registered no KV cache for the layers {missing[:5]}")
        for name in group.layer_names:
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
            layers.append(LayerCache(name=name, buffer=tensor, layout=layout, group=index))
    return layers


def ready_of(tensor: Any) -> Any:
    """Says when what the current stream does to ``tensor`` is done; None: it is done (CPU)."""
    if tensor.device.type == "cpu":
        return None
    import torch

    event = torch.get_device_module(tensor.device).Event()
    event.record()
    return event


def refuse_host_buffer(vllm_config: Any) -> None:
    """Device memory is moved where it lies: ``set_host_xfer_buffer_ops`` is not used.

    Raises:
        ConfigError: vLLM was told to stage the caches in host memory.
    """
    from vllm.platforms import current_platform

    device = vllm_config.kv_transfer_config.kv_buffer_device
    if device == "cpu" and current_platform.device_type != "cpu":
        raise ConfigError(
            f"kv_buffer_device is 'cpu' and the caches are on {current_platform.device_type!r}: "
            "staging in host memory (set_host_xfer_buffer_ops) is not supported",
            next_step="leave kv_buffer_device out, and take a backend that reads device memory",
        )


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
    specs = [group.kv_cache_spec for group in attention_groups(kv_cache_config)]
    kv_dtype = ",".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs}))
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
