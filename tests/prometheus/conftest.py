from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "docs" / "operations" / "kvxfer-alerts.yml"


class NotReady(OSError):
    """It listens, and still loads what it has stored."""


class Prometheus:
    """A real server that scrapes ``targets`` every two seconds and evaluates our rules."""

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        program = shutil.which("prometheus")
        assert program, "install prometheus; the lane does: apt-get install prometheus"
        config = folder / "prometheus.yml"
        named = ", ".join(f'"{target}"' for target in targets)
        config.write_text(
            "global: {scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}\n"
            f"rule_files: ['{RULES}']\n"
            "scrape_configs:\n"
            "  - job_name: kvxfer\n"
            f"    static_configs: [{{targets: [{named}]}}]\n"
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **query: str) -> Any:
        """The ``data`` of an answer; a refusal fails with Prometheus' own words.

        Raises:
            OSError: it does not answer yet.
        """
        url = f"{self.url}/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:
                    raise NotReady(url) from None
                raise AssertionError(f"{query}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples of now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def until(self, what: str, true: Callable[[], object], seconds: float = 200.0) -> None:
        """Look every 0.2 s until ``true()``; an outer limit for a loaded machine."""
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if true():
                    return
            except OSError:
                pass  # it does not listen yet, or is not ready
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self.log.read_text()}"
            time.sleep(0.2)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], Prometheus]]:
    """Starts servers, and ends them."""
    started: list[Prometheus] = []

    def start(targets: Sequence[str]) -> Prometheus:
        started.append(Prometheus(tmp_path, targets))
        return started[-1]

    yield start
    for server in started:
        server.end()
