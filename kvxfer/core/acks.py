"""Reconciles ACKs with what they acknowledge, in whatever order both arrive.

Usable alone: no transport, no agent, no clock of its own.  A producer *expects* ACKs for a transfer
id from a set of source ranks on behalf of one or several owners; peers' ACKs are *recorded*.  An
ACK may come before the expectation (normal: another process schedules), twice, from an older
epoch, or never.  Ranks are kept as a set, so that a duplicate never looks like a second rank.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable

import attrs

from kvxfer.core.timers import Timers
from kvxfer.errors import InvalidInputError

__all__ = ["Ack", "AckOutcome", "AckReconciler", "AckResult"]


class AckOutcome(enum.Enum):
    """What an ACK turned out to be."""

    PROGRESS = "progress"
    """Counted; other ranks are still missing."""
    COMPLETE = "complete"
    """The last missing rank; the owners may proceed. Happens once per transfer."""
    DUPLICATE = "duplicate"
    """This rank had acknowledged before."""
    EARLY = "early"
    """Nobody expects it yet; buffered within TTL and capacity."""
    STALE = "stale"
    """For a transfer that has ended, or of an older epoch."""
    DECLINED = "declined"
    """The consumer will not read: stands for all its ranks."""
    REJECTED = "rejected"
    """From a rank that is not expected."""
    EXPIRED = "expired"
    """From ``poll``: the deadline passed with ranks missing."""


@attrs.frozen(kw_only=True)
class Ack:
    """One peer rank is finished with a transfer.

    ``epoch`` tells two uses of one transfer id apart; None matches any.  ``sources`` are the ranks
    that have to acknowledge according to the sender (it knows its own size); the first ACK that
    names them settles an expectation that does not.
    """

    transfer_id: str
    source: int
    epoch: int | None = None
    declined: bool = False
    sources: frozenset[int] | None = None


@attrs.frozen(kw_only=True)
class AckResult:
    """What became of it. ``owners`` is filled with COMPLETE, DECLINED and EXPIRED."""

    outcome: AckOutcome
    transfer_id: str
    owners: tuple[str, ...] = ()
    missing: frozenset[int] = frozenset()


@attrs.define
class _Expected:
    epoch: int | None
    sources: frozenset[int] | None
    owners: dict[str, None]
    seen: set[int] = attrs.field(factory=set)


@attrs.define
class _Early:
    arrived: float
    acks: dict[int, Ack]


class AckReconciler:
    """See the module. All methods are cheap: none looks at entries that are not concerned.

    Args:
        early_ttl: seconds an ACK nobody expects yet is kept. 30 s is what vllm-project/vllm#50674
            proposes.
        early_capacity: how many transfer ids with early ACKs are kept, oldest out first.
        fan_in_limit: how many ranks one transfer may have.
        terminal_capacity: how many ended transfer ids are remembered to call later ACKs stale.
    """

    def __init__(
        self,
        *,
        early_ttl: float = 30.0,
        early_capacity: int = 1024,
        fan_in_limit: int = 1024,
        terminal_capacity: int = 65536,
    ) -> None:
        for name, value in (
            ("early_ttl", early_ttl),
            ("early_capacity", early_capacity),
            ("fan_in_limit", fan_in_limit),
            ("terminal_capacity", terminal_capacity),
        ):
            if not value > 0:
                raise InvalidInputError(f"{name} is {value}: it must be positive")
        self._ttl = early_ttl
        self._capacity = early_capacity
        self._fan_in = fan_in_limit
        self._terminal_capacity = terminal_capacity
        self._expected: dict[str, _Expected] = {}
        self._early: OrderedDict[str, _Early] = OrderedDict()
        self._terminal: OrderedDict[str, int | None] = OrderedDict()
        self._deadlines: Timers[str] = Timers()
        self.counters: dict[str, int] = {o.value: 0 for o in AckOutcome}
        self.counters.update(evicted_ttl=0, evicted_capacity=0)

    def __len__(self) -> int:
        """Expectations that are open."""
        return len(self._expected)

    @property
    def early(self) -> tuple[str, ...]:
        """Transfer ids with early ACKs, oldest first."""
        return tuple(self._early)

    def expect(
        self,
        transfer_id: str,
        *,
        sources: Collection[int] | None,
        owners: Iterable[str] = (),
        deadline: float,
        now: float,
        epoch: int | None = None,
    ) -> AckResult | None:
        """Expect ACKs from ``sources`` (None: the first ACK names them) by ``deadline``.

        Expecting the same id and epoch again adds owners to it.  Early ACKs are applied at once;
        if they complete it, that result is returned.

        Raises:
            InvalidInputError: the id is already expected with another epoch or other sources, or
                there are no or too many sources.
        """
        wanted = None if sources is None else frozenset(sources)
        if wanted is not None and not 0 < len(wanted) <= self._fan_in:
            raise InvalidInputError(
                f"{len(wanted)} source ranks for {transfer_id!r}: must be 1 to {self._fan_in}"
            )
        entry = self._expected.get(transfer_id)
        if entry is not None:
            if entry.epoch != epoch or (
                wanted is not None and entry.sources is not None and wanted != entry.sources
            ):
                raise InvalidInputError(
                    f"transfer {transfer_id!r} is already expected with epoch {entry.epoch} and "
                    f"sources {_show(entry.sources)}; refused: epoch {epoch}, sources "
                    f"{_show(wanted)}",
                    next_step="use a transfer id of its own, or unmap the old one first",
                )
            entry.owners.update(dict.fromkeys(owners))
            return None
        self._terminal.pop(transfer_id, None)
        self._expected[transfer_id] = _Expected(epoch, wanted, dict.fromkeys(owners))
        self._deadlines.set(transfer_id, deadline)
        early = self._early.pop(transfer_id, None)
        result = None
        if early is not None and now - early.arrived <= self._ttl:
            for ack in early.acks.values():
                outcome = self.record(ack, now)
                if outcome.outcome in (AckOutcome.COMPLETE, AckOutcome.DECLINED):
                    result = outcome
        return result

    def record(self, ack: Ack, now: float) -> AckResult:
        """Take one ACK. Never raises for what a peer sent."""
        entry = self._expected.get(ack.transfer_id)
        if entry is None:
            return self._unexpected(ack, now)
        if ack.epoch is not None and entry.epoch is not None and ack.epoch != entry.epoch:
            return self._result(AckOutcome.STALE, ack.transfer_id)
        if ack.declined:
            return self._finish(AckOutcome.DECLINED, ack.transfer_id)
        if entry.sources is None and ack.sources is not None:
            if not 0 < len(ack.sources) <= self._fan_in:
                return self._result(AckOutcome.REJECTED, ack.transfer_id)
            entry.sources = ack.sources
        if entry.sources is not None and ack.source not in entry.sources:
            return self._result(AckOutcome.REJECTED, ack.transfer_id)
        if ack.source in entry.seen:
            return self._result(AckOutcome.DUPLICATE, ack.transfer_id)
        if len(entry.seen) >= self._fan_in:
            return self._result(AckOutcome.REJECTED, ack.transfer_id)
        entry.seen.add(ack.source)
        if entry.sources is not None and entry.sources <= entry.seen:
            return self._finish(AckOutcome.COMPLETE, ack.transfer_id)
        missing = frozenset() if entry.sources is None else entry.sources - entry.seen
        self.counters[AckOutcome.PROGRESS.value] += 1
        return AckResult(outcome=AckOutcome.PROGRESS, transfer_id=ack.transfer_id, missing=missing)

    def acknowledged(self, transfer_id: str, source: int) -> bool:
        """Whether this rank has acknowledged an open expectation, or it has ended altogether."""
        entry = self._expected.get(transfer_id)
        return transfer_id in self._terminal if entry is None else source in entry.seen

    def poll(self, now: float) -> list[AckResult]:
        """Expectations whose deadline passed, each once. Drops early ACKs older than the TTL."""
        while self._early:
            transfer_id, early = next(iter(self._early.items()))
            if now - early.arrived <= self._ttl:
                break
            del self._early[transfer_id]
            self.counters["evicted_ttl"] += 1
        return [
            self._finish(AckOutcome.EXPIRED, transfer_id)
            for transfer_id in self._deadlines.pop_due(now)
        ]

    def extend(self, transfer_id: str, deadline: float) -> None:
        """Move the deadline of an open expectation. Unknown ids are ignored."""
        if transfer_id in self._expected:
            self._deadlines.set(transfer_id, deadline)

    def next_at(self) -> float | None:
        """When ``poll`` has something next."""
        at = self._deadlines.next_at()
        if self._early:
            ttl = next(iter(self._early.values())).arrived + self._ttl
            return ttl if at is None else min(at, ttl)
        return at

    def unmap(self, transfer_id: str, *, owner: str | None = None) -> bool:
        """Withdraw ``owner``, or with None the whole expectation. True if something was removed.

        An owner that does not own the id removes nothing: a late unmap cannot delete a newer one.
        """
        entry = self._expected.get(transfer_id)
        if entry is None:
            return False
        if owner is not None:
            if owner not in entry.owners:
                return False
            del entry.owners[owner]
            if entry.owners:
                return True
        self._forget(transfer_id, entry)
        return True

    # ---- inside ----------------------------------------------------------------------------

    def _unexpected(self, ack: Ack, now: float) -> AckResult:
        if ack.transfer_id in self._terminal:
            ended = self._terminal[ack.transfer_id]
            if ack.epoch is None or ended is None or ack.epoch <= ended:
                return self._result(AckOutcome.STALE, ack.transfer_id)
        early = self._early.get(ack.transfer_id)
        if early is None:
            early = self._early[ack.transfer_id] = _Early(now, {})
            if len(self._early) > self._capacity:
                self._early.popitem(last=False)
                self.counters["evicted_capacity"] += 1
        elif ack.source in early.acks:
            return self._result(AckOutcome.DUPLICATE, ack.transfer_id)
        if len(early.acks) >= self._fan_in:
            return self._result(AckOutcome.REJECTED, ack.transfer_id)
        early.acks[ack.source] = ack
        return self._result(AckOutcome.EARLY, ack.transfer_id)

    def _result(self, outcome: AckOutcome, transfer_id: str) -> AckResult:
        self.counters[outcome.value] += 1
        return AckResult(outcome=outcome, transfer_id=transfer_id)

    def _finish(self, outcome: AckOutcome, transfer_id: str) -> AckResult:
        entry = self._expected[transfer_id]
        self._forget(transfer_id, entry)
        self.counters[outcome.value] += 1
        missing = frozenset() if entry.sources is None else entry.sources - entry.seen
        return AckResult(
            outcome=outcome,
            transfer_id=transfer_id,
            owners=tuple(entry.owners),
            missing=missing if outcome is AckOutcome.EXPIRED else frozenset(),
        )

    def _forget(self, transfer_id: str, entry: _Expected) -> None:
        del self._expected[transfer_id]
        self._deadlines.cancel(transfer_id)
        self._terminal[transfer_id] = entry.epoch
        self._terminal.move_to_end(transfer_id)
        if len(self._terminal) > self._terminal_capacity:
            self._terminal.popitem(last=False)


def _show(sources: Collection[int] | None) -> str:
    return "not yet known" if sources is None else str(sorted(sources))
