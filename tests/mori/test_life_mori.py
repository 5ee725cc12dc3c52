"""Peers that are killed, stopped and restarted under load, each in a process of its own.

``SOAK_ROUNDS=n`` in the environment sets the number of rounds (5 by default), in which the three
take turns.
"""

from __future__ import annotations

import os

import pytest

from kvxfer.testing.life import Life

CONFIG = {
    "rehearse": False,
    "generation_linger_s": 1.0,
    "generation_drain_s": 2.0,
    "qp_retry_count": 3,
}
SLOW = 0.0005
"""Seconds per work request, so that some are under way at any moment."""
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "5"))

pytestmark = pytest.mark.timeout(120 + 60 * ROUNDS)


@pytest.fixture
def life(softrdma):
    softrdma.delay(SLOW)
    made = Life([("moriio", CONFIG)], seed=1, fences=True, softrdma=softrdma, slow=SLOW)
    yield made
    made.end()


EVENTS = ("killed", "stopped", "restarted")


def test_peer_life(life, capsys):
    """Whatever happens to the victim under load: its transfers end by their deadlines, those of the
    healthy peer are all received, it is served again by itself, no byte is wrong, and no block is
    handed back while something could still land in it."""
    for number in range(ROUNDS):
        event = EVENTS[number % len(EVENTS)]
        seconds = life.round(number, event)
        if ROUNDS > 5:
            with capsys.disabled():
                print(
                    f"round {number}, {event}: {seconds:.1f} s, {life.count} requests, wrong "
                    f"{life.wrong + life.trespasses}, problems {life.problems or 'none'}",
                    flush=True,
                )
    life.finish()
    print(life)
    life.judge()
    assert life.landed_late > 0, "nothing was half way: the rounds show nothing"
