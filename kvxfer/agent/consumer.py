"""The consumer role of an agent: pulls (READ) and accepts (WRITE) of this rank."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvxfer.agent.accept import (
    SEALED_SINCE,
    Accepting,
    destinations,
    refuse_seal,
    tell_sealed,
)
from kvxfer.agent.batches import PLAN_PIECES
from kvxfer.agent.early import Early
from kvxfer.agent.grants import Grants
from kvxfer.agent.mapping import (
    rank_of,
    ranks_from_wire,
    ranks_to_wire,
    read_sources,
    writer_ranks,
)
from kvxfer.agent.pull import Pull, PullSpec
from kvxfer.agent.renewal import Renewal
from kvxfer.core import wire
from kvxfer.core.inflight import PinTable, Quarantine
from kvxfer.core.layout import PlanCache
from kvxfer.core.remembered import Remembered
from kvxfer.errors import (
    CapacityError,
    CircuitOpenError,
    ErrorKind,
    InvalidInputError,
    TransferError,
)
from kvxfer.keeper.watches import SEQ_STRIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.context import Context
    from kvxfer.agent.draining import Draining
    from kvxfer.agent.handles import TransferHandle
    from kvxfer.agent.links import Link
    from kvxfer.agent.linktable import LinkTable
    from kvxfer.core.layout import Blocks
    from kvxfer.core.offer import Endpoint, Offer
    from kvxfer.core.topology import Ranks

__all__ = ["Consumer"]

_OUTCOMES_KEPT = 65536
"""Accepts that ended and are remembered, beyond their time to live."""


class Consumer:
    """Progress thread only."""

    def __init__(self, ctx: Context, links: LinkTable) -> None:
        self._ctx = ctx
        self.links = links
        self.blocks_per_group: list[int] = []
        self.pins = PinTable([])
        self.plans = PlanCache(max_pieces=PLAN_PIECES)
        self.quarantine = Quarantine(ctx.config.limits.quarantined)
        self.pulls: dict[str, Pull] = {}
        self.accepts: dict[str, Accepting] = {}
        self.drainings: dict[str, Draining] = {}
        self._seqs: dict[int, Pull | Renewal] = {}
        # Not from 1: an answer meant for an earlier life of this address must not fit.
        # In steps: between two there is room for the numbers of our keeper's requests.
        self._next_seq = itertools.count(ctx.rng.getrandbits(40) * SEQ_STRIDE, SEQ_STRIDE)
        self._epochs = itertools.count(1)
        self._early_asks: Early[Link] = Early(
            capacity=ctx.config.limits.early, ttl=ctx.config.limits.early_ttl
        )
        self.grants = Grants(ctx.config.limits.early)
        """Obtained by ``renew`` ahead of a pull."""
        self.renewals: dict[wire.Ref, Renewal] = {}
        """Requests for such grants that are not answered."""
        self._outcomes: Remembered[wire.Ref, TransferError | None] = Remembered(
            capacity=_OUTCOMES_KEPT, ttl=ctx.config.limits.remembered_ttl
        )
        """How accepts ended lately: a producer may still ask by sealing."""
        for table in (self._early_asks, self._outcomes, self.grants):
            ctx.sweeper.watch(table)

    @property
    def remembered(self) -> int:
        """What has ended and is remembered for a while."""
        return len(self._outcomes)

    @property
    def early(self) -> int:
        """Transfer ids with messages that came before our own orders."""
        return len(self._early_asks)

    @property
    def asking(self) -> int:
        """Requests for grants that are not answered."""
        return len(self._seqs)

    @property
    def ranks(self) -> Ranks:
        """Ours."""
        return self.links.local.ranks

    @property
    def layer_names(self) -> frozenset[str]:
        """The layers this rank has registered."""
        return frozenset(layer.name for layer in self.links.local.caches.layers)

    def caches_changed(self, blocks_per_group: list[int]) -> None:
        """Other caches were registered; nothing may be pinned then.

        Raises:
            InvalidInputError: transfers still use the old ones.
        """
        if len(self.pins):
            raise InvalidInputError(
                f"{len(self.pins)} transfers still use the caches registered before",
                next_step="drain the agent first",
            )
        self.blocks_per_group = blocks_per_group
        self.pins = PinTable(blocks_per_group, serial=self.pins.serial)

    # ---- orders ------------------------------------------------------------------------------

    def pull(
        self,
        offer: Offer,
        spec: PullSpec,
        handle: TransferHandle,
        *,
        pin: int,
        last: bool,
        now: float,
    ) -> None:
        """Begin a pull, or add a submit to one. Its destination blocks are pinned under ``pin``.

        Raises:
            InvalidInputError, CapacityError: nothing was begun.
        """
        known = self.pulls.get(offer.transfer_id)
        if known is not None:
            if known.handle is not handle or known.complete_specs or known.over:
                raise InvalidInputError(
                    f"transfer {offer.transfer_id!r} is being pulled or drained already",
                    next_step="wait for its event, or submit all but the last part with last=False",
                )
            known.add(spec, last=last)
            return
        self._check_room(offer.transfer_id)
        self._stop_renewing(offer)
        pull = Pull(
            self._ctx, self, offer, handle, read_sources(self.ranks, offer), pin=pin, now=now
        )
        pull.add(spec, last=last)
        self.pulls[offer.transfer_id] = pull
        self._ctx.counters.count("pulls.begun")
        self._ctx.began(handle)

    def accept(
        self,
        transfer_id: str,
        blocks: tuple[Blocks, ...],
        handle: TransferHandle,
        *,
        pin: int,
        producers: Sequence[Endpoint],
        uncovered_local: int,
        duration: float,
        now: float,
    ) -> None:
        """Offer destination blocks to producers, now and when they ask.

        Raises:
            InvalidInputError, CapacityError: nothing was begun.
        """
        self._check_room(transfer_id)
        links = []
        for x in producers:
            try:
                links.append(self.links.reach(x.address, x.incarnation or None, now))
            except CircuitOpenError:
                continue  # it may still come to us and ask
        accepting = Accepting(
            self._ctx,
            self,
            handle=handle,
            epoch=next(self._epochs),
            blocks=blocks,
            pin=pin,
            writers=None,
            expected_nbytes=self._expected_nbytes(blocks, uncovered_local),
            duration=duration,
            now=now,
        )
        self.accepts[transfer_id] = accepting
        self._ctx.counters.count("accepts.begun")
        self._ctx.began(handle)
        for link in self._early_asks.take(transfer_id, now):
            if link.usable:
                accepting.grant(link, now)
        for link in links:
            waiter = _GrantWhenUp(accepting, link)
            link.when_changed(waiter)
            self._ctx.soon(waiter)

    def _expected_nbytes(self, blocks: Sequence[Blocks], uncovered: int) -> int:
        """Payload bytes of the accepted blocks, all layers, but for ``uncovered`` of the last."""
        counts = [max(0, len(ids) - uncovered) if len(ids) else 0 for ids in destinations(blocks)]
        return sum(
            counts[layer.group] * layer.layout.block_nbytes
            for layer in self.links.local.caches.layers
        )

    def complete(self, handle: TransferHandle) -> None:
        """No more submits will come to that pull: the other owners have declined."""
        pull = self.pulls.get(handle.transfer_id)
        if pull is not None and pull.handle is handle:
            pull.complete()

    def decline(self, offer: Offer, now: float) -> None:
        """Tell every producer rank that nobody of this instance will read."""
        if offer.transfer_id in self.pulls:
            self.abort(offer.transfer_id, now)
            return
        until = self.tells_until(offer, now)
        self._stop_renewing(offer)
        for endpoint in offer.endpoints:
            self._ctx.keeping.unwatch(offer.ref(endpoint))
            self.grants.take(offer.ref(endpoint))
            self.links.mailboxes.dial(endpoint.address).mail(
                wire.Decline(offer.ref(endpoint), ranks_to_wire(self.ranks)),
                now=now,
                until=until,
                to=endpoint.incarnation,
            )
        self._ctx.counters.count("declines.sent")

    def give_back(self, offer: Offer, now: float) -> None:
        """A pull was refused here: do not let the producer hold for the rest of the lease.

        A rank of several speaks for itself only: the others may be reading.
        """
        if offer.transfer_id in self.pulls:
            return  # the refused one was a second pull of the same
        try:
            if self.ranks.tp_size * self.ranks.pp_size == 1:
                self.decline(offer, now)
            else:
                self._release_unread(offer, now)
        except (InvalidInputError, CapacityError):
            self._ctx.counters.count("declines.not_sent")

    def tells_until(self, offer: Offer, now: float) -> float:
        """Until when a producer that confirms nothing is told that we are finished.

        Until its lease ends, but a router may write any lease into an offer, and who does not
        confirm keeps its place among ``Limits.peers``: so not for longer than what has ended is
        remembered.
        """
        return now + min(offer.lease, self._ctx.config.limits.remembered_ttl)

    def _release_unread(self, offer: Offer, now: float) -> None:
        self._stop_renewing(offer)
        for endpoint, _ in read_sources(self.ranks, offer):
            ref = offer.ref(endpoint)
            self._ctx.keeping.unwatch(ref)
            self.grants.take(ref)
            self.links.mailboxes.dial(endpoint.address).mail(
                wire.Release(
                    ref,
                    ranks_to_wire(self.ranks),
                    False,
                    ErrorKind.INVALID.value,
                    "its pull was refused",
                    True,
                ),
                now=now,
                until=self.tells_until(offer, now),
                to=endpoint.incarnation,
            )
        self._ctx.counters.count("releases.unread")

    def renew(self, offers: Sequence[Offer], now: float) -> None:
        """Keep holds alive for requests that wait; remembers the grants for their pulls."""
        for offer in offers:
            if offer.transfer_id in self.pulls:
                continue  # it renews itself
            for endpoint, read in read_sources(self.ranks, offer):
                if read:
                    ref = offer.ref(endpoint)
                    if ref not in self.renewals:
                        renewal = Renewal(self._ctx, self, endpoint, ref, now)
                        if renewal.open:
                            self.renewals[ref] = renewal
                    self._ctx.keeping.watch(ref, bound=now + self._ctx.timeouts.transfer)

    def _stop_renewing(self, offer: Offer) -> None:
        """From here on its pull renews it, or nobody.

        A grant that was asked for before the pull must not be taken for one of after it: the
        blocks are free once the pull has released them.
        """
        for endpoint in offer.endpoints:
            renewal = self.renewals.get(offer.ref(endpoint))
            if renewal is not None:
                renewal.stop()

    def fail_live(self, handle: TransferHandle, error: TransferError, now: float) -> bool:
        """A later submit was refused: the whole transfer fails. False if it is not ours."""
        pull = self.pulls.get(handle.transfer_id)
        if pull is not None and pull.handle is handle:
            pull.fail(error, now)
            return True
        accepting = self.accepts.get(handle.transfer_id)
        if accepting is not None and accepting.handle is handle:
            accepting.fail(error, now)
            return True
        return False

    def abort(self, transfer_id: str, now: float) -> bool:
        """Give up a pull or an accept. False if there is none that has not ended."""
        error = TransferError("aborted by the user", kind=ErrorKind.ABORTED)
        pull = self.pulls.get(transfer_id)
        if pull is not None:
            pull.fail(error, now)
            return True
        accepting = self.accepts.get(transfer_id)
        if accepting is not None:
            accepting.fail(error, now)
            return True
        return False

    def reclaim(self, transfer_id: str, now: float) -> bool:
        """Take quarantined blocks back without proof. False if it is not in quarantine."""
        draining = self.drainings.get(transfer_id)
        if draining is None or not draining.quarantined:
            return False
        draining.reclaim(now)
        return True

    def _check_room(self, transfer_id: str) -> None:
        if transfer_id in self.pulls or transfer_id in self.accepts:
            raise InvalidInputError(f"transfer {transfer_id!r} is under way already")
        limit = self._ctx.config.limits.transfers
        # What has failed and only drains keeps its blocks, not its place.
        if len(self.pulls) + len(self.accepts) - len(self.drainings) >= limit:
            raise CapacityError(f"{limit} transfers are under way")
        if len(self.drainings) >= limit + self._ctx.config.limits.quarantined:
            raise CapacityError(f"{len(self.drainings)} transfers have failed and are not drained")
        if self.quarantine.full:
            raise CapacityError(
                f"{len(self.quarantine)} transfers are in quarantine: the limit",
                next_step="fence or restart the peers named by snapshot(), or reclaim",
            )

    # ---- messages ----------------------------------------------------------------------------

    def next_seq(self, asker: Pull | Renewal) -> int:
        seq = next(self._next_seq)
        self._seqs[seq] = asker
        return seq

    def closing_seq(self) -> int:
        """A number above those of all requests sent so far, and below those to come."""
        return next(self._next_seq)

    def forget_seq(self, seq: int) -> None:
        self._seqs.pop(seq, None)

    def on_grant(self, sender: str, message: wire.Grant, now: float) -> None:
        """Only an answer from the producer that was asked, about the hold that was asked for."""
        for granted in message.granted:
            asker = self._asker(message.seq, granted.ref, sender)
            if asker is not None:
                asker.on_grant(message.seq, granted.remaining, now)
        for refused in message.refused:
            asker = self._asker(message.seq, refused.ref, sender)
            if asker is not None:
                asker.on_refused(_kind(refused.kind), refused.message, now)

    def _asker(self, seq: int, ref: wire.Ref, sender: str) -> Pull | Renewal | None:
        asker = self._seqs.get(seq)
        if asker is None or not asker.asked(seq, ref, sender):
            self._ctx.counters.count("grants.late_or_foreign")
            return None
        del self._seqs[seq]
        return asker

    def on_gone(self, sender: str, message: wire.Gone, now: float) -> None:
        pull = self.pulls.get(message.ref.transfer)
        if pull is not None and pull.reads_from(sender, message.ref):
            pull.on_gone(_kind(message.kind), message.message, now)
        else:
            self._ctx.counters.count("gone.stale")

    def on_ask(self, link: Link, message: wire.Ask, now: float) -> None:
        accepting = self.accepts.get(message.transfer)
        if accepting is None:
            self._early_asks.add(message.transfer, link, now)
            self._ctx.sweeper.arm()
        else:
            accepting.grant(link, now)

    def on_seal(self, link: Link, message: wire.Seal, now: float) -> bool:
        """False if it must not be confirmed; see ``Accepting.on_seal``."""
        theirs = ranks_from_wire(message.ranks)
        accepting = self._accepting(message.ref)
        if accepting is not None:
            return accepting.on_seal(
                link, message, rank_of(theirs), writer_ranks(self.ranks, theirs), now
            )
        if message.ref in self._outcomes:
            error = self._outcomes.get(message.ref)
        else:
            error = TransferError("it is not, or no longer, accepted here", kind=ErrorKind.STALE)
        if error is not None:
            return refuse_seal(self._ctx, link, message.ref, error, now)
        if link.version >= SEALED_SINCE:
            tell_sealed(self._ctx, link, message.ref, None, now)
        return True

    def on_push_failed(self, sender: str, message: wire.PushFailed, now: float) -> None:
        accepting = self._accepting(message.ref)
        if accepting is not None:
            accepting.on_push_failed(sender, message, _kind(message.kind), now)

    def _accepting(self, ref: wire.Ref) -> Accepting | None:
        accepting = self.accepts.get(ref.transfer)
        if accepting is None or accepting.ref != ref:
            self._ctx.counters.count("writes.stale")
            return None
        return accepting

    # ---- from transfers ----------------------------------------------------------------------

    def granted(self, ref: wire.Ref, until: float, now: float) -> None:
        """``renew`` obtained a grant for a pull that will follow."""
        self._ctx.keeping.granted(ref, until)
        self._remember(ref, until)

    def _remember(self, ref: wire.Ref, until: float) -> None:
        """Keep a grant for its pull, while it lasts."""
        evicted = self.grants.evicted
        self.grants.add(ref, until)
        self._ctx.counters.count("grants.evicted", self.grants.evicted - evicted)
        self._ctx.sweeper.arm()

    def keeper_renewed(self, ref: wire.Ref, until: float, sent: float, now: float) -> None:
        """Our keeper obtained a grant: for a pull, or for one that will follow."""
        pull = self.pulls.get(ref.transfer)
        if pull is None or not pull.keeper_renewed(ref, until, sent, now):
            self._remember(ref, until)

    def granted_ahead(self, ref: wire.Ref) -> float:
        """Until when ``renew`` has obtained a grant; minus infinity if it has not."""
        return self.grants.take(ref)

    def pull_ended(self, pull: Pull) -> None:
        if self.pulls.get(pull.offer.transfer_id) is pull:
            del self.pulls[pull.offer.transfer_id]

    def accept_ended(self, accepting: Accepting, now: float) -> None:
        self._outcomes.add(accepting.ref, accepting.error, now)
        self._ctx.sweeper.arm()
        if self.accepts.get(accepting.handle.transfer_id) is accepting:
            del self.accepts[accepting.handle.transfer_id]

    def draining_began(self, draining: Draining) -> None:
        self.drainings[draining.transfer_id] = draining

    def draining_ended(self, draining: Draining) -> None:
        if self.drainings.get(draining.transfer_id) is draining:
            del self.drainings[draining.transfer_id]


class _GrantWhenUp:
    """Waits for the link to a producer that the consumer was told about."""

    def __init__(self, accepting: Accepting, link: Link) -> None:
        self._accepting = accepting
        self._link = link

    def step(self, now: float) -> None:
        if self._link.up:
            self._accepting.grant(self._link, now)
        if self._link.up or not self._link.usable or self._accepting.ended:
            self._link.unwatch(self)


def _kind(text: str) -> ErrorKind:
    try:
        return ErrorKind(text)
    except ValueError:
        return ErrorKind.UNKNOWN  # a newer peer's word
