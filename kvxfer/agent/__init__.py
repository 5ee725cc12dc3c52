"""The facade that connectors hold: ``Agent`` (worker half) and ``SchedulerAgent``."""

from kvxfer.agent.agent import Agent
from kvxfer.agent.config import AgentConfig, Progress
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.scheduler import SchedulerAgent

__all__ = [
    "Agent",
    "AgentConfig",
    "Progress",
    "SchedulerAgent",
    "TransferHandle",
    "TransferState",
]
