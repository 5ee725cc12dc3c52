"""Counts every container that an agent holds on to, wherever it hides: what grows is a leak."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sized
from typing import Any

__all__ = ["census"]

_BOUNDED = {
    "PlanCache",  # recomputed values, bounded by count
    "LinkLayers",  # the same
    "_Snapshot",  # the same, of the classifier
    "Counters",  # by name, and names are fixed
    "Breaker",  # faults of its window, bounded by count
    "ClassifierRegistry",  # examples of what no rule matched, bounded by count
    "BreakerTable",  # peers that failed lately, bounded by count
    "Desk",  # queues that are idle are kept, bounded by count
    "LimitedLog",  # by name of a kind of line, and those are fixed
    "RetryRun",  # of a link that is up: how its last connection came about
}
_LAZY = {("Timers", "_heap")}
"""Cancelled entries are dropped lazily; the bound is part of the class's own tests."""
_CONTAINERS = (dict, list, set, frozenset, collections.deque)


def census(root: Any) -> dict[str, int]:
    """Entries by class and attribute, summed over all instances that can be reached."""
    found: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        name = type(thing).__name__
        if isinstance(thing, (*_CONTAINERS, tuple)):
            waiting.extend(_ours(thing))
            continue
        if name in _BOUNDED:
            continue
        for attribute, value in _attributes(thing):
            if type(value).__name__ in _BOUNDED:
                continue
            if isinstance(value, _CONTAINERS) and (name, attribute) not in _LAZY:
                found[f"{name}.{attribute}"] += len(value)
            waiting.extend(_ours([value]))
    return dict(found)


def _ours(values: Any) -> Iterator[Any]:
    items = values.items() if isinstance(values, dict) else ((None, v) for v in values)
    for key, value in items:
        for part in (key, value):
            if isinstance(part, (*_CONTAINERS, tuple)) or _is_ours(part):
                yield part


def _is_ours(thing: Any) -> bool:
    module = type(thing).__module__
    return module.startswith("kvxfer.") and not module.startswith("kvxfer.testing")


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for cls in type(thing).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if hasattr(thing, slot) and slot != "__dict__":
                value = getattr(thing, slot)
                if isinstance(value, Sized) or _is_ours(value):
                    yield slot, value
