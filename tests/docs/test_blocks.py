"""What the pages show works: every block of code runs, is a part of a file that tests run, or says
why it cannot."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

import pytest
from doc_blocks import (
    ROOT,
    Block,
    all_blocks,
    blocks_of,
    is_code,
    is_python,
    is_setup,
    pages,
    program_of,
    run_page,
)

import kvxfer

# Other languages that a page may show. A block in a language that is not listed, or in none, could
# hide Python from the tests.
OTHER_LANGUAGES = {"shell", "text", "toml", "json", "{toctree}", "{eval-rst}"}

BLOCKS = all_blocks()
RUN = [block for block in BLOCKS if block.runs_here]
PAGES = [pytest.param(list(group), id=page) for page, group in groupby(RUN, key=lambda b: b.page)]


@pytest.mark.timeout(400)  # a page may take several commands, of a minute each on a busy machine
@pytest.mark.parametrize("blocks", PAGES)
def test_pages_run(blocks: list[Block], tmp_path: Path) -> None:
    """What a page shows can be followed: its program, its files, its commands, in order."""
    home = str(Path(kvxfer.__file__).parents[1])
    run_page(blocks, tmp_path, {**os.environ, "PYTHONPATH": home})


def test_every_block_is_run_or_excused() -> None:
    """No block escapes: its language is known; where it runs, or why it does not, is said once,
    and only of code."""
    for block in BLOCKS:
        assert is_python(block) or block.language in OTHER_LANGUAGES, f"{block}: {block.language!r}"
        said = [x for x in (block.excuse, block.lane, block.part_of) if x is not None]
        assert len(said) <= 1, f"{block}: one of {said}"
        if block.excuse is not None or block.lane is not None:
            assert is_code(block), f"{block}: only code runs, so it needs no comment"
        if block.excuse is not None:
            assert len(block.excuse.split()) >= 2, f"{block}: the excuse gives no reason"
    for mark, found in (("not run:", "excuse"), ("lane:", "lane"), ("file:", "file")):
        written = sum(len(re.findall(rf"<!--[^>]*{mark}", p.read_text())) for p in pages())
        assert written == sum(getattr(b, found) is not None for b in BLOCKS), f"a stray {mark}"


def test_few_are_excused() -> None:
    """At most one block of code in twenty runs nowhere, each for want of hardware."""
    code = [block for block in BLOCKS if is_code(block)]
    excused = [block for block in code if block.excuse is not None]
    assert len(excused) * 20 <= len(code), [f"{b}: {b.excuse}" for b in excused]
    for block in excused:
        assert re.search(r"\b(GPUs?|NICs?|hosts?|ROCm|CUDA)\b", block.excuse or ""), str(block)


def test_lanes_exist() -> None:
    """A block that another lane runs names a lane that there is."""
    table = (ROOT / "scripts" / "lane_table.py").read_text()
    for block in BLOCKS:
        if block.lane is not None:
            assert re.search(rf'Lane\(\s*"{block.lane}"', table), f"{block}: {block.lane}"


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


def anchors(page: Path) -> set[str]:
    """What its headings are called in links: as GitHub and the documentation make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", text).lower() for text in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in plain}


def test_extras_exist() -> None:
    """Every ``kvxfer[EXTRA]`` that a page installs is one that the package has."""
    project = (ROOT / "pyproject.toml").read_text()
    for page in pages():
        for extras in re.findall(r"kvxfer\[([\w,]+)\]", page.read_text()):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"{page.name}: {extra}"


def test_links_between_pages() -> None:
    """Every relative link names a file that is there, and a heading that is in it."""
    for page in pages():
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            there = page.parent / name if name else page
            assert there.exists(), f"{page.name}: {target}"
            if anchor and there.suffix == ".md":
                assert anchor in anchors(there), f"{page.name}: {target}: {sorted(anchors(there))}"


def test_shell_blocks_of_targets_need_no_comment() -> None:
    """Commands that CI makes are told from those that have to be run."""
    text = "```shell\nmake test\npip install a\n```\n```shell\nmake test\nrm x\n```"
    (made, mixed) = blocks_of("p", text)
    assert (is_setup(made), made.runs_here) == (True, False)
    assert (is_setup(mixed), mixed.runs_here) == (False, True)


def test_a_page_that_does_not_work(tmp_path: Path) -> None:
    """A failing program, one that prints to standard error, a failing command, and a file that is
    not what the command expects: each is noticed."""
    for text in (
        "```python\nassert 1 == 2\n```",
        "```python\nimport sys\nsys.stderr.write('x')\n```",
        "```shell\nfalse\n```",
        "```shell\nfalse | true\n```",
        "<!-- file: a.py -->\n```python\n1 / 0\n```\n\n```shell\npython a.py\n```",
    ):
        with pytest.raises(AssertionError):
            run_page(blocks_of("p", text), tmp_path, os.environ)
    good = "<!-- file: a.py -->\n```python\nprint(7)\n```\n\n```shell\npython a.py\n```"
    assert run_page(blocks_of("p", good), tmp_path, os.environ) == "7\n"


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
