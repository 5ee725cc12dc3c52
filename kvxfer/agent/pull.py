"""READ, consumer side: one transfer that this rank pulls.

The steps, top to bottom, are those of ``Pull.step``: reach every producer rank, ask for grants,
move the parts, and publish when all of them are terminal.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvxfer.agent.accept import destinations
from kvxfer.agent.batches import batch_of
from kvxfer.agent.draining import Draining
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.agent.part import Part, history_of, undrained_over, undrained_peers
from kvxfer.core import wire
from kvxfer.core.events import BlockIds, Failed, Gone, Received, Role
from kvxfer.core.layout import plan_layers
from kvxfer.core.topology import Role as RankRole
from kvxfer.core.verdict import Op
from kvxfer.errors import ErrorKind, InvalidInputError, KvxferError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.consumer import Consumer
    from kvxfer.agent.context import Context
    from kvxfer.agent.links import Link
    from kvxfer.agent.mailbox import Mailbox
    from kvxfer.core.batch import Batch
    from kvxfer.core.layout import Align, Blocks
    from kvxfer.core.offer import Endpoint, Offer

__all__ = ["Pull", "PullSpec"]

_SEQS_KEPT = 16
"""Requests for a grant whose sending time is remembered; a later answer is ignored."""


@attrs.frozen(kw_only=True)
class PullSpec:
    """One submit: destination blocks per group, for all layers or the named ones."""

    blocks: tuple[Blocks, ...]
    layers: frozenset[str] | None = None
    align: Align | None = None
    uncovered_local: int = 0

    @property
    def empty(self) -> bool:
        return not any(len(group) for group in self.blocks)


@attrs.define(eq=False)
class _Source:
    """One producer rank. ``read`` is False where it only has to be released."""

    endpoint: Endpoint
    read: bool
    link: Link | None = None
    granted_until: float = -math.inf
    asked_at: float = -math.inf
    sent: dict[int, float] = attrs.field(factory=dict)
    parts: list[Part] = attrs.field(factory=list)
    planned: int = 0
    """How many submits have been turned into parts."""


class Pull:
    """See the module. Progress thread only, but for the handle."""

    def __init__(
        self,
        ctx: Context,
        consumer: Consumer,
        offer: Offer,
        handle: TransferHandle,
        sources: Sequence[tuple[Endpoint, bool]],
        *,
        pin: int,
        now: float,
    ) -> None:
        self._ctx = ctx
        self._consumer = consumer
        self.offer = offer
        self.handle = handle
        self._sources = [
            _Source(endpoint, read, granted_until=consumer.granted_ahead(offer.ref(endpoint)))
            for endpoint, read in sources
        ]
        self._pin = pin
        self._specs: list[PullSpec] = []
        self._covered = 0
        """How many submits were checked: every layer they want is held by some producer rank."""
        self.complete_specs = False
        """The last submit has come."""
        self.error: TransferError | None = None
        self.draining: Draining | None = None
        self.ended = False
        self._began = now
        self._queue_deadline = now + ctx.timeouts.connect + ctx.timeouts.queue
        # Each part has its own ``Timeouts.transfer``, from its first post. This bounds the sum.
        self._deadline = self._queue_deadline + ctx.timeouts.transfer
        ctx.at(self, min(self._deadline, self._queue_deadline))
        for source in self._sources:
            self._watch(source)

    def _watch(self, source: _Source) -> None:
        """Our keeper keeps it granted while we cannot."""
        if source.read:
            ref = self.offer.ref(source.endpoint)
            until = source.granted_until
            self._ctx.keeping.watch(ref, bound=self._deadline, granted_until=until)

    def add(self, spec: PullSpec, *, last: bool) -> None:
        """One more submit. The caller has pinned its destination blocks."""
        self._specs.append(spec)
        self.complete_specs = self.complete_specs or last
        self._ctx.soon(self)

    def complete(self) -> None:
        """The last submit has come."""
        self.complete_specs = True
        self._ctx.soon(self)

    # ---- the data path -----------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Move on as far as possible."""
        if self.ended:
            return
        if self.draining is not None:
            self.draining.step(now)
            return
        if self.error is None:
            try:
                self._reach(now)
                self._ask(now)
                self._move(now)
            except KvxferError as error:
                self.fail(_as_transfer_error(error), now)
            self._watch_deadlines(now)
        self._publish_if_over(now)

    def _nothing_to_read(self) -> bool:
        return self.complete_specs and all(spec.empty for spec in self._specs)

    def _reach(self, now: float) -> None:
        """Have a link to every producer rank that is read."""
        if self._nothing_to_read():
            return
        for source in self._sources:
            if source.read and source.link is None:
                source.link = self._consumer.links.reach(
                    source.endpoint.address, source.endpoint.incarnation, now
                )
                source.link.when_changed(self)
                source.link.want_path(now)
            link = source.link
            if link is not None and not link.usable:
                self.fail(
                    TransferError(
                        f"producer rank {source.endpoint.rank} cannot be used: {link.error}",
                        kind=link.kind_of_failure(),
                        history=history_of(self._parts()),
                    ),
                    now,
                )
                return

    def _ask(self, now: float) -> None:
        """Ask for the grant, again until it is there, and renew it at half its time."""
        for source in self._sources:
            link = source.link
            if link is None or not link.answers:
                continue
            granted = source.granted_until > now
            interval = self._ctx.config.grant_interval
            if granted:
                interval = max(interval, (source.granted_until - source.asked_at) / 2)
            if now >= source.asked_at + interval:
                seq = self._consumer.next_seq(self)
                source.sent[seq] = source.asked_at = now
                while len(source.sent) > _SEQS_KEPT:
                    self._consumer.forget_seq(next(iter(source.sent)))
                    del source.sent[next(iter(source.sent))]
                link.mailbox.send(wire.Open(seq, [self.offer.ref(source.endpoint)]))
                self._ctx.at(self, now + self._ctx.config.grant_interval)
            else:
                self._ctx.at(self, source.asked_at + interval)

    @property
    def over(self) -> bool:
        """Failed or ended: nothing can be added."""
        return self.ended or self.error is not None or self.draining is not None

    def reads_from(self, sender: str, ref: wire.Ref) -> bool:
        """Whether ``sender`` is a producer rank of ours and ``ref`` its hold."""
        return any(
            s.endpoint.incarnation == sender and self.offer.ref(s.endpoint) == ref
            for s in self._sources
        )

    def asked(self, seq: int, ref: wire.Ref, sender: str) -> bool:
        """Whether we asked that producer rank for that hold with ``seq``."""
        return any(
            seq in source.sent
            and ref == self.offer.ref(source.endpoint)
            and sender == source.endpoint.incarnation
            for source in self._sources
        )

    def on_grant(self, seq: int, remaining: float, now: float) -> None:
        """A producer rank granted what was asked with ``seq``."""
        for source in self._sources:
            sent = source.sent.pop(seq, None)
            if sent is None:
                continue
            # Counted from when we sent the request: our lease ends before the producer's.
            source.granted_until = max(source.granted_until, sent + remaining)
            self._watch(source)
            self._renewed(source, now)

    def keeper_renewed(self, ref: wire.Ref, until: float, sent: float, now: float) -> bool:
        """Our keeper was granted ``ref`` until ``until``, as it asked at ``sent``."""
        for source in self._sources:
            if source.read and self.offer.ref(source.endpoint) == ref:
                source.granted_until = max(source.granted_until, until)
                source.asked_at = max(source.asked_at, sent)
                self._renewed(source, now)
                return True
        return False

    def _renewed(self, source: _Source, now: float) -> None:
        for part in source.parts:
            part.renewed(source.granted_until, now)
        self._ctx.soon(self)

    def on_refused(self, kind: ErrorKind, message: str, now: float) -> None:
        """A producer rank refused the grant."""
        if kind is ErrorKind.ABORTED and any(s.granted_until > now for s in self._sources):
            return  # it grants nothing more, but what it granted holds
        self.fail(TransferError(f"the producer refused: {message}", kind=kind), now)

    def _move(self, now: float) -> None:
        """Turn submits into parts once the grant is there, and let them run."""
        self._check_coverage()
        for source in self._sources:
            link = source.link
            if link is None or not link.knows_layers or source.granted_until <= now:
                continue
            while source.planned < len(self._specs):
                batch = self._plan(link, self._specs[source.planned])
                part = Part(
                    self._ctx,
                    link,
                    Op.READ,
                    batch,
                    deadline=self._deadline,
                    owner=self,
                    siblings=source.parts,
                    handle=self.handle,
                )
                part.lease_end = source.granted_until
                source.parts.append(part)
                source.planned += 1
                part.start(now)

    def _check_coverage(self) -> None:
        """Once every producer rank is known: some of them must hold each layer that is wanted."""
        if self._covered == len(self._specs):
            return
        links = [source.link for source in self._sources if source.read]
        if not all(link is not None and link.knows_layers for link in links):
            return
        held = frozenset[str]().union(
            *(link.layers.names(RankRole.CONSUMER) for link in links if link is not None)
        )
        for spec in self._specs[self._covered :]:
            wanted = spec.layers if spec.layers is not None else self._consumer.layer_names
            missing = sorted(wanted - held)
            if missing and not spec.empty:
                raise InvalidInputError(
                    f"no producer rank holds the layers {missing[:5]} ({len(missing)} in all)",
                    next_step="register equal layer names on both sides, on all pipeline stages",
                )
        self._covered = len(self._specs)

    def _plan(self, link: Link, spec: PullSpec) -> Batch:
        plan = plan_layers(
            link.layers.named(RankRole.CONSUMER, spec.layers),
            spec.blocks,
            self.offer.groups,
            align=spec.align,
            uncovered_local=spec.uncovered_local,
            cache=self._consumer.plans,
        )
        return batch_of(plan)

    def _watch_deadlines(self, now: float) -> None:
        if self.error is not None:
            return
        waiting = (
            [s for s in self._sources if s.read and s.granted_until == -math.inf]
            if not self._nothing_to_read()
            else []
        )
        if now >= self._deadline:
            self.fail(self._timeout("transfer", now), now)
        elif waiting and now >= self._queue_deadline:
            self.fail(self._timeout("queue", now), now)
        else:
            self._ctx.at(self, self._deadline)
            if waiting:
                self._ctx.at(self, self._queue_deadline)
            for source in self._sources:
                if not source.parts or all(p.done for p in source.parts):
                    continue
                if now >= source.granted_until:
                    if not self._ctx.keeping.knows(source.granted_until, now, self):
                        continue  # it may have been renewed while we could not hear of it
                    self.fail(
                        TransferError(
                            f"the lease of producer rank {source.endpoint.rank} ended before the "
                            "bytes were complete",
                            kind=ErrorKind.EXPIRED,
                        ),
                        now,
                    )
                    return
                self._ctx.at(self, source.granted_until)

    def _timeout(self, phase: str, now: float) -> TransferError:
        return TransferError(
            f"not complete {now - self._began:.3f} s after it began: Timeouts.{phase} is over",
            kind=ErrorKind.TIMEOUT,
            history=history_of(self._parts()),
        )

    # ---- the end -----------------------------------------------------------------------------

    def fail(self, error: TransferError, now: float) -> None:
        """Give up; the first reason stays."""
        if self.error is not None or self.ended or self.draining is not None:
            return
        self.error = self.handle.error = error  # known now, published when all is over
        self._deadline = min(self._deadline, now + self._ctx.timeouts.transfer)
        for part in self._parts():
            part.cancel()
        self._ctx.soon(self)

    def on_gone(self, kind: ErrorKind, message: str, now: float) -> None:
        """The producer no longer holds the blocks."""
        if self.ended or self.draining is not None:
            return
        self._ctx.emit(
            Gone(
                transfer_id=self.handle.transfer_id,
                kind=kind,
                message=message,
            ),
            self.handle,
        )
        self.fail(TransferError(f"the producer no longer holds it: {message}", kind=kind), now)

    def _parts(self) -> list[Part]:
        return [part for source in self._sources for part in source.parts]

    def _publish_if_over(self, now: float) -> None:
        """All members terminal: exactly one event, then the release."""
        parts = self._parts()
        for part in parts:
            if part.error is not None and self.error is None:
                self.fail(part.error, now)
        if self.error is not None:
            urgent = self.error.kind in (ErrorKind.ABORTED, ErrorKind.TIMEOUT, ErrorKind.EXPIRED)
            if urgent or now >= self._deadline or all(p.settled for p in parts):
                self._publish_failure(self.error, parts, now)
            else:
                self._ctx.at(self, self._deadline)
            return
        if not self.complete_specs:
            return
        if self._nothing_to_read():
            self._publish_success(0, now)
            return
        for source in self._sources:
            if source.read and (
                source.planned < len(self._specs) or not all(p.done for p in source.parts)
            ):
                return
            # The time of now, not of the round's beginning: a process can be stopped in between.
            if source.read and self._ctx.clock.now() > source.granted_until:
                if not self._ctx.keeping.knows(source.granted_until, now, self):
                    return
                self.fail(
                    TransferError("complete, but after the lease ended", kind=ErrorKind.EXPIRED),
                    now,
                )
                return
        self._publish_success(sum(p.batch.nbytes for p in parts), now)

    def _publish_success(self, nbytes: int, now: float) -> None:
        self.handle.nbytes = nbytes
        self._ctx.counters.count("pull.bytes", nbytes)
        self._release(ok=True, now=now)
        self._end(now)
        event = Received(transfer_id=self.handle.transfer_id, nbytes=nbytes)
        self.handle._finish(
            TransferState.DONE, drained=True, tell=lambda: self._ctx.emit(event, self.handle)
        )

    def _publish_failure(self, error: TransferError, parts: list[Part], now: float) -> None:
        drained = all(part.drained for part in parts)
        self._ctx.counters.count(f"pull.failed.{error.kind.value}")
        event = Failed(
            transfer_id=self.handle.transfer_id,
            role=Role.CONSUMER,
            kind=error.kind,
            error=error,
            blocks=self._block_ids(),
            drained=drained,
            fresh_blocks=error.fresh_blocks,
        )
        if drained:
            self._release(ok=False, now=now)
            self._end(now)
        else:
            self.draining = Draining(
                self._ctx,
                self._consumer.quarantine,
                handle=self.handle,
                blocks=self._block_ids(),
                links=[s.link for s in self._sources if s.link is not None],
                op=Op.READ,
                peers_write=False,
                over=partial(undrained_over, parts),
                peers=partial(undrained_peers, parts),
                abandon=partial(_abandon, parts),
                is_drained=lambda: all(part.drained for part in parts),
                on_fenced=lambda: None,
                free=self._drained_at_last,
                ended=self._consumer.draining_ended,
                now=now,
            )
            self._consumer.draining_began(self.draining)
        self.handle.error = error
        self.handle._finish(
            TransferState.FAILED, drained=drained, tell=lambda: self._ctx.emit(event, self.handle)
        )

    def _drained_at_last(self, now: float) -> None:
        self._release(ok=False, now=now)
        self._end(now)

    def _block_ids(self) -> BlockIds:
        groups: list[tuple[int, ...]] = []
        for group in range(len(self._consumer.blocks_per_group)):
            ids: list[int] = []
            for spec in self._specs:
                ids.extend(destinations(spec.blocks)[group].tolist())
            groups.append(tuple(dict.fromkeys(ids)))
        return tuple(groups)

    def _release(self, *, ok: bool, now: float) -> None:
        """Tell every producer rank that we are finished, until it is confirmed or too late."""
        until = self._consumer.tells_until(self.offer, now)
        error = self.error
        release = partial(wire.Release, ok=ok, seq=self._consumer.closing_seq())
        if not ok and error is not None:
            release = partial(
                release,
                kind=error.kind.value,
                message=error.message[:4096],
                final=error.kind is ErrorKind.ABORTED,
            )
        for source in self._sources:
            try:
                box = self._mailbox(source)
            except (InvalidInputError, KvxferError):
                self._ctx.counters.count("release.not_sent")
                continue
            box.mail(
                release(self.offer.ref(source.endpoint), self._ranks_for(source)),
                now=now,
                until=until,
                to=source.endpoint.incarnation,
            )

    def _ranks_for(self, source: _Source) -> dict[str, int]:
        """Which rank we are; left out for a producer that has read it in our hello."""
        link = source.link
        if link is not None and link.usable and link.hello is not None and link.version >= 2:
            return {}
        return ranks_to_wire(self._consumer.ranks)

    def _mailbox(self, source: _Source) -> Mailbox:
        if source.link is not None and source.link.usable:
            return source.link.mailbox
        return self._consumer.links.mailboxes.dial(source.endpoint.address)

    def _end(self, now: float) -> None:
        self.ended = True
        self.draining = None
        for part in self._parts():
            part.release()
        self._consumer.pins.unpin(
            self._pin,
            [np.array(ids, dtype=np.int64) for ids in self._block_ids()],
        )
        for source in self._sources:
            if source.link is not None:
                source.link.unwatch(self)
            if source.read:
                self._ctx.keeping.unwatch(self.offer.ref(source.endpoint))
            for seq in source.sent:
                self._consumer.forget_seq(seq)
        self._ctx.forget(self)
        self._consumer.pull_ended(self)


def _as_transfer_error(error: KvxferError) -> TransferError:
    return TransferError(error.message, kind=error.kind, next_step=error.next_step)


def _abandon(parts: list[Part]) -> None:
    for part in parts:
        part.abandon()
