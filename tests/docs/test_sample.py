"""The page "write a backend" is the sample plug-in: its blocks, put together, are its files."""

from __future__ import annotations

import re

import pytest
from doc_blocks import ROOT, Block, all_blocks

from kvxfer.testing.expected import table

SAMPLE = ROOT / "tests" / "sample_plugin"
PAGE = "docs/how-to/write-a-backend.md"


def parts() -> dict[str, list[Block]]:
    """The blocks of each file, in the order of the page."""
    found: dict[str, list[Block]] = {}
    for block in all_blocks():
        if block.part_of is not None:
            assert block.page == PAGE, f"{block}: parts of which plug-in?"
            found.setdefault(block.part_of, []).append(block)
    return found


def put_together(blocks: list[Block]) -> str:
    """A file: its blocks, with one empty line between them."""
    return "\n\n".join(block.code for block in blocks) + "\n"


def files() -> list[str]:
    """What the sample consists of; what builds leave behind apart."""
    return sorted(
        str(path.relative_to(SAMPLE))
        for path in SAMPLE.rglob("*")
        if path.is_file() and "egg-info" not in str(path) and path.suffix != ".pyc"
    )


@pytest.mark.parametrize("name", [f for f in files() if not f.endswith("py.typed")])
def test_the_page_is_the_sample(name: str) -> None:
    """Every file of the plug-in that the conformance suite passes stands on the page, whole, in
    order and to the letter."""
    assert put_together(parts()[name]) == (SAMPLE / name).read_text()


def test_nothing_else_is_on_the_page() -> None:
    """A block cannot be a part of a file that is not there; ``py.typed`` is named and empty."""
    assert {*parts(), "src/kvxfer_sample/py.typed"} == set(files())
    assert (SAMPLE / "src/kvxfer_sample/py.typed").read_text() == ""
    assert "`py.typed`" in (ROOT / PAGE).read_text()


def test_it_grows() -> None:
    """The backend is explained in steps: no block is long, and text stands before each."""
    blocks = parts()["src/kvxfer_sample/transport.py"]
    assert len(blocks) >= 5
    lines = (ROOT / PAGE).read_text().splitlines()
    for block in blocks:
        assert len(block.code.splitlines()) <= 40, block
        before = "\n".join(lines[: block.line - 3]).rpartition("```")[2]
        assert len(re.findall(r"\w+", before)) >= 15, f"{block}: what is it for?"


def test_the_table_of_backends_is_the_expected_one() -> None:
    """The reference page shows what ``kvxfer.testing.expected`` holds."""
    assert table() in (ROOT / "docs/reference/backends.md").read_text()
