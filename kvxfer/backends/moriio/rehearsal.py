"""What would end the process if it failed is tried in a child process first.

The engine exits when its control port is taken, and aborts when memory cannot be registered; the
latter not when it is asked to, but on its first session, perhaps on a thread that serves a peer.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import attrs

from kvxfer.core.limitedlog import LimitedLog
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from kvxfer.backends.moriio.config import MoriioConfig
    from kvxfer.core.memory import Span

__all__ = ["rehearse_port", "rehearse_registration"]

_log = LimitedLog(logging.getLogger("kvxfer.backends.moriio"))

TIMEOUT_S = 60.0
"""For one rehearsal. A large registration pins every page."""

UNABLE = 75
"""The child's exit status where it could not try (``EX_TEMPFAIL``): nothing is known then."""

IMPOSSIBLE = 76
"""And where it is known without a try: GPU memory, and no GPU."""

_rehearsed: set[tuple[MemoryKind, int]] = set()
_lock = threading.Lock()


def rehearse_registration(host: str, span: Span, config: MoriioConfig) -> None:
    """Register as much memory of that kind in a child, once per kind and device of this process.

    Raises:
        TransportError: the engine ends the process over it; holds the engine's last words.
    """
    key = (span.kind, span.device)
    with _lock:
        if key in _rehearsed:
            return
        options: dict[str, object] = {
            "what": "memory",
            "host": host,
            "kind": span.kind.value,
            "device": span.device,
            "nbytes": span.nbytes,
            "config": attrs.asdict(config, value_serializer=_plain),
        }
        status, words = _run(options)
        if status == UNABLE:
            _log.problem(
                "rehearsal",
                "the registration of %s memory could not be tried: %s",
                key[0].value,
                words,
            )
        elif status != 0:
            raise TransportError(
                f"registering {span.nbytes} bytes of {span.kind.value} memory ended the process "
                f"that tried it ({_how(status)}): {words}",
                next_step="check `ulimit -l` (locked memory), the driver, and for GPU memory that "
                "the NIC can reach it (peer memory or dmabuf)",
                engine=EngineError(backend="moriio", message=f"rehearsal failed: {words}"[:500]),
            )
        _rehearsed.add(key)


def rehearse_port(host: str, port: int) -> None:
    """Have an engine listen on the port in a child.

    Raises:
        ConfigError: it cannot.
    """
    status, words = _run({"what": "port", "host": host, "port": port})
    if status not in (0, UNABLE):
        raise ConfigError(
            f"the engine cannot listen on {host}:{port} ({_how(status)}): {words}",
            next_step="leave port at 0, or free that port and the next one",
        )


def _plain(_: object, __: object, value: object) -> object:
    return getattr(value, "value", value)


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _run(options: dict[str, object]) -> tuple[int, str]:
    search = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command = [sys.executable, "-m", "kvxfer.backends.moriio.rehearse", json.dumps(options)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": search},
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return UNABLE, str(error)
    lines = [x.strip() for x in (done.stdout + "\n" + done.stderr).splitlines() if x.strip()]
    return done.returncode, "; ".join(lines[-3:])
