"""The decode process: pulls, checks every byte against the pattern, frees."""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

from kvxfer.cli.demo.plan import Action, DemoPlan, Sabotage
from kvxfer.cli.demo.worker import Worker
from kvxfer.core.events import Drained, Event, Failed, Quarantined, Received
from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Offer

__all__ = ["Decode"]


class Decode(Worker):
    """The worker half alone; offers come from the router as JSON."""

    def __init__(self, plan: DemoPlan) -> None:
        super().__init__(plan, "decode", faulty_posts=True)
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._running: dict[str, dict[str, Any]] = {}
        self._flipped = False

    def on_command(self, command: dict[str, Any]) -> None:
        if command["op"] == "decode":
            self._waiting.append(command)
        elif command["op"] == "finish":
            self.finishing = True

    def tick(self) -> None:
        while self._waiting and self._begin(self._waiting[0]):
            self._waiting.popleft()

    def quiet(self) -> bool:
        return super().quiet() and not self._waiting and not self._running

    def _begin(self, command: dict[str, Any]) -> bool:
        """False while there are too few free blocks."""
        name = command["id"]
        offer = Offer.from_json(command["offer"])
        if command["action"] == Action.DECLINE.value:
            self.agent.decline(offer)
            self.say(op="over", side="decode", id=name, outcome="declined", nbytes=0, wrong=0)
            return True
        ids = self.blocks.take(name, command["blocks"] - command["prefix"])
        if ids is None:
            return False
        self._running[name] = command
        self.agent.pull(offer, Blocks.at(command["prefix"], ids))
        if command["action"] == Action.ABORT.value:
            self.agent.abort(name)
        return True

    def on_event(self, event: Event) -> None:
        name = event.transfer_id
        if isinstance(event, Received):
            self._check(name, event.nbytes)
        elif isinstance(event, Failed):
            self.say(
                op="over",
                side="decode",
                id=name,
                outcome=f"failed {event.kind.value}",
                nbytes=0,
                wrong=0,
                error=str(event.error),
            )
            if event.drained:
                self._free(name)
        elif isinstance(event, Drained):
            self._free(name)
        elif isinstance(event, Quarantined):
            self.say(op="quarantined", id=name, reason=event.reason)

    def _check(self, name: str, nbytes: int) -> None:
        command = self._running[name]
        ids = self.blocks.ids(name) if command["blocks"] > command["prefix"] else []
        positions = range(command["prefix"], command["blocks"])
        if self.plan.sabotage is Sabotage.FLIP_BYTE and ids and not self._flipped:
            self.cache[0, 0, ids[0], 5] ^= 0x40
            self._flipped = True
        wrong = self.pattern.wrong_bytes(self.cache, command["index"], positions, ids)
        expected = len(ids) * self.scaled.block_nbytes
        wrong += abs(expected - nbytes)
        self.say(op="over", side="decode", id=name, outcome="received", nbytes=nbytes, wrong=wrong)
        self._free(name)

    def _free(self, name: str) -> None:
        self.blocks.give_back(name)
        self._running.pop(name, None)


if __name__ == "__main__":
    Decode(DemoPlan.from_dict(json.loads(sys.argv[1]))).run()
