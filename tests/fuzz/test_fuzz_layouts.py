"""Layouts from the wire: refused by name, or usable; never a crash, a hang or a heap of memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from fuzz_rig import layout, rounds

from kvxfer.agent.caches import Caches, LayerCache, register_caches
from kvxfer.agent.mapping import match_link
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.layout import KVLayout, LayerRef, StateLayout
from kvxfer.core.layout.state import Sharding, StatePart
from kvxfer.core.topology import Ranks
from kvxfer.errors import InvalidInputError
from kvxfer.testing.hostile_messages import HOSTILE_VALUES, bend, hostile_layout


@pytest.mark.parametrize("seed", range(3))
def test_kv_layouts(seed: int) -> None:
    """Sizes of 2^63, negative strides, floats, missing and unknown keys: refused by name, or a
    layout whose every derived number is a number."""
    rng = random.Random(seed)
    taken = 0
    for _ in range(rounds(5000)):
        try:
            found = KVLayout.from_wire(hostile_layout(rng))
        except InvalidInputError:
            continue
        taken += 1
        assert 0 < found.end_offset < 2**63
        assert found.block_nbytes > 0
        assert found.describe()
    assert taken


@pytest.mark.parametrize("value", HOSTILE_VALUES, ids=lambda v: repr(v)[:20])
def test_what_is_no_dict(value: Any) -> None:
    """Anything in place of the dict is refused by both."""
    for kind in (KVLayout, StateLayout):
        with pytest.raises(InvalidInputError):
            kind.from_wire(value)


def test_deep_nesting() -> None:
    """Nesting beyond Python's recursion limit, wherever it stands."""
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    wire = layout().to_wire()
    for key in wire:
        with pytest.raises(InvalidInputError):
            KVLayout.from_wire({**wire, key: deep})
    state = _state().to_wire()
    for message in (
        {**state, "parts": deep},
        {**state, "parts": [deep]},
        {**state, "offset": deep},
    ):
        with pytest.raises(InvalidInputError):
            StateLayout.from_wire(message)


def _state() -> StateLayout:
    return StateLayout(
        num_slots=4,
        parts=[
            StatePart(
                name="ssm",
                slot_stride=256,
                units=4,
                unit_stride=32,
                unit_nbytes=32,
                rows=1,
                row_stride=0,
                dtype="float32",
                sharding=Sharding.REPLICATED,
            )
        ],
    )


@pytest.mark.parametrize("seed", range(3))
def test_state_layouts(seed: int) -> None:
    """The same for recurrent state, bent anywhere in its tree."""
    rng = random.Random(seed)
    for _ in range(rounds(3000)):
        message: Any = _state().to_wire()
        for _ in range(rng.randint(1, 3)):
            message = bend(message, rng)
        try:
            found = StateLayout.from_wire(message)
        except InvalidInputError:
            continue
        assert 0 < found.end_offset < 2**63


@pytest.mark.parametrize("seed", range(2))
def test_matching_a_hostile_layout(seed: int) -> None:
    """A layout that can be read is matched with ours: refused, or mapped, in bounded time and
    memory, whatever its numbers are."""
    rng = random.Random(seed)
    transport = LoopbackTransport()
    memory = np.zeros(layout().end_offset, dtype=np.uint8)
    caches: Caches = register_caches(
        [LayerCache(name="layer0", buffer=memory, layout=layout())], [transport]
    )
    mine = Ranks(tp_size=1, total_kv_heads=2)
    matched = 0
    tracemalloc.start()
    try:
        for _ in range(rounds(1500)):
            try:
                theirs = KVLayout.from_wire(hostile_layout(rng))
            except InvalidInputError:
                continue
            began = time.process_time()
            try:
                match_link(
                    caches, mine, [LayerRef(name="layer0", group=0, region=0, layout=theirs)], mine
                )
                matched += 1
            except InvalidInputError:
                pass
            assert time.process_time() - began < 5
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
        transport.close(0.5)
    assert matched
