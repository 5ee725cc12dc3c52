"""KV-cache geometries of real models, scaled to a demo's memory."""

from __future__ import annotations

import attrs

from kvxfer.core.layout import KVLayout, LayoutKind

__all__ = ["GEOMETRIES", "Geometry", "Scaled"]


@attrs.frozen(kw_only=True)
class Geometry:
    """One rank's KV cache of a model. bfloat16: 2 bytes an element.

    ``planes`` is 2 for K and V, 1 for a latent cache, of which ``head_dim`` is the latent width.
    """

    title: str
    layers: int
    planes: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int
    source: str

    @property
    def plane_nbytes(self) -> int:
        """Bytes of one plane of one block of one layer."""
        return self.tokens_per_block * self.kv_heads * self.head_dim * 2

    def scaled(self, memory_nbytes: int) -> Scaled:
        """Fewer layers, but all of a block: at least 256 blocks within the memory if possible."""
        block = self.planes * self.plane_nbytes
        layers = max(2, min(self.layers, memory_nbytes // (256 * block)))
        return Scaled(
            geometry=self, layers=layers, blocks=max(64, memory_nbytes // (layers * block))
        )


@attrs.frozen(kw_only=True)
class Scaled:
    """A geometry as the demo runs it."""

    geometry: Geometry
    layers: int
    blocks: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(layer, plane, block, byte): one storage, planes outermost within a layer."""
        g = self.geometry
        return (self.layers, g.planes, self.blocks, g.plane_nbytes)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers of the demo."""
        return self.layers * self.geometry.planes * self.geometry.plane_nbytes

    def layout(self, layer: int) -> KVLayout:
        """Layout of one layer, counted from the start of the storage."""
        g = self.geometry
        head = g.head_dim * 2
        layer_nbytes = g.planes * self.blocks * g.plane_nbytes
        return KVLayout(
            num_blocks=self.blocks,
            block_stride=g.plane_nbytes,
            planes=g.planes,
            plane_stride=self.blocks * g.plane_nbytes,
            kernel_tokens=g.tokens_per_block,
            token_stride=g.kv_heads * head,
            heads=g.kv_heads,
            head_stride=head,
            head_nbytes=head,
            offset=layer * layer_nbytes,
            dtype="bfloat16",
            kind=LayoutKind.KV if g.planes == 2 else LayoutKind.LATENT,
        )


GEOMETRIES = {
    "llama-3.1-8b": Geometry(
        title="Llama-3.1-8B",
        layers=32,
        planes=2,
        kv_heads=8,
        head_dim=128,
        tokens_per_block=16,
        source="config.json: 32 layers, 8 KV heads, head_dim 128",
    ),
    "llama-3.1-70b-tp8": Geometry(
        title="Llama-3.1-70B, one rank of TP 8",
        layers=80,
        planes=2,
        kv_heads=1,
        head_dim=128,
        tokens_per_block=16,
        source="config.json: 80 layers, 8 KV heads over 8 ranks, head_dim 128",
    ),
    "deepseek-v3": Geometry(
        title="DeepSeek-V3, latent (MLA)",
        layers=61,
        planes=1,
        kv_heads=1,
        head_dim=576,
        tokens_per_block=64,
        source="config.json: 61 layers, kv_lora_rank 512 + qk_rope_head_dim 64",
    ),
    "qwen3-30b-a3b": Geometry(
        title="Qwen3-30B-A3B",
        layers=48,
        planes=2,
        kv_heads=4,
        head_dim=128,
        tokens_per_block=16,
        source="config.json: 48 layers, 4 KV heads, head_dim 128",
    ),
}
