"""The conformance suite: what every backend must pass, unchanged.

Subclass ``TransportTests`` in a test module::

    class TestMyEngine(TransportTests):
        backend = "my_engine"          # plug-in name, or "module:attribute"
        options = {"port": 0}          # keyword arguments, JSON values

Each test runs with the far side in this process and in a peer process (``modes``); an engine that
is ``process_local`` runs in this process only.  A test is skipped if and only if the transport's
``Capabilities`` say that it does not apply: ``TransportTests.skips(capabilities)`` lists them.

A backend author may override ``make_transport``, ``memory`` (for device memory), ``hold`` (to keep
attempts unfinished), ``timeout``, ``quick`` and ``peer_env``.  The tests use nothing but the public
contract of ``kvxfer.core.transport``.
"""

from __future__ import annotations

from kvxfer.testing.contract.base import IN_PROCESS, TWO_PROCESS
from kvxfer.testing.contract.faulting import SurvivesFaults
from kvxfer.testing.contract.moving import MovesBytes
from kvxfer.testing.contract.reaching import ReachesPeers
from kvxfer.testing.contract.refusing import Refuses
from kvxfer.testing.contract.settling import Settles
from kvxfer.testing.contract.telling import TellsTheTruth

__all__ = ["IN_PROCESS", "TWO_PROCESS", "FaultTests", "TransportTests"]


class TransportTests(MovesBytes, Refuses, Settles, ReachesPeers, TellsTheTruth):
    """All of the transport contract. See the module's text and ``contract.base`` for the hooks."""


class FaultTests(SurvivesFaults):
    """Every fault of ``FaultyTransport``, injected above the engine: what it claims is true of this
    engine as well, so that code that was tested with such faults was tested with this engine."""
