"""Transfers between two hosts, over IPv4 and IPv6, whose link is cut and healed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import TwoHosts
from net_worker import LONGEST, NOTICED
from soak_rig import Child, Soak

pytestmark = pytest.mark.timeout(600)
WORKER = Path(__file__).with_name("net_worker.py")
SLACK = 40.0
"""Seconds that a busy machine, and TCP's pause before it sends again, may take."""


class Crossing(Soak):
    """A producer on one host, a consumer on the other, and the link between them."""

    start_timeout = 200.0

    def __init__(self, hosts: TwoHosts, backend: str) -> None:
        self.hosts = hosts
        self.up: dict[Child, bool] = {}
        self.counted: dict[Child, tuple[int, int]] = {}
        """Bytes where none may be, and blocks that nobody has, as a side counted them."""
        super().__init__(
            1,
            {
                name: self._command(host, name, backend)
                for name, host in (("producer", "a"), ("consumer", "b"))
            },
            LONGEST,
        )

    def _command(self, host: str, name: str, backend: str) -> Any:
        address = self.hosts.addresses[host]
        options = {"nixl": {"ucx_tls": "tcp"}, "mooncake": {"host": address}}[backend]
        told = {"name": name, "backend": backend, "options": options, "host": address}
        words = [sys.executable, str(WORKER), json.dumps(told)]
        return self.hosts.command(host, *words)

    @property
    def both(self) -> tuple[Child, Child]:
        return self.producer, self.consumer

    def take(self, timeout: float) -> dict[str, Any] | None:
        message = super().take(timeout)
        if message is not None and message["op"] in ("up", "down"):
            self.up[message["child"]] = message["op"] == "up"
        elif message is not None and message["op"] == "counted":
            self.counted[message["child"]] = message["trespasses"], message["leaked"]
        return message

    def under_way(self) -> int:
        return sum(len(child.open) for child in self.both)

    def cut_under_way(self, cut: Callable[[], None]) -> None:
        """Cut the link while transfers are under way, and see that they are: they cannot end."""
        for _ in range(20):
            for _ in range(10):
                self.request()
            received = self.outcomes["consumer received"]
            self.until(lambda r=received: self.outcomes["consumer received"] > r, "one", SLACK)  # type: ignore[misc]
            cut()
            self.passes(0.5)
            if self.consumer.open and self.producer.open:
                return
            self.hosts.heal()
        raise AssertionError("everything ended before the link was cut")

    def passes(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.take(min(0.1, left))

    def in_order(self, *children: Child) -> None:
        """No problem and no wrong byte; on these sides (both) no block lost, and no byte in one
        that was handed back."""
        assert not self.problems, f"{self.problems} {dict(self.outcomes)} {list(self.why)}"
        assert self.wrong == 0
        for child in children or self.both:
            self.counted.pop(child, None)
            child.tell(op="count")
            assert self.until(lambda c=child: c in self.counted, f"{child.name} counts", SLACK)  # type: ignore[misc]
            assert self.counted[child] == (0, 0), f"{child.name}: {self.counted[child]}"


@pytest.fixture(scope="module", params=[4, 6], ids=["ipv4", "ipv6"])
def crossing(
    request: pytest.FixtureRequest, hosts: Callable[[int], TwoHosts], backend: str
) -> Iterator[Crossing]:
    """One pair of workers for all tests of one IP version, in their order."""
    crossing = Crossing(hosts(request.param), backend)
    yield crossing
    crossing.hosts.heal()
    crossing.end()


def test_reads_and_writes_cross(crossing: Crossing) -> None:
    """READs and WRITEs between two hosts that share nothing but a link and one IP version, which is
    among the backend's ``ip_versions``: each is received, each byte is right."""
    for _ in range(16):
        crossing.request()
    assert crossing.settle("transfers", *crossing.both)
    crossing.in_order()
    seen = f"{dict(crossing.outcomes)} {list(crossing.why)}"
    assert crossing.outcomes["consumer received"] == 16, seen
    assert crossing.failed == 0, seen


def test_a_cut_shorter_than_the_deadlines_harms_nothing(crossing: Crossing) -> None:
    """The link is cut for two seconds in the middle of transfers: all are received, late."""
    crossing.in_order()
    begun = crossing.count
    received = crossing.outcomes["consumer received"]
    crossing.cut_under_way(crossing.hosts.cut)
    crossing.passes(1.5)
    crossing.hosts.heal()
    assert crossing.settle("after a short cut", *crossing.both)
    crossing.in_order()
    assert crossing.failed == 0, f"{dict(crossing.outcomes)} {list(crossing.why)}"
    assert crossing.outcomes["consumer received"] - received == crossing.count - begun


def test_a_cut_longer_than_the_deadlines_ends_everything_in_time(crossing: Crossing) -> None:
    """While the link is cut, every transfer ends by its deadline, on both sides, and both notice
    that their connections are dead, though no host can see it.  Once it is healed they find each
    other by themselves, new transfers are received, and what was undrained drains or is given back;
    no byte is wrong, and none lands in a block that was handed back."""
    crossing.in_order()
    crossing.cut_under_way(crossing.hosts.cut)
    assert crossing.settle("while the link is cut", *crossing.both), crossing.problems
    assert crossing.failed > 0
    crossing.until(
        lambda: not any(crossing.up.get(child, True) for child in crossing.both),
        f"dead connections noticed: {crossing.up}",
        2 * NOTICED + SLACK,
    )
    crossing.in_order()
    crossing.hosts.heal()
    _serves_again(crossing)
    crossing.until(
        lambda: all(crossing.up.get(child) for child in crossing.both), "peers are up again", SLACK
    )
    _nothing_is_left(crossing)


def test_a_host_that_vanishes_is_noticed(crossing: Crossing) -> None:
    """The producer's host loses power: the link is dead and the process killed, so that nobody
    closes a connection.  The consumer's transfers end by their deadlines, it notices, and it ends
    without waiting for anybody."""
    crossing.in_order()
    hosts = crossing.hosts
    crossing.cut_under_way(hosts.unplug if hosts.version == 4 else hosts.cut)
    crossing.producer.process.kill()
    assert crossing.settle("after the host vanished", crossing.consumer), crossing.problems
    crossing.until(
        lambda: crossing.up.get(crossing.consumer) is False,
        "the dead host noticed",
        2 * NOTICED + SLACK,
    )
    crossing.in_order(crossing.consumer)
    began = time.monotonic()
    assert crossing.consumer.process.stdin is not None
    crossing.consumer.process.stdin.close()
    assert crossing.consumer.process.wait(SLACK) == 0
    assert time.monotonic() - began < SLACK


def _serves_again(crossing: Crossing) -> None:
    """New transfers are received, as soon as TCP and the breaker have found out."""

    def served() -> bool:
        if crossing.under_way():
            return False
        if crossing.outcomes["consumer received"] - before >= 4:
            return True
        for _ in range(2):
            crossing.request()
        return False

    before = crossing.outcomes["consumer received"]
    assert crossing.until(served, "transfers after the cut", LONGEST + 2 * SLACK)
    failed = crossing.failed
    for _ in range(8):
        crossing.request()
    assert crossing.settle("after the cut", *crossing.both)
    crossing.in_order()
    assert crossing.failed == failed, f"{dict(crossing.outcomes)} {list(crossing.why)}"


def _nothing_is_left(crossing: Crossing) -> None:
    """Blocks in quarantine drain once the engine has heard of its peer, or are taken back."""
    end = time.monotonic() + SLACK
    while crossing.quarantined and time.monotonic() < end:
        crossing.take(0.2)
    for name in tuple(crossing.quarantined):
        for child in crossing.both:
            child.tell(op="reclaim", id=name)
    assert crossing.until(lambda: not crossing.quarantined, "the quarantine is empty", SLACK)
    crossing.in_order()
