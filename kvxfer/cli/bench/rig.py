"""A transport here, a peer process there, memory on both sides and a path between them."""

from __future__ import annotations

import os
import threading
import time
from typing import TypeVar

import numpy as np

from kvxfer.cli.bench.memory import Words, words_of
from kvxfer.cli.bench.plan import Contender
from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import MemoryKind, Span
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Path
from kvxfer.core.verdict import Op
from kvxfer.errors import KvxferError, TransportError
from kvxfer.testing.memory import load
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.station import GUARD, open_transport

__all__ = ["Link", "Rig", "describe"]

T = TypeVar("T")

_WAKES = frozenset({"shm"})
"""Engines whose own threads tell of every end. Others are asked in a loop."""


class Link:
    """A peer process with memory."""

    def __init__(self, contender: Contender, buffer: int) -> None:
        self.process = PeerProcess(
            contender.backend,
            options=contender.options,
            memory=contender.memory,
            timeout=120.0,
        )
        self.buffer = self.process.register(buffer)

    def dispose(self) -> None:
        self.process.dispose()


class Rig:
    """One thread at a time. Times are seconds.

    Raises:
        KvxferError: the backend does not open, or does not reach a peer process.
    """

    def __init__(self, contender: Contender, buffer: int, *, link: Link | None = None) -> None:
        """``link`` is a peer process that somebody else disposes of; by default one is started."""
        self.contender = contender
        self.nbytes = buffer
        self.transport = open_transport(contender.backend, contender.options)
        self._news = threading.Event()
        self.transport.on_change(self._news.set)
        self._asks = self.transport.name not in _WAKES
        self.links: list[Link] = []
        try:
            memory = load(contender.memory)(self.transport, buffer + GUARD, MemoryKind.DRAM)
            whole = memory.span
            span = Span(address=whole.address + GUARD, nbytes=buffer, owner=whole)
            self.words: Words = words_of(span)
            self.words[:] = np.uint64(2**64 - 1)
            self.region = self.transport.register(span)
            self.path = self.reach(link or self.link())
        except BaseException:
            self.close()
            raise

    def link(self) -> Link:
        """Another peer process, not connected yet."""
        self.links.append(Link(self.contender, self.nbytes))
        return self.links[-1]

    def reach(self, link: Link, timeout: float = 60.0) -> Path:
        """Connect to a peer and prepare a path to its memory."""
        until = time.monotonic() + timeout
        peer = self.answer(self.transport.connect(link.process.info), until)
        pairs = [(self.region, link.buffer.descriptor)]
        return self.answer(self.transport.prepare(peer, pairs), until)

    def answer(self, pollable: Pollable[T], until: float) -> T:
        """What ``pollable`` answers by then.

        Raises:
            TransportError: it did not. Its own error is raised as it is.
        """
        while True:
            value, error = pollable.poll()
            if error is not None:
                raise error
            if value is not None:
                return value
            if time.monotonic() > until:
                raise TransportError(f"{self.contender.label} did not answer in time")
            self.transport.progress()
            time.sleep(0.0005)

    # ---- transfers -------------------------------------------------------------------------

    def post(self, batch: Batch, path: Path | None = None) -> list[Attempt]:
        """Post a READ of ``batch``, in as many calls as the engine needs."""
        limits = self.transport.capabilities
        parts = batch.cut(max_pieces=limits.max_pieces, max_nbytes=limits.max_nbytes)
        return [self.transport.post(Op.READ, path or self.path, part) for part in parts]

    def look(self, patience: float = 0.05) -> list[Attempt]:
        """What changed, after at most ``patience`` if nothing did."""
        changed = self.transport.progress()
        if changed:
            return changed
        if self._asks:
            os.sched_yield()
        else:
            # Not in a loop: it would take the GIL from the threads that copy.
            self._news.wait(patience)
            self._news.clear()
        return self.transport.progress()

    def read(self, batch: Batch) -> float:
        """READ ``batch``; returns how long it took from ``post`` to the last end.

        Raises:
            TransportError: it failed, or took more than a minute.
        """
        start = time.perf_counter()
        attempts = self.post(batch)
        while not all(a.terminal for a in attempts):
            self.look()
            if time.perf_counter() - start > 60.0:
                raise TransportError(f"{self.contender.label}: {batch} took more than a minute")
        took = time.perf_counter() - start
        for attempt in attempts:
            if attempt.state is not AttemptState.DONE:
                raise TransportError(f"{self.contender.label}: {batch} failed: {attempt.error}")
        return took

    def close(self) -> None:
        self.transport.close()
        for link in self.links:
            link.dispose()


def describe(error: BaseException) -> str:
    """One line."""
    text = error.message if isinstance(error, KvxferError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
