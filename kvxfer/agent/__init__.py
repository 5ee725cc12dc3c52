"""The facade that connectors hold: ``Agent`` (worker half) and ``SchedulerAgent``."""

from kvxfer.agent.agent import Agent
from kvxfer.agent.config import AgentConfig, Progress
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.health import Health, Problem, Snapshot
from kvxfer.agent.scheduler import SchedulerAgent
from kvxfer.keeper.config import KeeperConfig

__all__ = [
    "Agent",
    "AgentConfig",
    "Health",
    "KeeperConfig",
    "Problem",
    "Progress",
    "SchedulerAgent",
    "Snapshot",
    "TransferHandle",
    "TransferState",
]
