"""The caches of both sides, and what they hold: whoever has the seed can check every byte."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvxfer.agent import Agent
from kvxfer.core.layout import KVLayout

__all__ = ["FREE", "Geometry"]

FREE = 0xEE
"""What free blocks of a consumer hold; no byte of a worker's cache has this value."""
_TOKENS = 16


@attrs.frozen(kw_only=True)
class Geometry:
    """The caches of both sides."""

    layers: int = 2
    blocks: int = 64
    nbytes: int = 4096

    def layout(self) -> KVLayout:
        return KVLayout(
            num_blocks=self.blocks,
            block_stride=self.nbytes,
            kernel_tokens=_TOKENS,
            token_stride=self.nbytes // _TOKENS,
            head_nbytes=self.nbytes // _TOKENS,
            dtype="uint8",
        )

    def content(self, seed: int) -> Any:
        """uint8[layers, blocks, nbytes] without ``FREE``."""
        shape = (self.layers, self.blocks, self.nbytes)
        return np.random.default_rng(seed).integers(0, FREE, shape, np.uint8)

    def memory(self, seed: int) -> Any:
        """The same, where every backend can read and write it: shm writes into such memory only."""
        from kvxfer.backends.shm import allocate

        memory = allocate((self.layers, self.blocks, self.nbytes), np.uint8)
        memory[:] = self.content(seed)
        return memory

    def register(self, agent: Agent, memory: Any) -> None:
        agent.register_kv_caches({f"layer{i}": m for i, m in enumerate(memory)}, self.layout())
