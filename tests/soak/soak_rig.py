"""Rounds of ``kill -9`` and SIGSTOP between two worker processes with READ and WRITE under way."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from soak_worker import LONGEST

__all__ = ["Child", "Soak"]

_WORKER = Path(__file__).with_name("soak_worker.py")
_SLACK = 20.0
"""Seconds that a busy machine may add to a deadline."""
IN_FLIGHT = 10


class Child:
    """One worker process."""

    def __init__(
        self,
        name: str,
        inbox: queue.SimpleQueue[tuple[Child, dict[str, Any]]],
        command: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.open: dict[str, float] = {}
        """Transfers whose end it has not reported, and when they were begun."""
        self.stopped = False
        self.process = subprocess.Popen(
            list(command) or [sys.executable, str(_WORKER), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._inbox = inbox
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # killed in mid-line
                    self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {"op": "gone"}))

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def begin(self, **command: Any) -> None:
        self.open[command["id"]] = time.monotonic()
        self.tell(**command)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        self.stopped = number == signal.SIGSTOP

    def end(self) -> None:
        """Kill it if it does not end by itself, and reap it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.stopped:
            self.process.kill()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)

    def mapped(self) -> int:
        """How many memfds of ours the process has mapped or open."""
        lines = Path(f"/proc/{self.process.pid}/maps").read_text(encoding="ascii").splitlines()
        return sum("memfd:" in line for line in lines)

    def named(self) -> set[str]:
        """Shared memory and semaphores with a name: those would outlive a kill."""
        here = Path(f"/proc/{self.process.pid}")
        lines = (here / "maps").read_text(encoding="utf-8").splitlines()
        held = {line.split(maxsplit=5)[-1] for line in lines}
        for descriptor in (here / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in between
                held.add(str(descriptor.readlink()))
        # What is deleted already goes with the process; /proc says so behind the name.
        return {at for at in held if at.startswith("/dev/shm/") and not at.endswith(" (deleted)")}


class Soak:
    """The router between a producer and a consumer, and the judge.

    Args:
        seed: of what is chosen at random.
        commands: what starts the two, by their names; otherwise they are workers over shm.
        longest: seconds after which no transfer of theirs may be open.
    """

    start_timeout = 60.0
    """Seconds until a worker is ready."""

    def __init__(
        self,
        seed: int,
        commands: Mapping[str, Sequence[str]] | None = None,
        longest: float = LONGEST,
    ) -> None:
        self.commands = commands or {}
        self.longest = longest
        self.rng = random.Random(seed)
        self.inbox: queue.SimpleQueue[tuple[Child, dict[str, Any]]] = queue.SimpleQueue()
        self.count = 0
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong = 0
        self.quarantined: set[str] = set()
        self.named: set[str] = set()
        """Shared memory with a name that one of the two held when it was to die, or at the end."""
        self.problems: list[str] = []
        self.why: collections.deque[str] = collections.deque(maxlen=8)
        """The latest failures, in words."""
        self.producer = self.child("producer")
        self.consumer = self.child("consumer")
        self.ready({self.producer, self.consumer})

    def child(self, name: str) -> Child:
        """A new worker process."""
        return Child(name, self.inbox, self.commands.get(name, ()))

    # ---- messages ------------------------------------------------------------------------------

    def take(self, timeout: float) -> dict[str, Any] | None:
        """One message, acted upon."""
        try:
            child, message = self.inbox.get(timeout=max(0.001, timeout))
        except queue.Empty:
            return None
        if child not in (self.producer, self.consumer):
            return message  # the last words of a dead one
        match message["op"]:
            case "offer":
                self._begin(self.consumer, "pull", message["id"], offer=message["offer"])
            case "target":
                address = {"address": message["address"], "of": message["of"]}
                self._begin(self.producer, "push", message["id"], **address)
            case "over":
                child.open.pop(message["id"], None)
                self.wrong += message["wrong"]
                self.outcomes[f"{child.name} {message['outcome']}"] += 1
                if "why" in message:
                    self.why.append(f"{child.name} {message['id']}: {message['why']}")
            case "quarantined":
                self.quarantined.add(message["id"])
            case "drained":
                self.quarantined.discard(message["id"])
            case "gone":
                status = child.process.wait(10)  # its output has ended: so has it, or nearly
                if status not in (0, -signal.SIGKILL):  # what the rig does to it
                    self.problems.append(f"{child.name} died by itself, with status {status}")
        return {**message, "child": child}

    def until(self, done: Callable[[], bool], what: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() >= end:
                self.problems.append(f"{what}: not within {seconds:.0f} s")
                return False
            self.take(min(0.5, end - time.monotonic()))
        return True

    def ready(self, children: set[Child]) -> None:
        waiting = set(children)
        end = time.monotonic() + self.start_timeout
        while waiting:
            child, message = self.inbox.get(timeout=max(0.01, end - time.monotonic()))
            if message["op"] == "ready":
                waiting.discard(child)
            assert message["op"] != "gone" or child not in waiting, f"{child.name} did not start"

    # ---- requests ------------------------------------------------------------------------------

    def _begin(self, child: Child, op: str, name: str, **more: Any) -> None:
        index = int(name.split("-")[1])
        child.begin(op=op, id=name, index=index, blocks=1 + index % 8, **more)

    def request(self) -> str:
        """One more READ or WRITE."""
        name = f"req-{self.count}"
        self.count += 1
        if self.rng.random() < 0.5:
            self._begin(self.producer, "hold", name)
        else:
            self._begin(self.consumer, "accept", name)
        return name

    def traffic(self, seconds: float) -> None:
        """Keep requests under way for that long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            while len(self.producer.open) + len(self.consumer.open) < IN_FLIGHT:
                self.request()
            self.take(min(left, 0.05))

    def settle(self, what: str, *children: Child) -> bool:
        """Wait until everything that is open on these sides has ended, in time."""
        return self.until(
            lambda: not any(child.open for child in children), what, self.longest + _SLACK
        )

    def serves(self, what: str) -> None:
        """Both sides carry out new requests, successfully.

        At the second try at the latest: on a busy machine a lease can end before it was asked for.
        """
        for _ in range(2):
            before = self.outcomes["consumer received"]
            for _ in range(4):
                self.request()
            self.settle(what, self.producer, self.consumer)
            received = self.outcomes["consumer received"] - before
            if received == 4:
                return
        self.problems.append(
            f"{what}: {received} of 4 requests were received; {dict(self.outcomes)} {self.why}"
        )

    # ---- rounds --------------------------------------------------------------------------------

    def kill_round(self, number: int) -> None:
        """``kill -9`` one side at a random moment; the other ends all in time and serves again."""
        what = f"round {number}"
        self.traffic(self.rng.uniform(0.05, 0.5))
        victim = self.rng.choice((self.producer, self.consumer))
        self.named |= victim.named()
        victim.signal(signal.SIGKILL)
        victim.process.wait()
        survivor = self.consumer if victim is self.producer else self.producer
        self.settle(f"{what}: {survivor.name} after the death of {victim.name}", survivor)
        self.until(
            lambda: not self.quarantined,
            f"{what}: quarantine {self.quarantined}",
            self.longest + _SLACK,
        )
        victim.end()
        new = self.child(victim.name)
        if victim is self.producer:
            self.producer = new
        else:
            self.consumer = new
        self.ready({new})
        self.serves(f"{what}: after the restart of {victim.name}")

    def stop_round(self, number: int, seconds: float, *, harmless: bool) -> None:
        """SIGSTOP one side for so long. Shorter than the deadlines: nothing fails."""
        what = f"stop round {number}"
        self.settle(f"{what}: before", self.producer, self.consumer)
        failed_before = self.failed
        self.traffic(self.rng.uniform(0.05, 0.2))
        victim = self.rng.choice((self.producer, self.consumer))
        survivor = self.consumer if victim is self.producer else self.producer
        victim.signal(signal.SIGSTOP)
        try:
            if harmless:
                time.sleep(seconds)  # what is measured is being stopped, not what follows
            else:
                self.settle(f"{what}: {survivor.name} while {victim.name} is stopped", survivor)
        finally:
            victim.signal(signal.SIGCONT)
        self.settle(f"{what}: after", self.producer, self.consumer)
        if harmless and self.failed > failed_before:
            self.problems.append(f"{what}: {dict(self.outcomes)}: something failed")
        self.until(
            lambda: not self.quarantined,
            f"{what}: quarantine {self.quarantined}",
            self.longest + _SLACK,
        )
        self.serves(f"{what}: after it goes on")

    @property
    def failed(self) -> int:
        return sum(n for name, n in self.outcomes.items() if "failed" in name or "expired" in name)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Have both sides count what is left."""
        finals: dict[str, dict[str, Any]] = {}
        self.settle("finish", self.producer, self.consumer)
        for child in (self.producer, self.consumer):
            self.named |= child.named()
            child.tell(op="finish")
        end = time.monotonic() + self.longest + _SLACK
        while len(finals) < 2 and time.monotonic() < end:
            message = self.take(0.5)
            if message is not None and message["op"] == "final":
                finals[message["child"].name] = message
        return finals

    def end(self) -> None:
        for child in (self.producer, self.consumer):
            if child.process.poll() is None and child.stopped:
                os.kill(child.process.pid, signal.SIGCONT)
            child.end()
