"""The parent: starts the two processes, is the router between them, and judges the run."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from kvxfer.cli.demo.plan import DemoPlan, Request
from kvxfer.cli.demo.report import Report, show
from kvxfer.core.plugins import load_backend
from kvxfer.errors import ConfigError

__all__ = ["Child", "Demo", "run"]

_STALL = 60.0
"""Seconds without any message after which the run is given up."""
_FINISH = 60.0


class Child:
    """One process of the demo; its messages go into the shared inbox as (child, message)."""

    def __init__(
        self, plan: DemoPlan, role: str, inbox: queue.SimpleQueue[tuple[Child, dict[str, Any]]]
    ) -> None:
        self.role = role
        self._inbox = inbox
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", f"kvxfer.cli.demo.{role}", json.dumps(plan.to_dict())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin: IO[str] = self.process.stdin
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {"op": "gone", "status": self.process.wait()}))

    def tell(self, **command: Any) -> None:
        try:
            self._stdin.write(json.dumps(command) + "\n")
            self._stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # its reader reports that it is gone

    def end(self) -> None:
        """Close its stdin, which ends it, and reap it."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)


class Demo:
    """One run. ``report`` fills up while ``step`` is called."""

    def __init__(self, plan: DemoPlan) -> None:
        backend = load_backend(plan.backend)
        if backend.name == "loopback":
            raise ConfigError(
                "the loopback backend reaches only its own process; the demo runs two",
                next_step="use --backend shm",
            )
        if plan.metrics_port is not None:
            import kvxfer.observe.metrics  # noqa: F401 - says what is missing, here and not there
        self.plan = plan
        self.requests = plan.make_requests()
        self.report = Report(plan=plan)
        self.inbox: queue.SimpleQueue[tuple[Child, dict[str, Any]]] = queue.SimpleQueue()
        self._by_id = {r.transfer_id: r for r in self.requests}
        self._next = 0
        self._last = len(self.requests)
        self._open: set[tuple[str, str]] = set()
        self._half_way = self._told = False
        """With failover the second half waits until prefill's engine has ended; prefill is told to
        end it once something has come over it."""
        self.prefill = Child(plan, "prefill", self.inbox)
        self.decode = Child(plan, "decode", self.inbox)

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self.prefill.end()
        self.decode.end()

    @property
    def over(self) -> bool:
        return self._next >= self._last and not self._open

    def stop(self) -> None:
        """Begin no more requests: the run is over when those that are open have ended. Any thread,
        signal handlers included."""
        self._last = 0
        self.inbox.put((self.prefill, {"op": "stop"}))  # so that ``step`` returns

    def step(self, timeout: float = _STALL) -> dict[str, Any]:
        """Take one message from a child and act on it.

        Raises:
            ConfigError: a child could not start.
        """
        try:
            child, message = self.inbox.get(timeout=timeout)
        except queue.Empty:
            self.report.problems.append(
                f"nothing happened for {timeout:.0f} s; {len(self._open)} are open: "
                f"{sorted(self._open)[:5]}"
            )
            return {"op": "stalled"}
        match message["op"]:
            case "offer":
                self._route(self._by_id[message["id"]], message["offer"])
            case "over":
                self._open.discard((message["side"], message["id"]))
                self.report.over(message)
                if self._half_way and not self._told and message["side"] == "decode":
                    self._told = True
                    self.prefill.tell(op="die")
            case "died":
                self._half_way = False
            case "changed":
                self.report.changes.append(f"{message['side']}: {message['event']}")
            case "quarantined":
                self.report.problems.append(f"{message['id']} quarantined: {message['reason']}")
            case "final":
                self.report.final(child.role, message)
        self._feed()
        return message

    def start(self) -> None:
        """Wait for both children, then send the first requests."""
        waiting = {self.prefill.role, self.decode.role}
        while waiting:
            child, message = self.inbox.get(timeout=_STALL)
            if message["op"] == "gone":
                raise ConfigError(
                    f"the {child.role} process could not start (exit status {message['status']})",
                    next_step=f"see its message above; is the backend {self.plan.backend} usable?",
                )
            waiting.discard(child.role)
            if message.get("status_port"):
                sys.stderr.write(
                    f"{child.role}: http://127.0.0.1:{message['status_port']}/metrics, /health\n"
                )
        self.report.began = time.monotonic()
        self._feed()

    def _feed(self) -> None:
        while (
            not self._half_way
            and self._next < self._last
            and len(self._open) < 2 * self.plan.in_flight
        ):
            request = self.requests[self._next]
            self._next += 1
            self._open |= {("prefill", request.transfer_id), ("decode", request.transfer_id)}
            self.report.begun(request)
            if self.plan.failover is not None and self._next == max(1, len(self.requests) // 2):
                self._half_way = True
            self.prefill.tell(
                op="prefill",
                id=request.transfer_id,
                index=request.index,
                blocks=request.blocks,
                early=request.early,
            )

    def _route(self, request: Request, offer: str) -> None:
        self.decode.tell(
            op="decode",
            id=request.transfer_id,
            index=request.index,
            blocks=request.blocks,
            prefix=request.prefix,
            action=request.action.value,
            offer=offer,
        )
        if request.early:
            # Decode has answered long before: what the worker is told now comes too late.
            timer = threading.Timer(
                0.3, lambda: self.prefill.tell(op="execute", id=request.transfer_id)
            )
            timer.daemon = True
            timer.start()

    def finish(self) -> None:
        """Have both children finish, and collect what they count."""
        self.report.ended = time.monotonic()
        self.prefill.tell(op="finish")
        self.decode.tell(op="finish")
        end = time.monotonic() + _FINISH
        while len(self.report.finals) < 2:
            message = self.step(timeout=max(0.1, end - time.monotonic()))
            if message["op"] in ("stalled", "gone"):
                self.report.problems.append("a process did not finish")
                return


@contextlib.contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Have the first Ctrl-C call ``stop``; the next one is an exception again."""

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    if threading.current_thread() is not threading.main_thread():  # those get no signals
        yield
        return
    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(plan: DemoPlan, *, as_json: bool) -> int:
    """The whole demo; returns the exit status. Ctrl-C ends it early, in an orderly way."""
    with (
        Demo(plan) as demo,
        _interrupts(demo.stop),
        show(demo.report, as_json=as_json) as progress,
    ):
        demo.start()
        while not demo.over:
            message = demo.step()
            progress.update()
            if message["op"] in ("stalled", "gone"):
                demo.report.problems.append(f"the run was given up: {message}")
                break
        demo.finish()
    return progress.conclude()
