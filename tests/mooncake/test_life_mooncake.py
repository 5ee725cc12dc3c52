"""Peers over Mooncake that are killed, stopped and restarted under load, in their own processes."""

from __future__ import annotations

import pytest

from kvxfer.testing.life import Life

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def life():
    made = Life([("mooncake", {})], seed=1)
    yield made
    made.end()


def test_peer_life(life):
    """Whatever happens to the victim under load: its transfers end by their deadlines, those of the
    healthy peer are all received, it is served again by itself, no byte is wrong, and no block is
    handed back while something could still land in it.  That holds for half-open connections, too:
    a peer that vanished is noticed."""
    for number, event in enumerate(("killed", "stopped", "restarted", "vanished")):
        print(f"{event}: {life.round(number, event):.1f} s, {life.count} requests")
    life.finish()
    print(life)
    life.judge()
