"""The other process of a two-process test: ``python -m kvxfer.testing.peer --backend NAME``.

It opens a transport and does what it is told, one JSON object per line on its standard input,
one per line back on the pipe that its standard output was at start.  It ends when its input ends,
and the kernel ends it with its parent, even while it is stopped.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from kvxfer.core.batch import Batch
from kvxfer.core.memory import Descriptor, MemoryKind
from kvxfer.core.transport import PeerInfo
from kvxfer.core.verdict import Op
from kvxfer.errors import ClosedError, KvxferError
from kvxfer.testing.memory import Memory, load
from kvxfer.testing.station import Buffer, Station, open_transport

__all__ = ["decode_descriptor", "decode_info", "encode_descriptor", "encode_info", "main"]

_PR_SET_PDEATHSIG = 1
_IDLE = 0.001
"""Seconds between two looks at ``progress`` while no command comes."""


def encode_info(info: PeerInfo) -> dict[str, Any]:
    """A ``PeerInfo`` as JSON values."""
    return {**attrs.asdict(info), "data": base64.b64encode(info.data).decode()}


def decode_info(values: Mapping[str, Any]) -> PeerInfo:
    """The inverse of ``encode_info``."""
    return PeerInfo(**{**values, "data": base64.b64decode(values["data"])})


def encode_descriptor(descriptor: Descriptor) -> dict[str, Any]:
    """A ``Descriptor`` as JSON values."""
    return {
        **attrs.asdict(descriptor),
        "kind": descriptor.kind.value,
        "data": base64.b64encode(descriptor.data).decode(),
    }


def decode_descriptor(values: Mapping[str, Any]) -> Descriptor:
    """The inverse of ``encode_descriptor``."""
    return Descriptor(
        **{
            **values,
            "kind": MemoryKind(values["kind"]),
            "data": base64.b64decode(values["data"]),
        }
    )


class _Commands:
    """One method per command. What they return is JSON."""

    def __init__(self, backend: str, options: Mapping[str, Any], memory: type[Memory]) -> None:
        self._backend = backend
        self._options = options
        self._memory = memory
        self._station: Station | None = None
        self._buffers: dict[int, Buffer] = {}

    @property
    def station(self) -> Station:
        if self._station is None:
            raise ClosedError("the peer process has no transport: open comes first")
        return self._station

    def pump(self) -> None:
        """Not a command: what happens between two of them."""
        if self._station is not None:
            self._station.pump()

    def open(self) -> Any:
        """A new transport, in place of the last one."""
        self.close()
        self._station = Station(open_transport(self._backend, self._options), self._memory)
        return encode_info(self._station.info)

    def close(self) -> None:
        station, self._station = self._station, None
        self._buffers.clear()
        if station is not None:
            station.dispose()

    def register(self, nbytes: int, kind: str) -> Any:
        buffer = self.station.register(nbytes, kind=MemoryKind(kind))
        self._buffers[buffer.key] = buffer
        return {"key": buffer.key, "descriptor": encode_descriptor(buffer.descriptor)}

    def deregister(self, key: int) -> None:
        self.station.deregister(self._buffers[key])

    def fill(self, key: int, seed: int) -> None:
        self.station.fill(self._buffers[key], seed)

    def digest(self, key: int) -> str:
        return self.station.digest(self._buffers[key])

    def read(self, key: int, offset: int, nbytes: int) -> Any:
        return base64.b64encode(self.station.read(self._buffers[key], offset, nbytes)).decode()

    def guards_intact(self, key: int) -> bool:
        return self.station.guards_intact(self._buffers[key])

    def exchange(
        self, op: str, info: dict[str, Any], pairs: list[Any], batch: list[list[int]]
    ) -> int:
        return self.station.exchange(
            Op(op),
            decode_info(info),
            [(self._buffers[key], decode_descriptor(d)) for key, d in pairs],
            Batch(*batch),
        )

    def fence(self, info: dict[str, Any]) -> int:
        return self.station.fence(decode_info(info))

    def exchange_state(self, number: int) -> str:
        return self.station.exchange_state(number)

    def shut(self) -> None:
        self.station.shut()


def main(argv: list[str] | None = None) -> int:
    """Run until the input ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, help="plug-in name or module:attribute")
    parser.add_argument("--options", default="{}", help="keyword arguments, as a JSON object")
    parser.add_argument("--memory", default="kvxfer.testing.memory:HostMemory")
    arguments = parser.parse_args(argv)
    # Engines print to standard output; the protocol keeps a descriptor of its own.
    replies = os.dup(1)
    os.dup2(2, 1)
    _die_with_parent()
    commands = _Commands(arguments.backend, json.loads(arguments.options), load(arguments.memory))
    _serve(commands, replies)
    commands.close()
    return 0


def _serve(commands: _Commands, replies: int) -> None:
    buffered = b""
    while True:
        line, newline, rest = buffered.partition(b"\n")
        if newline:
            buffered = rest
            _write_all(replies, json.dumps(_answer(commands, line)).encode() + b"\n")
            continue
        commands.pump()
        if select.select([0], [], [], _IDLE)[0]:
            chunk = os.read(0, 1 << 20)
            if not chunk:
                return
            buffered += chunk


def _answer(commands: _Commands, line: bytes) -> dict[str, Any]:
    request = json.loads(line)
    name = request.pop("do")
    try:
        return {"result": getattr(commands, name)(**request)}
    except KvxferError as error:
        return {
            "error": type(error).__name__,
            "message": error.message,
            "next_step": error.next_step,
        }


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
