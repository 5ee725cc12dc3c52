"""What travels between the halves, through vLLM."""

from __future__ import annotations

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.agent.orders import Order, Report, WorkerInfo
from kvxfer.integrations.pushes import Chunk

__all__ = ["Handshake", "Load", "Reports", "Step"]


@attrs.frozen
class Load:
    """Which request waits for a pull or push, and the blocks per group it has for it."""

    request_id: str
    blocks: tuple[tuple[int, ...], ...]


@attrs.frozen
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step: orders, and whose they are, by transfer id."""

    orders: list[Order]
    holds: dict[str, str]
    """Finished requests whose blocks wait for the end of a hold or push."""
    loads: dict[str, Load]
    chunks: list[Chunk]
    preempted: tuple[str, ...]
    """Pushes from blocks that are about to be overwritten."""


@attrs.frozen
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once: how this rank is reached."""

    info: WorkerInfo


@attrs.frozen
class Reports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, each step in which something happened."""

    reports: tuple[Report, ...]

    def aggregate(self, other: Reports) -> Reports:
        return Reports(self.reports + other.reports)
