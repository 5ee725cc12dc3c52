"""The vLLM connector.

vLLM loads it by name: ``kv_connector="KvxferConnector"`` with
``kv_connector_module_path="kvxfer.integrations.vllm"``.  Only the connector itself imports vLLM;
``ConnectorConfig``, and what ``caches`` and ``params`` hold, can be used without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.integrations.vllm.config import ConnectorConfig

if TYPE_CHECKING:
    from kvxfer.integrations.vllm.connector import KvxferConnector

__all__ = ["ConnectorConfig", "KvxferConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvxferConnector":
        from kvxfer.integrations.vllm.connector import KvxferConnector

        return KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
