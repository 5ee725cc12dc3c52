"""The nixl backend's decisions, without the library: prepared lists, envelopes, environment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.backends._machine import has_rdma_device
from kvxfer.backends.nixl.binding import describe
from kvxfer.backends.nixl.config import NixlConfig, apply_environment
from kvxfer.backends.nixl.envelope import Content, unwrap, wrap
from kvxfer.backends.nixl.pieces import (
    MAX_PHASES,
    Grid,
    Places,
    Scratch,
    SharedPlaces,
    Side,
    rows_of,
    unit_of,
)
from kvxfer.core.pieces import Pieces
from kvxfer.errors import ConfigError, WireError


def expand(rows):
    """``(address, length, device)`` of every piece of a prepared list, as NIXL counts them."""
    return [
        (int(address + i * stride), int(length), int(device))
        for address, length, device, stride, count in rows
        for i in range(int(count))
    ]


@given(
    size=st.integers(1, 48),
    regions=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    data=st.data(),
)
def test_an_index_names_exactly_its_piece(size, regions, data):
    """For any piece size, regions and offsets, the piece at the index is the piece asked for."""
    regions = [max(n, size) for n in regions]
    side = Side.of([(1000 * (i + 1), n, i) for i, n in enumerate(regions)])
    pieces = data.draw(
        st.lists(
            st.integers(0, len(regions) - 1).flatmap(
                lambda p: st.tuples(st.just(p), st.integers(0, regions[p] - size))
            ),
            min_size=1,
            max_size=8,
        )
    )
    pair = np.array([p for p, _ in pieces], np.int32)
    offset = np.array([o for _, o in pieces], np.int64)
    grid = Grid.over(side, size, offset)
    assert grid is not None
    assert grid.holds(offset)
    listed = expand(grid.rows(side))
    index = grid.index(pair, offset)
    assert index.dtype == np.int32
    found = [listed[i] for i in index]
    assert found == [(1000 * (p + 1) + o, size, p) for p, o in pieces]
    flat = rows_of(side, pair, offset, np.full(len(pieces), size), Scratch())
    assert [tuple(map(int, row)) for row in flat] == found
    for address, length, device in listed:
        assert 1000 * (device + 1) <= address
        assert address + length <= 1000 * (device + 1) + regions[device]


@settings(deadline=None)
@given(
    size=st.integers(1, 24),
    members=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90)), min_size=1, max_size=5),
    offset=st.lists(st.integers(-8, 60), min_size=1, max_size=6),
)
def test_members_are_described_as_if_written_out(size, members, offset):
    """A factored side gives the grid, the indices and the rows of its pieces one by one."""
    members = [(pair, max(base, -min(offset))) for pair, base in members]
    side = Side.of([(1000 * (i + 1), 200 + size, i) for i in range(3)])
    pair = np.array([p for p, _ in members], np.int32)
    base = np.array([b for _, b in members], np.int64)
    sizes = np.arange(1, len(offset) + 1)
    few = SharedPlaces(
        pair=pair, base=base, pieces=Pieces([0] * len(offset), offset, sizes), side="remote"
    )
    all_ = Places(pair=np.repeat(pair, len(offset)), offset=np.add.outer(base, offset).reshape(-1))
    grid = Grid.over(side, size, few.sample)
    other = Grid.over(side, size, all_.sample)
    assert grid.step == other.step
    for step in range(1, size + 1):
        if size % step == 0:
            trial = Grid(size=size, step=step, first=grid.first)
            assert few.lie_on(trial) == all_.lie_on(trial)
    assert few.index(grid).tolist() == all_.index(grid).tolist()
    assert few.index(grid).dtype == np.int32
    scratch = Scratch()
    rows = few.rows(side, sizes, scratch).tolist()
    assert rows == all_.rows(side, np.tile(sizes, len(members)), scratch).tolist()


def test_rows_are_written_into_the_same_memory():
    """Rows of one side reuse what the last ones had, which NIXL has copied; sides do not mix."""
    scratch = Scratch()
    first, second = scratch.take(4), scratch.take(3)
    assert np.shares_memory(first, second)
    assert second.shape == (3, 3)
    assert scratch.take(9).shape == (9, 3)
    assert not np.shares_memory(scratch.take(2**20 + 1), scratch.take(2**20 + 1))


def test_few_joined_pieces_are_parted_again():
    """One pair of blocks that happen to touch does not keep the others out of a prepared list."""
    size = np.array([8, 16, 8, 8, 8], np.int64)
    assert unit_of(size) == 8
    assert unit_of(np.array([8, 16, 16], np.int64)) == 0
    assert unit_of(np.array([8, 12, 8, 8, 8], np.int64)) == 0
    assert unit_of(np.array([24], np.int64)) == 24
    flat = Places(pair=np.array([0, 1, 0, 1, 1], np.int32), offset=np.arange(5) * 100)
    parted = flat.in_units(size, 8)
    assert parted.pair.tolist() == [0, 1, 1, 0, 1, 1]
    assert parted.offset.tolist() == [0, 100, 108, 200, 300, 400]
    pieces = Pieces(np.arange(5) * 100, np.arange(5) * 1000, size)
    pair = np.array([3, 2], np.int32)
    few = SharedPlaces(pair=pair, base=np.array([0, 7]), pieces=pieces, side="local").in_units(
        size, 8
    )
    assert few.pieces.local.tolist() == parted.offset.tolist()
    assert few.pieces.remote.tolist() == [0, 1000, 1008, 2000, 3000, 4000]
    assert few.pieces.one_size == 8
    assert flat.in_units(np.full(5, 8), 8) is flat


def test_rows_never_overlap_themselves():
    """NIXL refuses strides below the length: a finer grid is more rows, one per phase."""
    side = Side.of([(4096, 65536, 0)])
    grid = Grid.over(side, 4096, np.array([512, 8192]))
    assert grid.step == 512
    rows = grid.rows(side)
    assert len(rows) == 8
    assert (rows[:, 3] == rows[:, 1]).all()


def test_too_fine_a_grid_is_none():
    """Beyond MAX_PHASES rows per region, pieces are described one by one."""
    side = Side.of([(4096, 1 << 20, 0)])
    assert Grid.over(side, 4096, np.array([4096 // MAX_PHASES])) is not None
    assert Grid.over(side, 4096, np.array([4096 // MAX_PHASES // 2])) is None
    assert Grid.over(side, 4096, np.array([1])) is None


def test_indices_that_do_not_fit_are_none():
    """More pieces than an int32 can count are not listed."""
    side = Side.of([(4096, 1 << 40, 0)] * 2)
    assert Grid.over(side, 256, np.array([0])) is None
    assert Grid.over(side, 4096, np.array([0])) is not None


def test_a_grid_grows_finer_only():
    """A new grid holds what the old one held."""
    side = Side.of([(4096, 65536, 0)])
    coarse = Grid.over(side, 1024, np.array([512]))
    finer = Grid.over(side, 1024, np.array([768]), coarse.step)
    assert finer.step == 256
    assert finer.holds(np.array([512, 768, 1024]))


def test_envelope_returns_what_it_was_given():
    """Any payload comes back bit for bit."""
    for payload in (b"", b"x", bytes(range(256)) * 9):
        assert unwrap(Content.REGION, wrap(Content.REGION, payload)) == payload


@given(data=st.data())
def test_damaged_envelopes_are_refused(data):
    """Truncated anywhere, any byte changed, or bytes appended: refused, never passed on."""
    good = wrap(Content.CONNECTION, b"nixl metadata of an agent")
    cut = data.draw(st.integers(0, len(good) - 1))
    flip = data.draw(st.integers(1, 255))
    for bad in (
        good[:cut],
        good[:cut] + bytes([good[cut] ^ flip]) + good[cut + 1 :],
        good + good[: cut + 1],
    ):
        with pytest.raises(WireError):
            unwrap(Content.CONNECTION, bad)
    with pytest.raises(WireError, match="REGION"):
        unwrap(Content.REGION, good)


def test_exceptions_have_one_name_for_every_wheel():
    """The wheel's module differs by CUDA version; rules match one name."""
    for module in ("nixl_cu12._bindings", "nixl_cu13._bindings", "nixl_rocm._bindings"):
        kind = type("nixlBackendError", (Exception,), {"__module__": module})
        error = describe(kind("NIXL_ERR_BACKEND"))
        assert error.exception[0] == "nixl._bindings.nixlBackendError"
        assert error.message == "NIXL_ERR_BACKEND"
        assert error.backend == "nixl"


@pytest.mark.parametrize("value", ["cma", "sysv", "posix", "shm", "sm,self"])
def test_transports_that_cannot_connect_are_refused(value):
    """Shared memory alone cannot open a connection: refused before UCX fails on it."""
    with pytest.raises(ConfigError, match="cannot open a connection"):
        NixlConfig(ucx_tls=value)
    with pytest.raises(ConfigError, match="UCX_TLS"):
        apply_environment(NixlConfig(), {"UCX_TLS": value})
    for good in ("tcp", f"{value},tcp", "all", "^cma", "rc,sm"):
        assert NixlConfig(ucx_tls=good).ucx_tls == good


def test_ib_is_left_out_only_where_there_is_none(tmp_path, monkeypatch):
    """UCX's ib module is left out where no device exists, unless the user chose modules."""
    assert not has_rdma_device(tmp_path / "missing")
    assert not has_rdma_device(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma_device(tmp_path)
    for device, given_, expected in (
        (False, {}, "^ib"),
        (False, {"UCX_MODULES": "all"}, "all"),
        (True, {}, None),
    ):
        monkeypatch.setattr("kvxfer.backends.nixl.config.has_rdma_device", lambda d=device: d)
        environ = dict(given_)
        apply_environment(NixlConfig(ucx_tls="tcp"), environ)
        assert environ.get("UCX_MODULES") == expected
        assert environ["UCX_TLS"] == "tcp"
