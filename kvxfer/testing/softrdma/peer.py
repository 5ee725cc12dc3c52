"""``MoriPeer``: the other process of a two-process test, with an engine and memory of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from kvxfer.errors import KvxferError, PeerLostError
from kvxfer.testing.softrdma.faults import Faults

__all__ = ["DEFAULT_NBYTES", "MoriPeer"]

DEFAULT_NBYTES = 4 << 20
ANSWER_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0


class MoriPeer:
    """A second process with an engine and one registered buffer. A context manager.

    It ends with its control connection and with the thread that started it, even while stopped.
    It joins the run of the ``SoftRdma`` that is entered here.  Not thread-safe.

    Args:
        key: The engine's key; None makes a unique one.
        nbytes: The size of its buffer.
        seed: What its buffer holds at first: ``pattern(seed, nbytes)``.
        config: Fields of mori's ``RdmaBackendConfig``.
        environment: Variables to set for the process, on top of this one's.
        port: The port its engine listens on; 0 lets the system choose.
        quiet: Throw away what it prints, the engine's log among it.

    Raises:
        PeerLostError: It ended before it was ready; its own output says why.
    """

    def __init__(
        self,
        key: str | None = None,
        *,
        nbytes: int = DEFAULT_NBYTES,
        seed: int = 1,
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        quiet: bool = False,
    ) -> None:
        ours, theirs = socket.socketpair()
        options = {
            "key": key,
            "nbytes": nbytes,
            "seed": seed,
            "port": port,
            "config": dict(config or {}),
        }
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvxfer.testing.softrdma.peer_process",
                    str(theirs.fileno()),
                    json.dumps(options),
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": _search_path(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else None,
                stderr=subprocess.DEVNULL if quiet else None,
            )
        ours.settimeout(ANSWER_TIMEOUT_S)
        self._socket = ours
        self._lines = ours.makefile("r", encoding="utf-8")
        self.faults = PeerFaults(self)
        """The faults of the peer's process."""
        try:
            ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.nbytes = nbytes
        self.key = str(ready["key"])
        self.description = bytes.fromhex(ready["engine"])
        """What another engine needs to reach it."""
        self.memory = bytes.fromhex(ready["memory"])
        """The packed descriptor of its buffer."""

    def __enter__(self) -> MoriPeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    # ---- what it can be asked to do ----

    def add_peer(self, description: bytes) -> None:
        """Make another engine known to it."""
        self.ask("add_peer", engine=description.hex())

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of its buffer; None reads to the end."""
        answer = self.ask("read", offset=offset, nbytes=nbytes)
        return bytes.fromhex(answer["content"])

    def fill(self, seed: int) -> None:
        """Fill its buffer with ``pattern(seed, nbytes)``."""
        self.ask("fill", seed=seed)

    def deregister(self) -> None:
        """Deregister its buffer; the memory stays."""
        self.ask("deregister")

    def register(self) -> None:
        """Register its buffer (again) and take over the new descriptor."""
        self.memory = bytes.fromhex(self.ask("register")["memory"])

    def take_notification(self, engine_key: str, uid: int) -> bool:
        """Whether the notification of a transfer of ours has arrived there; it is taken."""
        return bool(self.ask("take_notification", engine_key=engine_key, uid=uid)["value"])

    def close_engine(self) -> None:
        """End its engine, but not the process."""
        self.ask("close_engine")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and return the answer.

        Raises:
            PeerLostError: The process ended, or did not answer.
            KvxferError: The command failed there; the text is the peer's.
        """
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            self._socket.sendall(line.encode())
        except OSError as error:
            raise self._lost(error) from error
        return self._answer()

    # ---- what can happen to it ----

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop it (SIGSTOP): its memory stays readable, its control plane goes silent."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """End ``stop``."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and wait for its end. Safe to call twice."""
        self._lines.close()
        self._socket.close()
        if self._process.poll() is not None:
            return
        self.resume()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except OSError as error:  # a time-out is one too
            raise self._lost(error) from error
        if not line:
            raise self._lost("it closed its control connection")
        answer = json.loads(line)
        if "error" in answer:
            raise KvxferError(f"peer {self.pid}: {answer['error']}")
        return dict(answer)

    def _lost(self, why: object) -> PeerLostError:
        try:
            status = f"ended with status {self._process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            status = "does not answer"
        return PeerLostError(f"peer process {self.pid} {status} ({why})")


class PeerFaults(Faults):
    """The faults of a peer's process, by way of its control connection."""

    def __init__(self, peer: MoriPeer) -> None:
        self._peer = peer

    def _set(self, name: str, value: int) -> None:
        self._peer.ask("set", name=name, value=value)

    def _get(self, name: str) -> int:
        return int(self._peer.ask("get", name=name)["value"])

    def _deliver(self, event: int) -> int:
        return int(self._peer.ask("deliver", event=event)["value"])

    def reset(self) -> None:
        self._peer.ask("reset")


def _search_path() -> str:
    """This process's import path: the peer must find the same kvxfer, installed or not."""
    return os.pathsep.join(entry for entry in sys.path if entry)
