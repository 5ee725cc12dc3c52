"""A real Prometheus scrapes the demo, evaluates the alerts and answers the dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RULES, Prometheus

DASHBOARD = ROOT / "docs" / "operations" / "kvxfer-dashboard.json"
REQUESTS = 100_000
"""More than it gets through until it is told to end."""


def promtool(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program, "promtool comes with Debian's prometheus"
    return subprocess.run(
        [program, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=200
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


class Demo:
    """``kvxfer demo`` with its status ports. It runs until it is told to end: however long a server
    takes to start on a busy machine, there is something to scrape."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "demo.log"
        words = ["demo", "--json", "--metrics-port", "0", "--requests", str(REQUESTS)]
        # Into a file: a pipe that nobody reads would hold it up.
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvxfer", *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.targets: list[str] = []
        until = time.monotonic() + 200
        while len(self.targets) < 2:
            self.alive()
            assert time.monotonic() < until, self._errors.read_text()
            time.sleep(0.1)
            self.targets = re.findall(r"http://([\d.:]+)/metrics", self._errors.read_text())

    def alive(self) -> None:
        assert self.process.poll() is None, self._errors.read_text()

    def end(self) -> dict[str, Any]:
        """Ctrl-C; what it tells."""
        self.alive()
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=200)
        assert output, self._errors.read_text()
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    demo.process.kill()
    demo.process.communicate()


@pytest.mark.timeout(900)
def test_the_demo_is_scraped(demo: Demo, prometheus: Callable[[Sequence[str]], Prometheus]) -> None:
    """While the demo runs with its faults: both processes are scraped, promtool finds nothing to
    complain of, all rules are evaluated without an error, and every query of the dashboard is
    answered. At the end the counts of Prometheus are no more than the demo tells."""
    server = prometheus(demo.targets)
    with urllib.request.urlopen(f"http://{demo.targets[1]}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    linted = promtool("check", "metrics", stdin=text)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    # Three times, so that a rate is known of everything.
    scraped = "count(count_over_time(kvxfer_info[5m]) >= 3)"
    server.until("both are scraped", lambda: values(server.query(scraped)) == [2])
    moved = "sum(increase(kvxfer_transfer_bytes_total[1m])) > 0"
    server.until("bytes have moved", lambda: bool(server.query(moved)))
    check_rules(server)
    check_dashboard(server)
    refused = 'kvxfer_posts_retried_total{kind="backpressure"}'
    server.until("a refused post is seen", lambda: most(server, refused) > 0)
    server.until("a transfer is seen", lambda: most(server, "kvxfer_transfer_seconds_count") > 0)
    # Whether it held is the demo lane's question: a machine that stalls for seconds fails leases.
    told = demo.end()
    begun = most(server, 'kvxfer_transfers_begun_total{verb="hold"}')
    assert 0 < begun <= told["requests"]["total"]
    for name, count in told["retries"].items():
        kind = name.removeprefix("posts.retried.")
        assert most(server, f'kvxfer_posts_retried_total{{agent="decode",kind="{kind}"}}') <= count


def values(samples: Sequence[dict[str, Any]]) -> list[float]:
    return [float(sample["value"][1]) for sample in samples]


def most(server: Prometheus, series: str) -> float:
    """The greatest value that was scraped; 0 if there is none."""
    return max(values(server.query(f"max(max_over_time({series}[20m]))")), default=0.0)


def check_rules(server: Prometheus) -> None:
    """Each was evaluated, and none had an error."""

    def evaluated() -> bool:
        (group,) = server.get("rules")["groups"]
        states = {rule["name"]: (rule["health"], rule.get("lastError")) for rule in group["rules"]}
        assert not any(error for _, error in states.values()), states
        return len(states) == 10 and {health for health, _ in states.values()} == {"ok"}

    server.until("all rules are evaluated", evaluated)


def check_dashboard(server: Prometheus) -> None:
    """As Grafana would ask, with "all" in each variable."""
    panels = [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            expression = re.sub(r"\$(job|instance|agent)", ".*", expression)
            answered = partial(server.query, expression)
            if "> 0" in expression:  # those show what went wrong, and that may be nothing
                answered()
            else:
                server.until(f"{panel['title']}: data for {expression}", answered)
