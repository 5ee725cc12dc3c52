"""The producer role of an agent: holds (READ) and pushes (WRITE) of this rank."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

from kvxfer.agent.early import Early
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.mapping import ack_ranks, rank_of, ranks_from_wire
from kvxfer.agent.push import Push, PushSpec
from kvxfer.core import wire
from kvxfer.core.acks import Ack, AckOutcome, AckReconciler, AckResult
from kvxfer.core.events import Declined, Event, Expired, Sent
from kvxfer.core.inflight import Quarantine
from kvxfer.core.layout import PlanCache
from kvxfer.core.leases import Hold, LeaseTable, Refusal
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.context import Context
    from kvxfer.agent.draining import Draining
    from kvxfer.agent.links import Link
    from kvxfer.agent.linktable import LinkTable
    from kvxfer.core.offer import Endpoint
    from kvxfer.core.topology import Ranks

__all__ = ["Producer"]

_CANCELLED_KEPT = 65536
"""Cancelled grants that are remembered, so that a late copy of one is not taken for new."""


@attrs.frozen
class _EarlyOpen:
    link: Link
    seq: int
    epoch: int


class Producer:
    """Progress thread only."""

    def __init__(self, ctx: Context, links: LinkTable, quarantine: Quarantine) -> None:
        self._ctx = ctx
        self.links = links
        self.plans = PlanCache()
        self.quarantine = quarantine
        self.leases = LeaseTable(margin=ctx.config.lease_margin, capacity=ctx.config.limits.holds)
        self.acks = AckReconciler(
            early_ttl=ctx.config.limits.early_ttl, early_capacity=ctx.config.limits.early
        )
        self.pushes: dict[str, Push] = {}
        self.queued = 0
        """Submits that wait for a grant or for their data, over all targets."""
        self._cancelled: OrderedDict[wire.Ref, None] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Pushes that ended lately."""
        self.drainings: dict[str, Draining] = {}
        self._early: Early[_EarlyOpen] = Early(
            capacity=ctx.config.limits.early, ttl=ctx.config.limits.early_ttl
        )

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
        self.leases.hold(transfer_id, epoch=epoch, lease=lease, now=now, content=handle)
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
        for early in self._early.take(transfer_id, now):
            if early.link.usable:
                self._answer(
                    early.link,
                    early.seq,
                    wire.Ref(transfer_id, self._ctx.incarnation, early.epoch),
                    now,
                )
        if result is not None:
            self._settle(result)
        self._schedule(now)

    def abort_hold(self, transfer_id: str, now: float) -> bool:
        """A held transfer is not freed under its readers: its lease gets short."""
        if transfer_id not in self.leases:
            return False
        self.leases.shorten(transfer_id, now=now, lease=self._ctx.config.abort_lease)
        self._schedule(now)
        return True

    def step(self, now: float) -> None:
        """Expire what is due."""
        for hold in self.leases.expire(now):
            self._expire(hold, now)
        self.acks.poll(now)
        self._schedule(now)

    def _schedule(self, now: float) -> None:
        at = self.leases.next_at()
        if at is not None:
            self._ctx.at(self, max(at, now))

    def _expire(self, hold: Hold, now: float) -> None:
        self.acks.unmap(hold.transfer_id)
        ref = wire.Ref(hold.transfer_id, self._ctx.incarnation, hold.epoch)
        self._tell_gone(hold, ref, Refusal(ErrorKind.EXPIRED, "the lease has ended"), now)
        self._ctx.counters.count("holds.expired")
        handle: TransferHandle = hold.content
        event = Expired(transfer_id=hold.transfer_id)
        handle._finish(TransferState.EXPIRED, drained=True, tell=lambda: self._ctx.emit(event))

    def _tell_gone(self, hold: Hold, ref: wire.Ref, why: Refusal, now: float) -> None:
        for reader in hold.readers:
            link = self.links.of(reader)
            if link is not None:
                link.mailbox.mail(
                    wire.Gone(ref, why.kind.value, why.message),
                    now=now,
                    until=now + self._ctx.timeouts.ack,
                )

    # ---- messages about holds ----------------------------------------------------------------

    def on_open(self, link: Link, message: wire.Open, now: float) -> None:
        for ref in message.refs:
            self._answer(link, message.seq, ref, now)

    def _answer(self, link: Link, seq: int, ref: wire.Ref, now: float) -> None:
        assert link.hello is not None
        answer: Hold | Refusal | None
        if ref.keeper != self._ctx.incarnation:
            answer = Refusal(
                ErrorKind.STALE,
                f"{ref.transfer!r} was held by incarnation {ref.keeper}, this is "
                f"{self._ctx.incarnation}",
            )
        elif ref.transfer in self.leases and self.acks.acknowledged(
            ref.transfer, rank_of(link.hello.ranks)
        ):
            answer = Refusal(ErrorKind.STALE, f"{ref.transfer!r} was consumed by this rank")
        else:
            answer = self.leases.open(ref.transfer, epoch=ref.epoch, now=now)
        if answer is None:
            self._early.add(ref.transfer, _EarlyOpen(link, seq, ref.epoch), now)
        elif isinstance(answer, Refusal):
            self._ctx.counters.count(f"grants.refused.{answer.kind.value}")
            refused = wire.Refused(ref, answer.kind.value, answer.message)
            link.mailbox.send(wire.Grant(seq, [], [refused]))
        else:
            answer.readers.add(link.incarnation)
            self._ctx.counters.count("grants.given")
            granted = wire.Granted(ref, max(0.0, answer.ends_at - now))
            link.mailbox.send(wire.Grant(seq, [granted], []))

    def on_release(self, message: wire.Release, now: float) -> None:
        """A rank is finished. Needs no link: the message says who it is."""
        reader = ranks_from_wire(message.ranks)
        self._record(message.ref, reader, declined=False, now=now)

    def on_decline(self, message: wire.Decline, now: float) -> None:
        """No rank of that instance will read."""
        reader = ranks_from_wire(message.ranks)
        self._record(message.ref, reader, declined=True, now=now)

    def _record(self, ref: wire.Ref, reader: Ranks, *, declined: bool, now: float) -> None:
        if ref.keeper != self._ctx.incarnation:
            self._ctx.counters.count("acks.stale")
            return
        ack = Ack(
            transfer_id=ref.transfer,
            source=rank_of(reader),
            epoch=ref.epoch,
            declined=declined,
            sources=ack_ranks(self.ranks, reader),
        )
        self._settle(self.acks.record(ack, now))

    def _settle(self, result: AckResult) -> None:
        self._ctx.counters.count(f"acks.{result.outcome.value}")
        if result.outcome not in (AckOutcome.COMPLETE, AckOutcome.DECLINED):
            return
        hold = self.leases.end(
            result.transfer_id,
            Refusal(ErrorKind.STALE, f"{result.transfer_id!r} was consumed"),
        )
        if hold is None:
            return
        handle: TransferHandle = hold.content
        event: Event
        if result.outcome is AckOutcome.COMPLETE:
            state, event = TransferState.DONE, Sent(transfer_id=hold.transfer_id)
        else:
            state, event = TransferState.DECLINED, Declined(transfer_id=hold.transfer_id)
        handle._finish(state, drained=True, tell=lambda: self._ctx.emit(event))

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
            if len(self.pushes) >= self._ctx.config.limits.transfers:
                raise CapacityError(f"{len(self.pushes)} transfers are being pushed")
            self._ended.pop(handle.transfer_id, None)
            push = self.pushes[handle.transfer_id] = Push(self._ctx, self, handle, targets, now)
            self._ctx.counters.count("pushes.begun")
        elif push.sealing or push.over or push.handle is not handle:
            raise InvalidInputError(
                f"transfer {handle.transfer_id!r} was sealed, has failed or is being drained"
            )
        push.add(spec)

    def seal(self, transfer_id: str, payload: bytes) -> bool:
        """No more submits will come. False if the push has ended (its event says how)."""
        push = self.pushes.get(transfer_id)
        if push is None:
            return False
        push.seal(payload)
        return True

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
        self._cancelled[message.ref] = None
        if len(self._cancelled) > _CANCELLED_KEPT:
            self._cancelled.popitem(last=False)
        push = self.pushes.get(message.ref.transfer)
        if push is None or not push.has(message.ref):
            return False
        push.on_cancel(kind, message.message, now)
        return True

    def push_ended(self, push: Push) -> None:
        self.queued -= push.queued
        if self.pushes.get(push.handle.transfer_id) is push:
            del self.pushes[push.handle.transfer_id]
            self._ended[push.handle.transfer_id] = None
            if len(self._ended) > _CANCELLED_KEPT:
                self._ended.popitem(last=False)

    # ---- draining ----------------------------------------------------------------------------

    def draining_began(self, draining: Draining) -> None:
        self.drainings[draining.transfer_id] = draining

    def draining_ended(self, draining: Draining) -> None:
        if self.drainings.get(draining.transfer_id) is draining:
            del self.drainings[draining.transfer_id]
