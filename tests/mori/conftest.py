"""Fixtures for tests of the real mori engine. They run in an environment that
``python -m kvxfer.testing.softrdma setup`` made, without torch."""

from __future__ import annotations

from kvxfer.testing.softrdma.pytest_plugin import (  # noqa: F401  fixtures, found by name
    mori_engine,
    mori_pair,
    mori_peer,
    softrdma,
    softrdma_run,
)
