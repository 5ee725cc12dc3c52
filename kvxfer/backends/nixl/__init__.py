"""NIXL, NVIDIA's transfer library, over UCX. Nothing here loads it before a transport is made."""

from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.transport import NixlTransport

__all__ = ["NixlConfig", "NixlTransport"]
