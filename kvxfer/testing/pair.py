"""Two or more sides under test, and how a test waits: by polling, against a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import Descriptor, Region
from kvxfer.core.pollable import Pollable
from kvxfer.core.transport import Path, Peer
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, KvxferError
from kvxfer.testing.station import Buffer, Far, Station

__all__ = ["Pair", "noise"]

T = TypeVar("T")

_POLL = 0.0002
"""Seconds between two looks. No test is right or wrong because of it."""


class Pair:
    """The near side, whose transport the test calls, and the far sides it talks to.

    ``timeout`` is the bound, in seconds, of everything that must end.
    """

    def __init__(self, near: Station, timeout: float) -> None:
        self.near = near
        self.fars: list[Far] = []
        self.posted: list[Attempt] = []
        """Every attempt that ``post`` returned."""
        self._timeout = timeout
        self._poster: _Poster | None = None

    @property
    def far(self) -> Far:
        """The first far side."""
        return self.fars[0]

    @property
    def reports(self) -> list[Attempt]:
        """Every attempt that the near side's ``progress`` returned so far."""
        return self.near.reports

    def pump(self) -> None:
        """One step of progress on every side that needs one."""
        self.near.pump()
        for far in self.fars:
            far.pump()

    def until(self, condition: Callable[[], bool], what: str, timeout: float | None = None) -> None:
        """Pump until ``condition`` holds.

        Raises:
            AssertionError: it did not within ``timeout`` seconds; names ``what``.
        """
        bound = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + bound
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {bound} s"
            self.pump()
            time.sleep(_POLL)

    def answer(self, pollable: Pollable[T], what: str) -> T:
        """The value of ``pollable``; its error is raised."""
        value, error = self.outcome(pollable, what)
        if error is not None:
            raise error
        assert value is not None
        return value

    def outcome(
        self, pollable: Pollable[T], what: str, timeout: float | None = None
    ) -> tuple[T, None] | tuple[None, KvxferError]:
        """What ``pollable`` answers: exactly one of value and error, and the same for ever."""
        found: list[tuple[T | None, KvxferError | None]] = []

        def answered() -> bool:
            value, error = pollable.poll()
            if value is not None or error is not None:
                found.append((value, error))
            return bool(found)

        self.until(answered, what, timeout)
        value, error = found[0]
        assert pollable.poll() == (value, error), f"{what}: the answer changed"
        if error is None:
            assert value is not None
            return value, None
        assert value is None, f"{what}: both a value and an error"
        return None, error

    def connect(self, far: Far | None = None) -> Peer:
        """Connect the near side to ``far``, by default the first."""
        info = (far or self.far).info
        return self.answer(self.near.transport.connect(info), f"connect to {info.incarnation}")

    def prepare(self, peer: Peer, pairs: Sequence[tuple[Buffer, Buffer]]) -> Path:
        """A path between near and far buffers."""
        return self.answer(
            self.near.transport.prepare(peer, self.regions(pairs)), f"prepare {len(pairs)} pairs"
        )

    @staticmethod
    def regions(
        pairs: Sequence[tuple[Buffer, Buffer]],
    ) -> list[tuple[Region, Descriptor]]:
        """``pairs`` as ``Transport.prepare`` takes them."""
        return [(near.region, far.descriptor) for near, far in pairs if near.region is not None]

    def post(self, op: Op, path: Path, batch: Batch, *, tag: object = None) -> Attempt:
        """Post, and again after a refusal that posted nothing, until it is taken."""
        taken: list[Attempt] = []
        refusals: list[object] = []

        def posted() -> bool:
            try:
                attempt = self.post_once(op, path, batch, tag=tag)
            except BackpressureError as error:
                refusals[:] = [error]
                return False
            if attempt.state is AttemptState.FAILED and attempt.accepted is Accepted.NONE:
                refusals[:] = [attempt.error]
                return False
            taken.append(attempt)
            return True

        try:
            self.until(posted, f"{op.value} of {batch!r} taken")
        except AssertionError as error:
            raise AssertionError(f"{error}; the last refusal: {refusals}") from None
        return taken[0]

    def post_all(self, op: Op, path: Path, batch: Batch) -> list[Attempt]:
        """Post ``batch`` in as many posts as the engine's capabilities ask for."""
        caps = self.near.transport.capabilities
        max_pieces = min(caps.max_pieces, caps.credits or caps.max_pieces)
        parts = batch.cut(max_pieces=max_pieces, max_nbytes=caps.max_nbytes)
        return [self.post(op, path, part) for part in parts]

    def post_once(self, op: Op, path: Path, batch: Batch, *, tag: object = None) -> Attempt:
        """Post the way the agent does: from a thread of its own if the engine may wait in there.

        Raises:
            AssertionError: the thread is stuck.
        """
        transport = self.near.transport
        if not transport.capabilities.may_block_in_post:
            attempt = transport.post(op, path, batch, tag=tag)
        else:
            if self._poster is None:
                self._poster = _Poster()
            outcome = self._poster.run(lambda: transport.post(op, path, batch, tag=tag))
            self.until(outcome.ended.is_set, f"{op.value} of {batch!r} back from post")
            attempt = outcome.result()
        self.posted.append(attempt)
        return attempt

    def ended(self, attempts: Iterable[Attempt], what: str, timeout: float | None = None) -> None:
        """Wait until all ``attempts`` are terminal."""
        waiting = list(attempts)
        self.until(lambda: all(a.terminal for a in waiting), what, timeout)

    def drained(self, attempts: Iterable[Attempt], what: str) -> None:
        """Wait until all ``attempts`` are drained."""
        waiting = list(attempts)
        self.until(lambda: all(a.drained for a in waiting), what)

    def done(self, attempts: Iterable[Attempt], what: str = "the transfer") -> None:
        """Wait until all ``attempts`` are terminal, and demand that each is DONE."""
        waiting = list(attempts)
        self.ended(waiting, what)
        failed = [a for a in waiting if a.state is not AttemptState.DONE]
        assert not failed, f"{what}: {len(failed)} attempts failed, the first: {failed[0].error}"

    def move(self, op: Op, path: Path, batch: Batch) -> list[Attempt]:
        """Post ``batch`` and see it through."""
        attempts = self.post_all(op, path, batch)
        self.done(attempts, f"{op.value} of {batch!r}")
        return attempts

    def dispose(self) -> None:
        """Close every side, far sides first; all are tried, the first error is raised."""
        first: BaseException | None = None
        for side in (*self.fars, self.near):
            try:
                side.dispose()
            except BaseException as error:  # noqa: BLE001 - the rest must be freed all the same
                first = first or error
        if self._poster is not None:
            self._poster.stop()
        if first is not None:
            raise first


class _Outcome:
    """What became of one call on the posting thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.attempt: Attempt | None = None
        self.error: Exception | None = None

    def result(self) -> Attempt:
        if self.error is not None:
            raise self.error
        assert self.attempt is not None
        return self.attempt


class _Poster:
    """The posting thread. A stuck one is left behind: it is a daemon."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Attempt], _Outcome] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="kvxfer-test-poster", daemon=True).start()

    def run(self, call: Callable[[], Attempt]) -> _Outcome:
        outcome = _Outcome()
        self._calls.put((call, outcome))
        return outcome

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, outcome = item
            try:
                outcome.attempt = call()
            except Exception as error:  # noqa: BLE001 - raised again on the test's thread
                outcome.error = error
            outcome.ended.set()


def noise(seconds: float = 0.02) -> float:
    """The longest gap, in seconds, in a loop that does nothing: what the machine itself adds."""
    start = last = time.monotonic()
    longest = 0.0
    while last < start + seconds:
        now = time.monotonic()
        longest = max(longest, now - last)
        last = now
    return longest
