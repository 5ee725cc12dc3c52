"""Every public report and every pinned behaviour is held by some test, whose docstring names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

REPORTS = range(1, 58)
"""O01 to O57."""
BEHAVIOURS = range(1, 80)
"""What vLLM 0.33 pins in its own unit tests."""

_LIST = r"((?:O?\d{1,2})(?:(?:,? and |, | to )O?\d{1,2})*)"
_REPORT = re.compile(r"[Rr]eports? " + _LIST)
_BEHAVIOUR = re.compile(r"[Bb]ehaviours? " + _LIST)
_RANGE = re.compile(r"(\d+) to O?(\d+)|(\d+)")


def numbers(pattern: re.Pattern[str], text: str) -> set[int]:
    """All numbers that ``text`` names: "behaviours 1 to 3, 5" gives 1, 2, 3, 5."""
    found: set[int] = set()
    for listed in pattern.findall(" ".join(text.split())):
        for first, last, single in _RANGE.findall(listed):
            found |= {int(single)} if single else set(range(int(first), int(last) + 1))
    return found


def docstrings() -> dict[str, str]:
    """Docstring by test, of all test functions below ``tests``."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.relative_to(TESTS)}::{node.name}"
                found[name] = ast.get_docstring(node) or ""
    return found


@pytest.fixture(scope="module")
def held() -> dict[str, dict[int, list[str]]]:
    """Which tests name which numbers."""
    index: dict[str, dict[int, list[str]]] = {"report": {}, "behaviour": {}}
    for name, text in docstrings().items():
        for kind, pattern in (("report", _REPORT), ("behaviour", _BEHAVIOUR)):
            for number in numbers(pattern, text):
                index[kind].setdefault(number, []).append(name)
    return index


def test_numbers_are_read_from_prose() -> None:
    """The index reads lists and ranges, and not any number that happens to stand nearby."""
    text = "Reports O02 and promise 3. Behaviours 30 to 33, and 36: the text. Report O23 with 5 s."
    assert numbers(_REPORT, text) == {2, 23}
    assert numbers(_BEHAVIOUR, text) == {30, 31, 32, 33, 36}
    assert numbers(_BEHAVIOUR, "behaviour 42, 1 against 2") == {42, 1}
    assert numbers(_REPORT, "reports O53 and O27") == {53, 27}


@pytest.mark.parametrize("number", REPORTS, ids=lambda n: f"O{n:02}")
def test_report_is_held(held: dict[str, dict[int, list[str]]], number: int) -> None:
    """Some test's docstring names the report."""
    assert held["report"].get(number), f"no test names report O{number:02}"


@pytest.mark.parametrize("number", BEHAVIOURS)
def test_behaviour_is_held(held: dict[str, dict[int, list[str]]], number: int) -> None:
    """Some test's docstring names the behaviour."""
    assert held["behaviour"].get(number), f"no test names behaviour {number}"
