"""A worker in a process of its own, seen from the test that tells it what to do."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from typing import Any

import attrs

from kvxfer.testing.life.geometry import Geometry

__all__ = ["Worker"]


class Worker:
    """Such a process, seen from the test. ``inbox`` gets ``(worker, message)``."""

    def __init__(self, name: str, inbox: queue.SimpleQueue[tuple[Worker, dict[str, Any]]]) -> None:
        self.name = name
        self._inbox = inbox
        self.seed = -1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.testing.life.child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.process.pid}>"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # killed in mid-line
                self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {"op": "gone"}))

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def open(self, *, seed: int, geometry: Geometry, port: int = 0, **options: Any) -> None:
        """Have it make its agent; it says "ready" then. ``options`` are ``config`` and so on."""
        self.seed = seed
        self.tell(op="open", seed=seed, geometry=attrs.asdict(geometry), port=port, **options)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Let it end by itself; its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status
