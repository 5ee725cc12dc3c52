"""Tools for testing backends and the code above them; part of the public API.

``TransportTests`` and ``FaultTests`` (need pytest), ``FaultyTransport`` with ``FaultPlan``,
``FakeClock``.  ``pytest --pyargs kvxfer.testing --kvxfer-backend NAME`` runs the suites by name.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.testing.clock import FakeClock
    from kvxfer.testing.conformance import FaultTests, TransportTests
    from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
    from kvxfer.testing.faulty import FaultyTransport
    from kvxfer.testing.peer_process import PeerProcess

__all__ = [
    "FakeClock",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultTests",
    "FaultyTransport",
    "PeerProcess",
    "TransportTests",
]

_WHERE = {
    "FakeClock": "clock",
    "Fault": "faults",
    "FaultKind": "faults",
    "FaultPlan": "faults",
    "FaultTests": "conformance",
    "FaultyTransport": "faulty",
    "PeerProcess": "peer_process",
    "TransportTests": "conformance",
}

if "pytest" in sys.modules:  # the suite's asserts then show the values they compared
    sys.modules["pytest"].register_assert_rewrite(
        "kvxfer.testing.contract", "kvxfer.testing.pair", "kvxfer.testing.station"
    )


def __getattr__(name: str) -> Any:
    # Lazy: the simulator wants a clock, not pytest.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
