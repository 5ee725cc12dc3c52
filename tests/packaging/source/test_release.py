"""How a release is made: fragments become a section of the change log, and the workflow fits."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOG = """# Changelog

## [Unreleased]

### Added

- One.

### Fixed

- Two, which takes
  two lines.

## [0.1.0] - 2030-01-01

- First.
"""


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("changes")


def test_a_release(changes: ModuleType) -> None:
    """What was unreleased and the fragments stand in one section, by kind; the older one stays."""
    texts = [("added", "Three,\nin two lines.\n"), ("removed", "Four.\n")]
    log = changes.released(LOG, texts, "0.2.0", "2030-02-01")
    assert (
        log
        == """# Changelog

## [Unreleased]

## [0.2.0] - 2030-02-01

### Added

- One.
- Three,
  in two lines.

### Fixed

- Two, which takes
  two lines.

### Removed

- Four.

## [0.1.0] - 2030-01-01

- First.
"""
    )
    with pytest.raises(ValueError, match="nothing has changed"):
        changes.released(log, [], "0.3.0", "2030-03-01")
    with pytest.raises(ValueError, match="no line"):
        changes.released("# Changelog\n", texts, "0.3.0", "2030-03-01")


def test_fragments_are_right(changes: ModuleType, tmp_path: Path) -> None:
    """Those that are here; and each way to be wrong is named."""
    assert changes.problems(ROOT / "changes") == []
    (tmp_path / "README.md").write_text("")
    for name, text in (
        ("x.md", "a"),
        ("x.odd.md", "a"),
        ("X.added.md", "a"),
        ("empty.added.md", " "),
        ("bullet.added.md", "- a"),
        ("good.added.md", "A sentence."),
    ):
        (tmp_path / name).write_text(text)
    assert len(changes.problems(tmp_path)) == 5


def test_the_change_log_can_be_released(changes: ModuleType) -> None:
    """The one that is here has the form that the script expects, and loses no line."""
    text = (ROOT / "CHANGELOG.md").read_text()
    log = changes.released(text, [], "9.9.9", "2030-01-01")
    assert log.count("## [9.9.9] - 2030-01-01") == 1
    lines = {line for line in text.splitlines() if line.strip()}
    assert lines <= set(log.splitlines())


def test_the_workflow_stores_no_secret() -> None:
    """It publishes for tags only, by trusted publishing, and runs commands that there are."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "secrets." not in text
    assert "id-token: write" in text
    assert text.count("startsWith(github.ref, 'refs/tags/')") == 2
    for command in re.findall(r"kvxfer (\w+)", text):
        assert (ROOT / "kvxfer" / "cli" / command).exists() or command in ("demo",)
