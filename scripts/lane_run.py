"""One lane while it runs: its output, its programs, its counts, its time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from venvs import HOME, ROOT

_running: set[subprocess.Popen[str]] = set()
"""Programs of all lanes, so that an interrupt can end them."""


def end_all() -> None:
    """End every program that a lane runs, with all that it started."""
    for process in tuple(_running):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


class LaneFailed(Exception):
    """The lane does not hold; the text says why."""


@dataclass
class Counts:
    """How many tests and other checks a lane ran."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, passed: int, failed: int, skipped: int) -> None:
        self.passed += passed
        self.failed += failed
        self.skipped += skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


@dataclass
class LaneRun:
    """What a lane's body works with. ``limit`` is seconds for the whole lane, set-up apart."""

    name: str
    log: Path
    live: bool
    limit: float
    counts: Counts = field(default_factory=Counts)
    skips: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> LaneRun:
        self._file = self.log.open("w")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def say(self, text: str) -> None:
        print(text, file=self._file, flush=True)
        if self.live:
            print(text, flush=True)

    def program(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> tuple[int, str]:
        """Run a program to its end; returns its exit status and what it printed.

        Its whole process group is ended at the lane's limit.

        Raises:
            LaneFailed: the limit was reached.
        """
        words = [str(part) for part in argv]
        self.say("$ " + " ".join(words))
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        _running.add(process)
        lines: list[str] = []

        def pump() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if not quiet:
                    self.say(line.rstrip("\n"))

        pumping = threading.Thread(target=pump, daemon=True)
        pumping.start()
        started = time.monotonic()
        try:
            status = process.wait(max(self.limit, 0.1))
        except subprocess.TimeoutExpired:
            raise LaneFailed(f"still running after {self.limit:.0f} s: ended") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _running.discard(process)
            self.limit -= time.monotonic() - started
            # A grandchild may hold the pipe open; its output is not ours to wait for.
            pumping.join(5)
            if not pumping.is_alive() and process.stdout is not None:
                process.stdout.close()
        if status < 0:
            self.say(f"-- ended by {signal.Signals(-status).name}")
        return status, "".join(lines)

    def check(self, what: str, held: bool, detail: str = "") -> None:
        """Count one check that is no pytest test."""
        self.counts.add(int(held), int(not held), 0)
        self.say(f"-- {'held' if held else 'DID NOT HOLD'}: {what}{detail and ': ' + detail}")

    def pytest(
        self,
        python: Path,
        *arguments: str | Path,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run pytest and count what its report says.

        Raises:
            LaneFailed: it left no report, ran no test, or failed without a failing test.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            status, _ = self.program(
                [
                    python,
                    "-m",
                    "pytest",
                    "-q",
                    f"--junitxml={report}",
                    "-o",
                    f"cache_dir={HOME / ('cache-' + self.name)}",
                    *arguments,
                ],
                cwd=cwd,
                env=env,
            )
            if not report.exists():
                raise LaneFailed(f"pytest left no report (exit status {status})")
            passed, failed = self.counts.passed, self.counts.failed
            self._read(report)
        if self.counts.failed == failed:
            if status not in (0, 5):
                raise LaneFailed(f"pytest ended with exit status {status}")
            if self.counts.passed == passed:
                raise LaneFailed("no test ran")

    def _read(self, report: Path) -> None:
        # Our own pytest wrote this file a moment ago.
        for case in ET.parse(report).getroot().iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.counts.add(0, 1, 0)
            elif skipped is not None:
                self.counts.add(0, 0, 1)
                where = f"{case.get('classname', '')}::{case.get('name', '')}"
                why = f"{skipped.get('message', '')} {skipped.text or ''}"
                self.skips.append((where, why))
            else:
                self.counts.add(1, 0, 0)

    def check_counts(
        self, expected_skips: Sequence[str], exactly: int | None = None, counted: str = ""
    ) -> None:
        """Raise ``LaneFailed`` unless tests ran, none failed and every skip was expected, and there
        were ``exactly`` so many whose reason matches ``counted``, where a number is given."""
        if self.counts.failed:
            raise LaneFailed(f"{self.counts.failed} tests or checks failed")
        if not self.counts.passed:
            raise LaneFailed("no test ran")
        for where, why in self.skips:
            if not any(re.search(pattern, why) for pattern in expected_skips):
                raise LaneFailed(f"unexpected skip: {where}: {' '.join(why.split())[:300]}")
        found = sum(bool(re.search(counted, why)) for _, why in self.skips)
        if exactly is not None and found != exactly:
            raise LaneFailed(f"{found} tests were skipped, not {exactly}")
