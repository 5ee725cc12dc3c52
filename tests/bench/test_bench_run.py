"""``kvxfer bench`` with tiny shapes: it measures, checks bytes, and survives what breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.cli.bench.driver import contenders, run
from kvxfer.cli.bench.plan import BenchPlan, Contender
from kvxfer.cli.bench.report import tables

TINY = BenchPlan(
    sizes=(4096,),
    counts=(4,),
    patterns=("random",),
    concurrency=(2,),
    buffer=1 << 20,
    seconds=0.5,
    recovery=False,
)
SHARED = "kvxfer.cli.bench.memory:SharedMemory"


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kvxfer", "bench", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=110)


def test_a_run(tmp_path: Path) -> None:
    """Every shape, every level of concurrency and the recovery of both kinds of shm memory are in
    the JSON, every byte that was looked at is right, and three pictures are there."""
    pytest.importorskip("matplotlib")
    shapes = ["--sizes", "4k", "64KiB", "--counts", 2, 16, "--concurrency", 1, 4]
    done = bench(
        *("--backend", "shm", "--buffer", "2M", "--seconds", 2, "--json", "--output", tmp_path),
        *shapes,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [c["label"] for c in result["contenders"]] == ["shm", "shm in place"]
    for contender in result["contenders"]:
        assert contender["state"] == "measured"
        assert contender["about"]["copier"]["name"] in {"compiled", "python"}
        measured = {(r["pattern"], r["size"], r["count"]) for r in contender["bandwidth"]}
        assert measured == {
            (p, s, n) for p in ("contiguous", "random") for s in (4096, 65536) for n in (2, 16)
        }
        for row in contender["bandwidth"]:
            assert row["rounds"] >= 3
            assert row["wrong_words"] == 0
            assert min(row[name] for name in ("kvxfer", "direct", "memmove")) > 0
        assert [r["under_way"] for r in contender["concurrency"]] == [1, 4]
        for row in contender["concurrency"]:
            assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
            assert row["transfers"] >= 20
        recovery = contender["recovery"]
        assert 0 <= recovery["noticed_after"] <= recovery["recovered_after"]
        assert sum(recovery["gb_per_s"]) > 0
    names = sorted(Path(file).name for file in result["files"])
    assert names == ["bandwidth.png", "bench.json", "latency.png", "recovery.png"]
    for name in names[::2]:
        assert (tmp_path / name).stat().st_size > 1000


def test_the_table() -> None:
    """Without a terminal the tables are plain text, with units in their heads."""
    done = bench(
        *("--backend", "shm", "--sizes", 4096, "--counts", 4, "--patterns", "random"),
        *("--concurrency", 1, "--buffer", "1M", "--seconds", 0.5, "--no-recovery"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert any(line.startswith("backend") and "kvxfer GB/s" in line for line in lines)
    assert any(line.startswith("shm in place") and "4 x 4 KiB" in line for line in lines)
    assert any("p99 ms" in line for line in lines)


def measured(backend: str) -> dict:
    chosen = [Contender(label="it", backend=f"bench_backends:{backend}", memory=SHARED)]
    (found,) = run(TINY, chosen, lambda label, part: None)["contenders"]
    return found


def test_wrong_bytes_are_noticed() -> None:
    """A backend that says DONE over wrong bytes is found out."""
    found = measured("Wrong")
    assert found["bandwidth"][0]["wrong_words"] >= 1


@pytest.mark.parametrize(
    ("backend", "reason"), [("Dying", "ended by SIGABRT"), ("Refusing", "refused on purpose")]
)
def test_an_engine_that_breaks_costs_its_own_results_only(backend: str, reason: str) -> None:
    """The reason is told, in the table as well, and the others are measured."""
    broken = Contender(label="broken", backend=f"bench_backends:{backend}", memory=SHARED)
    good = Contender(label="good", backend="shm", memory=SHARED)
    steps: list[str] = []
    result = run(TINY, [broken, good], lambda label, part: steps.append(label))
    first, second = result["contenders"]
    assert (first["label"], first["state"]) == ("broken", "failed")
    assert reason in first["reason"]
    assert second["state"] == "measured"
    assert steps == ["good"] * TINY.steps()
    title, _, rows = tables(result)[-1]
    assert title == "Not measured, or not to the end"
    assert rows == [["broken", "failed", first["reason"]]]


def test_a_backend_that_is_not_there() -> None:
    """Asked for by name it fails the run, with the reason."""
    done = bench("--backend", "no-such-backend", "--seconds", 0.5, "--json")
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)["contenders"]
    assert found["state"] == "unavailable"
    assert "no-such-backend" in found["reason"]


def test_all_backends_by_default() -> None:
    """Every installed one, shm first and twice, but the one that reaches no other process."""
    labels = [c.label for c in contenders([])]
    assert labels[:2] == ["shm", "shm in place"]
    assert "loopback" not in labels
    assert {"moriio", "nixl", "mooncake"} <= set(labels)
