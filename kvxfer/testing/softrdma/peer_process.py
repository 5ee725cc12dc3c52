"""The process behind ``MoriPeer``: does what it is told over a socket, one JSON object per line."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.testing.softrdma.control import SoftRdma
from kvxfer.testing.softrdma.engine import MoriEngine

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class PeerProcess:
    """One engine, one buffer, and the commands; every ``do_`` method answers one."""

    def __init__(
        self, rdma: SoftRdma, *, key: str | None, nbytes: int, seed: int, port: int, config: Any
    ) -> None:
        self._rdma = rdma
        self._engine = MoriEngine(key, port=port, **config)
        self._buffer = self._engine.buffer(nbytes, seed=seed)

    def ready(self) -> dict[str, Any]:
        """What ``MoriPeer`` learns first."""
        return {
            "key": self._engine.key,
            "engine": self._engine.description.hex(),
            "memory": self._memory(),
        }

    def _memory(self) -> str:
        return bytes(self._buffer.descriptor.pack()).hex()

    def do_add_peer(self, engine: str) -> dict[str, Any]:
        self._engine.add_peer(bytes.fromhex(engine))
        return {}

    def do_read(self, offset: int, nbytes: int | None) -> dict[str, Any]:
        return {"content": self._buffer.read(offset, nbytes).hex()}

    def do_fill(self, seed: int) -> dict[str, Any]:
        self._buffer.fill(seed)
        return {}

    def do_deregister(self) -> dict[str, Any]:
        self._engine.deregister(self._buffer)
        return {}

    def do_register(self) -> dict[str, Any]:
        self._engine.register(self._buffer)
        return {"memory": self._memory()}

    def do_take_notification(self, engine_key: str, uid: int) -> dict[str, Any]:
        return {"value": self._engine.take_notification(engine_key, uid)}

    def do_close_engine(self) -> dict[str, Any]:
        self._engine.close()
        return {}

    def do_set(self, name: str, value: int) -> dict[str, Any]:
        self._rdma._set(name, value)
        return {}

    def do_get(self, name: str) -> dict[str, Any]:
        return {"value": self._rdma._get(name)}

    def do_deliver(self, event: int) -> dict[str, Any]:
        return {"value": self._rdma._deliver(event)}

    def do_reset(self) -> dict[str, Any]:
        self._rdma.reset()
        return {}


def serve(peer: PeerProcess, connection: socket.socket) -> None:
    """Answer commands until the connection ends."""
    with connection.makefile("rw", encoding="utf-8") as stream:

        def answer(value: dict[str, Any]) -> None:
            stream.write(json.dumps(value) + "\n")
            stream.flush()

        answer(peer.ready())
        for line in stream:
            request = json.loads(line)
            command = request.pop("command")
            try:
                answer(getattr(peer, f"do_{command}")(**request))
            except (KvxferError, RuntimeError, AttributeError, TypeError) as error:
                answer({"error": f"{command}: {type(error).__name__}: {error}"})


def main() -> None:
    """Entry point: file descriptor of the control socket, options as JSON."""
    # The end of the connection ends this process too, but not while it is stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=int(sys.argv[1])) as connection, SoftRdma() as rdma:
        serve(PeerProcess(rdma, **json.loads(sys.argv[2])), connection)
        sys.stdout.flush()
        sys.stderr.flush()
        # The engine's own end may wait for peers that are gone: nobody needs it any more.
        os._exit(0)


if __name__ == "__main__":
    main()
