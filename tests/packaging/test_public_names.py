"""The names that ``kvxfer`` itself offers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer


def homes() -> dict[str, str]:
    """Name to module, as the block for type checkers says."""
    tree = ast.parse(Path(kvxfer.__file__).read_text())
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    assert len(blocks) == 1
    return {
        name.asname or name.name: node.module or ""
        for node in blocks[0].body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }


def test_type_checkers_and_users_see_the_same_names() -> None:
    """The block under TYPE_CHECKING, the lazy names and ``__all__`` agree."""
    assert homes() == kvxfer._HOME_OF
    assert {*homes(), "__version__"} == set(kvxfer.__all__)
    assert len(kvxfer.__all__) == len(set(kvxfer.__all__))


@pytest.mark.parametrize("name", sorted(homes()))
def test_name_loads(name: str) -> None:
    """Every public name loads, is public in its home, and is the same object there."""
    home = importlib.import_module(homes()[name])
    assert getattr(kvxfer, name) is getattr(home, name)
    assert name in home.__all__
    assert name in dir(kvxfer)


def test_unknown_name() -> None:
    """A name that is not there is an AttributeError that names it, as for any module."""
    with pytest.raises(AttributeError, match="'kvxfer' has no attribute 'Agnet'"):
        _ = kvxfer.Agnet


def test_dir_before_anything_is_loaded() -> None:
    """Tab completion sees the lazy names, and looking does not load them."""
    program = (
        "import sys, kvxfer\n"
        "assert set(kvxfer.__all__) <= set(dir(kvxfer))\n"
        "assert 'numpy' not in sys.modules and 'kvxfer.agent' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
