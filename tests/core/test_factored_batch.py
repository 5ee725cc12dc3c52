"""A factored batch is its flat twin, in everything but what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.batch import Batch, Members, Pieces
from kvxfer.core.memory import Descriptor, Region, Span
from kvxfer.core.transport import Path, Peer, PeerInfo
from kvxfer.errors import InvalidInputError

Factors = tuple[list[int], list[int], list[int], list[int], list[int], list[int]]

TOP = 2**63 - 1
OFFSETS = st.one_of(
    st.integers(0, 64),
    st.integers(-4, 64),
    st.sampled_from([0, 2**31, 2**62, TOP - 3, TOP, -(2**62)]),
)
SIZES = st.one_of(st.integers(1, 16), st.just(8), st.sampled_from([0, 1, 2**31, 2**62, TOP]))


@st.composite
def factors(draw: st.DrawFn, *, sane: bool = False) -> Factors:
    m, n = draw(st.integers(0, 5)), draw(st.integers(0, 7))
    offsets = st.integers(0, 64) if sane else OFFSETS
    sizes = st.one_of(st.integers(1, 16), st.just(8)) if sane else SIZES
    pairs = st.integers(0, 3) if sane else st.one_of(st.integers(0, 3), st.just(-1))
    return (
        draw(st.lists(pairs, min_size=m, max_size=m)),
        draw(st.lists(offsets, min_size=m, max_size=m)),
        draw(st.lists(offsets, min_size=m, max_size=m)),
        draw(st.lists(offsets, min_size=n, max_size=n)),
        draw(st.lists(offsets, min_size=n, max_size=n)),
        draw(st.lists(sizes, min_size=n, max_size=n)),
    )


def expanded(parts: Factors) -> tuple[list[int], list[int], list[int], list[int]]:
    pair, local_base, remote_base, local, remote, size = parts
    rows = [
        (p, a + x, b + y, s)
        for p, a, b in zip(pair, local_base, remote_base, strict=True)
        for x, y, s in zip(local, remote, size, strict=True)
    ]
    return tuple([row[i] for row in rows] for i in range(4))  # type: ignore[return-value]


def twins(parts: Factors) -> tuple[Batch, Batch]:
    return Batch.repeated(*parts), Batch(*expanded(parts))


def same(one: Batch, other: Batch) -> None:
    assert len(one) == len(other)
    assert one.nbytes == other.nbytes
    assert one.max_size == other.max_size
    assert one.used_pairs == other.used_pairs
    for mine, theirs in zip(one.vectors, other.vectors, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist()
    assert one.lists() == other.lists()
    if len(other):
        assert one.top_pair() == other.top_pair()


def refusal(make: Any) -> str | None:
    try:
        make()
    except InvalidInputError as error:
        return str(error)
    return None


def a_path(local: list[int], remote: list[int]) -> Path:
    """Regions of these sizes; nothing is registered anywhere."""
    peer = Peer(LoopbackTransport(), PeerInfo(transport="none", incarnation="one"))

    def descriptor(nbytes: int) -> Descriptor:
        return Descriptor(transport="none", incarnation="one", region_id=0, nbytes=nbytes)

    return Path(
        peer,
        [
            (Region(span=Span(address=4096, nbytes=a), descriptor=descriptor(a)), descriptor(b))
            for a, b in zip(local, remote, strict=True)
        ],
    )


@settings(deadline=None)
@given(factors())
@example(([0, 0], [0, TOP], [0, 0], [0, 1], [0, 0], [1, 1]))
@example(([0, 0], [0, -9], [0, 0], [3, 8], [0, 0], [1, 1]))
@example(([1, -1], [-1, 0], [0, 0], [0], [0], [0]))
def test_it_is_refused_for_the_same_reason(parts: Factors) -> None:
    """Overflow, negative offsets and empty pieces: the same text, the same index, or no error."""
    columns = expanded(parts)
    wide = any(not -(2**63) <= x <= TOP for column in columns for x in column)
    mine = refusal(lambda: Batch.repeated(*parts))
    if wide:
        event("outside int64")
        assert mine is not None
        assert "holds values outside int64" in mine
        return
    theirs = refusal(lambda: Batch(*columns))
    event("refused" if theirs else "fine")
    assert mine == theirs


@settings(deadline=None)
@given(factors(sane=True))
def test_it_reads_like_its_flat_twin(parts: Factors) -> None:
    """Vectors, lists, pairs, bytes and length are those of the pieces written out."""
    one, other = twins(parts)
    same(one, other)
    assert one.members is not None
    assert other.members is None
    assert [(*member,) for member in one.members] == list(zip(*parts[:3], strict=True))
    assert one.shared_lists() == tuple(parts[3:])
    assert other.shared_lists() == other.lists()[1:]


@settings(deadline=None)
@given(factors(sane=True), st.integers(-40, 40), st.integers(-40, 40))
def test_a_slice_is_the_slice_of_its_twin(parts: Factors, start: int, stop: int) -> None:
    """Also where it begins or ends inside a member, and counted from the end."""
    one, other = twins(parts)
    same(one.slice(start, stop), other.slice(start, stop))
    for i in range(len(other)):
        assert one.piece(i) == other.piece(i)
    for pairs in ([], [0], [1, 3], [0, 1, 2, 3]):
        same(one.of_pairs(pairs), other.of_pairs(pairs))


@settings(deadline=None)
@given(factors(sane=True), st.integers(1, 20), st.integers(1, 80))
def test_cuts_hold_the_same_bytes(parts: Factors, max_pieces: int, max_nbytes: int) -> None:
    """In order, within both bounds, each factored; no piece is cut that fits."""
    one, other = twins(parts)
    cuts = one.cut(max_pieces=max_pieces, max_nbytes=max_nbytes)
    assert all(0 < len(cut) <= max_pieces and cut.nbytes <= max_nbytes for cut in cuts)
    assert all(cut.members is not None for cut in cuts)
    limited = other.cut(max_pieces=1, max_nbytes=max_nbytes)
    mine = [row for cut in cuts for row in zip(*cut.lists(), strict=True)]
    assert mine == [row for cut in limited for row in zip(*cut.lists(), strict=True)]


@settings(deadline=None)
@given(factors(sane=True), st.integers(1, 6))
def test_members_share_the_lists_of_their_stretches(parts: Factors, max_pieces: int) -> None:
    """Lists are made once per stretch, however many members there are."""
    one = Batch.repeated(*parts)
    cuts = one.cut(max_pieces=max_pieces, max_nbytes=2**62)
    distinct = {id(cut.shared_lists()) for cut in cuts}
    n, m = len(parts[3]), len(parts[0])
    if n > max_pieces:
        assert len(distinct) == (-(-n // max_pieces) if m else 0)
        sizes = [len(cut) for cut in cuts]
        assert not sizes or max(sizes) - min(sizes) < len(distinct), "stretches are even"
    else:
        assert len(distinct) == bool(n and m)


@settings(deadline=None)
@given(st.lists(st.tuples(factors(sane=True), st.booleans()), max_size=4), st.integers(1, 20))
def test_joined_batches_hold_all_pieces_in_order(
    several: list[tuple[Factors, bool]], max_pieces: int
) -> None:
    """Flat and factored ones mixed; cut and sliced, they are still the pieces written out."""
    pairs = [twins(parts) for parts, _ in several]
    mixed = Batch.concat(
        [one if factored else other for (one, other), (_, factored) in zip(pairs, several)]  # noqa: B905
    )
    flat = Batch.concat([other for _, other in pairs])
    same(mixed, flat)
    same(mixed.slice(3, 17), flat.slice(3, 17))
    cuts = mixed.cut(max_pieces=max_pieces, max_nbytes=2**62)
    assert all(0 < len(cut) <= max_pieces for cut in cuts)
    same(Batch.concat(cuts), flat)


def test_one_size_for_all_is_as_good_as_a_vector() -> None:
    """A number in the place of the sizes is that many bytes for every piece, and checked alike."""
    offsets = [3, 0, 9]
    one = Batch.repeated_pieces(Members([0, 1], [0, 5], [2, 0]), Pieces(offsets, offsets, 4))
    same(one, Batch.repeated([0, 1], [0, 5], [2, 0], offsets, offsets, [4] * 3))
    assert one.shared_lists() == (offsets, offsets, [4] * 3)
    assert one.shared is not None
    assert one.shared.one_size == 4
    assert [cut.nbytes for cut in one.cut(max_pieces=2, max_nbytes=3)] == [3, 1] * 6
    for size, text in ((0, r"size\[0\] is 0, below 1"), (2**63, "size holds values outside int64")):
        with pytest.raises(InvalidInputError, match=text):
            Batch.repeated_pieces(Members([0], [0], [0]), Pieces(offsets, offsets, size))
    assert not len(Batch.repeated_pieces(Members([0], [0], [0]), Pieces([], [], 4)))


def test_batches_of_the_same_pieces_join_factored() -> None:
    """What ``cut`` parted at members, ``concat`` puts together again."""
    pieces = Pieces([0, 8], [8, 0], [8, 8])
    one = Batch.repeated_pieces(Members([0, 1, 2, 2], [0, 0, 0, 64], [0, 0, 64, 0]), pieces)
    parts = one.cut(max_pieces=2, max_nbytes=2**62)
    assert len(parts) == 4
    again = Batch.concat(parts)
    assert again.members is not None
    assert again.shared is pieces
    same(again, one)
    assert repr(one) == "Batch(2 pieces for each of 4 members, 64 bytes)"


@settings(deadline=None)
@given(factors(sane=True), st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), max_size=4))
@example(([0], [0], [0], [TOP - 9], [0], [9]), [(TOP, 9)])
@example(([0], [0], [0], [TOP - 9], [0], [10]), [(TOP, 10)])
@example(([0, 0], [0, 2], [0, 0], [TOP - 9], [0], [8]), [(TOP, 8)])
@example(([0], [0], [0], [1], [0], [TOP]), [(TOP, TOP)])
def test_bounds_are_checked_as_for_the_twin(parts: Factors, sizes: list[tuple[int, int]]) -> None:
    """The first piece outside its region is named with the same words, whichever the form."""
    one, other = twins(parts)
    path = a_path([a for a, _ in sizes], [b for _, b in sizes])
    for a, b in ((one, other), (Batch.concat([other, one]), Batch.concat([other, other]))):
        mine, theirs = refusal(lambda a=a: path.check(a)), refusal(lambda b=b: path.check(b))
        assert mine == theirs
    event("refused" if theirs else "fine")


def test_checking_does_not_write_the_pieces_out() -> None:
    """2000 members of a million pieces: neither making, checking nor cutting expands them."""
    n, m = 10**6, 2000
    offsets = np.arange(n, dtype=np.int64) * 16
    batch = Batch.repeated(
        np.zeros(m, np.int32), np.arange(m) * 2**24, np.zeros(m, int), offsets, offsets, [16] * n
    )
    assert len(batch) == m * n
    assert batch.nbytes == 16 * m * n
    path = a_path([2**24 * m], [2**24])
    path.check(batch)
    with pytest.raises(InvalidInputError, match=f"piece {m * n - 1} ends at local byte"):
        a_path([(m - 1) * 2**24 + 16 * n - 1], [2**24]).check(batch)
    cuts = batch.cut(max_pieces=2**19, max_nbytes=2**62)
    assert len(cuts) == 2 * m
    assert batch.piece(n + 3) == (0, 2**24 + 48, 48, 16)
    assert len(batch.slice(5, n + 5)) == n


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (([0, 0], [0], [0], [0], [0], [1]), "pair, local_base and remote_base have lengths 2, 1"),
        (([0], [0], [0], [0, 1], [0], [1]), "local, remote and size have lengths 2, 1 and 1"),
        (([0], [0.5], [0], [0], [0], [1]), "local_base has dtype float64"),
        (([0], [0], [0], [[0]], [0], [1]), "local has 2 dimensions"),
        (([0], [0], [0], [0], [0], [2**63]), "size holds values outside int64"),
        (([2**31], [0], [0], [0], [0], [1]), "pair holds values outside int32"),
    ],
)
def test_bad_factors_are_named(parts: Any, text: str) -> None:
    """What is wrong with the vectors themselves is said in the vectors' own names."""
    with pytest.raises(InvalidInputError, match=text):
        Batch.repeated(*parts)
