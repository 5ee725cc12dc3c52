"""WRITE, producer side: one transfer that this rank pushes.

The steps, top to bottom, are those of ``Push.step``: reach every consumer rank, ask for its
destination blocks, turn submits whose data is ready into parts, and seal when all have landed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from kvxfer.agent.accept import SEALED_SINCE, SESSIONS_SINCE
from kvxfer.agent.batches import batch_of
from kvxfer.agent.coverage import distinct_nbytes
from kvxfer.agent.draining import Draining
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.mapping import ranks_to_wire
from kvxfer.agent.part import Part, history_of, undrained_over, undrained_peers
from kvxfer.core import wire
from kvxfer.core.capabilities import Visibility
from kvxfer.core.events import BlockIds, Failed, Role, Sent
from kvxfer.core.layout import Blocks, Side, plan_layers
from kvxfer.core.topology import Role as RankRole
from kvxfer.core.verdict import Op
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError, KvxferError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.context import Context
    from kvxfer.agent.links import Link
    from kvxfer.agent.mailbox import Mailbox
    from kvxfer.agent.producer import Producer
    from kvxfer.core.batch import Batch
    from kvxfer.core.layout import Align
    from kvxfer.core.offer import Endpoint

__all__ = ["Push", "PushSpec", "Readiness"]


_ANY_TAIL = 2**31
"""How many destination blocks one push may leave to others."""


class Readiness(Protocol):
    """Says whether source bytes are there: ``torch.cuda.Event`` fits. Must not wait."""

    def query(self) -> bool: ...


@attrs.frozen(kw_only=True, eq=False)
class PushSpec:
    """One submit: source blocks per group, for all layers or the named ones."""

    blocks: tuple[Blocks, ...]
    layers: frozenset[str] | None = None
    ready: Readiness | None = None
    align: Align | None = None


@attrs.define(eq=False)
class _Target:
    """One consumer rank."""

    endpoint: Endpoint
    link: Link | None = None
    asked_at: float = float("-inf")
    ref: wire.Ref | None = None
    groups: tuple[Blocks, ...] = ()
    parts: list[Part] = attrs.field(factory=list)
    accepts_until: float = 0.0
    """When the consumer gives up by itself."""
    session: int = 0
    """Of the consumer's hello when it granted."""
    nbytes: int = 0
    """What was written, once it is known."""
    sealing: bool = False
    sealed: bool = False
    """It has received everything, or, if it speaks version 1, confirmed the seal."""


class Push:
    """See the module. Progress thread only, but for the handle."""

    def __init__(
        self,
        ctx: Context,
        producer: Producer,
        handle: TransferHandle,
        targets: Sequence[Endpoint],
        now: float,
    ) -> None:
        self._ctx = ctx
        self._producer = producer
        self.handle = handle
        self._targets = [_Target(endpoint) for endpoint in targets]
        self._specs: list[PushSpec] = []
        self._ready = 0
        """How many submits, from the first, have their data."""
        self._covered = 0
        """How many submits were checked: every layer they push is taken by some consumer rank."""
        self._payload: bytes | None = None
        self.error: TransferError | None = None
        self.draining: Draining | None = None
        self._unproven = False
        """Reclaimed: nothing proves that no byte lands any more."""
        self.ended = False
        self._began = now
        self._queue_deadline = now + ctx.timeouts.connect + ctx.timeouts.queue
        # Each part has its own ``Timeouts.transfer``, from its first post. This bounds the sum.
        self._deadline = self._queue_deadline + ctx.timeouts.transfer
        self._answers_by = 0.0
        """Once all is sealed: when every consumer rank must have answered."""
        ctx.at(self, min(self._deadline, self._queue_deadline))

    @property
    def over(self) -> bool:
        """Failed or ended: nothing can be added."""
        return self.ended or self.error is not None or self.draining is not None

    @property
    def sealing(self) -> bool:
        return self._payload is not None

    @property
    def queued(self) -> int:
        """Submits that are not parts yet, over all targets."""
        return sum(len(self._specs) - len(t.parts) for t in self._targets)

    @property
    def granted(self) -> bool:
        """Every consumer rank has said where the bytes go."""
        return all(target.ref is not None for target in self._targets)

    @property
    def reading(self) -> bool:
        """Whether something that was submitted has not left its source blocks, all of it."""
        return self.queued > 0 or not all(p.settled and p.drained for p in self._parts())

    def add(self, spec: PushSpec) -> None:
        self._specs.append(spec)
        self._producer.queued += len(self._targets)
        self._ctx.soon(self)

    def seal(self, payload: bytes) -> None:
        self._payload = payload
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
                self._check_sessions(now)
                self._ask(now)
                self._check_ready(now)
                self._move(now)
                self._seal(now)
            except KvxferError as error:
                self.fail(TransferError(str(error), kind=error.kind), now)
            self._watch_deadlines(now)
        self._publish_if_over(now)

    def _reach(self, now: float) -> None:
        for target in self._targets:
            if target.link is None:
                target.link = self._producer.links.reach(
                    target.endpoint.address, target.endpoint.incarnation or None, now
                )
                target.link.when_changed(self)
                target.link.want_path(now)
            if not target.link.usable and not target.sealed:
                self.fail(
                    TransferError(
                        f"consumer rank {target.endpoint.rank} cannot be used: {target.link.error}",
                        kind=target.link.kind_of_failure(),
                        history=history_of(self._parts()),
                    ),
                    now,
                )
                return

    def _check_sessions(self, now: float) -> None:
        """A consumer that builds its connection anew may have fenced us: its grant is void.

        Its blocks may belong to another transfer by now, whether or not its cancel reached us.
        """
        for target in self._targets:
            link = target.link
            if target.ref is None or target.sealing or link is None:
                continue
            if _session(link) != target.session:
                self.fail(
                    TransferError(
                        f"consumer rank {target.endpoint.rank} built its connection anew: what it "
                        "had granted is void",
                        kind=ErrorKind.STALE,
                        next_step="push again under a new transfer",
                    ),
                    now,
                )
                return

    def _ask(self, now: float) -> None:
        """Ask for the destination blocks, again until they come."""
        for target in self._targets:
            if target.ref is not None or target.link is None or not target.link.up:
                continue
            if now >= target.asked_at + self._ctx.config.grant_interval:
                target.link.mailbox.send(wire.Ask(self.handle.transfer_id))
                target.asked_at = now
            self._ctx.at(self, target.asked_at + self._ctx.config.grant_interval)

    def on_accept(self, sender: str, message: wire.Accept, now: float) -> None:
        """A consumer rank told us its destination blocks."""
        for target in self._targets:
            if target.link is not None and target.link.incarnation == sender:
                if target.link.version >= SESSIONS_SINCE and (
                    message.session != _session(target.link)
                ):
                    # From before its fence, and its blocks may be another's by now; or from after
                    # a hello that we have not seen. Asked again, it says what holds now.
                    self._ctx.counters.count("accepts.other_session")
                    return
                if target.ref is None and message.ref.keeper == sender:
                    target.groups = tuple(_blocks(group) for group in message.groups)
                    target.ref = message.ref
                    target.accepts_until = now + message.remaining
                    target.session = _session(target.link)
                    self._ctx.soon(self)
                return
        self._ctx.counters.count("accepts.stranger")

    def _check_ready(self, now: float) -> None:
        """Count the submits whose data is there, in order; look again soon while some is not."""
        while self._ready < len(self._specs):
            ready = self._specs[self._ready].ready
            if ready is not None and not self._query(ready, now):
                self._ctx.at(self, now + self._ctx.config.pump_interval)
                return
            self._ready += 1

    def _query(self, ready: Readiness, now: float) -> bool:
        try:
            return ready.query()
        except Exception as error:  # noqa: BLE001 - users' objects, such as a CUDA error
            self.fail(
                TransferError(
                    f"ready.query() raised {type(error).__name__}: {error}", kind=ErrorKind.INVALID
                ),
                now,
            )
            return False

    def _check_coverage(self) -> None:
        """Once every consumer rank is known: some of them must have each layer that is pushed.

        Where ranks hold copies, a producer rank may have nothing to write and only seals; the
        consumer counts the bytes.
        """
        links = [target.link for target in self._targets]
        if self._covered == len(self._specs) or not all(
            link is not None and link.knows_layers for link in links
        ):
            return
        taken = frozenset[str]().union(*(link.layers.common for link in links if link is not None))
        for spec in self._specs[self._covered :]:
            wanted = spec.layers if spec.layers is not None else self._producer.layer_names
            missing = sorted(wanted - taken)
            if missing:
                raise InvalidInputError(
                    f"no consumer rank takes the layers {missing[:5]} ({len(missing)} in all)",
                    next_step="register equal layer names on both sides, on all pipeline stages",
                )
        self._covered = len(self._specs)

    def _move(self, now: float) -> None:
        self._check_coverage()
        if self._covered < len(self._specs):
            return  # a consumer rank cannot be reached yet: without it the others are in vain
        for target in self._targets:
            link = target.link
            if target.ref is None or link is None or not link.knows_layers:
                continue
            _check_visibility(link)
            while len(target.parts) < self._ready:
                batch = self._plan(link, target, self._specs[len(target.parts)])
                part = Part(
                    self._ctx,
                    link,
                    Op.WRITE,
                    batch,
                    deadline=self._deadline,
                    owner=self,
                    siblings=target.parts,
                    handle=self.handle,
                )
                target.parts.append(part)
                self._producer.queued -= 1
                part.start(now)

    def _plan(self, link: Link, target: _Target, spec: PushSpec) -> Batch:
        plan = plan_layers(
            link.layers.named(RankRole.PRODUCER, spec.layers),
            spec.blocks,
            target.groups,
            align=spec.align,
            destination=Side.REMOTE,
            # One push may bring a part of the blocks; the consumer checks that all bytes came.
            allow_gaps=True,
            uncovered_remote=_ANY_TAIL,
            cache=self._producer.plans,
        )
        return batch_of(plan)

    def _seal(self, now: float) -> None:
        """Once all submits are there and have landed: tell every consumer rank, confirmed."""
        if self._payload is None or self._ready < len(self._specs):
            return
        for target in self._targets:
            if target.sealing or target.ref is None or target.link is None:
                continue
            if len(target.parts) < len(self._specs) or not all(p.done for p in target.parts):
                continue
            target.sealing = True
            target.nbytes = self._nbytes(target)
            speaks_sealed = target.link.version >= SEALED_SINCE
            target.link.mailbox.mail(
                wire.Seal(
                    target.ref,
                    ranks_to_wire(self._producer.ranks),
                    target.nbytes,
                    self._payload,
                ),
                now=now,
                until=self._answer_deadline(target, now),
                to=target.link.incarnation,
                on_confirm=None if speaks_sealed else partial(self._confirmed, target),
            )
        if all(t.sealing for t in self._targets) and not self._answers_by:
            # The transfer phase is over: what is missing is the consumers' word.
            self._answers_by = max(self._answer_deadline(t, now) for t in self._targets)

    def _answer_deadline(self, target: _Target, now: float) -> float:
        """Until when a consumer that was sent the seal may wait for other producer ranks, and tell.

        Its own deadline counts, but not beyond what a transfer may take here.
        """
        waits = min(target.accepts_until, now + self._ctx.timeouts.transfer)
        return max(now, waits) + self._ctx.timeouts.ack

    def _confirmed(self, target: _Target, _now: float) -> None:
        """By a consumer of version 1, which says no more."""
        target.sealed = True
        self._ctx.soon(self)

    def on_sealed(self, sender: str, message: wire.Sealed, kind: ErrorKind, now: float) -> bool:
        """A consumer rank says what became of it. False if it is not one of ours."""
        for target in self._targets:
            if target.ref != message.ref or message.ref.keeper != sender or not target.sealing:
                continue
            if message.ok:
                target.sealed = True
            else:
                self.fail(
                    TransferError(
                        f"consumer rank {target.endpoint.rank} did not receive it: "
                        f"{message.message}",
                        kind=kind,
                    ),
                    now,
                )
            self._ctx.soon(self)
            return True
        return False

    def _nbytes(self, target: _Target) -> int:
        """Bytes that were written to it; what was submitted twice counts once."""
        seen: set[str] = set()
        for spec in self._specs:
            if len(self._specs) > 1 and (spec.layers is None or seen & spec.layers):
                return distinct_nbytes([part.batch for part in target.parts])
            seen.update(spec.layers or ())
        return sum(part.batch.nbytes for part in target.parts)

    def _watch_deadlines(self, now: float) -> None:
        if self.error is not None:
            return
        waiting = [t for t in self._targets if t.ref is None]
        if self._answers_by:
            if now >= self._answers_by:
                self.fail(
                    TransferError(
                        "everything has landed, but not every consumer rank has said within "
                        "Timeouts.ack that it received it: it may have",
                        kind=ErrorKind.TIMEOUT,
                    ),
                    now,
                )
            else:
                self._ctx.at(self, self._answers_by)
        elif now >= self._deadline:
            self.fail(self._timeout("transfer", now), now)
        elif waiting and now >= self._queue_deadline:
            self.fail(self._timeout("queue", now), now)
        else:
            self._ctx.at(self, self._queue_deadline if waiting else self._deadline)

    def _timeout(self, phase: str, now: float) -> TransferError:
        return TransferError(
            f"not complete {now - self._began:.3f} s after it began: Timeouts.{phase} is over",
            kind=ErrorKind.TIMEOUT,
            history=history_of(self._parts()),
        )

    # ---- the end -----------------------------------------------------------------------------

    def has(self, ref: wire.Ref) -> bool:
        """Whether ``ref`` is what a consumer rank granted to this push."""
        return any(target.ref == ref for target in self._targets)

    def on_cancel(self, kind: ErrorKind, message: str, now: float) -> None:
        """A consumer rank no longer wants it."""
        self.fail(TransferError(f"the consumer cancelled: {message}", kind=kind), now)
        if self.ended:
            return
        self._ctx.soon(self)

    def fail(self, error: TransferError, now: float) -> None:
        """Give up; the first reason stays."""
        if self.error is not None or self.ended or self.draining is not None:
            return
        self.error = self.handle.error = error  # known now, published when all is over
        self._deadline = min(self._deadline, now + self._ctx.timeouts.transfer)
        for part in self._parts():
            part.cancel()
        self._ctx.soon(self)

    def _parts(self) -> list[Part]:
        return [part for target in self._targets for part in target.parts]

    def _publish_if_over(self, now: float) -> None:
        parts = self._parts()
        for part in parts:
            if part.error is not None and self.error is None:
                self.fail(part.error, now)
        if self.error is not None:
            urgent = self.error.kind in (ErrorKind.ABORTED, ErrorKind.TIMEOUT)
            if urgent or now >= self._deadline or all(p.settled for p in parts):
                self._publish_failure(self.error, parts, now)
            else:
                self._ctx.at(self, self._deadline)
        elif self._targets and all(t.sealed for t in self._targets):
            self.handle.nbytes = sum(t.nbytes for t in self._targets)
            self._ctx.counters.count("push.bytes", self.handle.nbytes)
            self._end(now)
            event = Sent(
                transfer_id=self.handle.transfer_id,
                nbytes=self.handle.nbytes,
            )
            self.handle._finish(
                TransferState.DONE, drained=True, tell=lambda: self._ctx.emit(event, self.handle)
            )

    def _publish_failure(self, error: TransferError, parts: list[Part], now: float) -> None:
        drained = all(part.drained for part in parts)
        self._ctx.counters.count(f"push.failed.{error.kind.value}")
        self.handle.error = error
        self._tell_failed(error, drained=drained, now=now)
        event = Failed(
            transfer_id=self.handle.transfer_id,
            role=Role.PRODUCER,
            kind=error.kind,
            error=error,
            blocks=self._block_ids(),
            drained=drained,
            fresh_blocks=error.fresh_blocks,
        )
        if drained:
            self._end(now)
        else:
            self.draining = Draining(
                self._ctx,
                self._producer.quarantine,
                handle=self.handle,
                blocks=self._block_ids(),
                links=[t.link for t in self._targets if t.link is not None],
                op=Op.WRITE,
                peers_write=False,
                over=partial(undrained_over, parts),
                peers=partial(undrained_peers, parts),
                abandon=self._abandon,
                is_drained=lambda: all(part.drained for part in parts),
                on_fenced=lambda: None,
                free=lambda at: self._drained_at_last(error, at),
                ended=self._producer.draining_ended,
                now=now,
            )
            self._producer.draining_began(self.draining)
        self.handle._finish(
            TransferState.FAILED, drained=drained, tell=lambda: self._ctx.emit(event, self.handle)
        )

    def _drained_at_last(self, error: TransferError, now: float) -> None:
        if not self._unproven:
            self._tell_failed(error, drained=True, now=now)
        self._end(now)

    def _tell_failed(self, error: TransferError, *, drained: bool, now: float) -> None:
        for target in self._targets:
            if target.ref is None or target.link is None:
                continue
            try:
                box = self._mailbox(target, target.link)
            except (InvalidInputError, CapacityError):
                self._ctx.counters.count("push_failed.not_sent")
                continue
            box.mail(
                wire.PushFailed(
                    target.ref,
                    error.kind.value,
                    error.message[:4096],
                    drained,
                    True,
                    left=sorted(undrained_over(target.parts, target.link)),
                    fresh=error.fresh_blocks,
                ),
                now=now,
                until=now + self._ctx.timeouts.ack + self._ctx.timeouts.drain,
                to=target.link.incarnation,
            )

    def _mailbox(self, target: _Target, link: Link) -> Mailbox:
        """Also of a consumer whose link has ended: our fence ends it, and is the proof it needs."""
        if link.usable or link.address:
            return link.letterbox()
        return self._producer.links.mailboxes.dial(target.endpoint.address)

    def _abandon(self) -> None:
        """Our user takes the blocks back without proof; the consumers' users have not."""
        self._unproven = True
        for part in self._parts():
            part.abandon()

    def _block_ids(self) -> BlockIds:
        groups = max((len(spec.blocks) for spec in self._specs), default=0)
        out: list[tuple[int, ...]] = []
        for group in range(groups):
            ids = [s.blocks[group].ids for s in self._specs if group < len(s.blocks)]
            out.append(tuple(np.unique(np.concatenate(ids)).tolist()) if ids else ())
        return tuple(out)

    def _end(self, now: float) -> None:
        self.ended = True
        self.draining = None
        for part in self._parts():
            part.release()
        for target in self._targets:
            if target.link is not None:
                target.link.unwatch(self)
        self._ctx.forget(self)
        self._producer.push_ended(self, now)


def _blocks(group: wire.BlocksWire) -> Blocks:
    ids = wire.unpack_ids(group.ids)
    if group.positions is None:
        return Blocks.unplaced(ids, placeholder=-1)
    return Blocks.placed(wire.unpack_ids(group.positions), ids, placeholder=-1)


def _session(link: Link) -> int:
    return link.hello.session if link.hello is not None else 0


def _check_visibility(link: Link) -> None:
    """An engine whose DONE only says "accepted" proves nothing that could be sealed.

    Raises:
        InvalidInputError: it is one; nothing was posted.
    """
    transport = link.transport
    if transport is None or transport.capabilities.visible(Op.WRITE) is not Visibility.ACCEPTED:
        return
    raise InvalidInputError(
        f"{transport.name} reports a WRITE as done once it was accepted, before the bytes are "
        "there, and nothing tells when they are",
        next_step="pull instead, or use an engine whose writes are acknowledged",
    )
