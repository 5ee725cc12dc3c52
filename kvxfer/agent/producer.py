"""The producer role of an agent: holds (READ) and pushes (WRITE) of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvxfer.agent.batches import PLAN_PIECES
from kvxfer.agent.early import Early
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.mapping import ack_ranks, rank_of, ranks_from_wire
from kvxfer.agent.push import Push, PushSpec
from kvxfer.core import wire
from kvxfer.core.acks import Ack, AckOutcome, AckReconciler, AckResult
from kvxfer.core.events import Declined, Event, Expired, Failed, Role, Sent
from kvxfer.core.inflight import Quarantine
from kvxfer.core.layout import PlanCache
from kvxfer.core.leases import Hold, LeaseTable, Refusal
from kvxfer.core.remembered import Remembered
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.context import Context
    from kvxfer.agent.draining import Draining
    from kvxfer.agent.links import Link
    from kvxfer.agent.linktable import LinkTable
    from kvxfer.core.channel import Route
    from kvxfer.core.offer import Endpoint
    from kvxfer.core.topology import Ranks

__all__ = ["Producer"]

_CANCELLED_KEPT = 65536
"""Cancelled grants that are remembered, so that a late copy of one is not taken for new."""


_FOR_GOOD = 2**63 - 1
"""Above the number of any request: whoever declines asks for nothing more."""


_READERS_KEPT = 4096
"""Different ``ranks`` of readers whose meaning is remembered."""
_COUNTED = {outcome.value: f"acks.{outcome.value}" for outcome in AckOutcome}
_CONSUMED = Refusal(ErrorKind.STALE, "its readers have consumed it")
_GIVEN_UP = Refusal(ErrorKind.STALE, "its readers have given it up")
_KINDS = {kind.value: kind for kind in ErrorKind}


@attrs.frozen
class _EarlyOpen:
    link: Link
    route: Route
    seq: int
    epoch: int


class Producer:
    """Progress thread only."""

    def __init__(self, ctx: Context, links: LinkTable, quarantine: Quarantine) -> None:
        self._ctx = ctx
        self.links = links
        self.plans = PlanCache(max_pieces=PLAN_PIECES)
        self.quarantine = quarantine
        self.leases = LeaseTable(
            margin=ctx.config.lease_margin,
            capacity=ctx.config.limits.holds,
            remembered_ttl=ctx.config.limits.remembered_ttl,
        )
        self.acks = AckReconciler(
            early_ttl=ctx.config.limits.early_ttl,
            early_capacity=ctx.config.limits.early,
            terminal_ttl=ctx.config.limits.remembered_ttl,
        )
        self.pushes: dict[str, Push] = {}
        self.queued = 0
        """Submits that wait for a grant or for their data, over all targets."""
        ttl = ctx.config.limits.remembered_ttl
        self._cancelled: Remembered[wire.Ref, None] = Remembered(capacity=_CANCELLED_KEPT, ttl=ttl)
        self._ended: Remembered[str, None] = Remembered(capacity=_CANCELLED_KEPT, ttl=ttl)
        """Pushes that ended lately."""
        self._readers: dict[tuple[str | int, ...], tuple[int, frozenset[int]]] = {}
        self._needed: dict[frozenset[int], frozenset[int]] = {}
        self._readers_of: Ranks | None = None
        self.drainings: dict[str, Draining] = {}
        self._early: Early[_EarlyOpen] = Early(
            capacity=ctx.config.limits.early, ttl=ctx.config.limits.early_ttl
        )
        for table in (self._cancelled, self._ended, self._early):
            ctx.sweeper.watch(table)

    @property
    def remembered(self) -> int:
        """What has ended and is remembered for a while."""
        return (
            len(self._cancelled) + len(self._ended) + self.leases.remembered + self.acks.remembered
        )

    @property
    def early(self) -> int:
        """Transfer ids with messages that came before our own orders."""
        return len(self._early) + len(self.acks.early)

    @property
    def ranks(self) -> Ranks:
        """Ours."""
        return self.links.local.ranks

    @property
    def layer_names(self) -> frozenset[str]:
        """The layers this rank has registered."""
        return frozenset(layer.name for layer in self.links.local.caches.layers)

    # ---- holds -------------------------------------------------------------------------------

    def hold(
        self,
        handle: TransferHandle,
        *,
        epoch: int,
        lease: float,
        readers: Sequence[int] | None,
        now: float,
    ) -> None:
        """Begin to hold; whoever asked before gets its answer.

        Raises:
            InvalidInputError, CapacityError: nothing was begun.
        """
        transfer_id = handle.transfer_id
        hold = self.leases.hold(transfer_id, epoch=epoch, lease=lease, now=now, content=handle)
        try:
            result = self.acks.expect(
                transfer_id,
                sources=readers,
                owners=(transfer_id,),
                deadline=float("inf"),
                now=now,
                epoch=epoch,
            )
        except InvalidInputError:
            self.leases.end(transfer_id, Refusal(ErrorKind.INVALID, "it was refused"))
            raise
        self._ctx.counters.count("holds.begun")
        self._ctx.began(handle)
        self._ctx.keeping.held(hold)
        if result is not None:
            self._settle(hold, result.outcome, now)
        for early in self._early.take(transfer_id, now):
            if early.link.usable:
                self._answer(
                    early.link,
                    early.route,
                    early.seq,
                    self._ctx.trust.ref(transfer_id, early.epoch),
                    now,
                )
        self._schedule(now)

    def abort_hold(self, transfer_id: str, now: float) -> bool:
        """A held transfer is not freed under its readers: its lease gets short."""
        hold = self.leases.get(transfer_id)
        if hold is None:
            return False
        self.leases.shorten(transfer_id, now=now, lease=self._ctx.config.abort_lease)
        self._ctx.keeping.lets_go(hold)
        self._schedule(now)
        return True

    def step(self, now: float) -> None:
        """Expire what is due."""
        for hold in self.leases.expire(now, self._ctx.keeping.judges):
            self._expire(hold, now)
        self.acks.poll(now)
        self._schedule(now)

    def _schedule(self, now: float) -> None:
        for at in (self.leases.next_at(), self.acks.next_at()):
            if at is not None:
                self._ctx.at(self, max(at, now))

    def _expire(self, hold: Hold, now: float) -> None:
        """The lease, or the time for another try, is over."""
        failure = self.acks.failure(hold.transfer_id)
        missing = tuple(sorted(self.acks.missing(hold.transfer_id)))
        self.acks.unmap(hold.transfer_id)
        ref = self._ctx.trust.ref(hold.transfer_id, hold.epoch)
        self._tell_gone(hold, ref, Refusal(ErrorKind.EXPIRED, "the lease has ended"), now)
        if hold.settled is not None:
            self._finish(hold, hold.settled)
        elif failure is not None and failure.finished:
            self._finish(hold, AckOutcome.FAILED, failure)
        else:
            self._ctx.counters.count("holds.expired")
            self._ctx.log.problem(
                "lease_expired",
                "a lease ended before ranks %s had the bytes; %d holds are left",
                list(missing) or "(not known)",
                len(self.leases),
                transfer=hold.transfer_id,
            )
            handle: TransferHandle = hold.content
            event = Expired(transfer_id=hold.transfer_id, missing=missing)
            handle._finish(
                TransferState.EXPIRED, drained=True, tell=lambda: self._ctx.emit(event, handle)
            )

    def _tell_gone(self, hold: Hold, ref: wire.Ref, why: Refusal, now: float) -> None:
        for reader in hold.reading:
            link = self.links.of(reader)
            if link is not None:
                link.mailbox.mail(
                    wire.Gone(ref, why.kind.value, why.message),
                    now=now,
                    until=now + self._ctx.timeouts.ack,
                    to=link.incarnation,
                )

    # ---- messages about holds ----------------------------------------------------------------

    def on_open(self, link: Link, route: Route, message: wire.Open, now: float) -> None:
        """Answered on the route it came by: a reader's keeper asks on one of its own."""
        for ref in message.refs:
            self._answer(link, route, message.seq, ref, now)

    def _answer(self, link: Link, route: Route, seq: int, ref: wire.Ref, now: float) -> None:
        assert link.hello is not None
        answer: Hold | Refusal | None
        hold = self.leases.get(ref.transfer)
        if hold is not None and hold.epoch != ref.epoch:
            hold = None
        reader = link.incarnation
        if hold is not None and seq <= hold.closed.get(reader, -1):
            self._ctx.counters.count("opens.late")  # sent before it said that it is finished
            return
        if ref.keeper != self._ctx.incarnation:
            answer = Refusal(
                ErrorKind.STALE,
                f"{ref.transfer!r} was held by incarnation {ref.keeper}, this is "
                f"{self._ctx.incarnation}",
            )
        elif (
            hold is not None
            and reader not in hold.reading
            and (reader in hold.consumed or hold.settled is not None)
        ):
            answer = Refusal(ErrorKind.STALE, f"{ref.transfer!r} was consumed by this rank")
        elif hold is not None and now >= hold.ends_at and not self._ctx.keeping.judges(hold):
            self._ctx.counters.count("grants.left_open")  # it will ask again
            return
        else:
            answer = self.leases.open(ref.transfer, epoch=ref.epoch, now=now)
        if answer is None:
            self._early.add(ref.transfer, _EarlyOpen(link, route, seq, ref.epoch), now)
            self._ctx.sweeper.arm()
        elif isinstance(answer, Refusal):
            self._ctx.counters.count(f"grants.refused.{answer.kind.value}")
            refused = wire.Refused(ref, answer.kind.value, answer.message)
            self._ctx.send(route, wire.Grant(seq, [], [refused]), link.version)
        else:
            answer.reading[reader] = None
            answer.opened[reader] = max(seq, answer.opened.get(reader, -1))
            if self.acks.begin_again(ref.transfer, rank_of(link.hello.ranks)):
                self._ctx.counters.count("holds.retried")
            self._ctx.counters.count("grants.given")
            self._ctx.keeping.held(answer)
            if reader in answer.closed:
                self._ctx.keeping.reads_again(answer, reader)
            granted = wire.Granted(ref, max(0.0, answer.ends_at - now))
            self._ctx.send(route, wire.Grant(seq, [granted], []), link.version)

    def on_release(self, link: Link | None, sender: str, message: wire.Release, now: float) -> None:
        """A rank is finished. Needs no link if the message says which rank it is."""
        ranks, ref = message.ranks, message.ref
        source, sources = self._reader(ranks) if ranks or link is None else self._linked(link)
        if ref.keeper != self._ctx.incarnation:
            self._ctx.counters.count("acks.stale")
            return
        hold = self._reader_finished(sender, ref, message.seq, now, ok=message.ok)
        if message.ok:
            outcome = self.acks.take(ref.transfer, source, ref.epoch, sources, now)
        else:
            ack = Ack(
                transfer_id=ref.transfer,
                source=source,
                epoch=ref.epoch,
                sources=sources,
                ok=False,
                final=message.final,
                reason=(_kind(message.kind), message.message),
            )
            outcome = self.acks.record(ack, now).outcome
        self._settle(hold, outcome, now)  # the round ends with our step

    def on_decline(self, sender: str, message: wire.Decline, now: float) -> None:
        """No rank of that instance will read."""
        reader, ref = ranks_from_wire(message.ranks), message.ref
        if ref.keeper != self._ctx.incarnation:
            self._ctx.counters.count("acks.stale")
            return
        hold = self._reader_finished(sender, ref, 0, now, ok=False, last=_FOR_GOOD)
        ack = Ack(transfer_id=ref.transfer, source=rank_of(reader), epoch=ref.epoch, declined=True)
        self._settle(hold, self.acks.record(ack, now).outcome, now)

    def _reader(self, ranks: dict[str, int]) -> tuple[int, frozenset[int]]:
        """A reader's rank, and all ranks that have to acknowledge besides it.

        ``ranks`` come from a decoded message.  There are few different ones and many releases.

        Raises:
            InvalidInputError: a rank is missing or out of range, or the sizes do not divide.
        """
        mine = self.links.local.ranks
        if self._readers_of is not mine:
            self._readers_of = mine
            self._readers.clear()
            self._needed.clear()
        key: tuple[str | int, ...] = (*ranks, *ranks.values())
        known = self._readers.get(key)
        if known is None:
            reader = ranks_from_wire(ranks)
            if len(self._readers) >= _READERS_KEPT:
                self._readers.clear()
                self._needed.clear()
            needed = ack_ranks(mine, reader)
            # One set for all the ranks of an instance, and for all instances of that shape.
            known = rank_of(reader), self._needed.setdefault(needed, needed)
            self._readers[key] = known
        return known

    def _linked(self, link: Link) -> tuple[int, frozenset[int]]:
        """``_reader`` of the ranks in a peer's hello."""
        assert link.hello is not None
        mine, theirs = self.links.local.ranks, link.hello.ranks
        known = link.reader
        if known is None or known[0] is not mine or known[1] is not theirs:
            known = link.reader = (mine, theirs, rank_of(theirs), ack_ranks(mine, theirs))
        return known[2], known[3]

    def _reader_finished(
        self, sender: str, ref: wire.Ref, seq: int, now: float, *, ok: bool, last: int = 0
    ) -> Hold | None:
        """``sender`` reads no more, on the word of a message that it sent after its request
        ``seq``; ``last``: up to which number its requests are closed, if beyond ``seq``. Returns
        the hold of that id."""
        hold = self.leases.get(ref.transfer)
        if hold is not None and hold.epoch == ref.epoch:
            if self.links.of(sender) is not None:  # bounded: it needs a link to open anything
                hold.closed[sender] = max(last, seq, hold.closed.get(sender, 0))
            again = seq and hold.opened.get(sender, -1) > seq  # sent after it: it reads once more
            if sender in hold.reading and not again:
                hold.reading.pop(sender, None)
                if ok:
                    hold.consumed.add(sender)
            self._ctx.keeping.finished(hold, sender)
        elif len(self._early):
            self._early.discard(
                ref.transfer, lambda early: early.link.incarnation == sender and early.seq < seq
            )
        return hold

    def keeper_opened(self, hold: Hold, reader: str, seq: int, now: float) -> None:
        """The keeper has granted ``reader`` a request of that number, or is about to."""
        hold.opened[reader] = max(seq, hold.opened.get(reader, -1))
        if reader in hold.reading or seq <= hold.closed.get(reader, -1):
            return  # it is known to read, or has finished since
        if reader in hold.closed:
            self._ctx.keeping.reads_again(hold, reader)
        hold.reading[reader] = None
        link = self.links.of(reader)
        if link is not None and link.hello is not None:
            self.acks.begin_again(hold.transfer_id, rank_of(link.hello.ranks))

    def keeper_answered(self, hold: Hold, now: float) -> None:
        """The keeper has let a hold go, or it was granted longer than we knew."""
        self.leases.rearm(hold, now)
        self._settle_if_idle(hold, now)
        self._schedule(now)

    def reader_left(self, sender: str, now: float) -> None:
        """A reader's process has ended: whatever it was granted, it reads no more."""
        for hold in tuple(self.leases):
            if sender in hold.reading:
                hold.reading.pop(sender, None)
                self._settle_if_idle(hold, now)
        self._schedule(now)

    def _settle(self, hold: Hold | None, outcome: AckOutcome, now: float) -> None:
        """Act on an ACK. Nothing is freed under whoever is still reading."""
        self._ctx.counters[_COUNTED[outcome._value_]] += 1
        if hold is None or outcome is AckOutcome.PROGRESS:
            return
        if outcome is AckOutcome.COMPLETE or outcome is AckOutcome.DECLINED:
            hold.settled = outcome
        self._settle_if_idle(hold, now)

    def _settle_if_idle(self, hold: Hold, now: float) -> None:
        if hold.reading:
            return
        if hold.settled is not None:
            if self._ctx.keeping.lets_go(hold):
                self._end(hold, hold.settled)
            return
        failure = self.acks.failure(hold.transfer_id)
        if failure is None or not failure.finished:
            return
        window = self._ctx.config.retry_window
        if failure.final or not window:
            if self._ctx.keeping.lets_go(hold):
                self.acks.unmap(hold.transfer_id)
                self._end(hold, AckOutcome.FAILED, failure)
        else:
            self.leases.limit(hold.transfer_id, now=now, lease=window)

    def _end(self, hold: Hold, outcome: AckOutcome, failure: AckResult | None = None) -> None:
        why = _CONSUMED if outcome is AckOutcome.COMPLETE else _GIVEN_UP
        self.leases.end(hold.transfer_id, why)
        self._finish(hold, outcome, failure)

    def _finish(self, hold: Hold, outcome: AckOutcome, failure: AckResult | None = None) -> None:
        """Publish the end of a hold that nobody reads any more."""
        handle: TransferHandle = hold.content
        event: Event
        if outcome is AckOutcome.COMPLETE:
            state = TransferState.DONE
            event = Sent(transfer_id=hold.transfer_id)
        elif outcome is AckOutcome.DECLINED:
            state = TransferState.DECLINED
            event = Declined(transfer_id=hold.transfer_id)
        else:
            state = TransferState.FAILED
            assert failure is not None
            handle.error = _readers_failed(failure)
            self._ctx.counters.count(f"holds.failed.{handle.error.kind.value}")
            event = Failed(
                transfer_id=hold.transfer_id,
                role=Role.PRODUCER,
                kind=handle.error.kind,
                error=handle.error,
            )
        handle._finish(state, drained=True, tell=lambda: self._ctx.emit(event, handle))

    # ---- pushes ------------------------------------------------------------------------------

    def push(
        self,
        handle: TransferHandle,
        targets: Sequence[Endpoint],
        spec: PushSpec,
        now: float,
    ) -> None:
        """Begin a push, or add a submit to one.

        Raises:
            InvalidInputError, CapacityError: nothing was begun.
        """
        push = self.pushes.get(handle.transfer_id)
        if self.queued >= self._ctx.config.limits.queued_pushes:
            raise CapacityError(f"{self.queued} pushes wait for grants or data: the queue is full")
        if push is None:
            self._check_room()
            self._ended.pop(handle.transfer_id)
            push = self.pushes[handle.transfer_id] = Push(self._ctx, self, handle, targets, now)
            self._ctx.counters.count("pushes.begun")
            self._ctx.began(handle)
        elif push.sealing or push.over or push.handle is not handle:
            raise InvalidInputError(
                f"transfer {handle.transfer_id!r} was sealed, has failed or is being drained"
            )
        push.add(spec)

    def _check_room(self) -> None:
        limit = self._ctx.config.limits.transfers
        # What has failed and only drains keeps its blocks, not its place.
        if len(self.pushes) - len(self.drainings) >= limit:
            raise CapacityError(f"{limit} transfers are being pushed")
        if len(self.drainings) >= limit + self._ctx.config.limits.quarantined:
            raise CapacityError(f"{len(self.drainings)} pushes have failed and are not drained")

    def seal(self, transfer_id: str, payload: bytes) -> bool:
        """No more submits will come. False if the push has ended (its event says how)."""
        push = self.pushes.get(transfer_id)
        if push is None:
            return False
        push.seal(payload)
        return True

    def reading(self, transfer_id: str) -> bool | None:
        """Whether what was submitted is yet to be read from its blocks; None if nobody knows when.

        False as well if there is no such push.
        """
        push = self.pushes.get(transfer_id)
        if push is None or not push.reading:
            return False
        return True if push.granted and not push.over else None

    def abort_push(self, transfer_id: str, now: float) -> bool:
        push = self.pushes.get(transfer_id)
        if push is None:
            return False
        push.fail(TransferError("aborted by the user", kind=ErrorKind.ABORTED), now)
        return True

    def fail_live(self, handle: TransferHandle, error: TransferError, now: float) -> bool:
        """A later submit was refused: the whole transfer fails. False if it is not ours."""
        push = self.pushes.get(handle.transfer_id)
        if push is None or push.handle is not handle:
            return False
        push.fail(error, now)
        return True

    def on_accept(self, sender: str, message: wire.Accept, now: float) -> bool:
        """False if that push has ended: the consumer must not wait for it."""
        push = self.pushes.get(message.ref.transfer)
        if push is None and message.ref.transfer in self._ended:
            return False
        if push is None or message.ref in self._cancelled:
            # Not pushing yet: we shall ask. Cancelled: an old copy must not grant anything.
            self._ctx.counters.count("accepts.early_or_stale")
        else:
            push.on_accept(sender, message, now)
        return True

    def on_cancel(self, sender: str, message: wire.Cancel, kind: ErrorKind, now: float) -> bool:
        """False if there is no such push: then nothing of it is in flight, nor ever will be."""
        self._cancelled.add(message.ref, None, now)
        self._ctx.sweeper.arm()
        push = self.pushes.get(message.ref.transfer)
        if push is None or not push.has(message.ref):
            return False
        push.on_cancel(kind, message.message, now)
        return True

    def on_sealed(self, sender: str, message: wire.Sealed, kind: ErrorKind, now: float) -> None:
        """A consumer rank says what became of what we sealed."""
        push = self.pushes.get(message.ref.transfer)
        if push is None or not push.on_sealed(sender, message, kind, now):
            self._ctx.counters.count("sealed.stale")

    def push_ended(self, push: Push, now: float) -> None:
        self.queued -= push.queued
        if self.pushes.get(push.handle.transfer_id) is push:
            del self.pushes[push.handle.transfer_id]
            self._ended.add(push.handle.transfer_id, None, now)
            self._ctx.sweeper.arm()

    # ---- draining ----------------------------------------------------------------------------

    def draining_began(self, draining: Draining) -> None:
        self.drainings[draining.transfer_id] = draining

    def draining_ended(self, draining: Draining) -> None:
        if self.drainings.get(draining.transfer_id) is draining:
            del self.drainings[draining.transfer_id]


def _kind(text: str) -> ErrorKind:
    # An older peer said nothing, a newer one something new.
    return _KINDS.get(text, ErrorKind.UNKNOWN)


def _readers_failed(result: AckResult) -> TransferError:
    """The first reader's reason stands for all."""
    first = result.failed[0]
    kind, message = first.reason if isinstance(first.reason, tuple) else (ErrorKind.UNKNOWN, "")
    return TransferError(
        f"reader rank {first.source} did not get the bytes: {message or 'it did not say why'}",
        kind=kind,
    )
