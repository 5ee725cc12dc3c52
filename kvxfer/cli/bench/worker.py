"""One contender's measurements, in a process of its own: ``python -m kvxfer.cli.bench.worker``.

Prints one JSON object per line: ``{"part": ..., ...}`` for each measurement as it is made, and
``{"part": "over"}`` at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import attrs

from kvxfer.cli.bench.bandwidth import Bandwidth
from kvxfer.cli.bench.concurrency import latencies
from kvxfer.cli.bench.plan import BenchPlan, Contender
from kvxfer.cli.bench.recovery import recovery
from kvxfer.cli.bench.rig import Rig, describe
from kvxfer.core.verdict import Op
from kvxfer.errors import KvxferError

__all__ = ["main"]

_RECOVERY = 4
"""The recovery part takes as long as so many other measurements, but a second at least."""


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args(argv)
    # Engines print to standard output; the results keep a descriptor of their own.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(part: str, **values: Any) -> None:
        results.write(json.dumps({"part": part, **values}) + "\n")

    plan = BenchPlan.from_json(arguments.plan)
    contender = Contender(**json.loads(arguments.contender))
    try:
        rig = Rig(contender, plan.buffer)
    except KvxferError as error:
        tell("unavailable", reason=describe(error))
        return 1
    try:
        _measure(rig, plan, arguments.seconds, tell)
    except KvxferError as error:
        tell("failed", reason=describe(error))
        return 1
    finally:
        rig.close()
    tell("over")
    return 0


def _measure(rig: Rig, plan: BenchPlan, seconds: float, tell: Any) -> None:
    began = time.monotonic()
    tell("about", **_about(rig))
    each = seconds / (plan.steps() + (_RECOVERY - 1) * plan.recovery)
    bandwidth = Bandwidth(rig, plan.seed)
    for cell in plan.cells():
        tell("bandwidth", **bandwidth.measure(cell, each))
    for under_way in plan.concurrency:
        row = latencies(rig, plan.load, under_way, seconds=each, seed=plan.seed)
        tell("concurrency", **row)
    if plan.recovery:
        lasting = max(_RECOVERY * each, 1.0)
        tell("recovery", **recovery(rig, plan.load, seconds=lasting, seed=plan.seed))
    tell("spent", seconds=round(time.monotonic() - began, 2))


def _about(rig: Rig) -> dict[str, Any]:
    limits = rig.transport.capabilities
    found: dict[str, Any] = {
        "backend": rig.transport.name,
        "visibility": limits.visible(Op.READ).name,
        "max_pieces": limits.max_pieces,
        "config": repr(getattr(rig.transport, "config", None)),
    }
    copier = getattr(rig.transport, "copier", None)
    if copier is not None:
        found["copier"] = attrs.asdict(copier, filter=lambda a, _: a.name != "copy_pieces")
    return {k: v if isinstance(v, int | dict) else str(v) for k, v in found.items()}


if __name__ == "__main__":
    sys.exit(main())
