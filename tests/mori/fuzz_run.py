"""Thousands of random calls of a transport over the real engine, in a process of its own.

    fuzz_run.py CALLS SEED

Every call is named on standard error before it is made, so that the last line tells what ended the
process, if something did.  The result is JSON on what standard output was at start.
"""

from __future__ import annotations

import collections
import errno
import faulthandler
import gc
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import MemoryKind, span_of
from kvxfer.core.transport import Path, Peer
from kvxfer.core.verdict import Op
from kvxfer.errors import InvalidInputError, KvxferError
from kvxfer.testing.memory import pattern
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.softrdma import AsyncEvent, SoftRdma, WcStatus

NBYTES = 64 * 1024
BLOCK = 1024
MOST = 12
"""Of each kind of object that are kept; the oldest are dropped, whatever is under way on them."""
CONFIG: dict[str, Any] = {
    "rehearse": False,
    "max_send_wr": 32,
    "generation_linger_s": 0.05,
    "generation_drain_s": 0.3,
    "connect_timeout_s": 0.2,
    "control_timeout_ms": 200,
    "qp_retry_count": 2,
}


class Fuzz:
    def __init__(self, softrdma: SoftRdma, seed: int) -> None:
        self.rng = random.Random(seed)
        self.softrdma = softrdma
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.defects: list[str] = []
        self.regions: list[Any] = []
        self.peers: list[Peer] = []
        self.paths: list[Path] = []
        self.pollables: list[Any] = []
        self.attempts: list[Attempt] = []
        self.descriptors: list[Any] = []
        self.infos: list[Any] = []
        self.stopped: PeerProcess | None = None
        self.transport = self.new_transport()
        self.fars = [self.new_far() for _ in range(2)]
        self.serve()

    def new_transport(self) -> MoriioTransport:
        queue_pairs = self.rng.choice((1, 2))
        return MoriioTransport(MoriioConfig(**CONFIG, qp_per_transfer=queue_pairs))

    def new_far(self) -> PeerProcess:
        return PeerProcess("moriio", options={"config": CONFIG}, timeout=60.0)

    def some(self, things: list[Any]) -> Any:
        if not things:
            raise InvalidInputError("there is none yet")
        # The latest more often: the older ones belong to peers and transports that are gone.
        return things[-1 - min(int(self.rng.expovariate(0.5)), len(things) - 1)]

    def usable(self, things: list[Any]) -> Any:
        """One that is open, mostly; a closed one sometimes."""
        is_open = [thing for thing in things if not thing.closed]
        return self.some(is_open if is_open and self.rng.random() < 0.85 else things)

    def keep(self, things: list[Any], thing: Any) -> None:
        things.append(thing)
        if len(things) > MOST:
            del things[0]

    # ---- calls -----------------------------------------------------------------------------

    def batch(self) -> Batch:
        """Mostly good pieces; else one vector of them is spoilt."""
        rng, count = self.rng, self.rng.choice((0, 1, 1, 2, 7, 31, 40))
        pair = [0] * count
        local, remote = (
            [rng.randrange(NBYTES // BLOCK) * BLOCK for _ in range(count)] for _ in range(2)
        )
        size = [rng.choice((1, 64, BLOCK))] * count
        if rng.random() < 0.25:
            spoilt = rng.choice((pair, local, remote, size))
            bad = (-1, 0, 1, NBYTES - 1, NBYTES, NBYTES + 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64)
            if rng.random() < 0.2:
                spoilt.append(0)  # lengths differ
            elif spoilt:
                spoilt[rng.randrange(len(spoilt))] = rng.choice(bad)
        return Batch(pair, local, remote, size)

    def post(self) -> None:
        path, batch = self.usable(self.paths), self.batch()
        self.keep(self.attempts, self.transport.post(self.rng.choice(list(Op)), path, batch))

    def progress(self) -> None:
        self.transport.progress(self.rng.choice((1, 3, 1024)))

    def poll(self) -> None:
        value, error = self.some(self.pollables).poll()
        if isinstance(value, Path):
            self.keep(self.paths, value)
        elif isinstance(value, Peer):
            self.keep(self.peers, value)
        if error is not None:
            raise error

    def spoil(self, data: bytes) -> bytes:
        rng = self.rng
        way = rng.randrange(4)
        if way == 0:
            return data[: rng.randrange(len(data) + 1)]
        if way == 1:
            return data + bytes(rng.randrange(1, 64))
        at = rng.randrange(len(data))
        if way == 2:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        return rng.randbytes(len(data))

    def connect(self) -> None:
        info = self.some(self.infos)
        if self.rng.random() < 0.4:
            other = self.some(self.infos)
            info = self.rng.choice(
                (
                    attrs.evolve(info, data=self.spoil(info.data)),
                    attrs.evolve(info, data=other.data),
                    attrs.evolve(info, incarnation=other.incarnation),
                    attrs.evolve(info, incarnation="x"),
                    attrs.evolve(info, transport="nixl"),
                )
            )
        self.keep(self.pollables, self.transport.connect(info))

    def prepare(self) -> None:
        peer = self.usable(self.peers)
        mine = [d for d in self.descriptors if d.incarnation == peer.info.incarnation]
        descriptor = self.some(mine or self.descriptors)
        if self.rng.random() < 0.3:
            descriptor = self.rng.choice(
                (
                    attrs.evolve(descriptor, data=self.spoil(descriptor.data)),
                    attrs.evolve(descriptor, data=self.some(self.descriptors).data),
                    attrs.evolve(descriptor, nbytes=self.rng.choice((1, 2 * NBYTES, 2**62))),
                    attrs.evolve(descriptor, kind=MemoryKind.VRAM),
                    attrs.evolve(descriptor, incarnation="x"),
                )
            )
        pairs = [(self.some(self.regions), descriptor)] * self.rng.choice((1, 1, 1, 2, 0))
        self.keep(self.pollables, self.transport.prepare(peer, pairs))

    def register(self) -> None:
        if self.rng.random() < 0.2:
            bad = ((0, 1), (1, 0), (-4096, 4096), np.zeros(0, np.uint8), None)
            self.transport.register(span_of(self.rng.choice(bad)))
            return
        if self.rng.random() < 0.1:
            views = ((0, NBYTES), (self.rng.choice((BLOCK, NBYTES)), BLOCK))
            array = np.zeros(NBYTES, np.uint8)
            span = span_of(array)
            self.keep(
                self.regions,
                self.transport.register(attrs.evolve(span, views=views)),
            )
            return
        self.keep(self.regions, self.transport.register(span_of(np.zeros(NBYTES, np.uint8))))

    def deregister(self) -> None:
        self.transport.deregister(self.some(self.regions))

    def describe(self) -> None:
        self.transport.local_info()
        self.transport.descriptor(self.some(self.regions))

    def close_path(self) -> None:
        self.some(self.paths).close()

    def disconnect(self) -> None:
        self.keep(self.pollables, self.transport.disconnect(self.some(self.peers)))

    def fence(self) -> None:
        self.keep(self.pollables, self.transport.fence(self.some(self.peers)))

    def cancel(self) -> None:
        self.some(self.attempts).request_cancel()

    def drop(self) -> None:
        """Nobody holds on to it any more, whatever is under way on it."""
        things = self.rng.choice((self.paths, self.attempts, self.pollables, self.regions))
        del things[: self.rng.randrange(len(things) + 1)]
        if self.rng.random() < 0.2:
            gc.collect()

    def lost_peers(self) -> None:
        self.transport.lost_peers()

    # ---- what happens to both sides --------------------------------------------------------

    def serve(self) -> None:
        """What the peers have to offer now."""
        for far in self.fars:
            if far.alive and far is not self.stopped:
                self.keep(self.infos, far.info)
                self.keep(self.descriptors, far.register(NBYTES).descriptor)

    def inbound(self) -> None:
        """A peer connects to us and moves something."""
        far = self.rng.choice([f for f in self.fars if f.alive] or self.fars)
        if not far.alive:
            return
        buffer = far.register(NBYTES)
        region = self.some(self.regions)
        try:
            far.exchange(
                self.rng.choice(list(Op)),
                self.transport.local_info(),
                [(buffer, self.transport.descriptor(region))],
                Batch([0], [0], [0], [BLOCK]),
            )
        finally:
            self.keep(self.descriptors, buffer.descriptor)

    def reach(self) -> None:
        """A good path to a peer that runs, so that there is something to spoil."""
        far = self.rng.choice(self.fars)
        if not far.alive:
            return
        descriptor = far.register(NBYTES).descriptor
        region = self.transport.register(span_of(np.zeros(NBYTES, np.uint8)))
        peer = self.answer(self.transport.connect(far.info))
        path = self.answer(self.transport.prepare(peer, [(region, descriptor)]))
        for things, thing in (
            (self.descriptors, descriptor),
            (self.regions, region),
            (self.peers, peer),
            (self.paths, path),
        ):
            self.keep(things, thing)

    def restart(self) -> None:
        """A peer's transport goes and comes back as another, or its whole process does."""
        self.resume()
        i = self.rng.randrange(len(self.fars))
        if self.rng.random() < 0.6:
            self.fars[i].reopen(pump=self.transport.progress)
        else:
            self.fars[i].kill()
            self.fars[i].dispose()
            self.fars[i] = self.new_far()
        self.serve()

    def forget(self) -> None:
        """A peer deregisters memory that we have a descriptor and perhaps a path of."""
        far = self.rng.choice([f for f in self.fars if f.alive] or self.fars)
        if far.alive:
            buffer = far.register(NBYTES)
            self.keep(self.descriptors, buffer.descriptor)
            far.deregister(buffer)

    def stop(self) -> None:
        if self.stopped is None:
            self.stopped = self.rng.choice(self.fars)
            self.stopped.stop()

    def resume(self) -> None:
        if self.stopped is not None:
            self.stopped.resume()
            self.stopped = None

    def break_something(self) -> None:
        rng = self.rng
        way = rng.randrange(5)
        if way == 0:
            self.softrdma.fail_next(rng.choice([s for s in WcStatus if s]), after=rng.randrange(8))
        elif way == 1:
            self.softrdma.refuse_posts(
                errno.ENOMEM, after=rng.randrange(8), times=rng.choice((1, 3))
            )
        elif way == 2:
            self.softrdma.async_event(rng.choice(list(AsyncEvent)[:12]))
        elif way == 3:
            self.softrdma.delay(rng.choice((0.0, 0.0002)))
        else:
            self.softrdma.hold()

    def mend(self) -> None:
        self.softrdma.reset()
        self.softrdma.transport_retry(0.02)

    def renew(self) -> None:
        """The transport is closed over everything, and its objects are still about."""
        self.transport.close(self.rng.choice((0.0, 0.2)))
        self.transport = self.new_transport()

    # ---- the whole -------------------------------------------------------------------------

    def run(self, calls: int) -> None:
        weights: dict[Callable[[], None], float] = {
            self.post: 38,
            self.progress: 14,
            self.poll: 14,
            self.prepare: 7,
            self.connect: 4,
            self.register: 5,
            self.deregister: 3,
            self.describe: 4,
            self.close_path: 1.5,
            self.disconnect: 0.8,
            self.cancel: 2,
            self.drop: 1.5,
            self.lost_peers: 1,
            self.mend: 2,
            self.break_something: 1,
            self.serve: 0.5,
            self.forget: 0.4,
            self.reach: 1.5,
            self.inbound: 0.4,
            self.resume: 0.5,
            self.stop: 0.15,
            self.fence: 0.15,
            self.restart: 0.15,
            self.renew: 0.1,
        }
        self.mend()
        for number in range(calls):
            (call,) = self.rng.choices(list(weights), list(weights.values()))
            sys.stderr.write(f"{number} {call.__name__}\n")
            self.one(call)

    def one(self, call: Callable[[], None]) -> None:
        name = call.__name__
        try:
            call()
        except KvxferError as error:
            self.outcomes[f"{name} {type(error).__name__}"] += 1
        except Exception:
            self.outcomes[f"{name} DEFECT"] += 1
            self.defects.append(f"{name}: {traceback.format_exc()}")
        else:
            self.outcomes[f"{name} ok"] += 1

    def answer(self, pollable: Any) -> Any:
        end = time.monotonic() + 30.0
        while pollable.poll() == (None, None):
            self.transport.progress()
            if time.monotonic() > end:
                raise TimeoutError("no answer within 30 s")
            time.sleep(0.0005)
        value, error = pollable.poll()
        if error is not None:
            raise error
        return value

    def works(self) -> bool:
        """A good READ from a new peer, after all that."""
        self.resume()
        self.softrdma.reset()
        far = self.new_far()
        self.fars.append(far)
        there = far.register(NBYTES)
        far.fill(there, 5)
        array = np.zeros(NBYTES, np.uint8)
        region = self.transport.register(span_of(array))
        peer = self.answer(self.transport.connect(far.info))
        path = self.answer(self.transport.prepare(peer, [(region, there.descriptor)]))
        batch = Batch([0] * 16, *[np.arange(16) * 2 * BLOCK] * 2, [BLOCK] * 16)
        attempt = self.transport.post(Op.READ, path, batch)
        end = time.monotonic() + 30.0
        while not attempt.terminal and time.monotonic() < end:
            self.transport.progress()
        expected = np.frombuffer(pattern(5, NBYTES), np.uint8).reshape(-1, BLOCK)[::2][:16]
        arrived = array.reshape(-1, BLOCK)[::2][:16]
        return attempt.state is AttemptState.DONE and bool((arrived == expected).all())

    def end(self) -> list[Any]:
        left = self.transport.close()
        for far in self.fars:
            far.dispose()
        return left


def main(calls: int, seed: int, replies: int) -> None:
    faulthandler.enable()
    began = time.monotonic()
    with SoftRdma() as softrdma:
        fuzz = Fuzz(softrdma, seed)
        fuzz.run(calls)
        works = fuzz.works()
        fuzz.end()
    result = {
        "calls": sum(fuzz.outcomes.values()),
        "outcomes": dict(fuzz.outcomes),
        "defects": fuzz.defects[:20],
        "works": works,
        "seconds": time.monotonic() - began,
    }
    with os.fdopen(replies, "w") as stream:
        json.dump(result, stream)


if __name__ == "__main__":
    replies = os.dup(1)
    os.dup2(2, 1)
    main(int(sys.argv[1]), int(sys.argv[2]), replies)
