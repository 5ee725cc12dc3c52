"""The conformance suite for the backend that the command line names::

pytest --pyargs kvxfer.testing --kvxfer-backend NAME
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvxfer.core.plugins import PluginGroup, list_plugins, load_backend
from kvxfer.testing.conformance import FaultTests, TransportTests
from kvxfer.testing.contract.base import ContractBase
from kvxfer.testing.expected import EXPECTED
from kvxfer.testing.pytest_plugin import selected

__all__: list[str] = []

_SELECTION = selected()


def _keywords(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """As ``create_transport`` takes a mapping; what is no plug-in takes keyword arguments."""
    if ":" in _SELECTION.backend or not options:
        return options
    return {"config": options}


class Selected(ContractBase):
    """What the command line says."""

    backend = _SELECTION.backend
    options = _keywords(_SELECTION.options)
    peer_options: ClassVar[Mapping[str, Any] | None] = (
        None if _SELECTION.peer_options is None else _keywords(_SELECTION.peer_options)
    )
    memory = _SELECTION.memory
    timeout = ContractBase.timeout if _SELECTION.timeout is None else _SELECTION.timeout


class TestBackend(Selected, TransportTests):
    """All of the transport contract."""


class TestBackendWithFaults(Selected, FaultTests):
    """Every fault of ``FaultyTransport``, above the engine."""


class TestPlugin:
    """What is known of it without moving a byte."""

    def test_it_is_found_by_name(self) -> None:
        """It is installed once, without an error, as a class whose ``name`` is the plug-in's."""
        if ":" not in _SELECTION.backend:
            found = [p for p in list_plugins(PluginGroup.BACKENDS) if p.name == _SELECTION.backend]
            assert [row.error for row in found] == [""]
            assert load_backend(_SELECTION.backend).name == _SELECTION.backend

    def test_capabilities_are_the_expected_ones(self) -> None:
        """A backend of kvxfer's own says of itself what ``kvxfer.testing.expected`` holds; which
        tests are skipped, and how many, follows from it."""
        caps = TestBackend().capabilities()
        expected = EXPECTED.get(_SELECTION.backend)
        if expected is not None and _SELECTION.as_it_comes:
            assert caps == expected.capabilities
            assert len(TransportTests.skips(caps)) == expected.skips
