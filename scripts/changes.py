"""The change log from its fragments: ``check``, or ``release VERSION DATE``.

A fragment is ``changes/NAME.KIND.md``; see ``changes/README.md``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("added", "changed", "fixed", "removed", "security")
UNRELEASED = "## [Unreleased]"


def fragments(folder: Path) -> list[Path]:
    """Every file but the one that explains them, in the order of their names."""
    return sorted(p for p in folder.iterdir() if p.name != "README.md")


def problems(folder: Path) -> list[str]:
    """What is wrong with the fragments; empty if nothing is."""
    found = []
    for path in fragments(folder):
        match = re.fullmatch(r"[a-z0-9][a-z0-9-]*\.(\w+)\.md", path.name)
        if match is None or match[1] not in KINDS:
            found.append(f"{path.name}: name it NAME.KIND.md, KIND one of {', '.join(KINDS)}")
        elif not path.read_text().strip():
            found.append(f"{path.name} is empty")
        elif path.read_text().lstrip().startswith(("-", "#")):
            found.append(f"{path.name}: a sentence, without a bullet or heading")
    return found


def released(changelog: str, texts: Sequence[tuple[str, str]], version: str, date: str) -> str:
    """The change log with a section for ``version``, and an empty one for what comes next.

    ``texts`` are pairs of kind and text.

    Raises:
        ValueError: there is no section for what is unreleased, or nothing has changed.
    """
    head, mark, rest = changelog.partition(UNRELEASED)
    if not mark:
        raise ValueError(f"CHANGELOG.md has no line {UNRELEASED!r}")
    body, *older = re.split(r"^(?=## \[)", rest, maxsplit=1, flags=re.MULTILINE)
    sections: dict[str, list[str]] = {}
    name = ""
    for line in body.splitlines():
        if line.startswith("### "):
            name = line[4:].strip()
            sections.setdefault(name, [])
        elif line.strip():
            sections.setdefault(name, []).append(line)
    for kind, text in texts:
        lines = text.strip().splitlines()
        sections.setdefault(kind.capitalize(), []).extend(
            f"- {line}" if i == 0 else f"  {line.strip()}" for i, line in enumerate(lines)
        )
    parts = [f"### {name}\n\n" + "\n".join(lines) for name, lines in sections.items() if lines]
    if not parts:
        raise ValueError("nothing has changed since the last release")
    section = f"## [{version}] - {date}\n\n" + "\n\n".join(parts).replace("### \n\n", "")
    return f"{head}{UNRELEASED}\n\n{section}\n" + ("\n" + older[0] if older else "")


def main(argv: Sequence[str]) -> int:
    folder, log = ROOT / "changes", ROOT / "CHANGELOG.md"
    wrong = problems(folder)
    for line in wrong:
        print(line)
    if wrong or list(argv) == ["check"]:
        return 1 if wrong else 0
    if len(argv) != 3 or argv[0] != "release":
        print(__doc__)
        return 2
    version, date = argv[1:]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        print("VERSION is like 1.2.3, DATE like 2030-01-31")
        return 2
    found = fragments(folder)
    texts = [(path.name.split(".")[-2], path.read_text()) for path in found]
    log.write_text(released(log.read_text(), texts, version, date))
    for path in found:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
