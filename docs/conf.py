"""Sphinx configuration. Built by ``make docs``, where every warning is an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generated

project = "kvxfer"
author = "The kvxfer authors"
project_copyright = author
version = release = installed_version("kvxfer")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "drawings"]
suppress_warnings: list[str] = []

# The engines are not needed to read about their backends.
autodoc_mock_imports = ["torch", "mori", "nixl", "mooncake", "vllm"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False

myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "kvxfer"
html_show_sourcelink = False


def _fill(app: Any, docname: str, source: list[str]) -> None:
    del app, docname
    source[0] = generated.fill(source[0])


def setup(app: Any) -> None:
    """Generated parts of pages take the place of their marks."""
    app.connect("source-read", _fill)
