"""Provoke what the Mooncake backend can say, with the real engine in two processes, and print it.

    MC_TCP_STATUS_TIMEOUT_SEC=1 MC_TCP_LANES_PER_PEER=1 python scripts/mooncake_samples.py

One JSON object per line: rule, code, message.  What varies between runs (addresses, ports) is
written as in ``kvxfer/policies/rules/mooncake_samples.py``, which holds the output; the suite of
the lane provokes all of it again.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

from kvxfer.backends.mooncake import MooncakeConfig, MooncakeTransport
from kvxfer.backends.mooncake.wire import EngineAddress
from kvxfer.core.attempt import Attempt
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Path, PeerInfo
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import BackpressureError, TransportError
from kvxfer.testing.peer_process import PeerProcess

BACKEND = "kvxfer.backends.mooncake:MooncakeTransport"
NBYTES = 1 << 16
PATIENCE_S = 30.0


class Stage:
    """A transport here, one peer in another process, and two regions on both sides."""

    def __init__(self) -> None:
        self.transport = MooncakeTransport(MooncakeConfig(connect_timeout=1.0))
        self.far = PeerProcess(BACKEND)
        self.arrays = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
        self.regions = [self.transport.register(span_of(a)) for a in self.arrays]
        self.buffers = [self.far.register(NBYTES) for _ in range(2)]

    def wait(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not ready():
            if time.monotonic() > end:
                raise TimeoutError("the scenario does not come to an end")
            self.transport.progress()
            time.sleep(0.001)

    def answer(self, pollable: Pollable[Any]) -> Any:
        self.wait(lambda: pollable.poll() != (None, None))
        value, error = pollable.poll()
        if error is not None:
            raise error
        return value

    def path(self) -> Path:
        peer = self.answer(self.transport.connect(self.far.info))
        pairs = list(zip(self.regions, (b.descriptor for b in self.buffers), strict=True))
        path: Path = self.answer(self.transport.prepare(peer, pairs))
        return path

    def post(self, path: Path, pieces: int = 1) -> Attempt:
        at = np.arange(pieces, dtype=np.int64) * 16
        batch = Batch(np.zeros(pieces, np.int32), at, at, np.full(pieces, 16, np.int64))
        return self.transport.post(Op.READ, path, batch)

    def said(self, attempt: Attempt) -> EngineError:
        self.wait(lambda: attempt.terminal)
        if attempt.error is None:
            raise RuntimeError("the attempt did not fail")
        return attempt.error

    def refused(self, info: PeerInfo) -> EngineError:
        try:
            self.answer(self.transport.connect(info))
        except TransportError as error:
            if error.engine is not None:
                return error.engine
            raise
        raise RuntimeError("connected")

    def close(self) -> None:
        self.transport.close()
        self.far.dispose()


def peer_gone(stage: Stage) -> EngineError:
    path = stage.path()
    stage.far.kill()
    return stage.said(stage.post(path))


def peer_silent(stage: Stage) -> EngineError:
    path = stage.path()
    stage.far.stop()
    try:
        return stage.said(stage.post(path))
    finally:
        stage.far.resume()


def not_registered(stage: Stage) -> EngineError:
    path = stage.path()
    stage.far.deregister(stage.buffers[0])
    return stage.said(stage.post(path))


def broken(stage: Stage) -> EngineError:
    """The engine drops the connection to a stopped peer, which runs again when it is asked why."""
    path = stage.path()
    stage.far.stop()
    try:
        attempt = stage.post(path)
        stage.wait(lambda: stage.transport._flights.under_way[0].diagnosis is not None)
    finally:
        stage.far.resume()
    return stage.said(attempt)


def other_life(stage: Stage) -> EngineError:
    return stage.refused(attrs.evolve(stage.far.info, incarnation="0123456789abcdef"))


def unreachable(stage: Stage) -> EngineError:
    """Something else listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_hang_up, args=(server,), daemon=True).start()
        where = EngineAddress.decode(stage.far.info.data)
        moved = EngineAddress(
            where.version, where.host, server.getsockname()[1], "tcp", where.token
        )
        return stage.refused(attrs.evolve(stage.far.info, data=moved.encode()))


def _hang_up(server: socket.socket) -> None:
    link, _ = server.accept()
    link.recv(64)
    link.close()


def queue_full(stage: Stage) -> EngineError:
    path = stage.path()
    stage.far.stop()
    try:
        for _ in range(8):
            stage.post(path, pieces=stage.transport.capabilities.max_pieces)
    except BackpressureError as error:
        if error.engine is not None:
            return error.engine
    finally:
        stage.far.resume()
    raise RuntimeError("eight full posts were taken")


def not_taken(stage: Stage) -> EngineError:
    """The engine no longer knows the memory that is unregistered."""
    region = stage.regions[0]
    stage.transport._engine.unregister(region.span.address)
    try:
        stage.transport.deregister(region)
    except TransportError as error:
        if error.engine is not None:
            return error.engine
    raise RuntimeError("it was unregistered twice")


SCENARIOS: dict[str, Callable[[Stage], EngineError]] = {
    f"mooncake.{scenario.__name__}": scenario
    for scenario in (
        peer_gone,
        other_life,
        not_registered,
        peer_silent,
        unreachable,
        broken,
        queue_full,
        not_taken,
    )
}


def normalise(message: str) -> str:
    """Without what varies between runs."""
    message = re.sub(r"0x[0-9a-f]+", "0x7f0000000000", message)
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:15000", message)


def capture(rule: str) -> EngineError:
    """What the backend says in the scenario of ``rule``, normalised."""
    stage = Stage()
    try:
        said = SCENARIOS[rule](stage)
    finally:
        stage.close()
    return attrs.evolve(said, message=normalise(said.message))


def captured() -> Iterator[tuple[str, EngineError]]:
    for rule in SCENARIOS:
        yield rule, capture(rule)


if __name__ == "__main__":
    for rule, said in captured():
        print(json.dumps({"rule": rule, "code": said.code, "message": said.message}), flush=True)
