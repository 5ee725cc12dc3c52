"""``kvxfer health``: asks a worker's status port what is wrong, and says it in one screen."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from kvxfer.errors import TransportError

__all__ = ["add_arguments"]

_TIMEOUT = 5.0
"""Seconds; a worker that does not answer for so long is not healthy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Asks a worker that runs kvxfer.observe.http.StatusServer what is wrong. Exit status: 0 "
        "ready, 1 not ready, 2 no answer."
    )
    parser.add_argument("url", help="where it listens, such as http://127.0.0.1:9400")
    parser.add_argument("--json", action="store_true", help="print what the worker answered")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    answer = _ask(arguments.url)
    if arguments.json:
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        for agent in answer["agents"]:
            _show(agent)
    return 0 if answer["ready"] else 1


def _ask(url: str) -> dict[str, Any]:
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise TransportError(f"{url} is not an address of HTTP", next_step="give http://HOST:PORT")
    try:
        try:
            with urllib.request.urlopen(  # noqa: S310 - the scheme was checked
                f"{url.rstrip('/')}/health", timeout=_TIMEOUT
            ) as reply:
                said = reply.read()
        except urllib.error.HTTPError as not_ready:  # 503 has the reasons
            with not_ready:
                said = not_ready.read()
        answer: dict[str, Any] = json.loads(said)
        if not isinstance(answer["ready"], bool) or not isinstance(answer["agents"], list):
            raise ValueError("it is not the answer of a worker")
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise TransportError(
            f"{url} does not tell its health: {error}",
            next_step="is the worker up, and is that its status port (StatusServer)?",
        ) from None
    return answer


def _show(agent: dict[str, Any]) -> None:
    state = "ready" if agent["ready"] else "NOT READY"
    sys.stdout.write(f"{agent['agent']} {agent['incarnation']}: {state}\n")
    for problem in agent["problems"]:
        mark = "!!" if problem["blocking"] else " ."
        sys.stdout.write(f" {mark} {problem['name']}: {problem['message']}\n")
        sys.stdout.write(f"      next: {problem['next_step']}\n")
