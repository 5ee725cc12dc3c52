"""The status server and ``kvxfer health``: what is wrong, over HTTP, in one screen."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from observe_rig import agent, at
from prometheus_client import CollectorRegistry

from kvxfer import Agent
from kvxfer.cli import main
from kvxfer.errors import ConfigError
from kvxfer.observe.http import StatusServer
from kvxfer.observe.metrics import AgentMetrics


@pytest.fixture
def worker() -> Iterator[Agent]:
    with agent("worker") as made:
        yield made


def get(server: StatusServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_paths(worker: Agent) -> None:
    """Metrics as Prometheus' text, health and snapshot as JSON; anything else names the three."""
    metrics = AgentMetrics(CollectorRegistry())
    metrics.watch(worker)
    worker.hold("t", at(0, 1))
    worker.poll()
    with StatusServer([worker], registry=metrics.registry) as server:
        status, text = get(server, "/metrics")
        assert status == 200
        assert 'kvxfer_transfers_open{agent="worker",verb="hold"} 1.0' in text
        status, text = get(server, "/health")
        assert status == 200
        assert json.loads(text)["agents"][0]["agent"] == "worker"
        status, text = get(server, "/snapshot")
        assert json.loads(text)["worker"]["holds"] == 1
        status, text = get(server, "/etc/passwd")
        assert status == 404
        assert json.loads(text) == {"paths": ["/metrics", "/health", "/snapshot"]}


def test_not_ready_is_503_with_the_reasons(
    worker: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    """A probe sees the status, a person the reason and what to do."""
    with StatusServer([worker]) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert main(["health", url]) == 0
        assert f"worker {worker.incarnation}: ready" in capsys.readouterr().out
        for _ in range(3):
            worker._engine.transport_failures.note(worker.clock.now())
        status, text = get(server, "/health")
        assert status == 503
        assert json.loads(text)["agents"][0]["problems"][0]["numbers"]["failures"] == 3
        assert main(["health", url]) == 1
        shown = capsys.readouterr().out
        assert "worker" in shown
        assert "NOT READY" in shown
        assert "!! transport_failed: progress of a transport failed 3 times" in shown
        assert "next: look for event=transport in the log" in shown
        assert main(["health", url.removeprefix("http://"), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["ready"] is False


def test_no_worker_there(capsys: pytest.CaptureFixture[str], worker: Agent) -> None:
    """No answer, another service, or no address of HTTP: status 2, with the next step."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["health", f"127.0.0.1:{port}"]) == 2
    assert "StatusServer" in capsys.readouterr().err
    assert main(["health", "file:///etc/passwd"]) == 2
    assert "http://HOST:PORT" in capsys.readouterr().err
    with StatusServer([worker]) as server:
        assert main(["health", f"http://127.0.0.1:{server.port}/snapshot"]) == 2
    assert "does not tell its health" in capsys.readouterr().err


def test_a_port_in_use(worker: Agent) -> None:
    """Refused with the port and what to do; without a registry there are no metrics."""
    with StatusServer([worker]) as server:
        assert get(server, "/metrics")[0] == 404
        with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port} cannot be bound"):
            StatusServer([worker], server.port)
        with pytest.raises(ConfigError, match="cannot be bound"):
            StatusServer([worker], 70_000)
