"""What happens to destination blocks after a failure: drained by proof, fenced, or quarantined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.events import BlockIds, Drained, Quarantined, Role
from kvxfer.core.inflight import QuarantineEntry
from kvxfer.core.observations import QuarantineLeft
from kvxfer.core.verdict import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.agent.context import Context
    from kvxfer.agent.handles import TransferHandle
    from kvxfer.agent.links import Link
    from kvxfer.core.inflight import Quarantine
    from kvxfer.core.pollable import Pollable
    from kvxfer.core.transport import Fence, Peer

__all__ = ["Draining"]


class Draining:
    """One failed transfer whose blocks something may still touch.

    Until ``Timeouts.drain`` has passed it waits for proof.  Then it asks for a fence of the peers
    concerned.  What neither proves goes into quarantine, and leaves it when the proof arrives
    after all, or by ``reclaim``.

    ``peers_write``: it is the peers that write into our memory (WRITE, consumer side).  ``over``
    says over which backends something may still move between us and that peer; None: over any.
    ``peers``: the connections of ours to it on which something is not proven to be over.
    """

    def __init__(
        self,
        ctx: Context,
        quarantine: Quarantine,
        *,
        handle: TransferHandle,
        blocks: BlockIds,
        links: Sequence[Link],
        op: Op,
        peers_write: bool,
        over: Callable[[Link], frozenset[str] | None],
        peers: Callable[[Link], Sequence[Peer]],
        is_drained: Callable[[], bool],
        on_fenced: Callable[[], None],
        free: Callable[[float], None],
        abandon: Callable[[], None],
        ended: Callable[[Draining], None],
        now: float,
    ) -> None:
        self._ctx = ctx
        self._quarantine = quarantine
        self.handle = handle
        self._blocks = blocks
        self._links = links
        self._op = op
        self._peers_write = peers_write
        self._over = over
        self._peers = peers
        self._fenced_over: dict[Link, frozenset[str] | None] = {}
        self._is_drained = is_drained
        self._on_fenced = on_fenced
        self._free = free
        self._abandon = abandon
        self._ended = ended
        self._deadline = now + ctx.timeouts.drain
        self._fence_deadline = self._deadline + ctx.timeouts.drain
        self._fences: list[tuple[Link, Pollable[Fence]]] | None = None
        self._reasons: list[str] = []
        self._only_a_source = op is Op.WRITE and not peers_write
        """The blocks are read and never written."""
        self._left: set[Link] = set()
        """Bytes that were sent there may still land; the connection goes on."""
        self.quarantined = False
        self._quarantined_at = 0.0
        ctx.at(self, self._deadline)

    @property
    def transfer_id(self) -> str:
        return self.handle.transfer_id

    @property
    def role(self) -> Role:
        return self.handle.role

    def step(self, now: float) -> None:
        """Called when an attempt or message of this transfer changed something, or when due."""
        if self._is_drained():
            self._finish("fence" if self._fences is not None else "proof", now)
            return
        if now < self._deadline:
            self._ctx.at(self, self._deadline)
            return
        if self.quarantined and not self._fences:
            return
        if self._fences is None:
            self._begin_fences()
        assert self._fences is not None
        pending = []
        for link, fence in self._fences:
            answer, error = fence.poll()
            if answer is None and error is None:
                pending.append((link, fence))
            elif answer is None:
                self._reasons.append(str(error))
            elif self._only_a_source and not answer.done and answer.source_done:
                self._left.add(link)
            elif not (answer.done if self._op is Op.WRITE else answer.ours_done):
                self._reasons.append(answer.reason)
        self._fences = pending
        if not pending and not self._reasons:
            if self._left:
                self._abandon()  # what was sent is the receiver's to fence; the source is not read
            self._on_fenced()
            for link in [link for link in self._links if link not in self._left]:
                link.fenced(self._fenced_over[link], now)
            if self._is_drained():
                self._finish("fence", now)
                return
            # A post that has not returned from the engine may still post: no fence covers it.
        if not self._reasons and now < self._fence_deadline:
            self._ctx.at(self, now + self._ctx.config.pump_interval)
            return
        if not self.quarantined:
            self._enter_quarantine(now)
        if pending and not self._reasons:  # a late answer is as good a proof
            self._ctx.at(self, now + self._ctx.config.idle_interval)

    def _begin_fences(self) -> None:
        self._fences = []
        for link in self._links:
            # Where there is no connection from here, nothing of ours was posted. A peer that writes
            # needs none of ours: then there may be nothing that we could fence.
            over = self._fenced_over[link] = self._over(link)
            fences, reasons = link.begin_fences(
                they_write=self._peers_write, over=over, also=self._peers(link)
            )
            self._fences += [(link, fence) for fence in fences]
            self._reasons += reasons
            self._ctx.counters.count("fences.begun", len(fences))

    def _enter_quarantine(self, now: float) -> None:
        reason = "; ".join(self._reasons) or "no proof and no fence by the drain deadline"
        self.quarantined = True
        self._quarantined_at = now
        self._quarantine.add(
            id(self),
            QuarantineEntry(
                transfer_id=self.transfer_id, blocks=self._blocks, since=now, reason=reason
            ),
        )
        self._ctx.log.problem(
            "quarantined",
            "%d blocks went into quarantine, %d transfers are in it: %s",
            sum(map(len, self._blocks)),
            len(self._quarantine),
            reason,
            role=self.role.value,
            transfer=self.transfer_id,
        )
        self._ctx.emit(
            Quarantined(
                transfer_id=self.transfer_id,
                role=self.role,
                blocks=self._blocks,
                reason=reason,
            ),
            self.handle,
        )

    def reclaim(self, now: float) -> None:
        """The user takes the blocks back on their own responsibility."""
        self._ctx.counters.count("quarantine.reclaimed")
        self._abandon()
        self._finish("reclaim", now)

    def _finish(self, by: str, now: float) -> None:
        self._quarantine.remove(id(self))
        self._free(now)
        self.handle.drained = True
        self._ctx.forget(self)
        self._ended(self)
        if self.quarantined:
            self._left_quarantine(by, now)
        self._ctx.emit(
            Drained(
                transfer_id=self.transfer_id,
                role=self.role,
                blocks=self._blocks,
                drained_by=by,
            ),
            self.handle,
        )

    def _left_quarantine(self, by: str, now: float) -> None:
        self._ctx.counters.count(f"quarantine.left.{by}")
        seconds = now - self._quarantined_at
        self._ctx.log.news(
            "quarantine_left",
            "blocks came out of quarantine after %.1f s by %s; %d transfers are in it",
            seconds,
            by,
            len(self._quarantine),
            role=self.role.value,
            transfer=self.transfer_id,
        )
        if self._ctx.observers:
            self._ctx.observe(
                QuarantineLeft(transfer_id=self.transfer_id, role=self.role, by=by, seconds=seconds)
            )
