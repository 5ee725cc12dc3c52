"""The findings as a whole: whether all can be used, as a table, as plain text or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.core.hostcheck import Finding, Level

if TYPE_CHECKING:
    from kvxfer.core.plugins import PluginInfo

__all__ = ["Report", "show"]


@attrs.frozen(kw_only=True)
class BackendReport:
    name: str
    distribution: str
    asked: bool
    findings: list[Finding]

    @property
    def missing(self) -> bool:
        return any(f.level is Level.MISSING for f in self.findings)

    @property
    def usable(self) -> bool:
        return not self.missing and all(f.level is not Level.ERROR for f in self.findings)

    @property
    def counts_against(self) -> bool:
        """Broken; or asked for by name and not there."""
        return not self.usable and (self.asked or not self.missing)

    @property
    def state(self) -> str:
        if self.missing:
            return "not installed"
        return "usable" if self.usable else "not usable"


@attrs.define(kw_only=True)
class Report:
    """Everything that was found, in order."""

    host: list[Finding]
    backends: list[BackendReport] = attrs.field(factory=list)

    def add(
        self, name: str, info: PluginInfo | None, findings: list[Finding], *, asked: bool
    ) -> None:
        origin = "" if info is None else f"{info.distribution} {info.version}".strip()
        self.backends.append(
            BackendReport(name=name, distribution=origin, asked=asked, findings=findings)
        )

    @property
    def usable(self) -> bool:
        """Whether everything that was asked for can be used."""
        host = all(f.level is not Level.ERROR for f in self.host)
        return host and not any(b.counts_against for b in self.backends)

    def to_json(self) -> dict[str, Any]:
        return {
            "usable": self.usable,
            "host": [_plain(f) for f in self.host],
            "backends": [
                {
                    "name": b.name,
                    "distribution": b.distribution,
                    "asked": b.asked,
                    "state": b.state,
                    "findings": [_plain(f) for f in b.findings],
                }
                for b in self.backends
            ],
        }

    def verdict(self) -> str:
        """One line."""
        if self.usable:
            names = ", ".join(b.name for b in self.backends if b.usable)
            backends = f" Backends: {names}." if names else ""
            return f"All that was asked for can be used.{backends}"
        wrong = [f.check for f in self.host if f.level is Level.ERROR]
        wrong += [b.name for b in self.backends if b.counts_against]
        return f"Not usable: {', '.join(dict.fromkeys(wrong))}. Begin with the first error above."


def _plain(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "what": finding.what,
        "next_step": finding.next_step,
    }


def show(report: Report, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
        return
    groups = [("host", "", report.host)]
    groups += [(b.name, b.state, b.findings) for b in report.backends]
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            _table(groups)
            groups = []
    _text(groups)  # into a file or pipe, or without rich: a line each
    sys.stdout.write(report.verdict() + "\n")


_Group = tuple[str, str, list[Finding]]
"""Title, state, findings."""


def _text(groups: list[_Group]) -> None:
    for title, state, findings in groups:
        sys.stdout.write(f"{title} {state}".rstrip() + "\n")
        for f in findings:
            sys.stdout.write(f"  {f.level.value.upper():<8} {f.check}: {f.what}\n")
            if f.next_step:
                sys.stdout.write(f"           -> {f.next_step}\n")


_STYLES = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.WARNING: "yellow",
    Level.MISSING: "dim",
    Level.ERROR: "bold red",
}


def _table(groups: list[_Group]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="kvxfer doctor", title_justify="left", expand=True)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("what was found, and the next step", ratio=1)
    for title, state, findings in groups:
        table.add_section()
        table.add_row(Text(title, style="bold"), "", Text(state, style="bold"))
        for f in findings:
            what = Text(f.what)
            if f.next_step:
                what.append(f"\n→ {f.next_step}", style="italic")
            table.add_row(f"  {f.check}", Text(f.level.value, style=_STYLES[f.level]), what)
    Console(file=sys.stdout).print(table)
