"""Reconciles ACKs with what they acknowledge, in whatever order both arrive.

Usable alone: no transport, no agent, no clock of its own.  A producer *expects* ACKs for a transfer
id from a set of source ranks on behalf of one or several owners; peers' ACKs are *recorded*.  An
ACK may come before the expectation (normal: another process schedules), twice, from an older
epoch, or never.  Ranks are kept as a set, so that a duplicate never looks like a second rank.

A rank that failed is finished as well, but has consumed nothing: its ACK (``ok`` is False) does not
complete anything, and the rank may begin again (``begin_again``) as long as somebody expects it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable

import attrs

from kvxfer.core.remembered import Remembered
from kvxfer.core.timers import Timers
from kvxfer.errors import InvalidInputError

__all__ = ["Ack", "AckOutcome", "AckReconciler", "AckResult"]


class AckOutcome(enum.Enum):
    """What an ACK turned out to be."""

    PROGRESS = "progress"
    """Counted; other ranks are still missing."""
    COMPLETE = "complete"
    """The last missing rank; the owners may proceed. Happens once per transfer."""
    FAILED = "failed"
    """This rank is finished, without the bytes; it may begin again. See ``AckResult.finished``."""
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


# Not frozen, though nobody may change one: making a frozen one takes four times as long.
@attrs.define(kw_only=True)
class Ack:
    """One peer rank is finished with a transfer.

    ``epoch`` tells two uses of one transfer id apart; None matches any.  ``sources`` are the ranks
    that have to acknowledge according to the sender (it knows its own size); the first ACK that
    names them settles an expectation that does not.  ``ok`` is False if the rank is finished but
    did not get the bytes, ``final`` if it will not try again, ``reason`` why.
    """

    transfer_id: str
    source: int
    epoch: int | None = None
    declined: bool = False
    sources: frozenset[int] | None = None
    ok: bool = True
    final: bool = False
    reason: object = None


@attrs.define(kw_only=True)
class AckResult:
    """What became of it. ``owners`` is filled with COMPLETE, DECLINED and EXPIRED.

    ``missing``: ranks that have not got the bytes, as far as the ranks are known.  With FAILED,
    ``finished`` says that nobody is expected to read any more, and ``final`` that nobody will even
    try again; ``failed`` are the ACKs of the ranks that failed.
    """

    outcome: AckOutcome
    transfer_id: str
    owners: tuple[str, ...] = ()
    missing: frozenset[int] = frozenset()
    finished: bool = False
    final: bool = False
    failed: tuple[Ack, ...] = ()


@attrs.define
class _Expected:
    epoch: int | None
    sources: frozenset[int] | None
    owners: dict[str, None]
    seen: set[int] = attrs.field(factory=set)
    failed: dict[int, Ack] = attrs.field(factory=dict)

    def missing(self) -> frozenset[int]:
        return frozenset() if self.sources is None else self.sources - self.seen


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
        terminal_ttl: for how many seconds they are.
    """

    def __init__(
        self,
        *,
        early_ttl: float = 30.0,
        early_capacity: int = 1024,
        fan_in_limit: int = 1024,
        terminal_capacity: int = 65536,
        terminal_ttl: float = 300.0,
    ) -> None:
        for name, value in (
            ("early_ttl", early_ttl),
            ("early_capacity", early_capacity),
            ("fan_in_limit", fan_in_limit),
            ("terminal_capacity", terminal_capacity),
            ("terminal_ttl", terminal_ttl),
        ):
            if not value > 0:
                raise InvalidInputError(f"{name} is {value}: it must be positive")
        self._ttl = early_ttl
        self._capacity = early_capacity
        self._fan_in = fan_in_limit
        self._expected: dict[str, _Expected] = {}
        self._early: OrderedDict[str, _Early] = OrderedDict()
        self._terminal: Remembered[str, int | None] = Remembered(
            capacity=terminal_capacity, ttl=terminal_ttl
        )
        self._now = float("-inf")
        """The latest time we were told."""
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

    @property
    def remembered(self) -> int:
        """How many ended transfer ids are remembered."""
        return len(self._terminal)

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
        self._now = now
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
        self._terminal.pop(transfer_id)
        self._expected[transfer_id] = _Expected(epoch, wanted, dict.fromkeys(owners))
        self._deadlines.set(transfer_id, deadline)
        early = self._early.pop(transfer_id, None)
        result = None
        if early is not None and now - early.arrived <= self._ttl:
            for ack in early.acks.values():
                outcome = self.record(ack, now)
                if outcome.finished or outcome.outcome in (
                    AckOutcome.COMPLETE,
                    AckOutcome.DECLINED,
                ):
                    result = outcome
        return result

    def record(self, ack: Ack, now: float) -> AckResult:
        """Take one ACK. Never raises for what a peer sent."""
        self._now = now
        transfer_id = ack.transfer_id
        entry = self._expected.get(transfer_id)
        if ack.ok and not ack.declined:
            outcome = self.take(transfer_id, ack.source, ack.epoch, ack.sources, now)
        elif entry is None:
            outcome = self._unexpected(ack, now)
        elif ack.epoch is not None and entry.epoch is not None and ack.epoch != entry.epoch:
            outcome = self._count(AckOutcome.STALE)
        elif ack.declined:
            outcome = self._finish(AckOutcome.DECLINED, transfer_id, entry)
        else:
            outcome = self._record_failed(entry, ack)
        if entry is None:
            return AckResult(outcome=outcome, transfer_id=transfer_id)
        if outcome is AckOutcome.FAILED:
            return self._failed(entry, transfer_id)
        if outcome is AckOutcome.PROGRESS:
            return AckResult(outcome=outcome, transfer_id=transfer_id, missing=entry.missing())
        if outcome in (AckOutcome.COMPLETE, AckOutcome.DECLINED):
            return _ended(outcome, transfer_id, entry)
        return AckResult(outcome=outcome, transfer_id=transfer_id)

    def take(
        self,
        transfer_id: str,
        source: int,
        epoch: int | None,
        sources: frozenset[int] | None,
        now: float,
    ) -> AckOutcome:
        """As ``record`` of an ACK that says that the rank got the bytes, and without a result.

        For producers that take many: neither is made, unless the ACK is early and has to be kept.
        ``failure`` tells more where the outcome is FAILED: the other ranks had failed before.
        """
        self._now = now
        entry = self._expected.get(transfer_id)
        if entry is None:
            ack = Ack(transfer_id=transfer_id, source=source, epoch=epoch, sources=sources)
            return self._unexpected(ack, now)
        wanted = entry.sources
        if epoch != entry.epoch and epoch is not None and entry.epoch is not None:
            return self._count(AckOutcome.STALE)
        if wanted is None and sources is not None:
            if not 0 < len(sources) <= self._fan_in:
                return self._count(AckOutcome.REJECTED)
            wanted = entry.sources = sources
        if wanted is not None and source not in wanted:
            return self._count(AckOutcome.REJECTED)
        seen = entry.seen
        if source in seen:
            return self._count(AckOutcome.DUPLICATE)
        if len(seen) >= self._fan_in:
            return self._count(AckOutcome.REJECTED)
        seen.add(source)
        if entry.failed:
            entry.failed.pop(source, None)
        if wanted is not None and wanted <= seen:
            return self._finish(AckOutcome.COMPLETE, transfer_id, entry)
        if entry.failed and wanted is not None and wanted <= _finished(entry):
            # The others had failed before: with this one nobody reads any more.
            return self._count(AckOutcome.FAILED)
        self.counters["progress"] += 1
        return AckOutcome.PROGRESS

    def _record_failed(self, entry: _Expected, ack: Ack) -> AckOutcome:
        """It names no ranks for good: whoever tries next may have other sizes."""
        wanted = entry.sources if entry.sources is not None else ack.sources
        if wanted is not None and ack.source not in wanted:
            return self._count(AckOutcome.REJECTED)
        if ack.source in entry.seen:
            return self._count(AckOutcome.DUPLICATE)
        if len(entry.failed) >= self._fan_in or (wanted and len(wanted) > self._fan_in):
            return self._count(AckOutcome.REJECTED)
        entry.failed[ack.source] = ack
        return self._count(AckOutcome.FAILED)

    def _failed(self, entry: _Expected, transfer_id: str) -> AckResult:
        failed = tuple(entry.failed.values())
        wanted = entry.sources
        if wanted is None:
            named = [ack.sources for ack in failed if ack.sources is not None]
            wanted = named[-1] if named else None
        finished = wanted is None or wanted <= _finished(entry)
        return AckResult(
            outcome=AckOutcome.FAILED,
            transfer_id=transfer_id,
            owners=tuple(entry.owners) if finished else (),
            missing=frozenset() if wanted is None else wanted - entry.seen,
            finished=finished,
            final=finished and all(ack.final for ack in failed),
            failed=failed,
        )

    def begin_again(self, transfer_id: str, source: int) -> bool:
        """A rank that had failed tries once more. False if it had not."""
        entry = self._expected.get(transfer_id)
        return entry is not None and entry.failed.pop(source, None) is not None

    def failure(self, transfer_id: str) -> AckResult | None:
        """The FAILED result as of now; None if no rank has failed without beginning again."""
        entry = self._expected.get(transfer_id)
        return None if entry is None or not entry.failed else self._failed(entry, transfer_id)

    def missing(self, transfer_id: str) -> frozenset[int]:
        """Ranks of an open expectation that have not got the bytes, as far as they are known."""
        entry = self._expected.get(transfer_id)
        return frozenset() if entry is None else entry.missing()

    def owners(self, transfer_id: str) -> tuple[str, ...]:
        """Owners of an open expectation."""
        entry = self._expected.get(transfer_id)
        return () if entry is None else tuple(entry.owners)

    def acknowledged(self, transfer_id: str, source: int) -> bool:
        """Whether this rank has acknowledged an open expectation, or it has ended altogether."""
        entry = self._expected.get(transfer_id)
        return transfer_id in self._terminal if entry is None else source in entry.seen

    def poll(self, now: float) -> list[AckResult]:
        """Expectations whose deadline passed, each once. Drops early ACKs older than the TTL."""
        self._now = now
        self._terminal.expire(now)
        while self._early:
            transfer_id, early = next(iter(self._early.items()))
            if now < early.arrived + self._ttl:
                break
            del self._early[transfer_id]
            self.counters["evicted_ttl"] += 1
        expired = []
        for transfer_id in self._deadlines.pop_due(now):
            entry = self._expected[transfer_id]
            self._finish(AckOutcome.EXPIRED, transfer_id, entry)
            expired.append(_ended(AckOutcome.EXPIRED, transfer_id, entry))
        return expired

    def extend(self, transfer_id: str, deadline: float) -> None:
        """Move the deadline of an open expectation. Unknown ids are ignored."""
        if transfer_id in self._expected:
            self._deadlines.set(transfer_id, deadline)

    def next_at(self) -> float | None:
        """When ``poll`` has something next."""
        times = [self._deadlines.next_at(), self._terminal.next_at()]
        if self._early:
            times.append(next(iter(self._early.values())).arrived + self._ttl)
        known = [at for at in times if at is not None and at < float("inf")]
        return min(known) if known else None

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

    def _unexpected(self, ack: Ack, now: float) -> AckOutcome:
        transfer_id = ack.transfer_id
        if transfer_id in self._terminal.entries:
            ended = self._terminal.get(transfer_id)
            if ack.epoch is None or ended is None or ack.epoch <= ended:
                return self._count(AckOutcome.STALE)
        early = self._early.get(transfer_id)
        if early is None:
            self._early[transfer_id] = _Early(now, {ack.source: ack})
            if len(self._early) > self._capacity:
                self._early.popitem(last=False)
                self.counters["evicted_capacity"] += 1
            return self._count(AckOutcome.EARLY)
        if ack.source in early.acks and early.acks[ack.source].ok:
            return self._count(AckOutcome.DUPLICATE)
        if len(early.acks) >= self._fan_in and ack.source not in early.acks:
            return self._count(AckOutcome.REJECTED)
        early.acks[ack.source] = ack
        return self._count(AckOutcome.EARLY)

    def _count(self, outcome: AckOutcome) -> AckOutcome:
        self.counters[outcome._value_] += 1
        return outcome

    def _finish(self, outcome: AckOutcome, transfer_id: str, entry: _Expected) -> AckOutcome:
        self._forget(transfer_id, entry)
        return self._count(outcome)

    def _forget(self, transfer_id: str, entry: _Expected) -> None:
        del self._expected[transfer_id]
        self._deadlines.cancel(transfer_id)
        self._terminal.add(transfer_id, entry.epoch, self._now)


def _ended(outcome: AckOutcome, transfer_id: str, entry: _Expected) -> AckResult:
    return AckResult(
        outcome=outcome,
        transfer_id=transfer_id,
        owners=tuple(entry.owners),
        missing=entry.missing() if outcome is AckOutcome.EXPIRED else frozenset(),
        failed=tuple(entry.failed.values()),
    )


def _finished(entry: _Expected) -> frozenset[int]:
    """Ranks that read no more, with or without the bytes."""
    return frozenset(entry.seen).union(entry.failed)


def _show(sources: Collection[int] | None) -> str:
    return "not yet known" if sources is None else str(sorted(sources))
