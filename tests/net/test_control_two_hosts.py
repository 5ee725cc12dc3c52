"""The control channel alone between two hosts, over IPv4 and IPv6, whose link is cut and healed."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import TwoHosts
from net_channel import NOTICED

pytestmark = pytest.mark.timeout(600)
PROGRAM = Path(__file__).with_name("net_channel.py")
PATIENCE = 150.0
"""Seconds until a test gives up; a busy machine included."""


class End:
    """One of the two programs, and what it said so far."""

    def __init__(self, hosts: TwoHosts, host: str, dial: str = "") -> None:
        told = json.dumps({"host": hosts.addresses[host], "dial": dial})
        self.process = subprocess.Popen(
            hosts.command(host, sys.executable, str(PROGRAM), told),
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.back: set[int] = set()
        self.last: dict[str, dict[str, Any]] = {}
        self.lost = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.put(json.loads(line))

    def until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, f"{what}: not within {PATIENCE} s; {self.last}"
            try:
                message = self.said.get(timeout=0.1)
            except queue.Empty:
                continue
            self.last[message["op"]] = message
            if message["op"] == "back":
                self.back.add(message["number"])
            self.lost += message["op"] == "lost"

    @property
    def sent(self) -> int:
        return int(self.last.get("sent", {"number": -1})["number"])

    @property
    def accepted(self) -> int:
        """Connections to it that it takes for alive. While the link is cut, none can be added."""
        return int(self.last.get("accepted", {"connections": 1})["connections"])

    def catch_up(self) -> None:
        """Read what it has said up to now."""
        while not self.said.empty():
            self.until(self.said.empty, "what was said")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)


class Ends:
    def __init__(self, hosts: TwoHosts) -> None:
        self.hosts = hosts
        self.echo = End(hosts, "b")
        self.echo.until(lambda: "address" in self.echo.last, "the echo is up")
        self.ping = End(hosts, "a", self.echo.last["address"]["address"])

    def answered(self, what: str) -> None:
        """What is sent from now on comes back: twenty in a row."""
        self.ping.catch_up()
        first = self.ping.sent + 1

        def twenty() -> bool:
            later = sorted(n for n in self.ping.back if n >= first)
            return any(b - a == 19 for a, b in zip(later, later[19:], strict=False))

        self.ping.until(twenty, what)

    def end(self) -> None:
        self.ping.end()
        self.echo.end()


@pytest.fixture(scope="module", params=[4, 6], ids=["ipv4", "ipv6"])
def ends(request: pytest.FixtureRequest, hosts: Callable[[int], TwoHosts]) -> Iterator[Ends]:
    """The two ends of one channel, for all tests of one IP version, in their order."""
    ends = Ends(hosts(request.param))
    yield ends
    ends.end()


def test_messages_cross(ends: Ends) -> None:
    """Messages go to the other host and come back, over the one IP version that there is."""
    ends.answered("messages come back")
    bracket = "[" if ends.hosts.version == 6 else ""
    host = ends.hosts.addresses["b"]
    assert ends.echo.last["address"]["address"].startswith(f"tcp://{bracket}{host}")


def test_a_short_cut_loses_nothing(ends: Ends) -> None:
    """A link that is cut for less than the heartbeat's time-out costs neither the connection nor a
    message: what was sent meanwhile comes back once it is healed."""
    ends.answered("before the cut")
    connections = ends.ping.last["back"]["connections"]
    ends.hosts.cut()
    ends.ping.catch_up()
    first = ends.ping.sent
    ends.ping.until(lambda: ends.ping.sent >= first + 15, "sending goes on while the link is cut")
    ends.hosts.heal()
    last = ends.ping.sent
    ends.ping.until(lambda: last in ends.ping.back, "what was sent during the cut comes back")
    assert set(range(first, last)) <= ends.ping.back
    assert ends.ping.last["back"]["connections"] == connections


def test_a_long_cut_is_noticed_and_healed(ends: Ends) -> None:
    """A connection whose other end cannot be reached any more, and which nobody closes, is noticed
    on both sides by its heartbeat.  Sending never waits meanwhile.  Once the link is healed the
    channel connects by itself, on the same route."""
    ends.answered("before the cut")
    ends.ping.catch_up()
    lost = ends.ping.lost
    ends.hosts.cut()
    ends.ping.until(lambda: ends.ping.lost > lost, "the dialling side notices")
    ends.echo.until(lambda: ends.echo.accepted <= 0, "the listening side notices")
    first = ends.ping.sent
    ends.ping.until(lambda: ends.ping.sent >= first + 20, "sending goes on while the link is cut")
    assert ends.ping.last["sent"]["slowest"] < NOTICED, "a send waited"
    ends.hosts.heal()
    ends.answered("after the link is healed")
