"""pytest fixtures for the real mori engine over software RDMA.

Load it with ``pytest_plugins = ["kvxfer.testing.softrdma.pytest_plugin"]`` in the top-level
``conftest.py``, or with ``-p kvxfer.testing.softrdma.pytest_plugin``.  The tests must run in an
environment made by ``python -m kvxfer.testing.softrdma setup``; elsewhere the fixtures fail, they
do not skip.

=================  ================================================================================
``softrdma``       the ``SoftRdma`` of this pytest process, all faults ended before and after
``mori_engine``    makes engines (``mori_engine(max_send_wr=64)``), closed after the test
``mori_peer``      makes peer processes (``mori_peer(seed=7)``), ended after the test
``mori_pair``      makes an engine, a buffer, a peer process and a session between them
=================  ================================================================================

With pytest-xdist every worker is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import pytest

from kvxfer.testing.softrdma.control import SoftRdma
from kvxfer.testing.softrdma.engine import MoriEngine
from kvxfer.testing.softrdma.pair import MoriPair
from kvxfer.testing.softrdma.peer import DEFAULT_NBYTES, MoriPeer

__all__ = ["MakeEngine", "MakePair", "MakePeer"]


class MakeEngine(Protocol):
    """Takes what ``MoriEngine`` takes."""

    def __call__(self, key: str | None = None, **options: Any) -> MoriEngine: ...


class MakePeer(Protocol):
    """Takes what ``MoriPeer`` takes."""

    def __call__(self, key: str | None = None, **options: Any) -> MoriPeer: ...


class MakePair(Protocol):
    """Takes the size of both buffers in bytes, what the peer's holds, and both configurations.

    The buffer of this process is all zeros.
    """

    def __call__(
        self,
        *,
        nbytes: int = DEFAULT_NBYTES,
        seed: int = 1,
        peer_config: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> MoriPair: ...


@pytest.fixture(scope="session")
def softrdma_run() -> Iterator[SoftRdma]:
    """The fabric of this pytest process."""
    with SoftRdma() as rdma:
        yield rdma


@pytest.fixture
def softrdma(softrdma_run: SoftRdma) -> Iterator[SoftRdma]:
    """The fabric of this pytest process, without any fault at the beginning and the end."""
    softrdma_run.reset()
    yield softrdma_run
    softrdma_run.reset()


@pytest.fixture
def mori_engine(softrdma: SoftRdma) -> Iterator[MakeEngine]:
    """Makes engines; all are closed after the test."""
    with ExitStack() as engines:

        def make(key: str | None = None, **options: Any) -> MoriEngine:
            return engines.enter_context(MoriEngine(key, **options))

        yield make


@pytest.fixture
def mori_peer(softrdma: SoftRdma) -> Iterator[MakePeer]:
    """Makes peer processes; all are ended after the test."""
    with ExitStack() as peers:

        def make(key: str | None = None, **options: Any) -> MoriPeer:
            return peers.enter_context(MoriPeer(key, **options))

        yield make


@pytest.fixture
def mori_pair(mori_engine: MakeEngine, mori_peer: MakePeer) -> MakePair:
    """Makes connected pairs of an engine here and a peer process."""

    def make(
        *,
        nbytes: int = DEFAULT_NBYTES,
        seed: int = 1,
        peer_config: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> MoriPair:
        peer = mori_peer(nbytes=nbytes, seed=seed, config=peer_config)
        return MoriPair.connect(mori_engine(**config), peer, seed=seed)

    return make
