"""Two sides over the real Mooncake engine: a transport here, its peers in other processes."""

from __future__ import annotations

from kvxfer.backends.mooncake import MooncakeConfig, MooncakeTransport
from kvxfer.core.batch import Batch
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.two_sides import BLOCK, TwoSides

BACKEND = "kvxfer.backends.mooncake:MooncakeTransport"


def two_sides(**config):
    return TwoSides(
        MooncakeTransport(MooncakeConfig(**config)), lambda: PeerProcess(BACKEND, timeout=60.0)
    )


BLOCKS = Batch([0, 1, 1, 0], [0, 4096, 8192, 12288], [8192, 0, 4096, 16384], [4096] * 4)
FIRST = Batch([0], [0], [0], [BLOCK])
