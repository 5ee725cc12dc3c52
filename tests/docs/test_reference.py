"""What is drawn and generated: nothing is left out, and pictures are what would be drawn."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from doc_blocks import ROOT, pages

import kvxfer

DOCS = ROOT / "docs"


def module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    return module("docs_generated", DOCS / "generated.py")


# ---- pictures ------------------------------------------------------------------------------


def test_pictures_are_what_is_drawn() -> None:
    """``python docs/drawings/draw.py`` would change nothing; every picture is on a page, and says
    in words what it shows."""
    draw = module("docs_draw", DOCS / "drawings" / "draw.py")
    committed = {path.stem: path.read_text() for path in (DOCS / "drawings").glob("*.svg")}
    assert committed == {name: make().svg() for name, make in draw.DRAWINGS.items()}
    shown = re.findall(r"!\[([^]]{20,})\]\([./]*drawings/(\w+)\.svg\)", _all_text())
    assert {name for _, name in shown} == set(committed)


def test_pictures_fit_their_frames() -> None:
    """No text begins or ends outside its picture (6.2 pixels for a character, at 12 pixels)."""
    for path in (DOCS / "drawings").glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        width, height = int(root.attrib["width"]), int(root.attrib["height"])
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            length = 6.2 * len(text.text or "")
            x, y = int(text.attrib["x"]), int(text.attrib["y"])
            begin = (
                x - {"start": 0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
            )
            assert -2 <= begin <= begin + length <= width + 2, f"{path.name}: {text.text}"
            assert 10 <= y <= height, f"{path.name}: {text.text}"


def _all_text() -> str:
    return "\n".join(page.read_text() for page in pages())


# ---- generated parts -----------------------------------------------------------------------


def test_every_part_is_on_a_page(generated: ModuleType) -> None:
    """And every mark on a page has a part."""
    marks = re.findall(r"<!-- generated: (\w+) -->", _all_text())
    assert sorted(marks) == sorted(generated.PARTS)


def test_configuration_is_whole(generated: ModuleType) -> None:
    """Every class whose name says that it is configuration, with every field that can be given."""
    names = {cls.__name__ for cls in generated.config_classes()}
    assert {
        "AgentConfig",
        "AimdAdmission",
        "BreakerPolicy",
        "ConnectorConfig",
        "ControlConfig",
        "KeeperConfig",
        "Limits",
        "LoopbackConfig",
        "MooncakeConfig",
        "MoriioConfig",
        "NixlConfig",
        "RetryPolicy",
        "Security",
        "ShmConfig",
        "Timeouts",
    } <= names
    text = generated.configuration()
    for path in (Path(kvxfer.__file__).parent / "backends").rglob("*.py"):
        for name in re.findall(r"^class (\w+Config)\b", path.read_text(), re.MULTILINE):
            assert f"\n## {name}\n" in "\n" + text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if not row.split(" | ")[-1].strip(" |")]  # each has a text
    assert any("`workers` | `2` | Copy threads" in row for row in rows)


def test_rules_are_whole(generated: ModuleType) -> None:
    """Every built-in rule has a row."""
    from kvxfer.policies.rules import builtin_rules

    text = generated.error_rules()
    for table in builtin_rules():
        for rule in table.rules:
            assert f"| `{rule.name}` |" in text
    from kvxfer.errors import ErrorKind

    assert all(f"| `{kind.name}` | " in generated.error_kinds() for kind in ErrorKind)


def test_messages_are_whole(generated: ModuleType) -> None:
    """Every message of the wire has a section."""
    from kvxfer.core import wire

    text = generated.wire_messages()
    for message in (*wire.MESSAGES, wire.Envelope, wire.Ref):
        assert f"### {message.__name__}\n" in text


def test_tables_are_tables(generated: ModuleType) -> None:
    """No cell breaks its row: all rows of a table have as many cells as its heading."""
    for name, part in generated.PARTS.items():
        cells = 0
        for line in part().splitlines():
            if not line.startswith("|"):
                cells = 0
                continue
            found = len(re.findall(r"(?<!\\)\|", line))
            assert found == (cells or found), f"{name}: {line}"
            cells = found


# ---- the house -----------------------------------------------------------------------------


def test_the_house_is_what_is_held() -> None:
    """The page's table of who may import whom is the one of the import rules, for every package."""
    rules = module("import_rules", ROOT / "tests" / "packaging" / "test_import_rules.py")
    page = (DOCS / "explanation" / "house.md").read_text()
    rows = re.findall(r"^\| `kvxfer\.(\w+)` \|[^|]*\| ([^|]*) \|$", page, re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", may)) for name, may in rows}
    home = Path(kvxfer.__file__).parent
    packages = {path.parent.name for path in home.glob("*/__init__.py")} | {"errors"}
    assert set(told) == packages
    assert told.pop("cli") == set()
    for name, may in told.items():
        held = {x.removeprefix("kvxfer.") for x in rules.LAYERS[f"kvxfer.{name}"]}
        held -= {name, "__version__"}
        assert may == held, name


def test_files_that_the_house_names_exist() -> None:
    """Every path in backquotes on the page is there."""
    page = (DOCS / "explanation" / "house.md").read_text()
    home = Path(kvxfer.__file__).parent
    for name in re.findall(r"`([\w/]+\.(?:py|toml|md))`", page):
        assert any((base / name).exists() for base in (home, ROOT)) or "NAME" in name, name
