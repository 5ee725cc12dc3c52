"""The parent: one worker after the other, progress, and what they measured."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from kvxfer import __version__
from kvxfer.cli.bench.plan import BenchPlan, Contender
from kvxfer.core.plugins import PluginGroup, list_plugins

__all__ = ["Step", "contenders", "run"]

Step = Callable[[str, str], None]
"""Told the contender's label and what was measured, once for each measurement."""

_NOT_MEASURED = frozenset({"loopback"})
"""It reaches only its own process."""
_ALWAYS_THERE = frozenset({"shm"})


def contenders(names: Sequence[str]) -> list[Contender]:
    """How the backends of these names are measured; all installed ones if there are none."""
    if not names:
        found = [info.name for info in list_plugins(PluginGroup.BACKENDS) if not info.error]
        names = sorted(set(found) - _NOT_MEASURED, key=lambda n: (n != "shm", n))
    return [contender for name in names for contender in Contender.named(name)]


def run(plan: BenchPlan, chosen: Sequence[Contender], step: Step) -> dict[str, Any]:
    """Measure every contender; the result as JSON values."""
    began = time.monotonic()
    result: dict[str, Any] = {
        "kvxfer": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "plan": attrs.asdict(plan),
    }
    # Whether an engine is there shows when it is opened, and what is not there needs no time: those
    # that are always there come last, and get what is left.
    found: dict[str, dict[str, Any]] = {}
    left = plan.seconds
    for i, contender in enumerate(sorted(chosen, key=lambda c: c.backend in _ALWAYS_THERE)):
        share = left / (len(chosen) - i)
        found[contender.label] = _measure(plan, contender, share, step)
        if found[contender.label]["state"] != "unavailable":
            left -= share
    result["contenders"] = [found[contender.label] for contender in chosen]
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def _measure(plan: BenchPlan, contender: Contender, seconds: float, step: Step) -> dict[str, Any]:
    found: dict[str, Any] = {
        "label": contender.label,
        "state": "failed",
        "reason": "",
        "about": {},
        "bandwidth": [],
        "concurrency": [],
        "recovery": None,
    }
    with _worker(plan, contender, seconds) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            part = told.pop("part")
            if part == "over":
                found["state"] = "measured"
            elif part in {"unavailable", "failed"}:
                found["state"], found["reason"] = part, told["reason"]
            elif part == "about":
                found["about"] = told
            elif part == "spent":
                found["seconds"] = told["seconds"]
            else:
                if part == "recovery":
                    found[part] = told
                else:
                    found[part].append(told)
                step(contender.label, part)
        status = process.wait()
    if status < 0:
        ended = f"its process was ended by {signal.Signals(-status).name}"
        # Some engines do that when everything was measured and they are closed.
        if found["state"] == "measured":
            found["reason"] = f"{ended} after the measurements"
        else:
            found["reason"] = found["reason"] or ended
    elif found["state"] == "failed" and not found["reason"]:
        found["reason"] = f"its process ended with status {status}"
    return found


@contextlib.contextmanager
def _worker(
    plan: BenchPlan, contender: Contender, seconds: float
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [
            *(sys.executable, "-m", "kvxfer.cli.bench.worker"),
            *("--plan", plan.to_json()),
            *("--contender", json.dumps(attrs.asdict(contender))),
            *("--seconds", repr(seconds)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
