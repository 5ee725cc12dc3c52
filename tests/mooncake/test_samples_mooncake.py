"""The samples of the classifier are what the backend says with the real engine today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.policies.rules import builtin_rules
from kvxfer.policies.rules.mooncake_samples import SAMPLES

SCRIPT = Path(__file__).parents[2] / "scripts" / "mooncake_samples.py"
SEEN = [sample for sample in SAMPLES if sample.evidence == "seen"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("mooncake_samples", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_scenario_is_a_sample(script):
    """Neither a scenario nor a sample that was seen stands alone."""
    assert sorted(script.SCENARIOS) == sorted(s.rule for s in SEEN)


@pytest.mark.parametrize("sample", SEEN, ids=lambda s: s.rule)
def test_provoked_again(script, monkeypatch, sample):
    """The same code and text, addresses aside, and the rule takes it."""
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")
    said = script.capture(sample.rule)
    assert (said.code, said.message) == (sample.error.code, sample.error.message)
    verdict = ClassifierRegistry(builtin_rules()).classify(said)
    assert verdict.rule == sample.rule
