"""What cannot be planned exactly is refused, with its numbers, before the engine sees anything."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from agent_rig import HEAD_NBYTES, HEADS, TOKENS, Node, Rig, at, layout

from kvxfer.agent.caches import LayerCache
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.batch import Batch
from kvxfer.core.events import Failed, Received
from kvxfer.core.layout import Blocks
from kvxfer.errors import ErrorKind


class Recording(LoopbackTransport):
    """A loopback engine that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def _post(self, attempt: Any) -> None:
        self.batches.append(attempt.batch)
        super()._post(attempt)


def pair(rig: Rig) -> tuple[Node, Node]:
    p, c = (rig.node(name, transport=Recording()) for name in ("p", "c"))
    return p, c


def refused(rig: Rig, node: Node, handle: Any) -> str:
    """The error's text; nothing was posted, and nothing is left behind."""
    rig.run(lambda: handle.done)
    (failed,) = node.of(Failed)
    assert failed.drained
    assert node.transport.batches == []  # type: ignore[attr-defined]
    rig.pass_time(20)
    assert not any(node.tables.values())
    return str(failed.error)


@pytest.mark.parametrize(
    ("theirs", "ours", "options", "text"),
    [
        ([5, 16], [1, 2], {}, "remote block id 16 lies outside 0..15"),
        ([-1, 5], [1, 2], {}, "remote block id -1 lies outside 0..15"),
        ([5, 6], [1, 2, 3], {}, "uncovered_local=0"),
        ([5], [1, 2, 3], {"uncovered_local": 1}, "uncovered_local=1"),
    ],
)
def test_pulls_that_do_not_pair(
    rig: Rig, theirs: list[int], ours: list[int], options: dict[str, int], text: str
) -> None:
    """The peer's ids out of range or negative, and local blocks beyond what may stay uncovered:
    value and range are named."""
    p, c = pair(rig)
    offer = attrs.evolve(p.agent.hold("t", at(0, 5, 6)), groups=(Blocks.at(0, theirs),))
    assert text in refused(rig, c, c.agent.pull(offer, at(0, *ours), **options))


def over_one_memory(node: Node) -> np.ndarray:
    """Two groups of layers over the same bytes, as hybrid models have them."""
    memory = np.zeros((2, 16, TOKENS, HEADS, HEAD_NBYTES), np.uint8)
    memory[:] = np.random.default_rng(len(node.name)).integers(0, 256, memory.shape)
    node.agent.register_kv_caches(
        [
            LayerCache(name=f"layer{group}", buffer=memory, layout=layout(16), group=group)
            for group in (0, 1)
        ]
    )
    return memory


def test_groups_that_would_write_the_same_bytes(rig: Rig) -> None:
    """Overlapping destinations are an error that names the bytes; distinct blocks are fine, and
    report O49: an empty list of one group moves the other's blocks only."""
    p, c = pair(rig)
    source, target = over_one_memory(p), over_one_memory(c)
    held = [at(0, 5), at(0, 6)]
    text = refused(rig, c, c.agent.pull(p.agent.hold("t", held), [at(0, 3), at(0, 3)]))
    assert "would be written twice" in text
    c.agent.pull(p.agent.hold("u", held), [at(0, 3), at(0, 4)])
    rig.run(lambda: bool(c.of(Received, "u")))
    assert (target[:, [3, 4]] == source[:, [5, 6]]).all()
    c.agent.pull(p.agent.hold("v", held), [at(0), at(0, 9)])
    rig.run(lambda: bool(c.of(Received, "v")))
    assert c.of(Received, "v")[0].nbytes == 2 * TOKENS * HEADS * HEAD_NBYTES
    assert (target[:, 9] == source[:, 6]).all()


def test_other_bytes_per_token_leave_no_state(rig: Rig) -> None:
    """Report O43: the error names both geometries, and no path to that peer is kept."""
    p, c = pair(rig)
    wide = {name: np.zeros((2, 16, TOKENS, HEADS, 2 * HEAD_NBYTES), np.uint8) for name in p.memory}
    p.agent.register_kv_caches(wide, layout(16, head_nbytes=2 * HEAD_NBYTES))
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    text = refused(rig, c, handle)
    assert c.of(Failed)[0].kind is ErrorKind.HANDSHAKE
    assert "the caches differ in bytes per token and head" in text
    assert f"{HEAD_NBYTES} B per head" in text
    assert f"{2 * HEAD_NBYTES} B per head" in text
    assert not c.transport._paths
