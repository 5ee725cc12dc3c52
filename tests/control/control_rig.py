"""What the tests of the control channel share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.core.channel import Inbound
    from kvxfer.core.control import ZmqChannel

PATIENCE = 20.0  # seconds until a test gives up on something that takes milliseconds


def pump(
    channel: ZmqChannel,
    done: Callable[[list[Inbound]], Any],
    *,
    others: tuple[ZmqChannel, ...] = (),
) -> list[Inbound]:
    """Run the channel (and others) until ``done(everything received)``; returns what came."""
    got: list[Inbound] = []
    deadline = time.monotonic() + PATIENCE
    while not done(got):
        assert time.monotonic() < deadline, f"gave up; got {len(got)}, {channel.counters}"
        for other in others:
            other.wait(0)
            other.receive()
        channel.wait(0.005)
        got += channel.receive()
    return got


def descriptors() -> list[str]:
    """What this process has open, without the directory handle used to look."""
    gc.collect()  # what earlier tests left behind is closed now, not in between
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").partition(":[")[0])
        except FileNotFoundError:
            continue
    return sorted(found)


def tasks() -> int:
    """Threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


class Peer:
    """A process with a channel that sends back what it gets."""

    def __init__(self, port: int = 0) -> None:
        script = Path(__file__).with_name("echo_peer.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(port)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the peer did not start"
        self.port = int(self.address.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
