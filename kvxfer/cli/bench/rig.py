"""A transport here, a peer process there, memory on both sides and a path between them."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Iterable
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
from kvxfer.errors import BackpressureError, KvxferError, TransportError
from kvxfer.testing.memory import load
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.station import GUARD, open_transport

__all__ = ["Flight", "Link", "Rig", "describe"]

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


class Flight:
    """One READ under way: calls that were not posted yet, and those that did not end yet."""

    def __init__(self, path: Path, parts: Iterable[Batch]) -> None:
        self.began = time.perf_counter()
        self.path = path
        self.parts = collections.deque(parts)
        self.under_way: dict[Attempt, None] = {}
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.error = ""
        """Of the first call that failed."""
        self.told = False

    @property
    def over(self) -> bool:
        return not self.parts and not self.under_way

    def take(self, attempt: Attempt) -> None:
        """A call has ended."""
        del self.under_way[attempt]
        if attempt.state is not AttemptState.DONE:
            self.fail(str(attempt.error))

    def fail(self, reason: str) -> None:
        """Post no more of it. The first reason counts."""
        self.error = self.error or reason
        self.parts.clear()


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
        self._waiting: collections.deque[Flight] = collections.deque()
        self._ended: list[Flight] = []
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

    def begin(self, batch: Batch, path: Path | None = None) -> Flight:
        """Begin to READ ``batch``: what fits into the engine's queue is posted, see ``look``."""
        limits = self.transport.capabilities
        pieces = limits.max_pieces if limits.credits is None else limits.credits
        parts = batch.cut(max_pieces=min(pieces, limits.max_pieces), max_nbytes=limits.max_nbytes)
        flight = Flight(path or self.path, parts)
        self._waiting.append(flight)
        self._post_waiting()
        return flight

    def look(self, patience: float = 0.05) -> list[Flight]:
        """Flights that ended, after at most ``patience`` if nothing changed; posts what waits."""
        changed = self.transport.progress()
        if not changed:
            if self._asks:
                os.sched_yield()
            else:
                # Not in a loop: it would take the GIL from the threads that copy.
                self._news.wait(patience)
                self._news.clear()
            changed = self.transport.progress()
        for attempt in changed:
            flight = attempt.tag
            # One that failed may appear again when it drains.
            if isinstance(flight, Flight) and attempt.terminal and attempt in flight.under_way:
                flight.take(attempt)
                self._tell_if_over(flight)
        self._post_waiting()
        ended, self._ended = self._ended, []
        return ended

    def forget_waiting(self) -> None:
        """What was not posted yet never will be."""
        self._waiting.clear()

    def read(self, batch: Batch) -> float:
        """READ ``batch``; returns how long it took from ``post`` to the last end.

        Raises:
            TransportError: it failed, or took more than a minute.
        """
        start = time.perf_counter()
        flight = self.begin(batch)
        while not flight.over:
            self.look()
            if time.perf_counter() - start > 60.0:
                raise TransportError(f"{self.contender.label}: {batch} took more than a minute")
        took = time.perf_counter() - start
        if flight.error:
            raise TransportError(f"{self.contender.label}: {batch} failed: {flight.error}")
        return took

    def _post_waiting(self) -> None:
        while self._waiting and self._post(self._waiting[0]):
            self._tell_if_over(self._waiting.popleft())

    def _post(self, flight: Flight) -> bool:
        """Post what is left of a flight; False if the queue is full."""
        while flight.parts:
            try:
                attempt = self.transport.post(Op.READ, flight.path, flight.parts[0], tag=flight)
            except BackpressureError:
                return False
            except KvxferError as error:
                flight.fail(str(error))
            else:
                flight.parts.popleft()
                flight.under_way[attempt] = None
        return True

    def _tell_if_over(self, flight: Flight) -> None:
        if flight.over and not flight.told:
            flight.told = True
            self._ended.append(flight)

    def close(self) -> None:
        self.transport.close()
        for link in self.links:
            link.dispose()


def describe(error: BaseException) -> str:
    """One line."""
    text = error.message if isinstance(error, KvxferError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
