"""Peers that are killed, stopped and restarted under load, each in a process of its own.

``SOAK_ROUNDS=n`` in the environment sets the number of rounds (5 by default), in which the three
take turns.
"""

from __future__ import annotations

import os
import time

import pytest
from mori_life import SLOW, Life

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "5"))

pytestmark = pytest.mark.timeout(120 + 60 * ROUNDS)


@pytest.fixture
def life(softrdma):
    softrdma.delay(SLOW)
    made = Life(softrdma, seed=1)
    yield made
    made.end()


def killed(life, what):
    """Dead for as long as its transfers take to end; another process takes over later."""
    life.kill()
    life.pull_stock()
    life.settle(f"{what}: after the death", life.victim)
    life.replace_victim(same_port=False)


def restarted(life, what):
    """Another process at the same address at once, while the transfers of the old one fail."""
    old = life.victim
    life.kill()
    life.pull_stock()
    life.replace_victim(same_port=True)
    life.settle(f"{what}: the old one's transfers", old)


def stopped(life, what):
    """SIGSTOP until all its transfers have ended, then SIGCONT: its late WRITEs touch nothing."""
    life.stop()
    life.pull_stock()
    life.settle(f"{what}: while it stands still", life.victim)
    life.resume()
    life.traffic(0.3, life.healthy)  # in which it sends what it still had to send
    life.check_free()


EVENTS = (killed, stopped, restarted)


def test_peer_life(life, capsys):
    """Whatever happens to the victim under load: its transfers end by their deadlines, those of the
    healthy peer are all received, it is served again by itself, no byte is wrong, and no block is
    handed back while something could still land in it."""
    for number in range(ROUNDS):
        began = time.monotonic()
        event = EVENTS[number % len(EVENTS)]
        what = f"round {number}, {event.__name__}"
        life.gather(life.victim, 2)
        life.traffic(life.rng.uniform(0.05, 0.4), life.victim, life.healthy)
        event(life, what)
        life.until(lambda: life.victim in life.ready, f"{what}: it is up", 60, life.healthy)
        life.serves(what, life.victim)
        if ROUNDS > 5:
            with capsys.disabled():
                print(
                    f"{what}: {time.monotonic() - began:.1f} s, {life.count} requests, wrong "
                    f"{life.wrong + life.trespasses}, problems {life.problems or 'none'}",
                    flush=True,
                )
    life.finish()
    print(dict(life.outcomes), {name: round(s, 2) for name, s in life.slowest.items()})
    print(f"landed late: {life.landed_late}, longest gap {life.longest_gap:.2f} s")
    print(f"quarantined for a while: {life.quarantined}")
    assert not life.problems, life.problems
    assert (life.wrong, life.trespasses) == (0, 0)
    assert life.agent.snapshot().quarantine == (), life.quarantined
    assert len(life.free) == len(set(life.free)) == life.memory.shape[1]
    assert not any(life.agent.snapshot().tables.values()), life.agent.snapshot().tables
    failed = sum(n for what, n in life.outcomes.items() if "failed" in what)
    assert failed > 0, "nothing was hit: the rounds show nothing"
    assert life.landed_late > 0, "nothing was half way: the rounds show nothing"
