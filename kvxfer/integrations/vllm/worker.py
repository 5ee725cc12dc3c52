"""The connector in one vLLM worker: carries orders out and says what became of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvxfer.agent import Agent
from kvxfer.agent.caches import LayerCache
from kvxfer.agent.orders import Report, SealOrder
from kvxfer.core.clock import Clock, SystemClock
from kvxfer.core.events import Expired, Failed, PeerDown, Quarantined
from kvxfer.core.limitedlog import LimitedLog
from kvxfer.core.topology import Ranks
from kvxfer.integrations.outcomes import Outcomes
from kvxfer.integrations.pushes import Chunk
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Load, Reports, Step
from kvxfer.integrations.vllm.stats import Tally

if TYPE_CHECKING:
    from kvxfer.agent.push import Readiness

__all__ = ["WorkerHalf"]

_WORTH_A_LINE = (Failed, Quarantined, Expired, PeerDown)
_HEARTBEAT = 0.5
"""Seconds between reports in which nothing happened: they say that this worker lives, which is
what keeps holds alive that readers renew."""
_SETTLE = 0.5
"""Seconds that a step waits for pushes out of blocks that it overwrites. Copies take milliseconds;
what takes longer is given up, and decode computes the prompt."""


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
        self.outcomes: Outcomes[Load] = Outcomes(self.agent.config.limits, self._clock)
        self._log = LimitedLog(logging.getLogger(__name__), self._clock)
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
            InvalidInputError: transfers still use them after a lease and all time-outs.
        """
        times = self._config.timeouts
        lease = self._config.lease + self._config.lease_margin
        self.agent.drain(lease + times.transfer + times.drain)
        self.agent.unregister_kv_caches()

    # ---- each step ---------------------------------------------------------------------------

    def preempted(self, transfer_ids: Iterable[str]) -> None:
        """Blocks that these push from are about to be overwritten: wait until they are read."""
        for transfer_id in transfer_ids:
            if not self.agent.settle_push(transfer_id, _SETTLE):
                self._log.problem("not_pushed", "%s is not pushed: preempted", transfer_id)

    def save(self, chunks: Iterable[Chunk], layer: str, ready: Readiness | None) -> None:
        """The forward has filled these blocks of one layer, once ``ready`` says so."""
        self.agent.execute(attrs.evolve(c.push, layers=(layer,), ready=ready) for c in chunks)

    def seal(self, chunks: Iterable[Chunk]) -> None:
        """All layers have been saved."""
        self.agent.execute(SealOrder(transfer_id=c.push.transfer_id) for c in chunks if c.last)

    def execute(self, step: Step) -> None:
        """Start what the scheduler ordered."""
        self.outcomes.begin(step.holds, step.loads)
        self.agent.execute(step.orders)

    def finished(self) -> KVConnectorTransferResults:
        """What has ended. A failed load ends only when nothing can land in its blocks any more."""
        report = self.agent.report()
        now = self._clock.now()
        if report.events or now >= self._reported + _HEARTBEAT:
            self._reports.append(report)
            self._reported = now
        for event in report.events:
            self.tally.count(event)
            if isinstance(event, _WORTH_A_LINE):
                why = getattr(event, "error", None) or getattr(event, "reason", "")
                kind = type(event).__name__
                self._log.problem("not_moved", "%s %s: %s", kind, event.transfer_id, why)
        sent, ends = self.outcomes.of(report.events)
        found = KVConnectorTransferResults(sent, set(), set())
        for end in ends:
            found.finished_recving.add(end.load.request_id)
            if end.nbytes is not None:
                self.tally.loaded(end.nbytes, end.seconds)
            elif end.drained and self._one_group:
                self._failed_blocks.update(end.load.blocks[0])  # the local prefix stays valid
            else:
                found.failed_recving.add(end.load.request_id)
        return found

    def take_failed_blocks(self) -> set[int]:
        """Blocks without data, since the last call. Of models with one group."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_reports(self) -> Reports | None:
        """For the scheduler half, since the last call."""
        reports, self._reports = self._reports, []
        return Reports(tuple(reports)) if reports else None
