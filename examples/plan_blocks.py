"""Only the planner: a connector of your own asks which bytes go where, and moves them itself.

The connector below has its own engine, one call that takes addresses and lengths.  Decode holds
the first two blocks of the prompt already (a prefix hit), so it reads the rest.  Pairing is by
position in the prompt, so that the two lists need not begin at the same place.

Run: python examples/plan_blocks.py
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvxfer.core.layout import Blocks, KVLayout, KVSpec, plan_blocks
from kvxfer.errors import InvalidInputError

LAYERS, HEADS, DIM, TOKENS = 4, 2, 16, 8
SPEC = KVSpec(tokens_per_block=TOKENS, heads=HEADS, head_size=DIM)


def engine_read(local: list[int], remote: list[int], sizes: list[int]) -> None:
    """Stands for the engine that the connector has: addresses in, bytes moved."""
    for to, source, nbytes in zip(local, remote, sizes, strict=True):
        ctypes.memmove(to, source, nbytes)


class Connector:
    """What is left to a connector once the planning is done elsewhere."""

    def __init__(self, layers: list[np.ndarray]) -> None:
        self.layers = layers
        # Layers of equal geometry share one layout, and so one plan per request.
        self.layout = KVLayout.from_tensor(layers[0], SPEC)

    def read(self, blocks: Blocks, peer: Connector, theirs: Blocks) -> int:
        """Read a request's blocks from ``peer``; returns the bytes that moved."""
        plan = plan_blocks(self.layout, blocks, peer.layout, theirs).merged()
        for mine, other in zip(self.layers, peer.layers, strict=True):
            engine_read(
                (plan.local + mine.ctypes.data).tolist(),
                (plan.remote + other.ctypes.data).tolist(),
                plan.size.tolist(),
            )
        return plan.nbytes * len(self.layers)


def main() -> None:
    rng = np.random.default_rng(0)
    # Prefill keeps K and V in two halves, decode keeps them together in each block.
    prefill = Connector(
        [rng.standard_normal((2, 32, TOKENS, HEADS, DIM)).astype(np.float16) for _ in range(LAYERS)]
    )
    decode = Connector([np.zeros((16, 2, TOKENS, HEADS, DIM), np.float16) for _ in range(LAYERS)])

    prompt = Blocks.at(0, [9, 4, 17, 30, 2])  # prefill: blocks 0 to 4 of the prompt
    missing = Blocks.at(2, [5, 11, 6])  # decode: only 2 to 4, it has the others
    moved = decode.read(missing, prefill, prompt)
    for mine, theirs in zip(decode.layers, prefill.layers, strict=True):
        np.testing.assert_array_equal(mine[[5, 11, 6]].swapaxes(0, 1), theirs[:, [17, 30, 2]])
    print(f"{moved} bytes moved, each to its place")

    # Two lists of unequal length without positions have no single meaning: nothing is guessed.
    try:
        decode.read(Blocks.unplaced([5, 11, 6]), prefill, Blocks.unplaced([9, 4, 17, 30, 2]))
    except InvalidInputError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("unequal lists without positions were paired")


if __name__ == "__main__":
    main()
