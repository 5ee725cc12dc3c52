"""``kvxfer plugins``: what is installed, where it comes from, and whether it loads."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.core.plugins import PluginInfo

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``kvxfer plugins``."""
    parser.description = (
        "Lists backends, classifiers of errors and retry policies of all installed distributions, "
        "with origin and version, and loads each. Exit status 1 if one cannot be used. That a "
        "backend loads does not say that its engine is installed: ask `kvxfer doctor`."
    )
    parser.add_argument(
        "--no-load", action="store_true", help="read the metadata only, import nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kvxfer.core.plugins import PluginGroup, list_plugins

    load = not arguments.no_load
    found = {group.value: list_plugins(group, load=load) for group in PluginGroup}
    if arguments.json:
        rows = {group: [_plain(info, load) for info in infos] for group, infos in found.items()}
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        _show(found, load)
    return 1 if any(info.error for infos in found.values() for info in infos) else 0


def _state(info: PluginInfo, load: bool) -> str:
    if info.error:
        return "broken"
    return "loads" if load else "not tried"


def _plain(info: PluginInfo, load: bool) -> dict[str, Any]:
    return {
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        "target": info.target,
        "ours": info.ours,
        "state": _state(info, load),
        "error": info.error,
    }


def _show(found: dict[str, list[PluginInfo]], load: bool) -> None:
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            _table(found, load)
            return
    for group, infos in found.items():  # into a file or pipe, or without rich
        sys.stdout.write(f"{group}\n")
        for info in infos:
            origin = f"{info.distribution} {info.version}".strip()
            problem = f"  PROBLEM: {info.error}" if info.error else ""
            row = f"{info.name or '?':<12} {_state(info, load):<9} {origin}  {info.target}"
            sys.stdout.write(f"  {row}{problem}\n")


def _table(found: dict[str, list[PluginInfo]], load: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="kvxfer plugins", title_justify="left", expand=True)
    for heading in ("name", "from", "state"):
        table.add_column(heading, no_wrap=True)
    table.add_column("target, or why it cannot be used", ratio=1, overflow="fold")
    for group, infos in found.items():
        table.add_section()
        table.add_row(Text(group, style="bold"), "", "", "")
        for info in infos:
            style = "bold red" if info.error else "green" if load else "dim"
            table.add_row(
                f"  {info.name or '?'}",
                f"{info.distribution} {info.version}".strip(),
                Text(_state(info, load), style=style),
                Text(info.error or info.target),
            )
    Console(file=sys.stdout).print(table)
