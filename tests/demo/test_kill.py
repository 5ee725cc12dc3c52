"""``kill -9`` of either process, mid-stream: the other ends everything in time and serves again."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.cli.demo.driver import Child
from kvxfer.cli.demo.plan import Action, DemoPlan

PLAN = DemoPlan(model="llama-3.1-70b-tp8", faults="none", lease=2.0, memory_nbytes=24 << 20)
DEADLINE = 25.0
"""Connect (5), queue (8), transfer (8) and drain (2) of the demo's timeouts, and some slack."""


class Router:
    """Drives the two children request by request."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[Child, dict[str, Any]]] = queue.SimpleQueue()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.prefill = Child(PLAN, "prefill", self.inbox)
        self.decode = Child(PLAN, "decode", self.inbox)
        self.ready(self.prefill, self.decode)
        self.count = 0

    def ready(self, *children: Child) -> None:
        waiting = set(children)
        while waiting:
            child, _ = self.until(lambda _, m: m["op"] == "ready")
            waiting.discard(child)

    def replace(self, child: Child) -> Child:
        """Another process in the place of a dead one."""
        child.end()
        new = Child(PLAN, child.role, self.inbox)
        self.ready(new)
        return new

    def until(
        self, wanted: Callable[[Child, dict[str, Any]], bool], seconds: float = DEADLINE
    ) -> tuple[Child, dict[str, Any]]:
        """Take messages until one is wanted."""
        end = time.monotonic() + seconds
        while True:
            child, message = self.inbox.get(timeout=max(0.01, end - time.monotonic()))
            self.seen.append((child.role, message))
            if message["op"] == "offer":
                self.route(message)
            if wanted(child, message):
                return child, message

    def send(self, requests: int) -> list[str]:
        """Have prefill make that many offers."""
        names = []
        for _ in range(requests):
            name = f"req-{self.count}"
            self.prefill.tell(op="prefill", id=name, index=self.count, blocks=8, early=False)
            names.append(name)
            self.count += 1
        return names

    def route(self, message: dict[str, Any]) -> None:
        self.decode.tell(
            op="decode",
            id=message["id"],
            index=int(message["id"].split("-")[1]),
            blocks=8,
            prefix=0,
            action=Action.PULL.value,
            offer=message["offer"],
        )

    def over(self, side: str) -> dict[str, str]:
        return {
            m["id"]: m["outcome"] for r, m in self.seen if m["op"] == "over" and m["side"] == side
        }

    def wrong(self) -> int:
        return sum(m.get("wrong", 0) for _, m in self.seen if m["op"] == "over")

    def end(self) -> None:
        self.prefill.end()
        self.decode.end()


@pytest.fixture
def router() -> Any:
    router = Router()
    yield router
    router.end()


def finish(router: Router, child: Child) -> dict[str, Any]:
    child.tell(op="finish")
    return router.until(lambda c, m: c is child and m["op"] == "final")[1]


def test_prefill_is_killed(router: Router) -> None:
    """Decode fails what it was pulling, drained; a new prefill process is served."""
    first = router.send(12)
    router.until(lambda c, m: m["op"] == "over" and m["side"] == "decode")
    router.prefill.process.send_signal(signal.SIGKILL)
    router.until(lambda c, m: m["op"] == "gone")
    offered = {m["id"] for _, m in router.seen if m["op"] == "offer"}
    began = time.monotonic()
    while set(router.over("decode")) < offered:
        router.until(lambda c, m: m["op"] == "over")
    assert time.monotonic() - began < DEADLINE
    assert offered <= set(first)
    outcomes = set(router.over("decode").values())
    assert outcomes <= {
        "received",
        "failed peer_lost",
        "failed handshake",
        "failed timeout",
        "failed stale",
        "failed expired",
        "failed connection",
    }
    router.prefill = router.replace(router.prefill)
    again = router.send(4)
    while not set(again) <= set(router.over("decode")):
        router.until(lambda c, m: m["op"] == "over")
    assert {router.over("decode")[name] for name in again} == {"received"}
    for child in (router.decode, router.prefill):
        final = finish(router, child)
        assert final["leaked"] == 0
        assert not any(final["tables"].values())
        assert final["quarantined"] == 0
    assert router.wrong() == 0


def test_decode_is_killed(router: Router) -> None:
    """Prefill frees what nobody will read at lease end; a new decode process is served."""
    first = router.send(12)
    router.until(lambda c, m: m["op"] == "over" and m["side"] == "decode")
    router.decode.process.send_signal(signal.SIGKILL)
    while not set(first) <= set(router.over("prefill")):
        router.until(lambda c, m: m["op"] == "over" and m["side"] == "prefill")
    assert set(router.over("prefill").values()) <= {"sent", "expired"}
    router.decode = router.replace(router.decode)
    again = router.send(4)
    while not set(again) <= set(router.over("prefill")):
        router.until(lambda c, m: m["op"] == "over" and m["side"] == "prefill")
    assert {router.over("prefill")[name] for name in again} == {"sent"}
    final = finish(router, router.prefill)
    assert final["leaked"] == 0
    assert not any(final["tables"].values())
    assert router.wrong() == 0
