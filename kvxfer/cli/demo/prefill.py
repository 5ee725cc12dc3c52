"""The prefill process: computes (fills) blocks, holds them, frees them when they were released."""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

from kvxfer.agent import SchedulerAgent
from kvxfer.cli.demo.plan import DemoPlan, Sabotage
from kvxfer.cli.demo.worker import Worker
from kvxfer.core.events import Declined, Event, Expired, Failed, Sent
from kvxfer.core.layout import Blocks

__all__ = ["Prefill"]


class Prefill(Worker):
    """Both halves of an agent: the scheduler half makes offers, the worker half holds."""

    def __init__(self, plan: DemoPlan) -> None:
        super().__init__(plan, "prefill", faulty_posts=False)
        self.scheduler = SchedulerAgent([self.agent.info], config=self.agent.config)
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._late_orders: dict[str, list[Any]] = {}

    def on_command(self, command: dict[str, Any]) -> None:
        match command["op"]:
            case "prefill":
                self._waiting.append(command)
            case "execute":
                self.agent.execute(self._late_orders.pop(command["id"]))
            case "die":
                self.transport.close(1.0)  # the engine; the process and its agent go on
                self.say(op="died")
            case "finish":
                self.finishing = True

    def tick(self) -> None:
        while self._waiting and self._prefill(self._waiting[0]):
            self._waiting.popleft()

    def quiet(self) -> bool:
        return super().quiet() and not self._waiting and not self._late_orders

    def _prefill(self, command: dict[str, Any]) -> bool:
        """False while there are too few free blocks."""
        name, count = command["id"], command["blocks"]
        ids = self.blocks.take(name, count)
        if ids is None:
            return False
        self.pattern.fill(self.cache, command["index"], range(count), ids)
        offer = self.scheduler.hold(name, Blocks.at(0, ids), lease=self.plan.lease)
        orders = self.scheduler.take_orders()
        if command["early"]:
            self._late_orders[name] = orders
        else:
            self.agent.execute(orders)
        self.say(op="offer", id=name, offer=offer.to_json())
        if self.plan.sabotage is Sabotage.EARLY_FREE and command["index"] % 5 == 0:
            self.blocks.give_back(name)
        return True

    def on_event(self, event: Event) -> None:
        from kvxfer.agent.orders import Report

        for combined in self.scheduler.apply(Report(rank=0, events=(event,))):
            if not isinstance(combined, (Sent, Declined, Expired, Failed)):
                continue
            outcome = type(combined).__name__.lower()
            if isinstance(combined, Failed):
                outcome += f" {combined.kind.value}"
            self.blocks.give_back(combined.transfer_id)
            self.say(
                op="over",
                side="prefill",
                id=combined.transfer_id,
                outcome=outcome,
            )


if __name__ == "__main__":
    Prefill(DemoPlan.from_dict(json.loads(sys.argv[1]))).run()
