"""No sentence of the Transport contract is without a test."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from contract_index import INDEX, WORDS
from contract_sentences import sentences

from kvxfer.testing.conformance import TransportTests

ROOT = Path(__file__).parents[2]
SENTENCES = [(name, sentence) for name, sentence in sentences()]
NAMED = sorted({test for about in INDEX.values() for tests in about.values() for test in tests})


def test_every_sentence_has_its_tests() -> None:
    """What the docstrings say and what the index holds are the same sentences, no more, no less."""
    indexed = {(name, sentence) for name, about in INDEX.items() for sentence in about}
    assert sorted(set(SENTENCES) - indexed) == [], "sentences without a test"
    assert sorted(indexed - set(SENTENCES)) == [], "sentences that are no longer there"


def test_few_sentences_promise_nothing() -> None:
    """Most of the contract can be held to: what is excused is counted."""
    excused = [s for about in INDEX.values() for s, tests in about.items() if tests == WORDS]
    assert len(excused) == 9, excused
    assert len(SENTENCES) > 130


@pytest.mark.parametrize("name", NAMED)
def test_the_tests_exist(name: str) -> None:
    """What the index names is a test with a docstring, of the suite or of the file it names."""
    if "::" not in name:
        function = getattr(TransportTests, name)
        assert inspect.getdoc(function), f"{name} does not say what it holds"
        return
    file, _, test = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert ast.get_docstring(functions[test])
