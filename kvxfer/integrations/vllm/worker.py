"""The connector in one vLLM worker: carries orders out and says what became of them."""

from __future__ import annotations

import logging

from kvxfer.agent import Agent
from kvxfer.agent.orders import Report
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
from kvxfer.core.topology import Ranks
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Load, Reports, Step

__all__ = ["WorkerHalf"]

logger = logging.getLogger(__name__)

_WORTH_A_LINE = (Failed, Quarantined, Expired, PeerDown)


class WorkerHalf:
    """Owns the agent of this rank. Called on vLLM's step thread; nothing here waits but set-up."""

    def __init__(self, config: ConnectorConfig, *, ranks: Ranks, fingerprint: str) -> None:
        self.agent = Agent(
            config.transport(),
            ranks=ranks,
            config=config.agent(f"vllm-tp{ranks.tp_rank}", fingerprint),
            control=config.control,
            timeouts=config.timeouts,
        )
        self._holds: dict[str, str] = {}
        self._loads: dict[str, Load] = {}
        self._failed: set[int] = set()
        self._reports: list[Report] = []

    def execute(self, step: Step) -> None:
        """Start what the scheduler ordered."""
        self._holds.update(step.holds)
        self._loads.update(step.loads)
        self.agent.execute(step.orders)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks are free again, and requests whose load has ended, once each.

        A failed load ends only when nothing can land in its blocks any more.
        """
        sent: set[str] = set()
        loaded: set[str] = set()
        report = self.agent.report()
        if report.events:
            self._reports.append(report)
        for event in report.events:
            if isinstance(event, _WORTH_A_LINE):
                why = getattr(event, "error", None) or getattr(event, "reason", "")
                logger.warning("kvxfer %s %s: %s", type(event).__name__, event.transfer_id, why)
            match event:
                case Sent() | Declined() | Expired() | Failed(role=Role.PRODUCER):
                    if event.transfer_id in self._holds:
                        sent.add(self._holds.pop(event.transfer_id))
                case Received():
                    self._ended(event, loaded, failed=False)
                case Failed(drained=True) | Drained(role=Role.CONSUMER):
                    self._ended(event, loaded, failed=True)
        return sent, loaded

    def take_failed_blocks(self) -> set[int]:
        """Blocks without data, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_reports(self) -> Reports | None:
        """For the scheduler half, since the last call."""
        reports, self._reports = self._reports, []
        return Reports(tuple(reports)) if reports else None

    def _ended(self, event: Event, loaded: set[str], *, failed: bool) -> None:
        load = self._loads.pop(event.transfer_id, None)
        if load is not None:
            loaded.add(load.request_id)
            if failed:
                self._failed.update(load.block_ids)
