"""Spans of users' buffers, and batches."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.core.batch import Batch
from kvxfer.core.memory import Span, span_of, storage_span
from kvxfer.errors import ErrorKind, InvalidInputError, TransferError


def test_span_of_arrays_and_buffers() -> None:
    """A span covers exactly the extent of what was passed, and keeps it alive."""
    array = np.zeros((4, 8), dtype=np.float32)
    view = array[1:3, 2:]
    span = span_of(view)
    assert span.address == view.ctypes.data
    assert span.nbytes == (8 + 6) * 4
    assert storage_span(view).nbytes == array.nbytes
    assert storage_span(view).covers(span)
    data = bytearray(64)
    assert span_of(data).nbytes == 64
    assert span_of((4096, 10)) == Span(address=4096, nbytes=10)


@pytest.mark.parametrize("bad", [np.zeros(0), np.zeros(4)[::-1], object(), (0, 5), b""])
def test_what_is_no_memory_is_refused(bad: object) -> None:
    """Bad input is named before anything is registered."""
    with pytest.raises(InvalidInputError):
        span_of(bad)


@pytest.mark.parametrize("field", ["address", "nbytes"])
@pytest.mark.parametrize("value", [0, -1, 2**63, 1.5, True, "8"])
def test_spans_that_no_memory_has(field: str, value: object) -> None:
    """Sizes and addresses that int64 does not hold are refused by name, with an error of ours."""
    fields: dict[str, object] = {"address": 4096, "nbytes": 8, field: value}
    with pytest.raises(InvalidInputError, match=rf"{field} is .* within 1\.\.2\*\*63-1"):
        Span(**fields)  # type: ignore[arg-type]


def test_torch_storage_is_one_region() -> None:
    """One Region per storage: layers that view one storage share a span; bf16 works."""
    torch = pytest.importorskip("torch", reason="runs in the lane with torch")
    storage = torch.zeros(4, 8, 16, dtype=torch.bfloat16)
    spans = {storage_span(storage[i]) for i in range(4)}
    assert len(spans) == 1
    assert spans.pop().nbytes == storage.numel() * 2
    assert span_of(storage[2]).address == storage[2].data_ptr()


@pytest.mark.parametrize(
    ("vectors", "text"),
    [
        (([0], [0], [0], [0]), r"size\[0\] is 0, below 1"),
        (([0], [-1], [0], [1]), r"local\[0\] is -1, below 0"),
        (([0, 0], [0], [0], [1]), "lengths 2, 1, 1 and 1"),
        (([0], [0.5], [0], [1]), "must hold integers"),
        (([0], [2**63], [0], [1]), "outside int64"),
    ],
)
def test_bad_batches_are_refused(vectors: tuple[list[int], ...], text: str) -> None:
    """A batch cannot be made of vectors an engine would abort on."""
    with pytest.raises(InvalidInputError, match=text):
        Batch(*vectors)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), max_size=30),
    max_pieces=st.integers(1, 8),
    max_nbytes=st.integers(1, 200),
)
def test_cutting_moves_the_same_bytes(sizes: list[int], max_pieces: int, max_nbytes: int) -> None:
    """Cut batches cover each byte once, in order, within both bounds."""
    starts = np.cumsum([0, *sizes])[:-1] if sizes else []
    batch = Batch(np.arange(len(sizes)) % 3, starts, np.asarray(starts) + 7, sizes)
    cuts = batch.cut(max_pieces=max_pieces, max_nbytes=max_nbytes)
    moved: list[tuple[int, int, int]] = []
    for cut in cuts:
        assert 0 < len(cut) <= max_pieces
        assert cut.nbytes <= max_nbytes
        for pair, local, remote, size in zip(*cut.lists(), strict=True):
            moved += [(pair, local + i, remote + i) for i in range(size)]
    wanted = [
        (pair, local + i, remote + i)
        for pair, local, remote, size in zip(*batch.lists(), strict=True)
        for i in range(size)
    ]
    assert moved == wanted


def test_exceptions_pickle_with_everything() -> None:
    """Errors cross process boundaries whole."""
    error = TransferError("late", kind=ErrorKind.TIMEOUT, next_step="wait longer")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "[timeout] late. wait longer"
    assert again.kind is ErrorKind.TIMEOUT


def test_reach_bounds_the_pieces_of_one_pair() -> None:
    """What ``post`` looks at first: no piece ends behind its reach, and it is exact where all
    pieces have one size. Batches of several pairs, or of none, have no reach."""
    rng = np.random.default_rng(5)
    for n in (1, 2, 64, 65, 300):
        local, remote = rng.integers(0, 1 << 40, n), rng.integers(0, 1 << 40, n)
        size = rng.integers(1, 1 << 20, n)
        reach = Batch(np.full(n, 3), local, remote, size).reach
        assert reach is not None
        assert reach[0] == 3
        assert reach[1] >= int((local + size).max())
        assert reach[2] >= int((remote + size).max())
        equal = Batch(np.full(n, 3), local, remote, np.full(n, 7)).reach
        assert equal == (3, int(local.max()) + 7, int(remote.max()) + 7)
    assert Batch([0, 1], [0, 0], [0, 0], [1, 1]).reach is None
    assert Batch([], [], [], []).reach is None


def test_what_a_batch_keeps_is_made_once() -> None:
    """``keep`` remembers the last thing that was made, for a batch that is posted again."""
    batch = Batch([0], [0], [0], [1])
    made = []

    def count(of: Batch) -> int:
        made.append(of)
        return len(of)

    assert [batch.keep(count) for _ in range(3)] == [1, 1, 1]
    assert made == [batch]
    assert batch.keep(lambda of: of.nbytes + 1) == 2
