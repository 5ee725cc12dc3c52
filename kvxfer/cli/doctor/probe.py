"""One process per backend: whatever an engine does to it, the doctor reads what it said before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import attrs

from kvxfer.core.hostcheck import Finding, HostQuery, Level

__all__ = ["backend"]

_WORDS = 500
"""Characters of a dead process's last words that are shown."""
_MOST = 1 << 20
"""Bytes that are read of what a backend finds."""


def backend(name: str, query: HostQuery, timeout: float) -> list[Finding]:
    """What the process found, and how it ended if not by itself. ``timeout`` is seconds."""
    reading, writing = os.pipe()
    words = {"backend": name, "query": attrs.asdict(query), "report": writing}
    command = [sys.executable, "-m", "kvxfer.cli.doctor.child", json.dumps(words)]
    search = os.pathsep.join(part or os.getcwd() for part in sys.path)
    try:
        with subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            start_new_session=True,  # so that what it starts can be ended with it
            env={**os.environ, "PYTHONPATH": search},
        ) as child:
            os.close(writing)
            writing = -1
            try:
                said, _ = child.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                said, _ = child.communicate()
                return _ended(name, reading, f"did not end within {timeout:g} s", said)
        if child.returncode == 0:
            return _findings(name, _lines(reading))[0]
        code = child.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return _ended(name, reading, how, said)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _lines(reading: int) -> list[dict[str, Any]]:
    os.set_blocking(reading, False)
    data = b""
    while len(data) < _MOST:
        try:
            more = os.read(reading, 65536)
        except BlockingIOError:  # something it started still holds the other end
            break
        if not more:
            break
        data += more
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def _findings(name: str, lines: list[dict[str, Any]]) -> tuple[list[Finding], str]:
    """What was found, and the check that was begun last."""
    found, last = [], "begin"
    for line in lines:
        last = line.get("begin", last)
        if "level" in line:
            level = Level(line.pop("level"))
            found.append(Finding(backend=name, level=level, **line))
    return found, last


def _ended(name: str, reading: int, how: str, said: bytes) -> list[Finding]:
    found, last = _findings(name, _lines(reading))
    tail = "; ".join(x.strip() for x in said.decode(errors="replace").splitlines() if x.strip())
    words = f": {tail[-_WORDS:]}" if tail else ""
    crash = Finding(
        backend=name,
        check=last,
        level=Level.ERROR,
        what=f"the process that tried {last!r} {how}{words}",
        next_step="a worker with this backend would end the same way: correct what the message "
        "names, or do not use this backend here",
    )
    return [*found, crash]
