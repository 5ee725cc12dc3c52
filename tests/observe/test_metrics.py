"""Metrics: what is exported is what happened, under the names of the table and no others."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from observe_rig import agent, at, drive
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvxfer
from kvxfer import Agent, Progress
from kvxfer.agent.health import PROBLEMS
from kvxfer.core.observations import Verb
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.observe.families import COUNTERS, GAUGES, INTERNAL, OUTCOMES, Type, all_families
from kvxfer.observe.metrics import AgentMetrics
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan

PACKAGE = Path(kvxfer.__file__).parent
FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): ep=0 depth=60 requested=8 max=64"
)
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def pair() -> Iterator[tuple[Agent, Agent]]:
    """A holder and a reader whose first post is refused."""
    plan = FaultPlan(posts=[Fault(kind=FaultKind.REFUSE_VALUE, error=FULL)])
    with agent("p") as p, agent("c", plan) as c:
        yield p, c


def scrape(registry: CollectorRegistry) -> Series:
    """As Prometheus reads it; a series that is there twice fails."""
    found: Series = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(found: Series, name: str, **labels: str) -> float:
    return found[(f"kvxfer_{name}", frozenset(labels.items()))]


def test_a_transfer_is_counted(pair: tuple[Agent, Agent]) -> None:
    """Bytes, durations, retries by kind and what is open, of two agents in one registry."""
    p, c = pair
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    metrics.watch(p)
    metrics.watch(c)
    before = scrape(registry)
    p.hold("other", at(0, 9))
    handle = c.pull(p.hold("t", at(0, 5)), at(0, 1))
    drive(p, c, until=lambda: handle.done and p.snapshot().holds == 1)
    after = scrape(registry)
    assert value(after, "transfers_begun_total", agent="p", verb="hold") == 2
    assert value(after, "transfers_open", agent="p", verb="hold") == 1
    assert value(after, "transfer_bytes_total", agent="c", verb="pull") == handle.nbytes > 0
    assert value(after, "posts_retried_total", agent="c", kind="backpressure") == 1
    assert value(before, "posts_retried_total", agent="c", kind="backpressure") == 0
    done = {"agent": "c", "verb": "pull", "outcome": "done"}
    assert value(after, "transfer_seconds_count", **done) == 1
    assert value(after, "transfer_seconds_bucket", **done, le="+Inf") == 1
    assert value(after, "transfer_queued_seconds_count", agent="c", verb="pull") == 1
    assert value(after, "transfer_size_bytes_sum", agent="c", verb="pull") == handle.nbytes
    assert value(after, "ready", agent="c") == 1
    assert value(after, "peers", agent="c") == 1
    # Every series was there before anything happened, but those of counters that are not named.
    named = {key for key in after if not key[0].startswith("kvxfer_internal")}
    assert named == {key for key in before if not key[0].startswith("kvxfer_internal")}


def test_no_label_is_an_id(pair: tuple[Agent, Agent]) -> None:
    """Nothing of a transfer, a request or a peer is in any name or label; labels are those of the
    table."""
    p, c = pair
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    metrics.watch(p)
    metrics.watch(c)
    handle = c.pull(p.hold("transfer-7f3a", at(0, 5), owner="request-91c2"), at(0, 1))
    drive(p, c, until=lambda: handle.done)
    text = generate_latest(registry).decode()
    for secret in ("transfer-7f3a", "request-91c2", p.incarnation, c.address):
        assert secret not in text
    known = {family.full_name: set(family.labels) | {"agent"} for family in all_families()}
    for name, labels in scrape(registry):
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        family = known.get(name) or known[base]
        assert {label for label, _ in labels} - {"le"} == family, name


def test_what_is_exported_is_the_table(pair: tuple[Agent, Agent]) -> None:
    """Names, types and help of a scrape are those of ``families``, no more and no less."""
    registry = CollectorRegistry()
    AgentMetrics(registry).watch(pair[0])
    got = {(f.name, f.type, f.documentation) for f in registry.collect()}
    assert got == {(f"kvxfer_{f.name}", f.type.value, f.help) for f in all_families()}
    sampled = {f.name.removeprefix("kvxfer_") for f in registry.collect() if f.samples}
    assert {f.name for f in (*GAUGES, *COUNTERS)} - sampled <= {
        "messages_refused",  # by reasons that exist with keys only
    }


def test_problems_are_exported_by_name(pair: tuple[Agent, Agent]) -> None:
    """``kvxfer_problems`` has one series per name, and counts."""
    c = pair[1]
    registry = CollectorRegistry()
    AgentMetrics(registry).watch(c)
    c.add_observer(lambda _: 1 // 0)
    c.hold("t", at(0, 1))
    c.poll()
    found = scrape(registry)
    assert value(found, "problems", agent="c", problem="observer_failed") == 1
    assert value(found, "observer_failures_total", agent="c") == 1
    assert sum(name == "kvxfer_problems" for name, _ in found) == len(PROBLEMS)


def counted_names() -> set[str]:
    """Every counter of the package, as far as its source says: f-strings end with a star."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name == "count":
                    found |= set(_texts(node.args[0]))
    return found


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values
        )
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)


MADE_ELSEWHERE = ("acks.", "received.")
"""Counters whose names are put together at import, from enumerations that ``families`` reads."""


def test_every_source_is_a_counter_of_the_code(pair: tuple[Agent, Agent]) -> None:
    """A family that counts what nothing counts would be 0 for ever."""
    there = counted_names() | set(pair[0].snapshot().counters)
    assert len(there) > 80
    for family in COUNTERS:
        for source in family.sources:
            if source.startswith(MADE_ELSEWHERE):
                continue
            hit = any(fnmatch(name, source) or fnmatch(source, name) for name in there)
            assert hit, f"{family.name}: nothing counts {source}"


def test_known_values_are_those_of_the_enumerations() -> None:
    """A new ``ErrorKind`` is a new series by itself."""
    failed = next(family for family in COUNTERS if family.name == "transfers_failed")
    assert len(list(failed.series())) == 4 * len(ErrorKind)
    assert set(OUTCOMES) == set(Verb)
    assert INTERNAL.sources == {"*": ()}
    names = [family.full_name for family in all_families()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"kvxfer_[a-z_]+", name) for name in names)
    counters = [f for f in all_families() if f.type is Type.COUNTER]
    assert all(f.full_name.endswith("_total") for f in counters)


def test_two_of_one_name(pair: tuple[Agent, Agent]) -> None:
    """Their series would be one: refused, with what to do."""
    metrics = AgentMetrics(None)
    metrics.watch(pair[0])
    with pytest.raises(InvalidInputError, match="'p' is watched already"):
        metrics.watch(pair[0])
    metrics.forget(pair[0])
    metrics.watch(pair[0])


def test_forgotten_agents_are_not_told_any_more(pair: tuple[Agent, Agent]) -> None:
    """``forget`` and ``close`` take the observer away: the agent makes nothing for nobody."""
    p, c = pair
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    metrics.watch(p)
    metrics.watch(c)
    metrics.forget(p)
    metrics.forget(p)
    assert not p._ctx.observers
    assert {dict(labels)["agent"] for _, labels in scrape(registry)} == {"c"}
    metrics.close()
    metrics.close()
    assert not c._ctx.observers
    assert scrape(registry) == {}
    AgentMetrics(registry)  # its names are free again


def test_scrapes_while_everything_moves() -> None:
    """Scrapes and snapshots of other threads see whole numbers while transfers come and go: no
    scrape raises, and no counter ever falls."""
    thread = {"config": {"progress": Progress.THREAD}}
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    with agent("p", **thread) as p, agent("c", **thread) as c:
        metrics.watch(p)
        metrics.watch(c)
        stop = threading.Event()
        failures: list[BaseException] = []

        def look() -> None:
            last: Series = {}
            try:
                while not stop.is_set():
                    found = scrape(registry)
                    for key, count in last.items():
                        counts = key[0].endswith(("_total", "_count", "_bucket"))
                        assert not counts or found[key] >= count, key
                    last = found
                    c.health().to_dict()
                    c.snapshot().to_dict()
            except BaseException as error:  # handed to the test below
                failures.append(error)

        lookers = [threading.Thread(target=look) for _ in range(2)]
        for looker in lookers:
            looker.start()
        for i in range(60):
            handle = c.pull(p.hold(f"t{i}", at(0, i % 32)), at(0, i % 32))
            assert c.wait(handle, 60)
            c.poll()
            p.poll()
        stop.set()
        for looker in lookers:
            looker.join(60)
        assert not failures, failures[0]
        done = value(scrape(registry), "events_total", agent="c", event="received")
        assert done == 60
