"""Dashboard, alerts and runbook speak of what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from doc_blocks import ROOT

from kvxfer.agent.health import PROBLEMS
from kvxfer.observe.families import Type, all_families

OPERATIONS = ROOT / "docs" / "operations"
SERIES = {
    name: family
    for family in all_families()
    for name in (
        [family.full_name + part for part in ("_bucket", "_count", "_sum")]
        if family.type is Type.HISTOGRAM
        else [family.full_name]
    )
}
EVERYWHERE = {"agent", "instance", "job"}
_SELECTOR = re.compile(r"(kvxfer_[a-z_]+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((OPERATIONS / "kvxfer-dashboard.json").read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> str:
    return (OPERATIONS / "kvxfer-alerts.yml").read_text()


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and the PromQL."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    text = rules()
    names = re.findall(r"- alert: (\w+)", text)
    found = re.findall(r"expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)", text)
    assert len(names) == len(found) >= 10
    for name, (block, line) in zip(names, found, strict=True):
        yield f"alert {name}", block or line


ALL = list(expressions())


@pytest.mark.parametrize(("where", "expression"), ALL, ids=[where for where, _ in ALL])
def test_every_expression_is_about_metrics_that_exist(where: str, expression: str) -> None:
    """Each series is exported under that name, each label is one of its own, and each label value
    that is written out is one that exists."""
    used = _SELECTOR.findall(expression)
    assert used, where
    labels = set(EVERYWHERE) | {"le"}
    for name, selector in used:
        assert name in SERIES, f"{where}: {name} is not exported"
        own = {*SERIES[name].labels, *EVERYWHERE}
        labels |= own
        for label, operator, value in re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', selector):
            assert label in own, f"{where}: {name} has no label {label}"
            if not value.startswith("$"):
                known = _values(name, label)
                for one in value.split("|") if "~" in operator else [value]:
                    assert one in known, f"{where}: {name} has no {label} {one}"
    for grouping in _GROUPING.findall(expression):
        for label in filter(None, (word.strip() for word in grouping.split(","))):
            assert label in labels, f"{where}: grouped by {label}"


def _values(name: str, label: str) -> set[str]:
    from kvxfer.observe.families import OUTCOMES, VERBS

    family = SERIES[name]
    if family.type is not Type.COUNTER:
        outcomes = {outcome.value for found in OUTCOMES.values() for outcome in found}
        return {"verb": set(VERBS), "outcome": outcomes, "problem": set(PROBLEMS)}[label]
    return {values[family.labels.index(label)] for values in family.series()}


def test_the_dashboard_is_whole() -> None:
    """Panels have ids of their own, titles, expressions and places that do not overlap; all use the
    data source that the viewer picks, and its variables are defined."""
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 20
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(panels())))
    assert used <= variables


def anchors() -> set[str]:
    text = (OPERATIONS / "runbook.md").read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_alert_leads_to_its_part_of_the_runbook() -> None:
    """And has a severity and a summary; the runbook names each alert."""
    runbook = (OPERATIONS / "runbook.md").read_text()
    blocks = rules().split("- alert: ")[1:]
    for block in blocks:
        name = block.split()[0]
        assert re.search(r"severity: (page|ticket)\n", block), name
        assert re.search(r'summary: ".+"', block), name
        link = re.search(r'runbook: "docs/operations/runbook\.md#([a-z-]+)"', block)
        assert link is not None, name
        assert link[1] in anchors(), f"{name}: no part {link[1]}"
        assert name in runbook, name


def test_the_runbook_has_every_problem() -> None:
    """One row per name that ``Health`` can give, and it says whether the worker is ready then."""
    runbook = (OPERATIONS / "runbook.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (yes|no)\b[^|]*\|", runbook, re.MULTILINE)
    assert {name for name, _ in rows} == set(PROBLEMS)


def test_the_runbook_speaks_of_what_there_is() -> None:
    """Its metrics are exported, its log lines are in the reference, its links inside lead to a
    heading."""
    runbook = (OPERATIONS / "runbook.md").read_text()
    known = set(SERIES) | {family.full_name for family in all_families()}
    for name in set(re.findall(r"kvxfer_[a-z_]+", runbook)):
        assert name in known, name
    logs = (ROOT / "docs" / "reference" / "logs.md").read_text()
    for event in set(re.findall(r"event=(\w+)", runbook)):
        assert f"| `{event}` |" in logs, event
    for anchor in re.findall(r"\]\(#([a-z-]+)\)", runbook):
        assert anchor in anchors(), anchor
