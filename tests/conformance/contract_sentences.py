"""The sentences of the Transport contract, read from the docstrings that state it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import kvxfer.core

__all__ = ["MODULES", "sentences"]

MODULES = ("transport", "attempt", "capabilities", "pollable")
"""Where the contract stands."""

_BREAK = re.compile(r"(?<=[.!?])\s+(?=[A-Z`(])")


def sentences() -> Iterator[tuple[str, str]]:
    """``(what it is about, the sentence)``, in the order of the sources.

    Public things and their attributes, and what of ``Transport`` begins with one underscore, since
    backend authors write or call these.  A sentence ends at a full stop before a capital, a
    backtick or a parenthesis.
    """
    folder = Path(kvxfer.core.__file__).parent
    for module in MODULES:
        tree = ast.parse((folder / f"{module}.py").read_text())
        for name, text in _docstrings(tree, f"{module}.py", ""):
            for paragraph in re.split(r"\n\s*\n", text):
                flat = " ".join(paragraph.split())
                yield from ((name, sentence) for sentence in _BREAK.split(flat) if sentence)


def _docstrings(
    node: ast.Module | ast.ClassDef, name: str, prefix: str
) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    yield from _attributes(node.body, prefix)
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _docstrings(child, prefix + child.name, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            text = ast.get_docstring(child)
            if child.name == "__init__":
                yield from _attributes(child.body, prefix)
            elif text and (name == "Transport" or not child.name.startswith("_")):
                yield prefix + child.name, text


def _attributes(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    """Texts that stand behind an assignment."""
    for child, following in itertools.pairwise(body):
        if not isinstance(child, ast.Assign | ast.AnnAssign):
            continue
        target = child.targets[0] if isinstance(child, ast.Assign) else child.target
        name = ast.unparse(target).removeprefix("self.")
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and not name.startswith("_")
        ):
            yield prefix + name, str(following.value.value)
