"""``check``: one READ, WRITE and batch between two processes, byte by byte."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.errors import KvxferError
from kvxfer.testing.softrdma.buffer import pattern
from kvxfer.testing.softrdma.control import SoftRdma
from kvxfer.testing.softrdma.engine import MoriEngine
from kvxfer.testing.softrdma.peer import MoriPeer
from kvxfer.testing.softrdma.session import Transfer

__all__ = ["check"]

NBYTES = 1 << 20
PIECE = 4096


def _require(transfer: Transfer, doing: str, left: bytes, right: bytes) -> None:
    outcome = transfer.outcome
    if not outcome.ok:
        raise KvxferError(f"{doing} failed with code {outcome.code}: {outcome.message}")
    if left != right:
        raise KvxferError(f"{doing} reported success, but the bytes differ")


def check(say: Callable[[str], None] = lambda line: None) -> None:
    """Move bytes between two processes through the real engine and compare them.

    Raises:
        KvxferError: Something is missing, a transfer failed, or bytes differ.
    """
    source = pattern(1, NBYTES)
    with SoftRdma() as rdma, MoriPeer(nbytes=NBYTES, seed=1) as peer, MoriEngine() as engine:
        buffer = engine.buffer(NBYTES)
        session = engine.connect(buffer, peer)

        transfer = session.read(0, 0, NBYTES)
        transfer.wait()
        _require(transfer, "READ", buffer.read(), source)
        say(f"READ   {NBYTES} bytes")

        remote = list(range(0, NBYTES, 2 * PIECE))
        local = remote[::-1]
        transfer = session.read_batch(local, remote, [PIECE] * len(remote))
        transfer.wait()
        expected = bytearray(source)
        for to, start in zip(local, remote, strict=True):
            expected[to : to + PIECE] = source[start : start + PIECE]
        _require(transfer, "batch READ", buffer.read(), bytes(expected))
        say(f"READ   {len(remote)} scattered pieces of {PIECE} bytes")

        content = buffer.fill(2)
        transfer = session.write(0, 0, NBYTES)
        transfer.wait()
        _require(transfer, "WRITE", peer.read(), content)
        say(f"WRITE  {NBYTES} bytes")
        say(f"{rdma.counters().executed} work requests, two processes, nothing differs")
