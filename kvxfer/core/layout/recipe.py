"""Comparing two layouts: which bytes run contiguously on both sides. No block ids are needed.

This is where a pair of caches is found to fit or not, so it belongs into the handshake: a connector
that matches its layers when it meets a peer meets every ``GeometryError`` there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.errors import GeometryError

if TYPE_CHECKING:
    from kvxfer.core.layout.heads import HeadSlice
    from kvxfer.core.layout.kv import KVLayout

__all__ = ["Axis", "Recipe", "recipe_of", "token_view"]

Axis = tuple[int, int, int]
"""Count, local stride, remote stride."""


class Recipe:
    """How one pair of blocks (or one run of cells) becomes pieces.

    Attributes:
        run_nbytes: bytes of one piece, or of one cell of it where cells join (``flat``).
        planes: the plane axis if it is left after growing the run, else None; emitted outermost.
        inner: the other axes that are left, outermost first.
        factor: pieces per pair of blocks or per run.
        local, remote: bytes from the layout's offset to the first head that moves.
        by_runs: blocks do not pair whole; see ``pairing.pair_runs``.
        flat: the cells of a run are contiguous on both sides.
        local_steps, remote_steps: cells after which a kernel block ends, if strides change there.
    """

    __slots__ = (
        "by_runs",
        "factor",
        "flat",
        "inner",
        "local",
        "local_steps",
        "planes",
        "remote",
        "remote_steps",
        "run_nbytes",
    )

    def __init__(self, run: int, left: list[Axis], plane: Axis, local: int, remote: int) -> None:
        self.planes: Axis | None = None
        if plane in left:
            left.remove(plane)
            self.planes = plane
        if len(left) > 1:
            left.sort(key=_local_stride, reverse=True)
        self.run_nbytes = run
        self.inner = tuple(left)
        self.local = local
        self.remote = remote
        factor = plane[0] if self.planes else 1
        for axis in left:
            factor *= axis[0]
        self.factor = factor
        self.by_runs = False
        self.flat = False
        self.local_steps: tuple[int, ...] = ()
        self.remote_steps: tuple[int, ...] = ()


def _local_stride(axis: Axis) -> int:
    return axis[1]


def recipe_of(
    local: KVLayout, remote: KVLayout, heads: HeadSlice | None, *, unequal_shares: bool = False
) -> Recipe:
    """Find the longest runs that two layouts share.

    ``unequal_shares`` says that the two sides deal tokens out to context-parallel ranks
    differently, so that blocks of equal size do not pair whole.

    Raises:
        GeometryError: the layouts cannot be mapped onto each other.
    """
    if heads is None:
        count, first, second = local.heads, 0, 0
        if count != remote.heads:
            raise _wrong_heads(local, remote, None)
    else:
        count, first, second = heads.count, heads.local, heads.remote
        if first + count > local.heads or second + count > remote.heads:
            raise _wrong_heads(local, remote, heads)
        first *= local.head_stride
        second *= remote.head_stride
    if local.cell_key != remote.cell_key:
        raise _unlike(local, remote)
    run = local.head_nbytes
    head = (count, local.head_stride, remote.head_stride)
    plane = (local.planes, local.plane_stride, remote.plane_stride)
    if not unequal_shares and local.cells_per_block == remote.cells_per_block:
        tokens = _token_axes(local, remote)
        if tokens is not None:
            run, left = _grow(run, [head, *tokens, plane])
            return Recipe(run, left, plane, first, second)
    run, left = _grow(run, [head, plane])
    recipe = Recipe(run, left, plane, first, second)
    ours, theirs = token_view(local), token_view(remote)
    recipe.by_runs = True
    recipe.flat = ours[1] == run and theirs[1] == run
    recipe.local_steps = (ours[0],) if ours[2] > 1 else ()
    recipe.remote_steps = (theirs[0],) if theirs[2] > 1 else ()
    return recipe


def _grow(run: int, axes: list[Axis]) -> tuple[int, list[Axis]]:
    """Absorb axes into the run while one continues it on both sides; the others are left."""
    left = [axis for axis in axes if axis[0] > 1]
    grown = True
    while grown:
        grown = False
        for axis in left:
            if axis[1] == run and axis[2] == run:
                run *= axis[0]
                left.remove(axis)
                grown = True
                break
    return run, left


def _token_axes(local: KVLayout, remote: KVLayout) -> list[Axis] | None:
    """The token axis of equally long blocks, in parts of one stride on both sides.

    None if the kernel blocks of the two sides do not nest.
    """
    ours, stride, our_kernels, kernel_stride = token_view(local)
    theirs, their_stride, their_kernels, their_kernel_stride = token_view(remote)
    if ours == theirs:
        return [(ours, stride, their_stride), (our_kernels, kernel_stride, their_kernel_stride)]
    # The finer side's kernel blocks, then their groups inside the coarser side's.
    if ours % theirs == 0:
        ratio = ours // theirs
        return [
            (theirs, stride, their_stride),
            (ratio, stride * theirs, their_kernel_stride),
            (our_kernels, kernel_stride, their_kernel_stride * ratio),
        ]
    if theirs % ours == 0:
        ratio = theirs // ours
        return [
            (ours, stride, their_stride),
            (ratio, kernel_stride, their_stride * ours),
            (their_kernels, kernel_stride * ratio, their_kernel_stride),
        ]
    return None


def token_view(layout: KVLayout) -> tuple[int, int, int, int]:
    """Cells, their stride, kernel blocks, their stride; one level where two would say the same."""
    cells, stride = layout.kernel_tokens, layout.token_stride
    kernels, kernel_stride = layout.kernel_blocks, layout.kernel_stride
    if kernels == 1:
        return cells, stride, 1, 0
    if cells == 1:
        return kernels, kernel_stride, 1, 0
    if kernel_stride == cells * stride:
        return cells * kernels, stride, 1, 0
    return cells, stride, kernels, kernel_stride


def _wrong_heads(local: KVLayout, remote: KVLayout, heads: HeadSlice | None) -> GeometryError:
    text = f"{local.heads} local and {remote.heads} remote heads"
    both = f"local {local.describe()}, remote {remote.describe()}"
    if heads is None:
        return GeometryError(
            f"{text} cannot move whole: {both}",
            next_step="pass heads=HeadSlice(...); topology.head_slice computes it",
        )
    return GeometryError(f"{heads} reaches beyond {text}: {both}")


def _unlike(local: KVLayout, remote: KVLayout) -> GeometryError:
    what = [
        f"{label} {ours} and {theirs}"
        for label, ours, theirs in (
            ("kind", local.kind.value, remote.kind.value),
            ("dtype", local.dtype, remote.dtype),
            ("planes", local.planes, remote.planes),
            ("bytes per token and head", local.head_nbytes, remote.head_nbytes),
            ("tokens per cell", local.cell_tokens, remote.cell_tokens),
        )
        if ours != theirs
    ]
    return GeometryError(
        f"the caches differ in {'; '.join(what)} (local and remote): "
        f"local {local.describe()}, remote {remote.describe()}",
        next_step="both sides must run the same model with the same KV dtype and quantisation",
    )
