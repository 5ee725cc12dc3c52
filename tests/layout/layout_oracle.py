"""An oracle for the planner: logical tensor indexing only. Imports nothing of kvxfer.

Memory is described by strides here as well, because that is what a cache is, but the oracle reads
and writes it only through an ordinary strided view with one axis per logical index, cell by cell.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Memory:
    """A cache in numbers: counts and byte strides of its axes."""

    blocks: int
    planes: int
    kernels: int
    tokens: int
    heads: int
    nbytes: int
    strides: tuple[int, int, int, int, int]  # block, plane, kernel, token, head
    offset: int
    slack: int

    @property
    def tokens_per_block(self) -> int:
        return self.kernels * self.tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.blocks, self.planes, self.kernels, self.tokens, self.heads)

    @property
    def total(self) -> int:
        inner = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset + inner + self.nbytes + self.slack

    def view(self, buffer: np.ndarray) -> np.ndarray:
        """uint8[block, plane, kernel, token, head, byte] onto the buffer."""
        return np.lib.stride_tricks.as_strided(
            buffer[self.offset :], (*self.shape, self.nbytes), (*self.strides, 1)
        )


def naive_copy(
    dst: Memory,
    dst_buffer: np.ndarray,
    src: Memory,
    src_buffer: np.ndarray,
    *,
    dst_tokens: dict[int, tuple[int, int]],
    src_tokens: dict[int, tuple[int, int]],
    heads: list[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray]:
    """``(destination after the copy, how often each byte was written)``.

    ``*_tokens`` say where each token of the request lies: (block id, token in block).  ``heads``
    are (destination head, source head).
    """
    out = dst_buffer.copy()
    written = np.zeros(len(out), np.int64)
    ours, theirs = dst.view(out), src.view(src_buffer)
    marks = np.lib.stride_tricks.as_strided(
        written[dst.offset :],
        (*dst.shape, dst.nbytes),
        tuple(8 * s for s in (*dst.strides, 1)),
    )
    for token, (block, at) in dst_tokens.items():
        if token not in src_tokens:
            continue
        other, other_at = src_tokens[token]
        for plane in range(dst.planes):
            for head, other_head in heads:
                here = (block, plane, at // dst.tokens, at % dst.tokens, head)
                there = (other, plane, other_at // src.tokens, other_at % src.tokens, other_head)
                ours[here] = theirs[there]
                marks[here] += 1
    return out, written


def place(
    positions: list[int], ids: list[int], tokens_per_block: int
) -> dict[int, tuple[int, int]]:
    """Where each token of a request lies, for blocks at these positions."""
    return {
        position * tokens_per_block + t: (block, t)
        for position, block in zip(positions, ids, strict=True)
        for t in range(tokens_per_block)
    }


def execute(
    local_offsets: list[int],
    remote_offsets: list[int],
    sizes: list[int],
    dst_buffer: np.ndarray,
    src_buffer: np.ndarray,
    *,
    dst_is_local: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Do what an engine does with a plan; IndexError if it leaves either buffer."""
    out = dst_buffer.copy()
    written = np.zeros(len(out), np.int64)
    for local, remote, size in zip(local_offsets, remote_offsets, sizes, strict=True):
        to, from_ = (local, remote) if dst_is_local else (remote, local)
        if min(to, from_) < 0 or to + size > len(out) or from_ + size > len(src_buffer):
            raise IndexError(f"piece {to} <- {from_}, {size} bytes, leaves the memory")
        out[to : to + size] = src_buffer[from_ : from_ + size]
        written[to : to + size] += 1
    return out, written
