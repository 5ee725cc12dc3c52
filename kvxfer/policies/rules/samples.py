"""Samples of what engines say, and the check that rules and samples fit each other."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvxfer.core.verdict import EngineError
from kvxfer.policies.classify import ClassifierRegistry

__all__ = ["Sample", "check_samples"]


@attrs.frozen(kw_only=True)
class Sample:
    """What an engine said, and the rule that has to catch it. ``evidence``: how it was obtained."""

    rule: str
    error: EngineError
    evidence: str = ""


def check_samples(
    registry: ClassifierRegistry, samples: Iterable[Sample], prefix: str = ""
) -> list[str]:
    """What is wrong between the registry's rules and ``samples``; empty if nothing is.

    Each sample must be caught by its rule, at most one rule may recognise its message, and no
    other rule may be as specific as the winner.  Each rule whose name begins with ``prefix`` needs
    a sample.
    """
    problems = []
    sampled = set()
    for sample in samples:
        sampled.add(sample.rule)
        matching = registry.matching(sample.error)
        if not matching or matching[0].name != sample.rule:
            caught = matching[0].name if matching else "no rule"
            problems.append(f"{sample.error} is caught by {caught}, not by {sample.rule}")
            continue
        winner = matching[0]
        for other in matching[1:]:
            if other.pattern is not None or other.rank(sample.error) == winner.rank(sample.error):
                problems.append(f"{sample.error} is claimed by {other.name} and {winner.name}")
    problems += [
        f"rule {rule.name} has no sample"
        for rule in registry.rules
        if rule.name.startswith(prefix) and rule.name not in sampled
    ]
    return problems
