"""Mooncake's transfer engine. Nothing here loads it before a transport is made."""

from kvxfer.backends.mooncake.config import MooncakeConfig, Protocol
from kvxfer.backends.mooncake.transport import MooncakeTransport

__all__ = ["MooncakeConfig", "MooncakeTransport", "Protocol"]
