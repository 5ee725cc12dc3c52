"""The in-process engine passes the suite, with copies in ``post`` and in ``progress``."""

from __future__ import annotations

from kvxfer.backends.loopback import CopyIn, LoopbackConfig, LoopbackTransport
from kvxfer.testing.conformance import IN_PROCESS, FaultTests, TransportTests


class TestCopiesInPost(TransportTests):
    backend = "kvxfer.backends.loopback:LoopbackTransport"
    modes = (IN_PROCESS,)


class TestCopiesInProgress(TransportTests):
    """Attempts stay unfinished until ``progress``; every limit that loopback knows is set."""

    modes = (IN_PROCESS,)

    def make_transport(self):
        return LoopbackTransport(
            LoopbackConfig(
                copy_in=CopyIn.PROGRESS, max_pieces=256, max_nbytes=8 << 20, credits=1024
            )
        )


class TestFaults(FaultTests):
    backend = "loopback"
    modes = (IN_PROCESS,)
