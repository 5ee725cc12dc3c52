"""The connector over a transport and a control channel that go wrong when a test says so.

vLLM loads it by name, as it loads the real one.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

from kvxfer.agent import agent as agent_module
from kvxfer.cli.demo.lossy import LossyChannel
from kvxfer.core.channel import Channel
from kvxfer.core.transport import Transport
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.connector import KvxferConnector
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint
from kvxfer.testing.faulty import FaultyTransport

__all__ = ["FaultyConnector"]

LATE_SECONDS = 0.05


class FaultyConnector(KvxferConnector):
    """Behaves well until ``inject``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transport, channel = ConnectorConfig.transport, agent_module.make_channel
        self.transports: list[FaultyTransport] = []
        self.channels: list[LossyChannel] = []

        def faulty(config: ConnectorConfig) -> Transport:
            self.transports.append(FaultyTransport(transport(config)))
            return self.transports[-1]

        def lossy(*channels: Any) -> Channel:
            made = LossyChannel(channel(*channels), lose=0.0, duplicate=0.0, rng=random.Random(1))
            self.channels.append(made)
            return made

        with (
            mock.patch.object(ConnectorConfig, "transport", faulty),
            mock.patch.object(agent_module, "make_channel", lossy),
        ):
            super().__init__(vllm_config, role, kv_cache_config)

    def inject(
        self,
        *,
        refuse: float = 0.0,
        late: float = 0.0,
        lose: float = 0.0,
        hold: int = 0,
        unfenced: bool = False,
    ) -> None:
        """From now on.

        Args:
            refuse, late: probabilities per post: it is refused, or lands ``LATE_SECONDS`` later.
            lose: probability per control message: it is lost; and the same that it comes twice.
            hold: so many of the next posts land only when they are released.
            unfenced: no fence can be had.
        """
        chances = {
            Fault(kind=FaultKind.REFUSE): refuse,
            Fault(kind=FaultKind.LATE, after=LATE_SECONDS): late,
        }
        for transport in self.transports:
            transport.plan = FaultPlan(
                posts=[Fault(kind=FaultKind.LATE)] * hold,
                chances={
                    FaultPoint.POST: chances,
                    FaultPoint.FENCE: {Fault(kind=FaultKind.FAIL): float(unfenced)},
                },
                rng=random.Random(2),
            )
        for channel in self.channels:
            channel._lose = channel._duplicate = lose

    def injected(self) -> dict[str, int]:
        """What went wrong so far."""
        return {
            "refused": sum(t.counters.get("post.refuse", 0) for t in self.transports),
            "late": sum(t.counters.get("post.late", 0) for t in self.transports),
            "held": sum(len(t.held) for t in self.transports),
            "lost": sum(c.lost for c in self.channels),
            "repeated": sum(c.duplicated for c in self.channels),
        }

    def release(self) -> int:
        return sum(t.release() for t in self.transports)
