"""Peers over NIXL that are killed, stopped and restarted under load, in their own processes."""

from __future__ import annotations

import pytest

from kvxfer.testing.life import Life

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def life(monkeypatch):
    # Over shared memory a READ of a stopped peer would complete: tcp needs the peer's help.
    monkeypatch.setenv("UCX_TLS", "tcp")
    made = Life([("nixl", {})], seed=1, aborts=True)
    yield made
    made.end()


def test_peer_life(life):
    """Whatever happens to the victim under load: its transfers end by their deadlines, those of the
    healthy peer are all received, it is served again by itself, no byte is wrong, and no block is
    handed back while something could still land in it.  That holds for half-open connections, too:
    a peer that vanished is noticed.  UCX may end the process of a peer that goes on."""
    for number, event in enumerate(("killed", "stopped", "restarted", "vanished")):
        print(f"{event}: {life.round(number, event):.1f} s, {life.count} requests")
    life.finish()
    print(life, f"ended by UCX: {life.aborted}")
    life.judge()
