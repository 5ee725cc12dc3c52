"""What the pages show about MoRI-IO and its software device works, where the engine is."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import kvxfer

_spec = importlib.util.spec_from_file_location(
    "doc_blocks", Path(__file__).parents[1] / "docs" / "doc_blocks.py"
)
assert _spec is not None
doc_blocks = importlib.util.module_from_spec(_spec)
sys.modules["doc_blocks"] = doc_blocks
_spec.loader.exec_module(doc_blocks)

MINE = [b for b in doc_blocks.all_blocks() if b.lane == "mori"]


def runs(block):
    """The set-up is what this lane did before; a recording is what tests/mori/test_samples.py
    does."""
    return doc_blocks.is_python(block) or block.code.startswith("pytest")


@pytest.mark.parametrize("page", sorted({b.page for b in MINE}))
def test_pages(page, softrdma, tmp_path):
    """The program of the page, its files, its commands."""
    blocks = [b for b in MINE if b.page == page and runs(b)]
    assert len(blocks) >= 2
    home = str(Path(kvxfer.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": home}
    if page.endswith("softrdma.md"):
        env.pop("SOFTIBV_SHM", None)  # it enters a run of its own
    doc_blocks.run_page(blocks, tmp_path, env)
