"""The connector in one vLLM worker: carries orders out and says what became of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from kvxfer.agent import Agent
from kvxfer.agent.caches import LayerCache
from kvxfer.agent.orders import Report, SealOrder
from kvxfer.core.clock import Clock, SystemClock
from kvxfer.core.events import (
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    PeerDown,
    Quarantined,
    Received,
    Role,
    Sent,
)
from kvxfer.core.remembered import Remembered
from kvxfer.core.topology import Ranks
from kvxfer.errors import ErrorKind, TransferError
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Chunk, Load, Reports, Step
from kvxfer.integrations.vllm.stats import Tally

if TYPE_CHECKING:
    from kvxfer.agent.push import Readiness

__all__ = ["Finished", "WorkerHalf"]

logger = logging.getLogger(__name__)

_WORTH_A_LINE = (Failed, Quarantined, Expired, PeerDown)
_HEARTBEAT = 0.5
"""Seconds between reports in which nothing happened: they say that this worker lives, which is
what keeps holds alive that readers renew."""


@attrs.define
class Finished:
    """What has ended since the last look, once each, by request id."""

    sent: set[str] = attrs.field(factory=set)
    """Their blocks are free again."""
    loaded: set[str] = attrs.field(factory=set)
    """Their load has ended, well or not."""
    failed: set[str] = attrs.field(factory=set)
    """Of those, the ones without data that ``WorkerHalf.take_failed_blocks`` does not tell of."""


class WorkerHalf:
    """Owns the agent of this rank. Called on vLLM's step thread, where only ``preempted`` waits."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        ranks: Ranks,
        fingerprint: str,
        groups: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.transport = config.transport()
        self.agent = Agent(
            self.transport,
            ranks=ranks,
            config=config.agent(f"vllm-tp{ranks.tp_rank}", fingerprint),
            control=config.control,
            timeouts=config.timeouts,
        )
        self.tally = Tally()
        self._config = config
        self._one_group = groups == 1
        self._clock = clock or SystemClock()
        self._holds: dict[str, str] = {}
        self._loads: dict[str, tuple[Load, float]] = {}
        """By transfer id, with when it began."""
        limits = self.agent.config.limits
        self._over: Remembered[str, bool] = Remembered(
            capacity=limits.early, ttl=limits.remembered_ttl
        )
        """Pushes that ended before their requests did."""
        self._sent: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports: list[Report] = []
        self._reported = float("-inf")

    # ---- the caches --------------------------------------------------------------------------

    def register(self, layers: Sequence[LayerCache]) -> None:
        """Register the KV caches, again if they were unregistered."""
        if self._config.share_caches:
            storages = {layer.buffer.untyped_storage().data_ptr(): layer for layer in layers}
            for layer in storages.values():
                self.transport.share_storage(layer.buffer)  # type: ignore[attr-defined]
        self.agent.register_kv_caches(layers)

    def unregister(self) -> None:
        """Wait until nobody uses the KV caches any more, and let go of them.

        Raises:
            TransferError: transfers are still under way after a lease and all time-outs.
        """
        times = self._config.timeouts
        patience = self._config.lease + self._config.lease_margin + times.transfer + times.drain
        if not self.agent.drain(patience):
            raise TransferError(
                f"transfers still use the KV caches after {patience:.0f} s",
                kind=ErrorKind.TIMEOUT,
                next_step="look at the snapshot; what is in quarantine ends with the process only",
            )
        self.agent.unregister_kv_caches()

    # ---- each step ---------------------------------------------------------------------------

    def preempted(self, transfer_ids: Iterable[str]) -> None:
        """Their blocks are about to be overwritten: nothing may be pushed from them after this."""
        for transfer_id in transfer_ids:
            self.agent.abort_push(transfer_id)

    def save(self, chunks: Iterable[Chunk], layer: str, ready: Readiness | None) -> None:
        """The forward has filled these blocks of one layer, once ``ready`` says so."""
        self.agent.execute(attrs.evolve(c.push, layers=(layer,), ready=ready) for c in chunks)

    def seal(self, chunks: Iterable[Chunk]) -> None:
        """All layers have been saved."""
        self.agent.execute(SealOrder(transfer_id=c.push.transfer_id) for c in chunks if c.last)

    def execute(self, step: Step) -> None:
        """Start what the scheduler ordered."""
        now = self._clock.now()
        for transfer_id, request_id in step.holds.items():
            if self._over.pop(transfer_id):
                self._sent.add(request_id)
            else:
                self._holds[transfer_id] = request_id
        self._loads.update({tid: (load, now) for tid, load in step.loads.items()})
        self.agent.execute(step.orders)

    def finished(self) -> Finished:
        """What has ended. A failed load ends only when nothing can land in its blocks any more."""
        found, self._sent = Finished(sent=self._sent), set()
        now = self._clock.now()
        self._over.expire(now)
        report = self.agent.report()
        if report.events or now >= self._reported + _HEARTBEAT:
            self._reports.append(report)
            self._reported = now
        for event in report.events:
            self.tally.count(event)
            if isinstance(event, _WORTH_A_LINE):
                why = getattr(event, "error", None) or getattr(event, "reason", "")
                logger.warning("kvxfer %s %s: %s", type(event).__name__, event.transfer_id, why)
            match event:
                case Sent() | Declined() | Expired() | Failed(role=Role.PRODUCER):
                    if event.transfer_id in self._holds:
                        found.sent.add(self._holds.pop(event.transfer_id))
                    else:
                        self._over.add(event.transfer_id, True, now)
                case Received():
                    began = self._end_load(event, found)
                    if began is not None:
                        self.tally.loaded(event.nbytes, now - began)
                case Failed(drained=True) | Drained(role=Role.CONSUMER):
                    self._end_load(event, found, blocks_are_ours=True)
                case Quarantined(role=Role.CONSUMER):
                    self._end_load(event, found, blocks_are_ours=False)
        return found

    def take_failed_blocks(self) -> set[int]:
        """Blocks without data, since the last call. Of models with one group."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_reports(self) -> Reports | None:
        """For the scheduler half, since the last call."""
        reports, self._reports = self._reports, []
        return Reports(tuple(reports)) if reports else None

    def _end_load(
        self, event: Event, found: Finished, *, blocks_are_ours: bool | None = None
    ) -> float | None:
        """When it began; None if it has ended before. ``blocks_are_ours`` is None if it is well."""
        load, began = self._loads.pop(event.transfer_id, (None, None))
        if load is None:
            return None
        found.loaded.add(load.request_id)
        if blocks_are_ours is None:
            return began
        if blocks_are_ours and self._one_group:
            self._failed_blocks.update(load.blocks[0])  # the local prefix stays valid
        else:
            found.failed.add(load.request_id)
        return began
