"""A real Prometheus scrapes the demo, evaluates the alerts and answers the dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RULES, Prometheus

DASHBOARD = ROOT / "docs" / "operations" / "kvxfer-dashboard.json"
REQUESTS = 1200


def promtool(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program, "promtool comes with Debian's prometheus"
    return subprocess.run(
        [program, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60
    )


def test_promtool_accepts_the_rules() -> None:
    """Syntax of every rule, by Prometheus' own checker."""
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stderr
    assert "SUCCESS: 10 rules found" in done.stdout


def test_each_alert_fires_on_its_symptom_and_not_before(tmp_path: Path) -> None:
    """Each alert on series that show its symptom; none on those of a healthy worker under load."""
    tests = Path(__file__).with_name("alerts.test.yml")
    copy = tmp_path / "alerts.test.yml"
    copy.write_text(tests.read_text().replace("RULES", str(RULES)))
    done = promtool("test", "rules", copy)
    assert done.returncode == 0, done.stdout + done.stderr
    names = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    fired = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", tests.read_text()))
    assert fired == names


def start_demo() -> tuple[subprocess.Popen[str], list[str]]:
    """The demo with its status ports, and where they are."""
    words = ["demo", "--json", "--metrics-port", "0", "--requests", str(REQUESTS)]
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvxfer", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stderr is not None
    targets = []
    while len(targets) < 2:
        line = demo.stderr.readline()
        assert line, "the demo ended before it served anything"
        targets += re.findall(r"http://([\d.:]+)/metrics", line)
    return demo, targets


@pytest.fixture
def demo() -> Any:
    process, targets = start_demo()
    yield process, targets
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.timeout(400)
def test_the_demo_is_scraped(
    demo: tuple[subprocess.Popen[str], list[str]],
    prometheus: Callable[[Sequence[str]], Prometheus],
) -> None:
    """While the demo runs with its faults: both processes are scraped, promtool finds nothing to
    complain of, all rules are evaluated without an error, and every query of the dashboard is
    answered. At the end the counts of Prometheus are no more than the demo tells."""
    process, targets = demo
    server = prometheus(targets)
    with urllib.request.urlopen(f"http://{targets[1]}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    linted = promtool("check", "metrics", stdin=text)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    # Three times, so that a rate is known of everything.
    scraped = "count(count_over_time(kvxfer_info[5m]) >= 3)"
    server.until("both are scraped", lambda: values(server.query(scraped)) == [2])
    moved = "sum(increase(kvxfer_transfer_bytes_total[1m])) > 0"
    server.until("bytes have moved", lambda: bool(server.query(moved)))
    check_rules(server)
    output, errors = process.communicate(timeout=300)
    assert output, errors
    # Whether it held is the demo lane's question: a machine that stalls for seconds fails leases.
    told = json.loads(output.splitlines()[-1])
    # The moment of the last scrape: a little before the end, and nothing is stale then.
    last = values(server.query("min(max_over_time(timestamp(kvxfer_info)[10m:500ms]))"))[0]
    check_dashboard(server, last)
    begun = most(server, 'kvxfer_transfers_begun_total{verb="hold"}')
    assert 0 < begun <= REQUESTS
    for name, count in told["retries"].items():
        kind = name.removeprefix("posts.retried.")
        assert most(server, f'kvxfer_posts_retried_total{{agent="decode",kind="{kind}"}}') <= count
    assert most(server, 'kvxfer_posts_retried_total{kind="backpressure"}') > 0
    assert most(server, "kvxfer_transfer_seconds_count") > 0


def values(samples: Sequence[dict[str, Any]]) -> list[float]:
    return [float(sample["value"][1]) for sample in samples]


def most(server: Prometheus, series: str) -> float:
    """The greatest value that was scraped."""
    return values(server.query(f"max(max_over_time({series}[10m]))"))[0]


def check_rules(server: Prometheus) -> None:
    """Each was evaluated, and none had an error."""

    def evaluated() -> bool:
        (group,) = server.get("rules")["groups"]
        states = {rule["name"]: (rule["health"], rule.get("lastError")) for rule in group["rules"]}
        assert not any(error for _, error in states.values()), states
        return len(states) == 10 and {health for health, _ in states.values()} == {"ok"}

    server.until("all rules are evaluated", evaluated)


def check_dashboard(server: Prometheus, at: float) -> None:
    """As Grafana would ask, with "all" in each variable."""
    panels = [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            expression = re.sub(r"\$(job|instance|agent)", ".*", expression)
            found = server.query(expression, at)
            if "> 0" not in expression:  # those show what went wrong, and that may be nothing
                assert found, f"{panel['title']}: no data for {expression}"
