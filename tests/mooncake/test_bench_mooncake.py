"""``kvxfer bench`` over the real Mooncake: its own call beside kvxfer, and no byte is wrong."""

from __future__ import annotations

from kvxfer.cli.bench.driver import run
from kvxfer.cli.bench.plan import BenchPlan, Contender

PLAN = BenchPlan(
    sizes=(4096,),
    counts=(16,),
    patterns=("random",),
    concurrency=(2,),
    buffer=1 << 20,
    seconds=0.5,
)


def test_bench():
    """A run with one shape measures the engine alone as well, and a killed peer is noticed."""
    (found,) = run(PLAN, Contender.named("mooncake"), lambda label, part: None)["contenders"]
    assert found["state"] == "measured", found["reason"]
    (row,) = found["bandwidth"]
    assert row["wrong_words"] == 0
    assert row["direct"] > 0
    assert found["concurrency"][0]["transfers"] >= 20
    assert found["recovery"]["noticed_after"] is not None
