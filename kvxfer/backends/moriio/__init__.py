"""MoRI-IO, AMD's RDMA engine. Nothing here loads the engine before a transport is made."""

from kvxfer.backends.moriio.config import MoriioConfig, PollMode
from kvxfer.backends.moriio.transport import MoriioTransport

__all__ = ["MoriioConfig", "MoriioTransport", "PollMode"]
