"""The recorded samples are what the engine says today: every one is provoked again."""

from __future__ import annotations

import pytest

from kvxfer.testing.softrdma.record import describe_wheel
from kvxfer.testing.softrdma.samples import Sample, Surface, Verdict, load_samples, normalise
from kvxfer.testing.softrdma.scenario import all_scenarios, run_scenario

RECORDING = load_samples()


def test_every_scenario_is_recorded() -> None:
    """There is a sample of every scenario, with its row and verdict, and none besides."""
    scenarios = all_scenarios()
    assert [sample.name for sample in RECORDING.samples] == list(scenarios)
    for sample in RECORDING.samples:
        entry = scenarios[sample.name]
        assert (sample.row, sample.verdict, sample.how) == (entry.row, entry.verdict, entry.how)


def test_recorded_with_this_wheel() -> None:
    """The recording is of the very wheel that runs here, unless another Python's is installed."""
    here = describe_wheel()
    assert RECORDING.wheel["version"] == here["version"]
    if RECORDING.wheel["tag"] == here["tag"]:
        assert RECORDING.wheel == here


@pytest.mark.parametrize("sample", RECORDING.samples, ids=lambda sample: sample.name)
def test_the_engine_says_it_again(sample: Sample) -> None:
    """Provoked again, the error has the same surface, code and message, hints and numbers aside,
    and the same consequences."""
    seen = run_scenario(sample.name)
    assert (seen.surface, seen.code, seen.exception) == (
        sample.surface,
        sample.code,
        sample.exception,
    )
    assert normalise(seen.message) == normalise(sample.message)
    assert consequences(seen) == consequences(sample)


def consequences(sample: Sample) -> dict[str, object]:
    """The facts, with outcomes reduced to code and normalised message."""
    return {
        name: (fact["code"], normalise(fact["message"])) if isinstance(fact, dict) else fact
        for name, fact in sample.facts.items()
    }


@pytest.mark.parametrize("sample", RECORDING.samples, ids=lambda sample: sample.name)
def test_the_verdict_fits_what_was_seen(sample: Sample) -> None:
    """Where the call was repeated, a transient error was gone and the others were not; a permanent
    one left the connection healthy."""
    retry = sample.facts.get("retry")
    if sample.verdict is Verdict.FATAL:
        assert sample.surface is Surface.EXIT
        assert sample.code != 0
    elif sample.verdict is Verdict.TRANSIENT and retry is not None:
        assert retry["code"] == 0
    elif sample.verdict is Verdict.REBUILD:
        assert retry is not None
        assert retry["code"] != 0
    elif sample.verdict is Verdict.PERMANENT and "valid" in sample.facts:
        assert retry["code"] == sample.code
        assert sample.facts["valid"]["code"] == 0
