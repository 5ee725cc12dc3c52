"""What a run counted, whether all promises held, and how that is shown."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs

from kvxfer.cli.demo.plan import Action, DemoPlan, Request

__all__ = ["Report", "show"]


@attrs.define(kw_only=True)
class Report:
    """Filled while the demo runs."""

    plan: DemoPlan
    began: float = 0.0
    ended: float = 0.0
    requests: Counter[str] = attrs.field(factory=Counter)
    outcomes: dict[str, Counter[str]] = attrs.field(
        factory=lambda: {"prefill": Counter(), "decode": Counter()}
    )
    ended_ids: dict[str, Counter[str]] = attrs.field(
        factory=lambda: {"prefill": Counter(), "decode": Counter()}
    )
    nbytes: int = 0
    wrong: int = 0
    finals: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    changes: list[str] = attrs.field(factory=list)
    """Of backends: who, to which, and why."""

    def begun(self, request: Request) -> None:
        self.requests["total"] += 1
        self.requests[request.action.value] += 1
        self.requests["early"] += request.early
        self.requests["prefix hit"] += 0 < request.prefix < request.blocks

    def over(self, message: dict[str, Any]) -> None:
        side = message["side"]
        self.outcomes[side][message["outcome"]] += 1
        self.ended_ids[side][message["id"]] += 1
        self.nbytes += message.get("nbytes", 0)
        self.wrong += message.get("wrong", 0)
        if message["outcome"].startswith("failed") and message["outcome"] != "failed aborted":
            self.problems.append(f"{message['id']} {message['outcome']}: {message.get('error')}")

    def final(self, role: str, message: dict[str, Any]) -> None:
        self.finals[role] = message

    # ---- the verdict -------------------------------------------------------------------------

    def injected(self) -> dict[str, int]:
        """Faults by kind, counted where they were injected."""
        found: Counter[str] = Counter()
        for final in self.finals.values():
            found.update(final["faults"])
        if self.plan.level.odd_requests:
            found["aborts"] = self.requests[Action.ABORT.value]
            found["declines"] = self.requests[Action.DECLINE.value]
            found["early ACKs"] = self.counter("prefill", "acks.early")
            found["prefix hits"] = self.requests["prefix hit"]
        return dict(found)

    def counter(self, role: str, name: str) -> int:
        return int(self.finals.get(role, {}).get("counters", {}).get(name, 0))

    def counters(self, role: str, prefix: str) -> dict[str, int]:
        counters = self.finals.get(role, {}).get("counters", {})
        return {
            name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)
        }

    def leaked(self) -> int:
        return sum(final["leaked"] for final in self.finals.values())

    def verdict(self) -> list[str]:
        """Every promise that did not hold; empty if all did."""
        broken = list(self.problems)
        if self.wrong:
            broken.append(f"{self.wrong} bytes are wrong")
        if len(self.finals) == 2 and self.leaked():
            broken.append(f"{self.leaked()} blocks leaked")
        for role, final in self.finals.items():
            left = {name: n for name, n in final["tables"].items() if n}
            if left:
                broken.append(f"{role}: tables are not empty: {left}")
            if final["quarantined"]:
                broken.append(f"{role}: {final['quarantined']} transfers in quarantine")
            if not final["healthy"]:
                broken.append(f"{role}: not healthy")
        for role, ended in self.ended_ids.items():
            twice = [name for name, n in ended.items() if n > 1]
            if twice:
                broken.append(f"{role}: {len(twice)} requests ended twice, such as {twice[0]}")
            if sum(ended.values()) < self.requests["total"]:
                broken.append(f"{role}: {self.requests['total'] - len(ended)} requests never ended")
        expired = self.outcomes["prefill"]["expired"]
        if expired:
            broken.append(f"{expired} holds expired although their readers were alive")
        if self.plan.failover is not None and not self.counter("decode", "failover.downgrades"):
            broken.append(f"decode did not move to {self.plan.failover}")
        if self.plan.level.posts:
            least = self.requests["total"] // 100
            for name in (
                *(k.value for k in self.plan.level.posts),
                "lost_messages",
                "repeated_messages",
                "aborts",
                "declines",
                "early ACKs",
                "prefix hits",
            ):
                hits = self.injected().get(name, 0)
                if hits < least:
                    broken.append(f"fault {name} struck {hits} times: at least {least} are wanted")
        return broken

    def to_dict(self) -> dict[str, Any]:
        seconds = max(1e-9, self.ended - self.began)
        scaled = self.plan.scaled
        return {
            "held": not self.verdict(),
            "broken": self.verdict(),
            "backend": self.plan.backend,
            "model": scaled.geometry.title,
            "layers": scaled.layers,
            "layers_of_model": scaled.geometry.layers,
            "blocks": scaled.blocks,
            "block_nbytes": scaled.block_nbytes,
            "seed": self.plan.seed,
            "requests": dict(self.requests),
            "outcomes": {side: dict(c) for side, c in self.outcomes.items()},
            "bytes": self.nbytes,
            "seconds": round(seconds, 3),
            "gib_per_s": round(self.nbytes / seconds / 2**30, 3),
            "retries": self.counters("decode", "posts.retried."),
            "acks": self.counters("prefill", "acks."),
            "failover": self.counters("decode", "failover."),
            "backend_changes": self.changes,
            "blocks_leaked": self.leaked() if len(self.finals) == 2 else None,
            "bytes_wrong": self.wrong,
            "faults": self.injected(),
        }

    def rows(self) -> list[tuple[str, str]]:
        """The final table."""
        d = self.to_dict()
        return [
            ("backend", d["backend"]),
            ("model", d["model"]),
            (
                "KV cache",
                f"{d['layers']} of {d['layers_of_model']} layers, {d['blocks']} blocks of "
                f"{d['block_nbytes'] >> 10} KiB (scaled to memory)",
            ),
            ("requests", _listed(d["requests"])),
            ("ended, decode", _listed(d["outcomes"]["decode"])),
            ("ended, prefill", _listed(d["outcomes"]["prefill"])),
            ("bytes moved", f"{d['bytes']:,} in {d['seconds']} s"),
            ("GiB/s", f"{d['gib_per_s']} (filling and checking every byte included)"),
            ("retries by kind", _listed(d["retries"])),
            ("ACKs by result", _listed(d["acks"])),
            ("faults injected", _listed(d["faults"])),
            *(("backend changed", change) for change in d["backend_changes"]),
            ("failover, decode", _listed(d["failover"])),
            ("blocks leaked", str(d["blocks_leaked"])),
            ("bytes wrong", str(d["bytes_wrong"])),
        ]


def _listed(table: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(table.items()) if n) or "none"


class _Plain:
    """Progress as lines, for logs and terminals without rich."""

    def __init__(self, report: Report, *, as_json: bool) -> None:
        self.report = report
        self._json = as_json
        self._last = time.monotonic()

    def update(self) -> None:
        if not self._json and time.monotonic() - self._last >= 2.0:
            self._last = time.monotonic()
            done = sum(self.report.ended_ids["decode"].values())
            sys.stdout.write(
                f"{done} of {self.report.plan.requests} requests, "
                f"{self.report.nbytes / 2**20:.0f} MiB, {self.report.wrong} wrong bytes\n"
            )
            sys.stdout.flush()

    def conclude(self) -> int:
        """Print the result; returns the exit status."""
        broken = self.report.verdict()
        if self._json:
            sys.stdout.write(json.dumps(self.report.to_dict()) + "\n")
        else:
            self.table()
            self.verdict(broken)
        return 1 if broken else 0

    def table(self) -> None:
        for name, value in self.report.rows():
            sys.stdout.write(f"{name:<16} {value}\n")

    def verdict(self, broken: list[str]) -> None:
        for line in broken[:20]:
            sys.stdout.write(f"BROKEN: {line}\n")
        if len(broken) > 20:
            sys.stdout.write(f"BROKEN: and {len(broken) - 20} more\n")
        if not broken:
            sys.stdout.write("All promises held.\n")


class _Rich(_Plain):
    """A live progress bar and a table."""

    def __init__(self, report: Report) -> None:
        super().__init__(report, as_json=False)
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self.console = Console()
        self.progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[mib]:.0f} MiB, {task.fields[wrong]} wrong bytes"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self.progress.add_task(
            "requests", total=report.plan.requests, mib=0.0, wrong=0
        )

    def update(self) -> None:
        self.progress.update(
            self._task,
            completed=sum(self.report.ended_ids["decode"].values()),
            mib=self.report.nbytes / 2**20,
            wrong=self.report.wrong,
        )

    def table(self) -> None:
        from rich.table import Table

        table = Table(show_header=False)
        for name, value in self.report.rows():
            table.add_row(name, value)
        self.console.print(table)


@contextlib.contextmanager
def show(report: Report, *, as_json: bool) -> Iterator[_Plain]:
    """Live progress while the block runs: with rich on a terminal, as lines elsewhere."""
    if as_json or not sys.stdout.isatty():
        yield _Plain(report, as_json=as_json)
        return
    try:
        view = _Rich(report)
    except ImportError:
        yield _Plain(report, as_json=False)
        return
    with view.progress:
        yield view
