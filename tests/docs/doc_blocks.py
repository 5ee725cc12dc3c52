"""Fenced blocks of the Markdown pages: which there are, which run, which are excused.

A Python block runs unless a comment on the line before it says why not::

    <!-- not run: needs two hosts -->
    ```python

The blocks of one page run in order, as one program in a fresh interpreter.

A block that is a part of a file of the source says so, and is compared with it::

    <!-- part of src/kvxfer_sample/transport.py -->
    ```python
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<language>\S*)")
_PART = re.compile(r"<!--\s*part of (?P<file>\S+)\s*-->")
_EXCUSE = re.compile(r"<!--\s*not run:\s*(?P<reason>.*?)\s*-->")


@dataclasses.dataclass(frozen=True)
class Block:
    """``line`` is that of the first line of code, counted from 1."""

    page: str
    line: int
    language: str
    code: str
    excuse: str | None
    part_of: str | None = None

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"


def pages() -> list[Path]:
    """Every Markdown page that a reader may follow."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: a fence is not closed.
    """
    found: list[Block] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        fence = _FENCE.match(lines[i])
        if fence is None:
            i += 1
            continue
        excuse = _EXCUSE.search(lines[i - 1]) if i else None
        part = _PART.search(lines[i - 1]) if i else None
        start = i + 1
        closing = re.compile(rf"^\s*{re.escape(fence['ticks'])}\s*$")
        end = start
        while end < len(lines) and not closing.match(lines[end]):
            end += 1
        if end == len(lines):
            raise ValueError(f"{page}, line {start}: the fence is not closed")
        indent = len(fence["indent"])
        code = "\n".join(line[indent:] for line in lines[start:end])
        reason = excuse["reason"] if excuse else None
        file = part["file"] if part else None
        found.append(Block(page, start + 1, fence["language"], code, reason, file))
        i = end + 1
    return found


def all_blocks() -> list[Block]:
    return [
        block
        for page in pages()
        for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())
    ]


def is_python(block: Block) -> bool:
    return block.language.lower() in {"python", "python3", "py", "pycon"}


def program_of(blocks: Sequence[Block]) -> str:
    """One program, padded so that a traceback names the lines of the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"
