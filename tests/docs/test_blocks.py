"""What the pages show works: every Python block runs, is a part of a file that tests run, or says
why it cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from doc_blocks import ROOT, Block, all_blocks, blocks_of, is_python, pages, program_of

import kvxfer

# Other languages that a page may show. A block in a language that is not listed, or in none, could
# hide Python from the tests.
OTHER_LANGUAGES = {"shell", "text", "toml", "json", "{toctree}", "{eval-rst}"}

RUN = [
    block
    for block in all_blocks()
    if is_python(block) and block.excuse is None and block.part_of is None
]
PROGRAMS = [
    pytest.param(list(group), id=page) for page, group in groupby(RUN, key=lambda b: b.page)
]


@pytest.mark.parametrize("blocks", PROGRAMS)
def test_python_blocks_run(blocks: list[Block], tmp_path: Path) -> None:
    """The blocks of the page, as one program, exit with 0 and print no error."""
    program = tmp_path / (blocks[0].page.replace("/", "_") + ".py")
    program.write_text(program_of(blocks))
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(kvxfer.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not done.stderr


def test_every_block_is_run_or_excused() -> None:
    """No block escapes: its language is known, and an excuse has a reason and a Python block."""
    for block in all_blocks():
        assert is_python(block) or block.language in OTHER_LANGUAGES, f"{block}: {block.language!r}"
        if block.excuse is not None:
            assert is_python(block), f"{block}: only Python blocks run, so it needs no excuse"
            assert len(block.excuse.split()) >= 2, f"{block}: the excuse gives no reason"
    written = sum(page.read_text().count("<!-- not run") for page in pages())
    assert written == sum(block.excuse is not None for block in all_blocks())


def test_the_readme_has_a_program() -> None:
    """The quickstart of the README is Python, runs, and has at most 30 lines."""
    blocks = [block for block in RUN if block.page == "README.md"]
    assert blocks
    assert len(blocks[0].code.splitlines()) <= 30


def test_the_readme_begins_with_the_two_commands() -> None:
    """Demo first, tests second, before anything else."""
    first = next(block for block in all_blocks() if block.page == "README.md")
    commands = [line.split("#")[0].strip() for line in first.code.splitlines()]
    assert commands == ["make demo", "make test"]


def test_make_targets_exist() -> None:
    """Every ``make TARGET`` that a page names is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in pages():
        for named in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE):
            assert named in targets or named.startswith("lane-"), f"{page.name}: make {named}"


def test_links_between_pages() -> None:
    """Every relative link names a file that is there."""
    for page in pages():
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nx = 1\n```", [("python", 2, "x = 1", None)]),
        ("<!-- not run: needs a NIC -->\n```py\nx\n```", [("py", 3, "x", "needs a NIC")]),
        ("1. a\n\n   ```toml\n   x = 1\n   ```", [("toml", 4, "x = 1", None)]),
        ("````text\n```\n````", [("text", 2, "```", None)]),
        ("```\nx\n```", [("", 2, "x", None)]),
    ],
)
def test_blocks_are_found(text: str, expected: list[tuple[str, int, str, str | None]]) -> None:
    """Language, line, code and excuse of a block, indented ones and longer fences included."""
    assert [(b.language, b.line, b.code, b.excuse) for b in blocks_of("p", text)] == expected


def test_open_fence() -> None:
    """A fence that is not closed would swallow the rest of the page."""
    with pytest.raises(ValueError, match="p, line 1: the fence is not closed"):
        blocks_of("p", "```python\nx = 1")


def test_a_program_keeps_the_lines_of_its_page() -> None:
    """A traceback of a documentation block points into the page."""
    blocks = blocks_of("p", "text\n\n```python\na = 1\n```\ntext\n```python\nb = 2\n```")
    assert program_of(blocks).splitlines() == ["", "", "", "a = 1", "", "", "", "b = 2"]
