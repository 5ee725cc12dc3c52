"""ACKs of foreign connectors, which do not say which rank sends them: they can only be counted.

kvxfer's own messages carry the rank, and ``AckReconciler`` keeps ranks as a set.  Connectors that
exist send a transfer id and at best the size of the consumer, and their request ids grow suffixes.
``LegacyCountingAcks`` is for those who must talk to them.  It cannot tell a duplicate from another
rank, which is why kvxfer does not use it for itself.

Usable alone: no transport, no agent, no clock of its own; loads no socket, no retry policy and no
backend.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from kvxfer.core.acks import AckOutcome, AckResult
from kvxfer.core.remembered import Remembered
from kvxfer.core.timers import Timers
from kvxfer.core.topology import peer_size
from kvxfer.errors import InvalidInputError

__all__ = ["LegacyCountingAcks"]

_SUFFIX = re.compile(r"-[0-9a-fA-F]{8}\Z")
"""What engines append to a request id."""


@attrs.define
class _Expected:
    owners: dict[str, None]
    needed: int | None = None
    """How many ACKs complete it, once one of them has said."""
    count: int = 0


@attrs.define
class _Early:
    arrived: float
    needed: int
    count: int = 0
    declined: bool = False
    failed: bool = False


class LegacyCountingAcks:
    """Counts ACKs per transfer id until the expected fan-in, on one producer rank or consumer rank.

    Args:
        tp_size: ours.
        unknown_peer_size: ``"equal"`` takes a size that the peer did not send (absent, 0 or -1) for
            ours. None, the default, refuses such a message: say it yourself, it is a guess.
        early_ttl: seconds an ACK is kept whose id nobody has mapped yet.
        early_capacity: how many such ids are kept, oldest out first.
        terminal_ttl: seconds an ended id is remembered, so that what follows it is a duplicate.
        terminal_capacity: how many ended ids are.

    Raises:
        InvalidInputError: a value is not positive, or ``unknown_peer_size`` is something else.
    """

    def __init__(
        self,
        *,
        tp_size: int,
        unknown_peer_size: Literal["equal"] | None = None,
        early_ttl: float = 30.0,
        early_capacity: int = 1024,
        terminal_ttl: float = 300.0,
        terminal_capacity: int = 65536,
    ) -> None:
        if type(tp_size) is not int or tp_size < 1:
            raise InvalidInputError(f"tp_size must be an integer of at least 1, not {tp_size!r}")
        for name, value in (("early_ttl", early_ttl), ("early_capacity", early_capacity)):
            if not value > 0:
                raise InvalidInputError(f"{name} is {value}: it must be positive")
        peer_size("tp_size", tp_size, tp_size, unknown_peer_size=unknown_peer_size)
        self._tp_size = tp_size
        self._unknown = unknown_peer_size
        self._ttl = early_ttl
        self._capacity = early_capacity
        self._expected: dict[str, _Expected] = {}
        self._by_owner: dict[str, str] = {}
        self._early: OrderedDict[str, _Early] = OrderedDict()
        self._ended: Remembered[str, None] = Remembered(
            capacity=terminal_capacity, ttl=terminal_ttl
        )
        self._deadlines: Timers[str] = Timers()
        self._results: list[AckResult] = []
        self.counters: dict[str, int] = {o.value: 0 for o in AckOutcome}
        self.counters.update(evicted_ttl=0, evicted_capacity=0)

    # ---- sizes -------------------------------------------------------------------------------

    def peer_size(self, value: object) -> int:
        """The peer's size as it sent it, or ours if it sent none and that was allowed.

        Raises:
            InvalidInputError: it is unknown, no integer, or no multiple or divisor of ours.
        """
        size = peer_size("tp_size", value, self._tp_size, unknown_peer_size=self._unknown)
        if size % self._tp_size and self._tp_size % size:
            raise InvalidInputError(
                f"TP sizes {self._tp_size} and {size} do not divide each other",
                next_step="choose sizes that are multiples",
            )
        return size

    def expected_acks(self, consumer_size: object) -> int:
        """How many ACKs this producer rank needs from a consumer of that size."""
        return max(1, self.peer_size(consumer_size) // self._tp_size)

    def faced(self, rank: int, size: object) -> tuple[int, ...]:
        """The peer ranks that our ``rank`` has to do with."""
        theirs = self.peer_size(size)
        if theirs <= self._tp_size:
            return (rank * theirs // self._tp_size,)
        ratio = theirs // self._tp_size
        return tuple(range(rank * ratio, (rank + 1) * ratio))

    def all_ranks(self, size: object) -> tuple[int, ...]:
        """Every rank of the peer, once: whom to release when a request ends early."""
        return tuple(range(self.peer_size(size)))

    # ---- the map -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Transfers that are mapped and not complete."""
        return len(self._expected)

    @property
    def early(self) -> tuple[str, ...]:
        """Ids with ACKs that nobody has mapped yet, oldest first."""
        return tuple(self._early)

    @property
    def counts(self) -> dict[str, int]:
        """ACKs so far, for the transfers that have some."""
        return {t: e.count for t, e in self._expected.items() if e.count}

    def ended(self, transfer_id: str) -> bool:
        """Whether it completed, was declined, failed, expired or was unmapped, lately."""
        return transfer_id in self._ended

    def map(
        self, transfer_id: str, owner: str, *, now: float, deadline: float = float("inf")
    ) -> None:
        """``owner``, a request of ours, waits for ACKs of ``transfer_id`` until ``deadline``.

        Several owners may share one id: all of them complete, once.  ACKs that came before count;
        the result, if any, is in the next ``poll``.

        Raises:
            InvalidInputError: the owner waits for another transfer.
        """
        known = self._by_owner.get(owner)
        if known is not None and known != transfer_id:
            raise InvalidInputError(
                f"request {owner!r} waits for transfer {known!r} already, not {transfer_id!r}",
                next_step="unmap it first",
            )
        entry = self._expected.get(transfer_id)
        if entry is None:
            entry = self._expected[transfer_id] = _Expected({})
            self._ended.pop(transfer_id)
        entry.owners[owner] = None
        self._by_owner[owner] = transfer_id
        self._deadlines.set(transfer_id, deadline)
        early = self._early.pop(transfer_id, None)
        if early is None or now >= early.arrived + self._ttl:
            return
        if early.declined or early.failed:
            self._end(
                transfer_id, AckOutcome.DECLINED if early.declined else AckOutcome.FAILED, now
            )
            return
        for _ in range(early.count):
            self._count(transfer_id, early.needed, now)

    def unmap(self, owner: str, transfer_id: str | None = None, *, now: float = 0.0) -> bool:
        """Forget a request. True if something was removed; unknown ids change nothing.

        An exact match wins.  Otherwise, with ``transfer_id``, an owner of that transfer matches if
        ``owner`` is its id plus "-" and exactly eight hexadecimal digits.
        """
        exact = self._by_owner.get(owner)
        if exact is not None:
            self._remove(exact, owner, now)
            return True
        entry = None if transfer_id is None else self._expected.get(transfer_id)
        if transfer_id is None or entry is None or _SUFFIX.search(owner) is None:
            return False
        original = owner[:-9]
        if original not in entry.owners:
            return False
        self._remove(transfer_id, original, now)
        return True

    # ---- what peers send ---------------------------------------------------------------------

    def record(self, transfer_id: str, *, size: object = None, now: float) -> AckResult:
        """One "release": some consumer rank is finished. Never raises for what a peer sent.

        ``size`` is the consumer's TP size, if the message has it.
        """
        if transfer_id in self._ended and transfer_id not in self._expected:
            return self._result(AckOutcome.DUPLICATE, transfer_id)
        try:
            needed = self.expected_acks(size)
        except InvalidInputError:
            return self._result(AckOutcome.REJECTED, transfer_id)
        return self._count(transfer_id, needed, now)

    def write_done(self, transfer_id: str, *, writers: object = None, now: float) -> AckResult:
        """One producer rank has written everything. Without ``writers`` it was the only one."""
        if transfer_id in self._ended and transfer_id not in self._expected:
            return self._result(AckOutcome.DUPLICATE, transfer_id)
        if writers is None and self._unknown == "equal":
            writers = 1
        if type(writers) is not int or writers < 1:
            return self._result(AckOutcome.REJECTED, transfer_id)
        return self._count(transfer_id, writers, now)

    def write_failed(self, transfer_id: str, *, now: float) -> AckResult:
        """A producer rank has failed: what the others have done so far counts no more."""
        return self._end_or_wait(transfer_id, AckOutcome.FAILED, now)

    def decline(self, transfer_id: str, *, now: float) -> AckResult:
        """Nobody will read: stands for all ranks."""
        return self._end_or_wait(transfer_id, AckOutcome.DECLINED, now)

    def receive(self, message: object, *, now: float) -> AckResult:
        """A message as foreign connectors send it: a bare id, or a mapping.

        A bare id is one "release" without a size.  A mapping has ``type`` ("release", "write_done",
        "write_failed"), ``transfer_id`` and perhaps ``size`` or ``writers``; a "release" with an
        empty list of ``blocks`` declines.  Anything else is counted as rejected.
        """
        if isinstance(message, str) and message:
            return self.record(message, now=now)
        transfer_id = message.get("transfer_id") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(transfer_id, str) or not transfer_id:
            return self._result(AckOutcome.REJECTED, "")
        match message.get("type"):
            case "release":
                if message.get("blocks") == []:
                    return self.decline(transfer_id, now=now)
                return self.record(transfer_id, size=message.get("size"), now=now)
            case "write_done":
                return self.write_done(transfer_id, writers=message.get("writers"), now=now)
            case "write_failed":
                return self.write_failed(transfer_id, now=now)
        return self._result(AckOutcome.REJECTED, transfer_id)

    # ---- results -----------------------------------------------------------------------------

    def poll(self, now: float) -> list[AckResult]:
        """What completed, was declined, failed or expired since the last call, each once.

        Also drops what is too old to wait for an owner.
        """
        for transfer_id in self._deadlines.pop_due(now):
            self._end(transfer_id, AckOutcome.EXPIRED, now)
        while self._early:
            transfer_id, early = next(iter(self._early.items()))
            if now < early.arrived + self._ttl:
                break
            del self._early[transfer_id]
            self.counters["evicted_ttl"] += 1
        self._ended.expire(now)
        results, self._results = self._results, []
        return results

    def next_at(self) -> float | None:
        """When ``poll`` has something next, if no message comes first."""
        times = [self._deadlines.next_at(), self._ended.next_at()]
        if self._early:
            times.append(next(iter(self._early.values())).arrived + self._ttl)
        known = [at for at in times if at is not None and at < float("inf")]
        return min(known) if known else None

    # ---- inside ------------------------------------------------------------------------------

    def _count(self, transfer_id: str, needed: int, now: float) -> AckResult:
        entry = self._expected.get(transfer_id)
        if entry is None:
            return self._count_early(transfer_id, needed, now)
        # What one message said of the fan-in holds: nobody completes it early by saying less.
        entry.needed = max(needed, entry.needed or 1)
        entry.count += 1
        if entry.count < entry.needed:
            return self._result(AckOutcome.PROGRESS, transfer_id)
        return self._end(transfer_id, AckOutcome.COMPLETE, now)

    def _count_early(self, transfer_id: str, needed: int, now: float) -> AckResult:
        early = self._early_entry(transfer_id, needed, now)
        early.needed = max(early.needed, needed)
        if early.count >= early.needed:
            return self._result(AckOutcome.DUPLICATE, transfer_id)
        early.count += 1
        return self._result(AckOutcome.EARLY, transfer_id)

    def _early_entry(self, transfer_id: str, needed: int, now: float) -> _Early:
        early = self._early.get(transfer_id)
        if early is None:
            early = self._early[transfer_id] = _Early(now, needed)
            if len(self._early) > self._capacity:
                self._early.popitem(last=False)
                self.counters["evicted_capacity"] += 1
        return early

    def _end_or_wait(self, transfer_id: str, outcome: AckOutcome, now: float) -> AckResult:
        if transfer_id in self._expected:
            return self._end(transfer_id, outcome, now)
        if transfer_id in self._ended:
            return self._result(AckOutcome.STALE, transfer_id)
        early = self._early_entry(transfer_id, 1, now)
        early.declined = early.declined or outcome is AckOutcome.DECLINED
        early.failed = early.failed or outcome is AckOutcome.FAILED
        return self._result(AckOutcome.EARLY, transfer_id)

    def _end(self, transfer_id: str, outcome: AckOutcome, now: float) -> AckResult:
        owners = self._forget(transfer_id, now)
        self.counters[outcome.value] += 1
        result = AckResult(outcome=outcome, transfer_id=transfer_id, owners=tuple(owners))
        self._results.append(result)
        return result

    def _remove(self, transfer_id: str, owner: str, now: float) -> None:
        entry = self._expected[transfer_id]
        del entry.owners[owner]
        del self._by_owner[owner]
        if not entry.owners:
            self._forget(transfer_id, now)

    def _forget(self, transfer_id: str, now: float) -> Iterable[str]:
        entry = self._expected.pop(transfer_id)
        for owner in entry.owners:
            del self._by_owner[owner]
        self._deadlines.cancel(transfer_id)
        self._ended.add(transfer_id, None, now)
        return entry.owners

    def _result(self, outcome: AckOutcome, transfer_id: str) -> AckResult:
        self.counters[outcome.value] += 1
        return AckResult(outcome=outcome, transfer_id=transfer_id)
