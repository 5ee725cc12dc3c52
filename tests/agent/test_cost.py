"""Guards on what the agent's own work costs. The figures are ``benchmarks/agent_cost.py``'s.

CPU time of this thread, contenders interleaved, medians of ratios; bounds are several times what is
measured on an idle machine, so that a busy one does not fail them and a loop over everything does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import agent_cost
import observe_cost


@pytest.fixture
def stages() -> Iterator[list[agent_cost.Stage]]:
    stages: list[agent_cost.Stage] = []
    yield stages
    for stage in stages:
        stage.close()


def ratio(few: Callable[[], object], many: Callable[[], object], times: int) -> float:
    return float(agent_cost.compare(few, many, 5, times)["ratio"])


def test_held_leases_cost_a_poll_nothing(stages: list[agent_cost.Stage]) -> None:
    """5,000 held leases and 10 active transfers: a poll costs what it costs with none held, and a
    renewal what it costs with 10 held."""
    none, ten, many = (agent_cost.Held(count) for count in (0, 10, 5_000))
    stages += [none.stage, ten.stage, many.stage]
    assert ratio(none.poll, many.poll, 100) < 4
    assert ratio(ten.renew, many.renew, 100) < 4


def test_idle_peers_cost_the_others_nothing(stages: list[agent_cost.Stage]) -> None:
    """A transfer with one peer costs the same with 40 connected peers as with 4."""
    few, crowd = agent_cost.Peers(4), agent_cost.Peers(40)
    stages += [few.stage, crowd.stage]
    assert ratio(few.transfer, crowd.transfer, 15) < 3


@pytest.mark.parametrize("kind", ["early", "progress"])
def test_releases_are_cheap(kind: str) -> None:
    """Decoding, reconciling and counting a release costs a small multiple of decoding it alone,
    however many came before it."""
    alone = min(agent_cost.plain_decode(2000) for _ in range(3))
    seconds = min(agent_cost.Releases(kind, 1000).run() for _ in range(3))
    assert seconds < 30 * alone


def test_metrics_cost_a_pull_next_to_nothing() -> None:
    """A pull of 256 bytes, the smallest there is, with metrics and without."""
    nobody, metrics = observe_cost.Pair(), observe_cost.Pair(metrics=True)
    try:
        assert ratio(nobody.pull, metrics.pull, 40) < 1.5
    finally:
        nobody.close()
        metrics.close()
