"""docs/reference/metrics.md and docs/reference/logs.md say what the code does."""

from __future__ import annotations

import ast
from pathlib import Path

from doc_blocks import ROOT

import kvxfer
from kvxfer.observe.families import BYTE_BUCKETS, SECOND_BUCKETS, markdown

PACKAGE = Path(kvxfer.__file__).parent
_METHODS = {"problem": "WARNING", "news": "INFO", "failed": "ERROR"}


def test_the_table_of_metrics_is_the_codes() -> None:
    """Names, types, labels and help, in the order of a scrape. To renew it:
    python -c "from kvxfer.observe.families import markdown; print(markdown())"
    """
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert markdown() in page
    for bound in SECOND_BUCKETS:
        assert f"{bound:g}" in page
    assert f"{int(BYTE_BUCKETS[0]) >> 10} KiB" in page
    assert f"{int(BYTE_BUCKETS[-1]) >> 30} GiB" in page


def limited_lines() -> set[tuple[str, str]]:
    """Level and event of every limited line of the package, from its source."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "LimitedLog(" not in text and ".log." not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            first = node.args[0]
            events = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
            levels = _levels(node.func)
            for event in events:
                if isinstance(event, ast.Constant) and isinstance(event.value, str):
                    found |= {(level, event.value) for level in levels}
    return found


def _levels(function: ast.expr) -> list[str]:
    if isinstance(function, ast.Attribute) and ast.unparse(function.value).split(".")[-1] in (
        "_log",
        "log",
        "logger",
    ):
        return [_METHODS[function.attr]] if function.attr in _METHODS else []
    # ``log = ctx.log.problem if ... else ctx.log.news``
    return ["WARNING", "INFO"] if isinstance(function, ast.Name) and function.id == "log" else []


def test_the_table_of_log_lines_is_the_codes() -> None:
    """Every line above DEBUG that is limited is listed with its level, and nothing else is."""
    page = (ROOT / "docs" / "reference" / "logs.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    listed = {
        (level.strip(), row[1].strip().strip("`")) for row in rows for level in row[2].split(",")
    }
    there = limited_lines()
    assert len(there) > 15
    assert listed == there
