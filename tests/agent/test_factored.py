"""What the agent posts: layers of equal geometry share their pieces down to the engine."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from agent_rig import HEAD_NBYTES, HEADS, TOKENS, Node, Rig, at, layout

from kvxfer.agent.batches import batch_of
from kvxfer.agent.caches import LayerCache, register_caches
from kvxfer.backends.loopback import CopyIn, LoopbackConfig, LoopbackTransport
from kvxfer.core.batch import Batch
from kvxfer.core.events import Failed, Received, Sent
from kvxfer.core.layout import Blocks, KVLayout, LayerRef, match_layers, plan_layers

LAYERS, BLOCKS = 5, 16
BLOCK = TOKENS * HEADS * HEAD_NBYTES
SPAN = 2 * BLOCKS * BLOCK
THEIRS, OURS = [5, 9, 2, 14], [1, 7, 3, 12]


class Recording(LoopbackTransport):
    """A loopback engine that takes few pieces per post, and what it was given."""

    def __init__(self, max_pieces: int, *, room: int | None = None) -> None:
        copy_in = CopyIn.POST if room is None else CopyIn.PROGRESS
        super().__init__(LoopbackConfig(copy_in=copy_in, max_pieces=max_pieces, credits=room))
        self.batches: list[Batch] = []

    def _post(self, attempt: Any) -> None:
        self.batches.append(attempt.batch)
        super()._post(attempt)


def one_storage(node: Node) -> None:
    """All layers of ``node`` in one storage, one after the other."""
    rng = np.random.default_rng(len(node.name))
    shape = (LAYERS, 2, BLOCKS, TOKENS, HEADS, HEAD_NBYTES)
    whole = rng.integers(0, 256, size=shape, dtype=np.uint8)
    node.memory = {f"layer{i}": whole[i] for i in range(LAYERS)}
    node.agent.register_kv_caches(node.memory, layout(BLOCKS))


def two_storages(node: Node) -> None:
    """Two layers in one storage, three in another."""
    rng = np.random.default_rng(len(node.name))
    node.memory = {}
    for first, count in ((0, 2), (2, 3)):
        shape = (count, 2, BLOCKS, TOKENS, HEADS, HEAD_NBYTES)
        whole = rng.integers(0, 256, size=shape, dtype=np.uint8)
        node.memory.update({f"layer{first + i}": whole[i] for i in range(count)})
    node.agent.register_kv_caches(node.memory, layout(BLOCKS))


def storage_per_layer(node: Node) -> None:
    """As the rig makes it."""


SHAPES = {
    "one storage": (one_storage, 1),
    "two storages": (two_storages, 2),
    "a storage per layer": (storage_per_layer, LAYERS),
}


def pull(rig: Rig, arrange: Any, *, max_pieces: int) -> tuple[Node, Node, Recording]:
    p, c = (
        rig.node(name, layers=LAYERS, transport=Recording(max_pieces), num_blocks=BLOCKS)
        for name in ("producer", "c")
    )
    arrange(p)
    arrange(c)
    untouched = [i for i in range(BLOCKS) if i not in OURS]
    before = c.content(untouched)
    c.agent.pull(p.agent.hold("t", at(0, *THEIRS)), at(0, *OURS))
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content(OURS) == p.content(THEIRS)
    assert c.content(untouched) == before
    assert c.of(Received)[0].nbytes == LAYERS * 2 * len(OURS) * BLOCK
    assert not c.of(Failed)
    return p, c, c.transport  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pull_posts_one_plan_for_all_layers(rig: Rig, shape: str) -> None:
    """Equal layers, in one storage or in several: one factored batch, whose lists hold the pieces
    of one layer; the bytes are exact."""
    arrange, regions = SHAPES[shape]
    _, _, engine = pull(rig, arrange, max_pieces=1000)
    (batch,) = engine.batches
    assert batch.members is not None
    assert len(batch.members) == LAYERS
    assert len(batch.used_pairs) == regions
    assert [len(column) for column in batch.shared_lists()] == [2 * len(OURS)] * 3
    assert batch._vectors is None, "nobody has written the pieces out"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("max_pieces", "posts"), [(16, 3), (8, 5), (5, 10), (1, 40)])
def test_cut_pulls_share_their_lists(rig: Rig, shape: str, max_pieces: int, posts: int) -> None:
    """What does not fit one post is cut between layers, then inside them; the lists of a stretch
    are the same objects for every layer."""
    arrange, _ = SHAPES[shape]
    _, _, engine = pull(rig, arrange, max_pieces=max_pieces)
    assert len(engine.batches) == posts
    assert all(batch.members is not None for batch in engine.batches)
    lists = {id(batch.shared_lists()) for batch in engine.batches}
    assert len(lists) == max(2 * len(OURS) // max_pieces, 1) + (max_pieces == 5)


@pytest.mark.parametrize(("room", "posts", "lists"), [(32, 3, 1), (20, 5, 1), (8, 10, 2)])
def test_credits_cut_between_layers(rig: Rig, room: int, posts: int, lists: int) -> None:
    """A share of the credits that ends inside a layer does not part layers from their lists."""
    p = rig.node("producer", layers=LAYERS, num_blocks=BLOCKS)
    engine = Recording(1000, room=room)
    c = rig.node("c", layers=LAYERS, transport=engine, num_blocks=BLOCKS)
    one_storage(p)
    one_storage(c)
    c.agent.pull(p.agent.hold("t", at(0, *THEIRS)), at(0, *OURS))
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content(OURS) == p.content(THEIRS)
    assert len(engine.batches) == posts
    assert all(batch.members is not None for batch in engine.batches)
    assert len({id(batch.shared_lists()) for batch in engine.batches}) == lists
    assert c.counters["admission.cut"] == 1


def test_pushes_layer_by_layer_share_one_plan(rig: Rig) -> None:
    """WRITE: one push per layer takes its pieces, and their lists, from the plan cache."""
    p, c = (
        rig.node(name, layers=LAYERS, transport=Recording(1000), num_blocks=BLOCKS)
        for name in ("producer", "c")
    )
    one_storage(p)
    one_storage(c)
    c.agent.accept("t", at(0, *OURS), producers=[p.agent.endpoint])
    for i in range(LAYERS):
        p.agent.push("t", at(0, *THEIRS), to=c.agent.endpoint, layers=[f"layer{i}"])
    p.agent.seal("t")
    rig.run(lambda: bool(c.of(Received)))
    assert c.content(OURS) == p.content(THEIRS)
    batches = p.transport.batches  # type: ignore[attr-defined]
    assert len(batches) == LAYERS
    assert len({id(batch.shared) for batch in batches}) == 1


def test_views_name_the_layers_of_a_shared_storage() -> None:
    """Engines that count from a registration's begin learn where layers begin, once each."""
    whole = np.zeros(4 * SPAN, np.uint8)

    def cache(name: str, offset: int, **changes: int) -> LayerCache:
        at_ = attrs.evolve(layout(BLOCKS), offset=offset, **changes)
        return LayerCache(name=name, buffer=whole, layout=at_)

    stacked = [cache(f"l{i}", i * SPAN) for i in range(3)]
    (span,) = register_caches(stacked, [LoopbackTransport()]).spans
    assert span.views == ((SPAN, SPAN), (2 * SPAN, SPAN))
    alone = [cache("l0", 0)]
    assert register_caches(alone, [LoopbackTransport()]).spans[0].views == ()
    rows = [
        cache(f"l{i}", i * BLOCK, block_stride=2 * BLOCK, plane_stride=2 * SPAN) for i in (0, 1)
    ]
    assert register_caches(rows, [LoopbackTransport()]).spans[0].views == ()


def test_small_groups_share_a_batch_and_large_ones_get_their_own() -> None:
    """Layers of other geometry come in batches of their own only where that is worth a call."""

    def side(blocks: int) -> list[LayerRef]:
        refs = []
        for number, heads in enumerate([2, 2, 2, 3, 4]):
            at_: KVLayout = layout(blocks, heads)
            refs.append(LayerRef(name=f"l{number}", group=0, region=number, layout=at_))
        return refs

    layers = match_layers(side(400), side(400))
    rng = np.random.default_rng(3)
    for count, wanted in ((4, [6 * 4 + 2 * 4 + 2 * 4]), (100, [600, 400]), (200, [1200, 400, 400])):
        ids = [[Blocks.at(0, 2 * rng.permutation(200)[:count])] for _ in range(2)]
        plan = plan_layers(layers, *ids)
        batch = batch_of(plan)
        assert sorted(zip(*batch.lists(), strict=True)) == sorted(zip(*plan.lists(), strict=True))
        parts = batch.cut(max_pieces=1 << 20, max_nbytes=1 << 40)
        assert len(parts) == 1
        parts = batch.cut(max_pieces=len(batch) - 1, max_nbytes=1 << 40)
        if count == 4:
            assert batch.members is None
        else:
            assert [len(part) for part in parts] == wanted
