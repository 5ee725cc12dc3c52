"""A small HTTP server for whoever watches a worker: metrics, health and snapshot.

- ``/metrics``: Prometheus' text, of everything in the registry; 404 without one.
- ``/health``: JSON, one ``Health.to_dict()`` per agent; status 200 if all are ready, else 503.
- ``/snapshot``: JSON, one ``Snapshot.to_dict()`` per agent.

Whoever reaches the port reads addresses of peers and ids of transfers, and no data: it listens on
loopback unless told otherwise.  Requests are answered on threads of their own.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from kvxfer.agent import Agent

__all__ = ["StatusServer"]

_JSON = [("Content-Type", "application/json; charset=utf-8"), ("Cache-Control", "no-store")]

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class StatusServer:
    """Serves from the moment it is made, until ``close``.

    Args:
        agents: whose health and snapshots are told.
        port: 0: any that is free; see ``port``.
        host: where to listen.
        registry: what ``/metrics`` shows; left out: nothing.

    Raises:
        ConfigError: the port cannot be bound.
    """

    def __init__(
        self,
        agents: Iterable[Agent],
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._agents = tuple(agents)
        self._metrics = None if registry is None else _metrics_app(registry)
        try:
            self._server = make_server(host, port, self._answer, _Server, _Quiet)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host}:{port} cannot be bound for metrics and health: {error}",
                next_step="use another port, or 0 for any that is free",
            ) from None
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvxfer-status", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> StatusServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Answer no more. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/").rstrip("/")
        if path == "/metrics" and self._metrics is not None:
            return self._metrics(environ, start)
        if path == "/health":
            health = [agent.health() for agent in self._agents]
            ready = all(one.ready for one in health)
            body = {"ready": ready, "agents": [one.to_dict() for one in health]}
            return _json(start, body, "200 OK" if ready else "503 Service Unavailable")
        if path == "/snapshot":
            named = {agent.config.name: agent.snapshot().to_dict() for agent in self._agents}
            return _json(start, named, "200 OK")
        return _json(start, {"paths": ["/metrics", "/health", "/snapshot"]}, "404 Not Found")


def _json(start: StartResponse, body: object, status: str) -> Sequence[bytes]:
    start(status, list(_JSON))
    return [json.dumps(body).encode()]


def _metrics_app(
    registry: CollectorRegistry,
) -> Callable[[dict[str, Any], StartResponse], Iterable[bytes]]:
    from prometheus_client import make_wsgi_app

    return make_wsgi_app(registry)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """Without looking up the host's name, which may take its time."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


class _Quiet(WSGIRequestHandler):
    timeout = 10.0
    """Seconds for a request: a client that says nothing holds a thread no longer."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Scrapes are not worth a line each."""
