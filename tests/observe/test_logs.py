"""What a worker writes while transfers fail in every way: little, bounded, and in one form."""

from __future__ import annotations

import collections
import logging
import random
import re

import pytest
from observe_rig import agent, at, drive

from kvxfer.core.events import Event, Failed
from kvxfer.core.verdict import EngineError
from kvxfer.policies.breaker import BreakerPolicy
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint

FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): ep=0 depth=60 requested=8 max=64"
)
DEAD = EngineError(backend="moriio", code=13, message="Work Request Flushed Error")
RANGE = EngineError(backend="moriio", code=11, message="length out of range")
FAULTS = {
    Fault(kind=FaultKind.REFUSE_VALUE, error=FULL): 0.2,
    Fault(kind=FaultKind.FAIL_DRAINED, error=DEAD): 0.1,
    Fault(kind=FaultKind.REFUSE_VALUE, error=RANGE): 0.1,
    Fault(kind=FaultKind.NEVER): 0.02,
}
FORM = re.compile(r".+ \[event=(\w+) agent=[pc]( \w+=.*)*\]", re.DOTALL)
PER_TRANSFER = {"received", "sent", "failed", "expired", "gone", "drained", "declined"}
TRANSFERS = 150
PER_WINDOW = 5


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_transfers_with_faults(caplog: pytest.LogCaptureFixture, level: int) -> None:
    """150 transfers, a third of which meet a fault. At INFO and above there are a few lines of each
    kind, none of them one per transfer; at DEBUG each event is one line; every line has the form
    and its fields."""
    caplog.set_level(level, "kvxfer")
    plan = FaultPlan(chances={FaultPoint.POST: FAULTS}, rng=random.Random(3))
    seen: list[Event] = []
    timeouts = Timeouts(connect=5.0, transfer=0.1, drain=0.05)
    policy = BreakerPolicy(faults=3, window=60.0, pause=0.01)
    with (
        agent("p", config={"lease": 0.5, "lease_margin": 0.05}) as p,
        agent("c", plan, timeouts=timeouts, config={"breaker": policy}) as c,
    ):
        for i in range(TRANSFERS):
            handle = c.pull(p.hold(f"t{i}", at(0, i % 32)), at(0, i % 60))
            seen += drive(p, c, until=lambda handle=handle: handle.done)  # type: ignore[misc]
            for entry in c.snapshot().quarantine:
                c.reclaim(entry.transfer_id)
            seen += drive(p, c, until=lambda: not c.snapshot().quarantine)
            seen += drive(p, c, until=lambda: not c.snapshot().pinned_blocks)
    failed = sum(isinstance(event, Failed) for event in seen)
    assert failed > 10, "the faults have to strike"
    ours = [record for record in caplog.records if record.name.startswith("kvxfer")]
    above = [record for record in ours if record.levelno > logging.DEBUG]
    counts = collections.Counter(
        (record.kvxfer["agent"], record.kvxfer["event"])  # type: ignore[attr-defined]
        for record in above
        if "suppressed" not in record.kvxfer  # type: ignore[attr-defined]
    )
    windows = 1 + int((ours[-1].created - ours[0].created) // 60)
    assert max(counts.values()) <= PER_WINDOW * windows
    assert {event for _, event in counts} & PER_TRANSFER == set()
    assert len(above) < failed
    assert max(record.levelno for record in above) == logging.WARNING
    for record in ours:
        form = FORM.fullmatch(record.getMessage())
        assert form is not None, record.getMessage()
        assert form[1] == record.kvxfer["event"]  # type: ignore[attr-defined]
    details = [record for record in ours if record.levelno == logging.DEBUG]
    assert bool(details) is (level == logging.DEBUG)
    if details:
        told = collections.Counter(
            record.kvxfer["event"]  # type: ignore[attr-defined]
            for record in details
        )
        for name in PER_TRANSFER:
            counted = sum(x.snapshot().counters.get(f"events.{name}", 0) for x in (p, c))
            assert told[name] == counted, name
