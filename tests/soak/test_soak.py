"""Real processes over shm: killed and stopped at random moments, READ and WRITE under way.

``--soak-rounds N`` sets the number of rounds (20 by default; ``make soak`` runs 200).
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from soak_rig import Child, Soak

pytestmark = pytest.mark.timeout(7000)


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Iterator[Soak]:
    soak = Soak(seed=request.config.getoption("--soak-seed"))
    yield soak
    soak.end()


def judge(soak: Soak) -> None:
    """Nothing wrong, nothing leaked, nothing stuck, nothing quarantined for ever."""
    finals = soak.finish()
    assert not soak.problems, soak.problems
    assert soak.wrong == 0
    assert set(finals) == {"producer", "consumer"}
    for final in finals.values():
        assert final["leaked"] == 0
        assert final["trespasses"] == 0
        assert final["quarantined"] == 0
        assert not any(final["tables"].values())


def test_kill_9_at_random_moments(soak: Soak, request: pytest.FixtureRequest) -> None:
    """Promises 3 to 5 and 8: after a death 0 wrong bytes, 0 leaked blocks, no shared memory left.

    Also that the survivor does not collect mappings of the dead.
    """
    rounds = request.config.getoption("--soak-rounds")
    mapped = []
    for number in range(rounds):
        began = time.monotonic()
        soak.kill_round(number)
        mapped.append(max(soak.producer.mapped(), soak.consumer.mapped()))
        print(
            f"round {number}: {time.monotonic() - began:.1f} s, {soak.count} requests, "
            f"wrong {soak.wrong}, problems {len(soak.problems)}, mapped {mapped[-1]}",
            flush=True,
        )
    print(dict(soak.outcomes), flush=True)
    judge(soak)
    assert soak.outcomes["consumer received"] >= 4 * rounds
    assert max(mapped[len(mapped) // 2 :]) <= max(mapped[: len(mapped) // 2]) + 1
    assert soak.named == set()


NAMED = """
import sys
from multiprocessing.shared_memory import SharedMemory
kept = SharedMemory(create=True, size=4096)
print('{"op": "ready"}', flush=True)
sys.stdin.read()
kept.close()
kept.unlink()
"""


def test_shared_memory_with_a_name_would_be_seen() -> None:
    """A control of the promise that none is left: a worker that keeps some is told from ours."""
    inbox: queue.SimpleQueue[tuple[Child, dict[str, Any]]] = queue.SimpleQueue()
    child = Child("keeper", inbox, [sys.executable, "-c", NAMED])
    try:
        assert inbox.get(timeout=60)[1] == {"op": "ready"}
        (name,) = child.named()
        assert Path(name).exists()
    finally:
        child.end()
    assert not Path(name).exists()


@pytest.mark.parametrize(
    ("seconds", "harmless"), [(0.4, True), (0.0, False)], ids=["shorter", "longer"]
)
def test_a_peer_that_is_stopped(soak: Soak, seconds: float, harmless: bool) -> None:
    """SIGSTOP for less than the deadlines harms nothing; for more, the other side ends in time."""
    for number in range(3):
        soak.stop_round(number, seconds, harmless=harmless)
    judge(soak)
