"""Fenced blocks of the Markdown pages: which there are, how each runs, which are excused.

The Python blocks of one page run in order, as one program in a fresh interpreter.  Then its shell
blocks run, in order, in one folder.  A comment on the line before a block says otherwise::

    <!-- file: worker.py -->           is written to that file before the shell blocks run
    <!-- lane: mori -->                that lane runs it, as it stands or as a step of its set-up
    <!-- not run: needs two NICs -->   nobody here can; at most one block in twenty

A shell block of nothing but ``make TARGET`` and ``pip install`` needs no comment: CI makes those
targets, and its lanes install those extras, from the source.

    python tests/docs/doc_blocks.py    prints what does not run here, and why

A block that is a part of a file of the source says so, and is compared with it::

    <!-- part of src/kvxfer_sample/transport.py -->
    ```python
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<language>\S*)")
_FILE = re.compile(r"<!--.*\bfile:\s*(?P<file>[\w.]+).*-->")
_LANE = re.compile(r"<!--.*\blane:\s*(?P<lane>\w+).*-->")
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
    file: str | None = None
    lane: str | None = None

    @property
    def runs_here(self) -> bool:
        """Whether the docs lane runs it. Other languages than Python and shell are no code."""
        if self.excuse or self.part_of or self.lane or is_setup(self):
            return False
        return is_python(self) or self.language == "shell"

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
        named = _FILE.search(lines[i - 1]) if i else None
        lane = _LANE.search(lines[i - 1]) if i else None
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
        found.append(
            Block(
                page,
                start + 1,
                fence["language"],
                code,
                reason,
                part["file"] if part else None,
                named["file"] if named else None,
                lane["lane"] if lane else None,
            )
        )
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


def is_code(block: Block) -> bool:
    """What has to be executed somewhere, or excused."""
    return is_python(block) or block.language == "shell"


def is_setup(block: Block) -> bool:
    """Nothing but what CI does to set its lanes up."""
    lines = [line for line in block.code.splitlines() if line.strip()]
    return block.language == "shell" and all(
        line.startswith(("make ", "pip install ")) for line in lines
    )


def run_page(
    blocks: Sequence[Block], folder: Path, env: Mapping[str, str], timeout: float = 100.0
) -> str:
    """Run what one page shows, in ``folder``; what it printed.

    Raises:
        AssertionError: a program did not exit with 0, or printed to standard error.
    """
    printed = ""
    for block in blocks:
        if block.file is not None:
            (folder / block.file).write_text(block.code + "\n")
    plain = [block for block in blocks if is_python(block) and block.file is None]
    if plain:
        program = folder / (plain[0].page.replace("/", "_") + ".py")
        program.write_text(program_of(plain))
        printed += _run([sys.executable, "-W", "error", str(program)], folder, env, timeout)
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    for name, words in (("kvxfer", " -m kvxfer"), ("python", ""), ("pytest", " -m pytest")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        (tools / name).chmod(0o755)
    shell = {**env, "PATH": f"{tools}{os.pathsep}{env.get('PATH', os.defpath)}"}
    for block in blocks:
        if block.language == "shell":
            printed += _run(["bash", "-euo", "pipefail", "-c", block.code], folder, shell, timeout)
    return printed


def _run(words: list[str], folder: Path, env: Mapping[str, str], timeout: float) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=dict(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout}\n{done.stderr}"
    # Commands may tell people something. What a program of a page prints there is a warning of
    # Python's or a traceback of a thread, unless it is a log line of kvxfer's.
    other = [line for line in done.stderr.splitlines() if "[event=" not in line]
    assert words[0] == "bash" or not other, done.stderr
    return done.stdout


def program_of(blocks: Sequence[Block]) -> str:
    """One program, padded so that a traceback names the lines of the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print every block that this lane does not run, and why."""
    code = [block for block in all_blocks() if is_code(block)]
    for block in code:
        if block.excuse is not None:
            print(f"{block}: not run: {block.excuse}")
        elif block.lane is not None:
            print(f"{block}: run by the {block.lane} lane")
    excused = sum(block.excuse is not None for block in code)
    print(f"{len(code)} blocks of code, {excused} of them not run anywhere")


if __name__ == "__main__":
    main()
