"""The result as a table: with rich where it is installed, plain text elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from kvxfer.cli.bench.driver import Step
from kvxfer.cli.bench.plan import in_words

__all__ = ["progress", "show", "tables"]

Table = tuple[str, list[str], list[list[str]]]
"""Title, column heads, rows."""


def tables(result: dict[str, Any]) -> list[Table]:
    """What is shown: bandwidth, latencies, recovery; and who could not be measured, and why."""
    measured = [c for c in result["contenders"] if c["bandwidth"]]
    found: list[Table] = []
    heads = ["backend", "blocks", "pattern", "kvxfer GB/s", "engine GB/s", "memmove GB/s"]
    heads += ["of engine", "of memmove"]
    rows = [
        [
            contender["label"],
            f"{row['count']} x {in_words(row['size'])}",
            row["pattern"],
            *(_number(row.get(name)) for name in ("kvxfer", "direct", "memmove")),
            *(_number(row.get(f"to_{name}")) for name in ("direct", "memmove")),
        ]
        for contender in measured
        for row in contender["bandwidth"]
    ]
    found.append(("Bandwidth of one transfer (READ)", heads, rows))
    heads = ["backend", "under way", "p50 ms", "p90 ms", "p99 ms", "GB/s together"]
    rows = [
        [
            contender["label"],
            str(row["under_way"]),
            *(_number(row[f"p{p}_ms"]) for p in (50, 90, 99)),
            _number(row["gb_per_s"]),
        ]
        for contender in measured
        for row in contender["concurrency"]
    ]
    if rows:
        found.append(("Latency of a transfer of about 1 MiB", heads, rows))
    heads = ["backend", "noticed after s", "recovered after s", "failed transfers"]
    rows = [
        [
            contender["label"],
            *(
                _number(told[name], "not within 20")
                for name in ("noticed_after", "recovered_after")
            ),
            str(told["failed_transfers"]),
        ]
        for contender in measured
        if (told := contender["recovery"])
    ]
    if rows:
        found.append(("A peer is killed, another takes over", heads, rows))
    rows = [[c["label"], c["state"], c["reason"]] for c in result["contenders"] if c["reason"]]
    if rows:
        found.append(("Not measured, or not to the end", ["backend", "state", "reason"], rows))
    return found


def _number(value: float | None, missing: str = "-") -> str:
    if value is None:
        return missing
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            _show_rich(tables(result))
            return
    for title, heads, rows in tables(result):
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
        head = "  ".join(f"{c:<{w}}" for c, w in zip(heads, widths, strict=True))
        sys.stdout.write("\n".join(["", title, head, *lines]) + "\n")


def _show_rich(found: list[Table]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    for title, heads, rows in found:
        table = RichTable(title=title, title_justify="left")
        for i, head in enumerate(heads):
            table.add_column(head, justify="left" if i == 0 or not _numeric(rows, i) else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _numeric(rows: list[list[str]], column: int) -> bool:
    return all(row[column][:1].isdigit() or row[column] == "-" for row in rows)


@contextlib.contextmanager
def progress(steps: int, *, quiet: bool) -> Iterator[Step]:
    """Tells on standard error what was measured: a bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda label, part: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda label, part: None
        return
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=steps)
        yield lambda label, part: bar.update(task, advance=1, description=f"{label}: {part}")
