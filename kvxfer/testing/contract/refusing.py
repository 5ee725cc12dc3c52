"""What cannot work is refused before anything is posted."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from kvxfer.core.batch import Batch
from kvxfer.core.capabilities import Capabilities
from kvxfer.core.memory import MemoryKind, Span
from kvxfer.core.transport import Path
from kvxfer.core.verdict import Op
from kvxfer.errors import ClosedError, InvalidInputError, StaleError
from kvxfer.testing.contract.base import ContractBase, Rig, requires
from kvxfer.testing.pair import Pair
from kvxfer.testing.pieces import whole

__all__ = ["Refuses"]

_MOST_PIECES = 1 << 20
"""Beyond this, a limit is too high to be exceeded in a test."""


def _kinds(caps: Capabilities) -> set[MemoryKind]:
    return {kind for _, local, remote in caps.ops for kind in (local, remote)}


class Refuses(ContractBase):
    """Wrong arguments, closed things and older incarnations."""

    def test_describes_itself(self, pair: Pair) -> None:
        """Name, capabilities and incarnation are constant; ``local_info`` has the latter, no two
        transports share it, and what admits to the engine is in no ``repr``."""
        transport = pair.near.transport
        info = transport.local_info()
        assert transport.name
        assert info.transport == transport.name
        assert info.incarnation == transport.incarnation
        caps = transport.capabilities
        assert caps.ops, "an engine that can do nothing"
        assert pair.far.info.transport == transport.name
        assert pair.far.info.incarnation != info.incarnation
        assert transport.local_info() == info
        assert (4 in caps.ip_versions or 6 in caps.ip_versions) or not caps.ip_versions
        assert not (caps.process_local and caps.ip_versions)
        if len(info.data) > 8:
            assert repr(info.data)[2:-1] not in repr(info)
        buffers = self.buffers(pair, pair.far, [4096])
        path = pair.prepare(pair.connect(), buffers)
        pair.move(self.usable(caps)[0], path, whole(4096))
        transport.close()
        assert transport.capabilities == caps

    def test_region_says_what_was_registered(self, pair: Pair) -> None:
        """A region keeps its span; its descriptor names transport, incarnation, size and kind, and
        an id of its own."""
        transport = pair.near.transport
        buffers = [pair.near.register(4096 + i, kind=self.near_kind) for i in range(3)]
        for i, buffer in enumerate(buffers):
            region = buffer.region
            assert region is not None
            assert region.nbytes == region.span.nbytes == 4096 + i
            descriptor = region.descriptor
            assert descriptor.transport == transport.name
            assert descriptor.incarnation == transport.incarnation
            assert descriptor.nbytes == 4096 + i
            assert descriptor.kind is region.span.kind is self.near_kind
            assert descriptor.device == region.span.device
        assert len({b.descriptor.region_id for b in buffers}) == 3

    @requires(
        "ops: every memory kind is supported", lambda caps, _: _kinds(caps) != set(MemoryKind)
    )
    def test_register_refuses_memory_it_cannot_use(self, pair: Pair) -> None:
        """A span of a kind that appears in no op is refused."""
        transport = pair.near.transport
        here = pair.near.register(4096, kind=self.near_kind).region
        assert here is not None
        for kind in set(MemoryKind) - _kinds(transport.capabilities):
            span = Span(address=here.span.address, nbytes=1024, kind=kind, device=0)
            with pytest.raises(InvalidInputError, match=kind.value):
                transport.register(span)

    @pytest.mark.parametrize("side", ["local", "remote"])
    def test_out_of_range_is_refused(self, pair: Pair, op: Op, side: str) -> None:
        """One piece that leaves its region, by one byte or by far, refuses the batch; the error
        names it, where it ends and what the region has."""
        rig = self.rig(pair, [4096, 4096])
        for offset, size in ((4096 - 63, 64), (4096, 1), (1 << 40, 64), (2**63 - 64, 64)):
            at = {"local": 0, "remote": 0, side: offset}
            batch = Batch([0, 1, 1], [0, at["local"], 512], [0, at["remote"], 512], [64, size, 64])
            with pytest.raises(InvalidInputError, match=f"piece 1 .*{side}") as refused:
                pair.post_once(op, rig.path, batch)
            assert str(offset + size) in str(refused.value)
            assert "4096 bytes" in str(refused.value)
        with pytest.raises(InvalidInputError, match="pair"):
            pair.post_once(op, rig.path, Batch([0, 2], [0, 0], [0, 0], [64, 64]))
        self._works_and_nothing_else_moved(rig, rig.path, op)

    @requires("ops: both ops work with this memory", lambda c, suite: len(suite.usable(c)) < 2)
    def test_unsupported_op_is_refused(self, pair: Pair) -> None:
        """An op that the engine cannot do with such memory is refused at the latest by ``post``:
        an (op, kinds) triple outside ``ops``, or memory that peers cannot write."""
        usable = self.usable(pair.near.transport.capabilities)
        missing = [op for op in Op if op not in usable]
        rig = self.rig(pair, [4096])
        for op in missing:
            with pytest.raises(InvalidInputError, match=op.value):
                pair.post_once(op, rig.path, whole(4096))
        rig.expect_untouched("by an unsupported op")

    @requires("max_pieces: too high to exceed", lambda caps, _: caps.max_pieces < _MOST_PIECES)
    def test_too_many_pieces_are_refused(self, pair: Pair, op: Op) -> None:
        """More than ``max_pieces`` pieces in one post are refused, not cut."""
        limit = pair.near.transport.capabilities.max_pieces
        rig = self.rig(pair, [65536])
        offsets = np.arange(limit + 1) % 65536
        batch = Batch(np.zeros(limit + 1, int), offsets, offsets, np.ones(limit + 1, int))
        with pytest.raises(InvalidInputError, match="cut"):
            pair.post_once(op, rig.path, batch)
        self._works_and_nothing_else_moved(rig, rig.path, op)

    @requires(
        "max_nbytes: too high to exceed",
        lambda caps, _: caps.max_nbytes < (1 << 20) * min(caps.max_pieces, _MOST_PIECES),
    )
    def test_too_many_bytes_are_refused(self, pair: Pair, op: Op) -> None:
        """More than ``max_nbytes`` bytes in one post are refused, not cut."""
        limit = pair.near.transport.capabilities.max_nbytes
        size = 1 << 20
        rig = self.rig(pair, [size])
        n = limit // size + 1
        zeros = np.zeros(n, int)
        with pytest.raises(InvalidInputError, match="cut"):
            pair.post_once(op, rig.path, Batch(zeros, zeros, zeros, np.full(n, size)))
        rig.expect_untouched("by a post of too many bytes")

    def test_closed_path_is_stale(self, pair: Pair, op: Op) -> None:
        """Posting on a closed path is refused; another path of the same peer is not affected."""
        rig = self.rig(pair, [4096])
        other = pair.prepare(rig.path.peer, rig.buffers)
        rig.path.close()
        for batch in (whole(4096), whole(4096).slice(0, 0)):
            with pytest.raises(StaleError):
                pair.post_once(op, rig.path, batch)
        self._works_and_nothing_else_moved(rig, other, op)

    def test_disconnected_peer_is_stale(self, pair: Pair, op: Op) -> None:
        """After ``disconnect``, ``post`` and ``prepare`` on that peer are refused."""
        rig = self.rig(pair, [4096])
        fence = pair.near.transport.disconnect(rig.path.peer)
        assert rig.path.peer.closed
        assert rig.path.closed
        with pytest.raises(StaleError):
            pair.post_once(op, rig.path, whole(4096))
        with pytest.raises(StaleError):
            pair.near.transport.prepare(rig.path.peer, pair.regions(rig.buffers))
        pair.outcome(fence, "disconnect")
        rig.expect_untouched("by a post on a closed peer")

    def test_other_incarnation_is_stale(self, pair: Pair) -> None:
        """A descriptor of another life of the peer is refused, also among good ones."""
        peer = pair.connect()
        good, bad = self.buffers(pair, pair.far, [4096, 4096])
        assert good[0].region is not None
        assert bad[0].region is not None
        old = attrs.evolve(bad[1].descriptor, incarnation="0123456789abcdef")
        with pytest.raises(StaleError, match="incarnation"):
            pair.near.transport.prepare(
                peer, [(good[0].region, good[1].descriptor), (bad[0].region, old)]
            )

    def test_deregistered_region_is_stale(self, pair: Pair, op: Op) -> None:
        """Memory that was deregistered, and may be gone, is not touched: ``post`` on an earlier
        path and ``prepare`` refuse it; other regions of that path go on working."""
        rig = self.rig(pair, [4096, 4096])
        (here, _), _ = rig.buffers
        pair.near.deregister(here)
        for batch in (whole(4096), Batch([1, 0], [0, 0], [0, 0], [64, 64])):
            with pytest.raises(StaleError):
                pair.post_once(op, rig.path, batch)
        with pytest.raises(StaleError):
            pair.near.transport.prepare(rig.path.peer, pair.regions(rig.buffers))
        rig.expect_untouched("by a post on a deregistered region")
        batch = whole(4096, pair=1)
        pair.move(op, rig.path, batch)
        rig.expect(op, batch)

    def test_prepare_refuses_what_is_not_ours(self, pair: Pair) -> None:
        """No pairs, a descriptor of another engine, or a region of another transport of this one,
        are refused."""
        peer = pair.connect()
        ((here, there),) = self.buffers(pair, pair.far, [4096])
        assert here.region is not None
        foreign = attrs.evolve(there.descriptor, transport="another")
        for pairs in ([], [(here.region, foreign)]):
            with pytest.raises(InvalidInputError):
                pair.near.transport.prepare(peer, pairs)
        other = self.make_transport()
        try:
            elsewhere = other.register(here.region.span)
            with pytest.raises(StaleError):
                pair.near.transport.prepare(peer, [(elsewhere, there.descriptor)])
        finally:
            other.close()
        with pytest.raises(InvalidInputError):
            pair.near.transport.connect(attrs.evolve(pair.far.info, transport="another"))

    def test_closed_transport_refuses(self, pair: Pair, op: Op) -> None:
        """After ``close`` every verb but ``progress``, ``deregister``, ``disconnect`` and ``close``
        raises ClosedError; those four do no harm."""
        rig = self.rig(pair, [4096])
        region = rig.buffers[0][0].region
        assert region is not None
        transport = pair.near.transport
        transport.close()
        for refused in (
            lambda: transport.register(region.span),
            lambda: transport.connect(pair.far.info),
            lambda: transport.prepare(rig.path.peer, pair.regions(rig.buffers)),
            lambda: transport.post(op, rig.path, whole(4096)),
        ):
            with pytest.raises(ClosedError):
                refused()
        assert transport.progress() == []
        transport.deregister(region)
        pair.outcome(transport.disconnect(rig.path.peer), "disconnect after close")
        rig.path.close()
        assert transport.close() == []
        rig.expect_untouched("after close")

    def _works_and_nothing_else_moved(self, rig: Rig, path: Path, op: Op) -> None:
        rig.expect_untouched("by a refused post")
        batch = whole(4096, pieces=4)
        rig.pair.move(op, path, batch)
        rig.expect(op, batch)
