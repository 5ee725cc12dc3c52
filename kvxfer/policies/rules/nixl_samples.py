"""Samples for ``nixl``: classes as seen with nixl 1.5.1, between two processes over UCX tcp."""

from __future__ import annotations

from kvxfer.core.verdict import EngineError
from kvxfer.policies.rules.samples import Sample

__all__ = ["SAMPLES"]

_BASES = ("builtins.Exception", "builtins.BaseException")

_RAISED = (
    ("nixl.not_found", "nixlNotFoundError", "NIXL_ERR_NOT_FOUND"),
    ("nixl.invalid_param", "nixlInvalidParamError", "NIXL_ERR_INVALID_PARAM"),
    ("nixl.mismatch", "nixlMismatchError", "NIXL_ERR_MISMATCH"),
    ("nixl.backend", "nixlBackendError", "NIXL_ERR_BACKEND"),
    ("nixl.repost_active", "nixlRepostActiveError", "NIXL_ERR_REPOST_ACTIVE"),
    ("nixl.remote_disconnect", "nixlRemoteDisconnectError", "NIXL_ERR_REMOTE_DISCONNECT"),
)

SAMPLES: tuple[Sample, ...] = (
    *(
        Sample(
            rule=rule,
            error=EngineError(
                backend="nixl", message=text, exception=(f"nixl_cu12._bindings.{name}", *_BASES)
            ),
        )
        for rule, name, text in _RAISED
    ),
    Sample(rule="nixl.bad_operation", error=EngineError.of("nixl", KeyError("COPY"))),
    Sample(
        rule="nixl.empty_list",
        error=EngineError.of("nixl", IndexError("list index out of range")),
    ),
)
