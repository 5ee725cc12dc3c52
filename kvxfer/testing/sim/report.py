"""What a run found: violations with their trace, outcomes, and what struck in which phase."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvxfer.testing.sim.config import NodeFault, PostFault, SimConfig
from kvxfer.testing.sim.phases import MESSAGES, POSTS, TRANSFERS

__all__ = ["SimReport", "Violation", "coverage_table", "expected_cells", "merge"]

_MESSAGE_FAULTS = ("lost", "duplicated")


@attrs.frozen(kw_only=True)
class Violation:
    """One broken promise. ``trace`` is what happened to its transfer, oldest first."""

    at: float
    text: str
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"t={self.at:.3f} {self.text}", *(f"    {line}" for line in self.trace)])


@attrs.define
class SimReport:
    """What happened. ``violations`` is empty if every promise held."""

    seed: int
    config: SimConfig
    violations: list[Violation] = attrs.field(factory=list)
    outcomes: collections.Counter[str] = attrs.field(factory=collections.Counter)
    faults: collections.Counter[tuple[str, str]] = attrs.field(factory=collections.Counter)
    """By (fault, phase)."""
    seconds: float = 0.0
    """Simulated ones."""
    polls: int = 0
    messages: int = 0
    posts: int = 0
    actions: int = 0

    @property
    def happenings(self) -> int:
        """Rounds, messages and steps of flights, all together."""
        return self.polls + self.messages + self.actions

    def to_dict(self) -> dict[str, Any]:
        """For other processes and JSON."""
        return {
            "seed": self.seed,
            "violations": [str(v) for v in self.violations],
            "outcomes": dict(self.outcomes),
            "faults": [[fault, phase, n] for (fault, phase), n in self.faults.items()],
            "seconds": self.seconds,
            "happenings": self.happenings,
            "transfers": self.config.transfers,
        }


def expected_cells() -> list[tuple[str, str]]:
    """Every (fault, phase) that a large enough campaign must hit."""
    return [
        *((f.value, phase) for f in NodeFault for phase in TRANSFERS),
        *((f.value, phase) for f in PostFault for phase in POSTS),
        *((name, phase) for name in _MESSAGE_FAULTS for phase in MESSAGES),
    ]


def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs as one."""
    outcomes: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[tuple[str, str]] = collections.Counter()
    violations: list[tuple[int, str]] = []
    happenings = transfers = runs = 0
    for report in reports:
        runs += 1
        outcomes.update(report["outcomes"])
        for fault, phase, n in report["faults"]:
            faults[fault, phase] += n
        violations += [(report["seed"], text) for text in report["violations"]]
        happenings += report["happenings"]
        transfers += report["transfers"]
    return {
        "runs": runs,
        "transfers": transfers,
        "happenings": happenings,
        "violations": violations,
        "outcomes": dict(outcomes.most_common()),
        "faults": faults,
    }


def coverage_table(faults: Mapping[tuple[str, str], int]) -> str:
    """Faults by phase, as text."""
    blocks = (
        ([f.value for f in NodeFault], TRANSFERS),
        ([f.value for f in PostFault], POSTS),
        ([*_MESSAGE_FAULTS, "cut"], MESSAGES),
    )
    lines: list[str] = []
    for names, phases in blocks:
        width = max(map(len, phases)) + 2
        lines.append(" " * width + "".join(f"{name:>16}" for name in names))
        for phase in phases:
            counts = "".join(f"{faults.get((name, phase), 0):>16}" for name in names)
            lines.append(f"{phase:<{width}}{counts}")
        lines.append("")
    return "\n".join(lines)
