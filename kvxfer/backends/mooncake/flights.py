"""What is under way: pieces submitted to the engine, asked for one by one until each has ended."""

from __future__ import annotations

import collections
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvxfer.backends._background import Turnstile
from kvxfer.backends.mooncake import messages
from kvxfer.backends.mooncake.binding import DONE, TIMED_OUT, UNDER_WAY
from kvxfer.backends.mooncake.identity import NBYTES
from kvxfer.backends.mooncake.remotes import Diagnosis, MooncakePath, diagnose
from kvxfer.core.attempt import Accepted
from kvxfer.core.pollable import Ready
from kvxfer.core.verdict import Op
from kvxfer.errors import BackpressureError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.backends.mooncake.binding import Engine
    from kvxfer.backends.mooncake.identity import Tokens
    from kvxfer.backends.mooncake.remotes import Remote
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.pollable import Pollable

__all__ = ["Flight", "Flights"]

ALL_ENDED = "every piece has ended"


@attrs.define(eq=False)
class Flight:
    """The pieces of one attempt, in the order of their submits, or of one look at an identity."""

    remote: Remote
    attempt: Attempt | None = None
    pending: collections.deque[int] = attrs.field(factory=collections.deque)
    pieces: int = 0
    """For which there is room in the engine's queue."""
    slot: int | None = None
    """Where the peer's identity is read into."""
    failed: int = 0
    cut: bool = False
    """The engine did not take all pieces."""
    diagnosis: Pollable[Diagnosis] | None = None


class Flights:
    """The flights of one engine.

    ``lock`` guards everything but the submits, which may wait in the engine; methods that say so
    are called with it held.

    Args:
        engine: what the pieces are submitted to.
        tokens: places for identities.
        queue: pieces that the engine queues per peer.
        ends_prove: a READ is drained once every piece has ended.
        patience: seconds for finding out why pieces failed.
        report: called with each attempt that changed.
        over: called with a remote, and the lock held, when a flight with it is over.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: Tokens,
        *,
        queue: int,
        ends_prove: bool,
        patience: float,
        report: Callable[[Attempt], None],
        over: Callable[[Remote], None],
    ) -> None:
        self.lock = Turnstile()
        self.under_way: list[Flight] = []
        self._engine = engine
        self._tokens = tokens
        self._queue = queue
        self._ends_prove = ends_prove
        self._patience = patience
        self._report = report
        self._over = over

    # ---- submitting ------------------------------------------------------------------------

    def reserve(
        self, remote: Remote, attempt: Attempt | None, pieces: int, *, identity: bool
    ) -> Flight:
        """Room in the engine's queue, and a place for the identity. Called with the lock held.

        Raises:
            BackpressureError: there is none.
        """
        wanted = pieces + identity
        # A single post goes through an empty queue, however short that was made.
        room = not remote.pieces or remote.pieces + wanted <= self._queue
        slot = self._tokens.take() if identity and room else None
        if not room or (identity and slot is None):
            raise BackpressureError(
                f"{remote.pieces} pieces are under way with {remote.name}, {wanted} more do not "
                f"fit into the engine's queue of {self._queue}",
                next_step="post again when some have ended",
                engine=messages.QUEUE_FULL.engine(f"{remote.pieces} of {self._queue}", None),
            )
        remote.pieces += wanted
        remote.flights += 1
        return Flight(remote=remote, attempt=attempt, pieces=wanted, slot=slot)

    def release(self, flight: Flight) -> None:
        """Nothing of ``flight`` is under way any more. Called with the lock held."""
        flight.remote.pieces -= flight.pieces
        flight.pieces = 0
        if flight.slot is not None:
            self._tokens.give_back(flight.slot)
            flight.slot = None
        flight.remote.flights -= 1

    def submit(self, flight: Flight, path: MooncakePath, attempt: Attempt) -> None:
        """Hand the pieces of ``attempt`` to the engine, then the look at the identity.

        Raises:
            TransportError: the engine took none.
        """
        broken: Exception | None = None
        try:
            self._submit_all(flight, path, attempt)
        except Exception as error:  # noqa: BLE001 - what has begun must be seen to its end
            flight.cut, broken = True, error
        begun = bool(flight.pending)  # from here on, progress takes away what has ended
        with self.lock:
            if begun:
                self.under_way.append(flight)
            else:
                self.release(flight)
        if not begun:
            raise TransportError(
                f"Mooncake did not begin {attempt.batch} with {flight.remote.name}",
                next_step="connect again",
                engine=messages.NOT_SUBMITTED.engine(flight.remote.name),
            ) from broken

    def _submit_all(self, flight: Flight, path: MooncakePath, attempt: Attempt) -> None:
        submit, name, pending = self._engine.submit, flight.remote.name, flight.pending
        local_base, remote_base = path.local_base, path.remote_base
        for p, local, remote, nbytes in zip(*attempt.batch.lists(), strict=True):
            here, there = local_base[p] + local, remote_base[p] + remote
            number = submit(attempt.op, name, here, there, nbytes)
            if not number:
                flight.cut = True
                return
            pending.append(number)
        if flight.slot is not None:
            self.submit_identity(flight)

    def submit_identity(self, flight: Flight) -> None:
        """Have the peer's identity read into the place of ``flight``."""
        if flight.slot is None:
            return
        number = self._engine.submit(
            Op.READ,
            flight.remote.name,
            self._tokens.address_of(flight.slot),
            flight.remote.token_address,
            NBYTES,
        )
        if number:
            flight.pending.append(number)
        else:
            flight.cut = True

    # ---- progress --------------------------------------------------------------------------

    def advance(self, budget: int) -> None:
        """Ask for what is under way, unless another thread is at it; at most ``budget`` end."""
        if not self.under_way or not self.lock.try_enter():
            return
        try:
            still: list[Flight] = []
            ended = 0
            for i, flight in enumerate(self.under_way):
                if ended >= budget:
                    still.extend(self.under_way[i:])
                    break
                if self._moved_on(flight):
                    ended += 1
                else:
                    still.append(flight)
            self.under_way = still
        finally:
            self.lock.leave()

    def ask(self, flight: Flight) -> bool:
        """Ask for the pieces of ``flight``; whether all have ended. One thread at a time."""
        state, pending = self._engine.state, flight.pending
        while pending:
            found = state(pending[0])
            if found in (UNDER_WAY, TIMED_OUT):
                return False
            pending.popleft()
            flight.failed += found != DONE
        return True

    def is_same(self, flight: Flight) -> bool:
        """Whether the identity that was read is the remote's. Called with the lock held."""
        return flight.slot is None or self._tokens.holds(flight.slot, flight.remote.token)

    def _moved_on(self, flight: Flight) -> bool:
        """Whether ``flight`` is over. Called with the lock held."""
        if not self.ask(flight):
            return False
        if flight.diagnosis is None:
            self._begin_verdict(flight)
        return self._finish(flight)

    def _begin_verdict(self, flight: Flight) -> None:
        """All pieces have ended."""
        attempt, remote = flight.attempt, flight.remote
        whole = not flight.failed and not flight.cut
        same = self.is_same(flight)
        self.release(flight)
        remote.flights += 1  # until the verdict
        unknown = Ready(Diagnosis(message=messages.BROKEN))
        if attempt is None:
            flight.diagnosis = unknown
        elif whole and same:
            flight.diagnosis = unknown
            if attempt.complete():
                self._report(attempt)
        elif whole:
            flight.diagnosis = Ready(
                Diagnosis(message=messages.OTHER_LIFE, detail=remote.name, lost=True)
            )
        elif attempt.terminal:  # nobody waits for a reason
            flight.diagnosis = unknown
        else:
            assert isinstance(attempt.path, MooncakePath)
            ranges = attempt.path.remote_ranges(attempt)
            flight.diagnosis = remote.thread.submit(
                partial(diagnose, remote, ranges, self._patience)
            )

    def _finish(self, flight: Flight) -> bool:
        assert flight.diagnosis is not None
        found, error = flight.diagnosis.poll()
        if found is None and error is None:
            return False
        attempt, remote = flight.attempt, flight.remote
        if attempt is not None and not attempt.drained:
            # The thread may have been stopped, or have too much to do: the reason stays unknown.
            diagnosis = found or Diagnosis(message=messages.BROKEN, detail=str(error))
            said = diagnosis.message.engine(diagnosis.detail)
            if diagnosis.lost:
                remote.lost = said
            # Each piece was asked for, and its connection closed where it failed. What a WRITE has
            # sent may land all the same.
            proven = attempt.op is Op.READ and self._ends_prove
            accepted = Accepted.UNKNOWN if flight.cut else Accepted.ALL
            if attempt.fail(said, accepted=accepted, drained_by=ALL_ENDED if proven else ""):
                self._report(attempt)
        remote.flights -= 1
        self._over(remote)
        return True
