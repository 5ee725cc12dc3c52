"""The parts of ``kvxfer bench`` that measure nothing themselves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer.cli.bench.command import size_of
from kvxfer.cli.bench.plan import BenchPlan, Cell, Contender, in_words
from kvxfer.cli.bench.report import tables
from kvxfer.cli.bench.shapes import batch_of, wrong_words
from kvxfer.errors import ConfigError

BUFFER = 1 << 20


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4k", 4096), ("64KiB", 65536), ("1M", 1 << 20), ("2gib", 2 << 30)],
)
def test_sizes(text: str, nbytes: int) -> None:
    """Bytes, or a number with a binary unit."""
    assert size_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "k", "4 miles", "1.5k", "0x10"])
def test_what_is_no_size(text: str) -> None:
    """Refused with the text that was given."""
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        size_of(text)


@pytest.mark.parametrize(
    ("nbytes", "words"), [(100, "100 B"), (4096, "4 KiB"), (6144, "6 KiB"), (3 << 20, "3 MiB")]
)
def test_in_words(nbytes: int, words: str) -> None:
    """Whole units only."""
    assert in_words(nbytes) == words


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"sizes": (4095,)}, "multiples of 8 bytes"),
        ({"sizes": ()}, "sizes must be positive integers"),
        ({"counts": (0,)}, "counts must be positive integers"),
        ({"patterns": ("spiral",)}, "spiral"),
        ({"seconds": 0.0}, "seconds"),
        ({"buffer": 4096, "counts": (2,)}, "no shape fits into a buffer of 4096 bytes"),
    ],
)
def test_plans_that_make_no_sense(values: dict, problem: str) -> None:
    """Refused before anything is started."""
    with pytest.raises(ConfigError, match=problem):
        BenchPlan(**values)


def test_a_plan_survives_json() -> None:
    """What the worker gets is what the parent has; shapes that do not fit are left out."""
    plan = BenchPlan(sizes=(4096, 1 << 20), counts=(1, 2), buffer=BUFFER, patterns=("random",))
    assert BenchPlan.from_json(plan.to_json()) == plan
    assert [(c.size, c.count) for c in plan.cells()] == [(4096, 1), (4096, 2), (1 << 20, 1)]


def test_default_shapes() -> None:
    """Block sizes from 4 KiB to 1 MiB, both patterns; a load of a mebibyte in 16 KiB blocks."""
    plan = BenchPlan()
    assert {c.size for c in plan.cells()} == {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}
    assert {c.pattern for c in plan.cells()} == {"contiguous", "random"}
    assert (plan.load.size, plan.load.nbytes) == (16 << 10, 1 << 20)
    assert plan.seconds <= 120  # set-up comes on top: three minutes in all


@pytest.mark.parametrize("pattern", ["contiguous", "random"])
def test_blocks_lie_in_the_buffer_and_none_twice(pattern: str) -> None:
    """Whatever the random numbers: on block boundaries, inside, each block once on each side."""
    for seed in range(50):
        cell = Cell(size=4096, count=1 + seed * 5, pattern=pattern)
        batch = batch_of(cell, BUFFER, np.random.default_rng(seed))
        assert (len(batch), batch.nbytes) == (cell.count, cell.nbytes)
        for side in (batch.local, batch.remote):
            assert not (side % cell.size).any()
            assert 0 <= side.min() <= side.max() <= BUFFER - cell.size
            assert len(set(side.tolist())) == cell.count
            if pattern == "contiguous":
                assert (np.diff(side) == cell.size).all()


def test_one_wrong_byte_is_seen() -> None:
    """Each word of the other side is its own index, so that bytes of another place are wrong."""
    cell = Cell(size=64, count=20, pattern="random")
    batch = batch_of(cell, BUFFER, np.random.default_rng(4))
    here = np.full(BUFFER // 8, 2**64 - 1, np.uint64)
    assert wrong_words(here, batch) == cell.nbytes // 8
    for a, b in zip(batch.local.tolist(), batch.remote.tolist(), strict=True):
        here[a // 8 : a // 8 + 8] = np.arange(b // 8, b // 8 + 8, dtype=np.uint64)
    assert wrong_words(here, batch) == 0
    here[int(batch.local[7]) // 8 + 3] ^= np.uint64(1 << 40)
    assert wrong_words(here, batch) == 1


def test_shm_is_measured_twice() -> None:
    """With memory that is mapped, and with memory in place."""
    first, second = Contender.named("shm", {"workers": 1})
    assert first.memory != second.memory
    assert first.options == second.options == {"config": {"workers": 1}}
    (other,) = Contender.named("nixl")
    assert (other.label, other.options) == ("nixl", {})


def row(size: int, pattern: str, **values: float) -> dict:
    return {"size": size, "count": 16, "pattern": pattern, **values}


RESULT = {
    "contenders": [
        {
            "label": "shm",
            "state": "measured",
            "reason": "",
            "bandwidth": [
                row(4096, p, kvxfer=1.0, direct=2.0, memmove=4.0, to_direct=0.5, to_memmove=0.25)
                for p in ("contiguous", "random")
            ],
            "concurrency": [
                {"under_way": n, "p50_ms": 0.1 * n, "p90_ms": 0.2 * n, "p99_ms": n, "gb_per_s": 3.0}
                for n in (1, 2)
            ],
            "recovery": {
                "noticed_after": 0.01,
                "recovered_after": 0.25,
                "failed_transfers": 3,
                "killed_at": 0.1,
                "bucket": 0.05,
                "gb_per_s": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
            },
        },
        {
            "label": "other",
            "state": "failed",
            "reason": "its process was ended by SIGSEGV",
            "bandwidth": [row(4096, "random", kvxfer=1.0, memmove=4.0, to_memmove=0.25)],
            "concurrency": [],
            "recovery": {
                "noticed_after": None,
                "recovered_after": None,
                "failed_transfers": 0,
                "killed_at": 0.1,
                "bucket": 0.05,
                "gb_per_s": [1.0, 1.0, 0.0],
            },
        },
        {
            "label": "absent",
            "state": "unavailable",
            "reason": "not installed",
            "bandwidth": [],
            "concurrency": [],
            "recovery": None,
        },
    ]
}


def test_tables_say_what_is_missing() -> None:
    """A number that was not measured is a dash, a recovery that did not come is said to be late,
    and who could not be measured is listed with the reason."""
    found = {title: rows for title, _, rows in tables(RESULT)}
    bandwidth, _, recovery, missing = found.values()
    assert bandwidth[-1] == ["other", "16 x 4 KiB", "random", "1", "-", "4", "-", "0.25"]
    assert recovery == [
        ["shm", "0.01", "0.25", "3"],
        ["other", "not within 20", "not within 20", "0"],
    ]
    assert [row[0] for row in missing] == ["other", "absent"]


def test_pictures_of_what_there_is(tmp_path: Path) -> None:
    """A contender that lacks a part is left out of that picture; without any there is none."""
    pytest.importorskip("matplotlib")
    from kvxfer.cli.bench.plots import plot

    written = plot(RESULT, tmp_path)
    assert [p.name for p in written] == ["bandwidth.png", "latency.png", "recovery.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)
    assert plot({"contenders": RESULT["contenders"][2:]}, tmp_path) == []


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers are written all the same, and what to install is said."""
    from kvxfer.cli.bench.command import _write

    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert _write(tmp_path, RESULT) == [str(tmp_path / "bench.json")]
    assert "kvxfer[bench]" in capsys.readouterr().err
