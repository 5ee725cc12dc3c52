"""WRITE, consumer side: destination blocks that producer ranks push into.

Drained here is what producers prove: a seal (all its writes were acknowledged), a ``PushFailed``
that says so, or our own fence of that peer.  Our silence proves nothing: bytes already sent may
still land.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvxfer.agent.draining import Draining
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.part import FRESH_BLOCKS
from kvxfer.core import wire
from kvxfer.core.acks import Ack, AckOutcome, AckReconciler
from kvxfer.core.events import BlockIds, Failed, Received, Role
from kvxfer.core.verdict import Op
from kvxfer.errors import CapacityError, ErrorKind, InvalidInputError, TransferError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvxfer.agent.consumer import Consumer
    from kvxfer.agent.context import Context
    from kvxfer.agent.links import Link
    from kvxfer.core.batch import Int64Array
    from kvxfer.core.layout import Blocks

__all__ = [
    "SEALED_SINCE",
    "SESSIONS_SINCE",
    "Accepting",
    "destinations",
    "refuse_seal",
    "tell_sealed",
]

SEALED_SINCE = 2
"""The wire version from which on the consumer says what became of a seal."""
SESSIONS_SINCE = 2
"""And the one from which on it says for which of its connections it grants."""


@attrs.define(eq=False)
class _Writer:
    """One producer rank that was told our destination blocks."""

    link: Link
    sealed: bool = False
    drained: bool = False
    left: frozenset[str] | None = None
    """The backends over which something of it may still land; None: any."""


class Accepting:
    """One accepted transfer. Progress thread only, but for the handle."""

    def __init__(
        self,
        ctx: Context,
        consumer: Consumer,
        *,
        handle: TransferHandle,
        epoch: int,
        blocks: tuple[Blocks, ...],
        pin: int,
        writers: Collection[int] | None,
        expected_nbytes: int,
        duration: float,
        now: float,
    ) -> None:
        self._ctx = ctx
        self._consumer = consumer
        self.handle = handle
        self.ref = wire.Ref(handle.transfer_id, ctx.incarnation, epoch)
        self._blocks = blocks
        self._destinations = destinations(blocks)
        self._token = pin
        self._deadline = now + duration
        self._writers: dict[str, _Writer] = {}
        self._seals = AckReconciler()
        self._seals.expect(
            handle.transfer_id, sources=writers, deadline=float("inf"), now=now, epoch=epoch
        )
        self._payload: tuple[int, bytes] = (2**62, b"")
        self._nbytes = 0
        self._expected_nbytes = expected_nbytes
        """At least so many bytes must have been written when all have sealed."""
        self._complete = False
        """All ranks that had to seal did; what other writers may still do is waited for."""
        self.error: TransferError | None = None
        self.draining: Draining | None = None
        self.ended = False
        ctx.at(self, self._deadline)

    def step(self, now: float) -> None:
        if self.ended:
            return
        if self.draining is not None:
            self.draining.step(now)
            return
        if self.error is None and now >= self._deadline:
            self.fail(
                TransferError(
                    f"not sealed by its deadline; {self._state_of_writers()}",
                    kind=ErrorKind.TIMEOUT,
                ),
                now,
            )
        for writer in self._writers.values():
            if self.error is None and not writer.link.usable and not writer.drained:
                self.fail(
                    TransferError(
                        f"the producer was lost before it sealed: {writer.link.error}",
                        kind=writer.link.kind_of_failure(),
                    ),
                    now,
                )
        if self.error is not None:
            self._publish_failure(now)
        elif self._complete and self._drained():
            self._publish_success(now)
        else:
            self._ctx.at(self, self._deadline)

    def _state_of_writers(self) -> str:
        if not self._writers:
            return "no producer asked for the blocks"
        sealed = sum(w.sealed for w in self._writers.values())
        return f"{len(self._writers)} producers were granted, {sealed} sealed"

    # ---- messages ----------------------------------------------------------------------------

    def grant(self, link: Link, now: float) -> None:
        """A producer rank asked, or was named: tell it where to write."""
        if self.error is not None or self.ended or self.draining is not None:
            return
        accept = wire.Accept(
            self.ref,
            [_blocks_wire(b) for b in self._blocks],
            max(0.0, self._deadline - now),
            link.session,
        )
        if link.incarnation in self._writers:
            # It asks although it was told: it may not have been pushing yet.
            link.mailbox.send(accept)
            return
        self._writers[link.incarnation] = _Writer(link)
        link.when_changed(self)
        link.mailbox.mail(accept, now=now, until=self._deadline, to=link.incarnation)

    def on_seal(
        self, link: Link, seal: wire.Seal, source: int, expected: frozenset[int], now: float
    ) -> bool:
        """A producer rank says that everything of it has landed.

        False if it must not be confirmed: a producer of version 1 takes that for success.
        """
        writer = self._writers.get(link.incarnation)
        if writer is None:
            self._ctx.counters.count("seals.stranger")
            error = TransferError("these blocks were not granted to it", kind=ErrorKind.STALE)
            return refuse_seal(self._ctx, link, seal.ref, error, now)
        again = writer.sealed
        writer.sealed = writer.drained = True
        if self.error is not None:
            self._ctx.soon(self)
            return refuse_seal(self._ctx, link, seal.ref, self.error, now)
        if again:
            return True
        result = self._seals.record(
            Ack(
                transfer_id=seal.ref.transfer, source=source, epoch=seal.ref.epoch, sources=expected
            ),
            now,
        )
        if result.outcome in (AckOutcome.PROGRESS, AckOutcome.COMPLETE):
            self._nbytes += seal.nbytes
            if seal.payload and source < self._payload[0]:
                self._payload = (source, seal.payload)
        if result.outcome is AckOutcome.COMPLETE:
            self._all_sealed(now)
        elif result.outcome is not AckOutcome.PROGRESS:
            # Others have sealed, or this rank was none of theirs, and yet it wrote as well.
            self.fail(_two_producers(), now)
        self._ctx.soon(self)
        # ``fail`` has told a producer that speaks version 2; the other must not take it for done.
        return self.error is None or link.version >= SEALED_SINCE

    def _all_sealed(self, now: float) -> None:
        """Every rank sealed. Others that were granted must not write into what we hand out."""
        if self._nbytes < self._expected_nbytes:
            self.fail(
                TransferError(
                    f"sealed with {self._nbytes} bytes, but the accepted blocks have "
                    f"{self._expected_nbytes}",
                    kind=ErrorKind.INVALID,
                    next_step="push every layer and block, or accept with uncovered_local",
                ),
                now,
            )
            return
        self._complete = True
        self._cancel_others(ErrorKind.STALE, "another producer has sealed", now)
        self._ctx.soon(self)

    def _tell_sealed(self, error: TransferError | None, now: float) -> None:
        """Tell those who sealed what became of it."""
        for writer in self._writers.values():
            if writer.sealed and writer.link.version >= SEALED_SINCE:
                tell_sealed(self._ctx, writer.link, self.ref, error, now)

    def _cancel_others(self, kind: ErrorKind, message: str, now: float) -> None:
        """Have every writer that may still write stop, and say when it is drained."""
        for writer in self._writers.values():
            if not writer.drained:
                cancel = wire.Cancel(self.ref, kind.value, message[:4096])
                until = now + self._ctx.timeouts.drain + self._ctx.timeouts.ack
                _mail(self._ctx, writer.link, cancel, now=now, until=until)

    def on_push_failed(
        self, sender: str, message: wire.PushFailed, kind: ErrorKind, now: float
    ) -> None:
        """A producer rank gave up, or, later, tells that it is drained."""
        writer = self._writers.get(sender)
        if writer is None:
            return
        writer.drained = writer.drained or message.drained
        writer.left = frozenset(message.left) or None
        if not message.began and message.drained and not writer.sealed:
            # It never began: the others decide.
            writer.link.unwatch(self)
            del self._writers[sender]
        elif self._complete and self.draining is None:
            self.fail(_two_producers(), now)
        elif self.draining is None:
            if message.fresh:
                self._ctx.counters.count("failover.fresh_blocks")
            self.fail(
                TransferError(
                    f"the producer failed: {message.message}",
                    kind=kind,
                    next_step=FRESH_BLOCKS if message.fresh else "",
                    fresh_blocks=message.fresh,
                ),
                now,
            )
        self._ctx.soon(self)

    # ---- the end -----------------------------------------------------------------------------

    def fail(self, error: TransferError, now: float) -> None:
        """Give up: every producer that may still write is told to stop."""
        if self.error is not None or self.ended or self.draining is not None:
            return
        self.error = self.handle.error = error  # known now, published when all is over
        self._tell_sealed(error, now)
        self._cancel_others(error.kind, error.message, now)
        self._ctx.soon(self)

    def _drained(self) -> bool:
        return all(writer.drained for writer in self._writers.values())

    def _left_over(self, link: Link) -> frozenset[str] | None:
        """Over which backends that producer may still write here; None: any."""
        writer = self._writers.get(link.incarnation)
        return None if writer is None else writer.left

    def _fenced(self) -> None:
        for writer in self._writers.values():
            writer.drained = True

    def _block_ids(self) -> BlockIds:
        return tuple(tuple(ids.tolist()) for ids in self._destinations)

    def _publish_success(self, now: float) -> None:
        self.handle.nbytes = self._nbytes
        self.handle.payload = self._payload[1]
        self._ctx.counters.count("accept.bytes", self._nbytes)
        self._tell_sealed(None, now)
        self._end(now)
        event = Received(
            transfer_id=self.handle.transfer_id,
            nbytes=self._nbytes,
            payload=self._payload[1],
        )
        self.handle._finish(
            TransferState.DONE, drained=True, tell=lambda: self._ctx.emit(event, self.handle)
        )

    def _publish_failure(self, now: float) -> None:
        error = self.error
        assert error is not None
        drained = self._drained()
        self._ctx.counters.count(f"accept.failed.{error.kind.value}")
        self.handle.error = error
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
            self._end(now)
        else:
            self.draining = Draining(
                self._ctx,
                self._consumer.quarantine,
                handle=self.handle,
                blocks=self._block_ids(),
                links=[w.link for w in self._writers.values() if not w.drained],
                op=Op.WRITE,
                peers_write=True,
                over=self._left_over,
                peers=lambda link: (),
                abandon=lambda: None,
                is_drained=self._drained,
                on_fenced=self._fenced,
                free=self._end,
                ended=self._consumer.draining_ended,
                now=now,
            )
            self._consumer.draining_began(self.draining)
        self.handle._finish(
            TransferState.FAILED, drained=drained, tell=lambda: self._ctx.emit(event, self.handle)
        )

    def _end(self, now: float) -> None:
        self.ended = True
        self.draining = None
        self._consumer.pins.unpin(self._token, self._destinations)
        for writer in self._writers.values():
            writer.link.unwatch(self)
        self._ctx.forget(self)
        self._consumer.accept_ended(self, now)


def _two_producers() -> TransferError:
    return TransferError(
        "two producers wrote into the same blocks: what they hold is not known",
        kind=ErrorKind.STALE,
    )


def tell_sealed(
    ctx: Context, link: Link, ref: wire.Ref, error: TransferError | None, now: float
) -> None:
    """Tell a producer rank what became of what it sealed; None: received."""
    kind, message = ("", "") if error is None else (error.kind.value, error.message[:4096])
    sealed = wire.Sealed(ref, error is None, kind, message)
    _mail(ctx, link, sealed, now=now, until=now + ctx.timeouts.ack)


def refuse_seal(ctx: Context, link: Link, ref: wire.Ref, error: TransferError, now: float) -> bool:
    """It was sealed in vain. Returns whether the seal may be confirmed.

    Version 1 knows no such answer and takes a confirmation for success: there it is cancelled.
    """
    ctx.counters.count("seals.refused")
    if link.version >= SEALED_SINCE:
        tell_sealed(ctx, link, ref, error, now)
        return True
    cancel = wire.Cancel(ref, error.kind.value, error.message[:4096])
    _mail(ctx, link, cancel, now=now, until=now + ctx.timeouts.ack)
    return False


def _mail(ctx: Context, link: Link, message: wire.Message, *, now: float, until: float) -> None:
    """Also to a producer whose link has ended: it may still wait for the answer, or write."""
    try:
        box = link.letterbox()
    except (InvalidInputError, CapacityError):
        ctx.counters.count("messages.undeliverable")
        return
    box.mail(message, now=now, until=until, to=link.incarnation)


def destinations(blocks: Sequence[Blocks]) -> list[Int64Array]:
    """Block ids per group that are really written: no placeholders."""
    return [b.ids if b.holes is None else b.ids[~b.holes] for b in blocks]


def _blocks_wire(blocks: Blocks) -> wire.BlocksWire:
    ids = blocks.ids
    if blocks.holes is not None:
        ids = ids.copy()
        ids[blocks.holes] = -1
    positions = blocks.positions
    return wire.BlocksWire(
        wire.pack_ids(ids), None if positions is None else wire.pack_ids(positions)
    )
