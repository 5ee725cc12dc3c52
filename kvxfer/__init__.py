"""Moves KV-cache blocks between the prefill and the decode workers of a disaggregated LLM service.

The names below load on first use, so that ``import kvxfer`` costs next to nothing and loads no
dependency, optional or not.  Everything else has its home in a submodule, such as
``kvxfer.core.acks`` or ``kvxfer.core.layout``, and works without the rest.
"""

from __future__ import annotations

# As in typing, which would be nine tenths of what this module costs. Type checkers know the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from kvxfer.agent import (
        Agent,
        AgentConfig,
        Progress,
        SchedulerAgent,
        TransferHandle,
        TransferState,
    )
    from kvxfer.core.events import (
        BackendChanged,
        Declined,
        Drained,
        Event,
        Expired,
        Failed,
        Gone,
        PeerDown,
        PeerUp,
        Quarantined,
        Received,
        Role,
        Sent,
    )
    from kvxfer.core.layout import Blocks, KVLayout, KVSpec, StateLayout
    from kvxfer.core.offer import Offer
    from kvxfer.errors import ErrorKind, KvxferError, TransferError

__version__ = "0.1.0.dev0"

__all__ = [
    # the facade
    "Agent",
    "AgentConfig",
    "Progress",
    "SchedulerAgent",
    "TransferHandle",
    "TransferState",
    # what is moved
    "Blocks",
    "KVLayout",
    "KVSpec",
    "Offer",
    "StateLayout",
    # what happens
    "BackendChanged",
    "Declined",
    "Drained",
    "Event",
    "Expired",
    "Failed",
    "Gone",
    "PeerDown",
    "PeerUp",
    "Quarantined",
    "Received",
    "Role",
    "Sent",
    # what goes wrong
    "ErrorKind",
    "KvxferError",
    "TransferError",
    "__version__",
]

# Where each name lives; the block under TYPE_CHECKING says the same to type checkers.
_HOMES = {
    "kvxfer.agent": (
        "Agent",
        "AgentConfig",
        "Progress",
        "SchedulerAgent",
        "TransferHandle",
        "TransferState",
    ),
    "kvxfer.core.events": (
        "BackendChanged",
        "Declined",
        "Drained",
        "Event",
        "Expired",
        "Failed",
        "Gone",
        "PeerDown",
        "PeerUp",
        "Quarantined",
        "Received",
        "Role",
        "Sent",
    ),
    "kvxfer.core.layout": ("Blocks", "KVLayout", "KVSpec", "StateLayout"),
    "kvxfer.core.offer": ("Offer",),
    "kvxfer.errors": ("ErrorKind", "KvxferError", "TransferError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker must not believe that every name exists

    def __getattr__(name):
        """Load a public name on first use (PEP 562) and keep it."""
        from importlib import import_module

        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
