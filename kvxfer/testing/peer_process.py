"""A side of a test in another process. See ``kvxfer.testing.peer`` for what runs there."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvxfer.errors
from kvxfer.core.batch import Batch
from kvxfer.core.memory import Descriptor, MemoryKind
from kvxfer.core.transport import PeerInfo
from kvxfer.core.verdict import Op
from kvxfer.errors import KvxferError
from kvxfer.testing.peer import decode_descriptor, decode_info, encode_descriptor, encode_info
from kvxfer.testing.station import Buffer, Far

__all__ = ["PeerProcess", "PeerProcessError"]

_POLL = 0.0005
"""Seconds between two calls of ``pump`` while an answer is awaited."""


class PeerProcessError(RuntimeError):
    """The peer process died or did not answer in time: a fault of the test rig or the backend."""


class PeerProcess(Far):
    """Spawn ``python -m kvxfer.testing.peer`` and talk to it.

    ``pump`` is called while an answer is awaited, for engines that need both sides to make
    progress.  ``timeout`` bounds every answer, in seconds.  The child inherits the environment,
    changed by ``env``, and finds what this process can import.

    Raises:
        PeerProcessError: the child does not come up.
    """

    def __init__(
        self,
        backend: str,
        *,
        options: Mapping[str, Any] | None = None,
        memory: str = "kvxfer.testing.memory:HostMemory",
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        pump: Callable[[], object] | None = None,
    ) -> None:
        self._timeout = timeout
        self._pump = pump
        self._received = b""
        self._stopped = False
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvxfer.testing.peer"),
                *("--backend", backend),
                *("--options", json.dumps(dict(options or {}))),
                *("--memory", memory),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
                **(env or {}),
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to = self._process.stdin.fileno()
        self._from = self._process.stdout.fileno()
        try:
            self._info = decode_info(self._call("open"))
        except BaseException:
            self.dispose()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Neither ended nor stopped."""
        return not self._stopped and self._process.poll() is None

    @property
    def info(self) -> PeerInfo:
        return self._info

    def reopen(self, pump: Callable[[], object] | None = None) -> None:
        """Begin anew with another transport in the same process, which saves its start."""
        self._pump = pump
        self._info = decode_info(self._call("open"))

    def close(self) -> None:
        """Close the transport and free all memory; the process waits for ``reopen``."""
        self._call("close")

    def register(self, nbytes: int, *, kind: MemoryKind = MemoryKind.DRAM) -> Buffer:
        reply = self._call("register", nbytes=nbytes, kind=kind.value)
        return Buffer(
            key=reply["key"], nbytes=nbytes, descriptor=decode_descriptor(reply["descriptor"])
        )

    def deregister(self, buffer: Buffer) -> None:
        self._call("deregister", key=buffer.key)

    def fill(self, buffer: Buffer, seed: int) -> None:
        self._call("fill", key=buffer.key, seed=seed)

    def digest(self, buffer: Buffer) -> str:
        return str(self._call("digest", key=buffer.key))

    def read(self, buffer: Buffer, offset: int = 0, nbytes: int | None = None) -> bytes:
        nbytes = buffer.nbytes - offset if nbytes is None else nbytes
        return base64.b64decode(self._call("read", key=buffer.key, offset=offset, nbytes=nbytes))

    def guards_intact(self, buffer: Buffer) -> bool:
        return bool(self._call("guards_intact", key=buffer.key))

    def exchange(
        self, op: Op, info: PeerInfo, pairs: Sequence[tuple[Buffer, Descriptor]], batch: Batch
    ) -> int:
        return int(
            self._call(
                "exchange",
                op=op.value,
                info=encode_info(info),
                pairs=[(buffer.key, encode_descriptor(d)) for buffer, d in pairs],
                batch=batch.lists(),
            )
        )

    def fence(self, info: PeerInfo) -> int:
        return int(self._call("fence", info=encode_info(info)))

    def exchange_state(self, number: int) -> str:
        return str(self._call("exchange_state", number=number))

    def pump(self) -> None:
        """Nothing: the child does it by itself."""

    def shut(self) -> None:
        self._call("shut")

    # ---- what only a process can suffer ----------------------------------------------------

    def stop(self) -> None:
        """SIGSTOP, as a debugger or a full host would. Returns once it stands still."""
        self._stopped = True
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, without a chance to tell anybody. Returns once it is gone."""
        self._process.kill()
        self._process.wait()

    def dispose(self) -> None:
        """End the child: by its input's end, else by force.

        Raises:
            PeerProcessError: it had to be killed, or ended with an error, though nobody killed it.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            if self._process.returncode is None:
                if self._stopped:
                    self.kill()
                    return
                stdin.close()
                self._reap()
                if self._process.returncode:
                    raise PeerProcessError(
                        f"the peer process ended with status {self._process.returncode} "
                        "when it was asked to end"
                    )
        finally:
            stdin.close()
            stdout.close()

    def _reap(self) -> None:
        deadline = time.monotonic() + self._timeout
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise PeerProcessError(
                    f"the peer process did not end within {self._timeout} s of being asked to"
                )
            if self._pump is not None:
                self._pump()
            time.sleep(_POLL)

    # ---- the line protocol -----------------------------------------------------------------

    def _call(self, do: str, **arguments: Any) -> Any:
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        deadline = time.monotonic() + self._timeout
        self._send(line, do, deadline)
        reply = json.loads(self._receive(do, deadline))
        if "error" in reply:
            kind = getattr(kvxfer.errors, reply["error"], KvxferError)
            raise kind(reply["message"], next_step=reply["next_step"])
        return reply["result"]

    def _send(self, line: bytes, do: str, deadline: float) -> None:
        os.set_blocking(self._to, False)
        while line:
            try:
                line = line[os.write(self._to, line) :]
            except BlockingIOError:
                self._wait(do, deadline)
            except BrokenPipeError:
                raise self._died(do) from None

    def _receive(self, do: str, deadline: float) -> bytes:
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                return line
            if select.select([self._from], [], [], _POLL)[0]:
                chunk = os.read(self._from, 1 << 20)
                if not chunk:
                    raise self._died(do)
                self._received += chunk
            else:
                self._wait(do, deadline)

    def _wait(self, do: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise PeerProcessError(f"the peer process did not answer {do!r} in {self._timeout} s")
        if self._pump is not None:
            self._pump()

    def _died(self, do: str) -> PeerProcessError:
        status = self._process.wait()
        return PeerProcessError(f"the peer process ended with status {status} during {do!r}")
