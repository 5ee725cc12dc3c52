"""The small simulation: promises hold for many orders of events, and the checker can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvxfer.agent.draining import Draining
from kvxfer.agent.part import Part
from kvxfer.agent.pull import Pull
from kvxfer.core.inflight import PinTable
from kvxfer.core.leases import LeaseTable
from kvxfer.core.reliable import Outbox
from kvxfer.testing.sim import SimConfig, run

SMALL = SimConfig(transfers=60)
ROUGH = SimConfig(transfers=60, lose=0.15, duplicate=0.15, delay=0.15, kill=0.03)


@pytest.mark.parametrize("config", [SMALL, ROUGH], ids=["small", "rough"])
@pytest.mark.parametrize("seed", range(6))
def test_promises_hold(seed: int, config: SimConfig) -> None:
    """Promises 1, 3, 4, 5, 6 and 8 under loss, delay, refusals, silence and kills."""
    report = run(seed, config)
    assert report.violations == []
    assert report.outcomes["Received"] > 20


def test_equal_seeds_give_equal_runs() -> None:
    """A failing seed can be replayed."""
    first, second = run(3, SMALL), run(3, SMALL)
    assert (first.outcomes, first.faults, first.steps, first.seconds) == (
        second.outcomes,
        second.faults,
        second.steps,
        second.seconds,
    )


def test_every_fault_strikes() -> None:
    """What the simulation says it injects is injected."""
    struck: dict[str, int] = {}
    for seed in range(4):
        for name, count in run(seed, ROUGH).faults.items():
            struck[name] = struck.get(name, 0) + count
    for name in ("kill", "lost", "duplicated", *(f"post.{k.value}" for k in ROUGH.posts)):
        assert struck.get(name, 0) > 0, name


Patch = Callable[[pytest.MonkeyPatch], None]


def _publish_undrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "drained", property(lambda self: True))


def _forget_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pull, "_release", lambda self, *, ok, now: None)


def _never_resend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "put", lambda self, mid, frame, *, now, until: None)


def _forget_to_unpin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinTable, "unpin", lambda self, token, groups: None)


def _no_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "expire", lambda self, now: [])


def _no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pull, "_watch_deadlines", lambda self, now: None)


def _drained_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Draining.step

    def early(self: Draining, now: float) -> None:
        self._is_drained = lambda: True
        step(self, now)

    monkeypatch.setattr(Draining, "step", early)


@pytest.mark.parametrize(
    "sabotage",
    [
        _publish_undrained,
        _forget_to_release,
        _never_resend,
        _forget_to_unpin,
        _no_expiry,
        _no_deadline,
        _drained_without_proof,
    ],
)
def test_sabotage_is_found(sabotage: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken promise shows within a few seeds: the checker can fail."""
    sabotage(monkeypatch)
    assert any(run(seed, ROUGH).violations for seed in range(5))
