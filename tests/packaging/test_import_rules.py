"""Who may import whom, read from the sources of the package that is installed."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvxfer

PACKAGE = Path(kvxfer.__file__).parent

# What each part of the package may import of the package. The longest matching name counts.
LAYERS = {
    "kvxfer": (),  # its names load on first use
    "kvxfer.__main__": ("kvxfer.cli",),
    "kvxfer.errors": (),
    "kvxfer.core": ("kvxfer.errors", "kvxfer.core"),
    # These stand alone: a connector may use one of them and nothing else.
    "kvxfer.core.layout": ("kvxfer.errors", "kvxfer.core.layout"),
    "kvxfer.core.topology": ("kvxfer.errors", "kvxfer.core.topology", "kvxfer.core.layout"),
    "kvxfer.core.acks": (
        "kvxfer.errors",
        "kvxfer.core.acks",
        "kvxfer.core.remembered",
        "kvxfer.core.timers",
    ),
    "kvxfer.core.legacy_acks": (
        "kvxfer.errors",
        "kvxfer.core.acks",
        "kvxfer.core.legacy_acks",
        "kvxfer.core.remembered",
        "kvxfer.core.timers",
        "kvxfer.core.topology",
    ),
    "kvxfer.policies": ("kvxfer.errors", "kvxfer.core", "kvxfer.policies"),
    "kvxfer.backends": ("kvxfer.errors", "kvxfer.core", "kvxfer.backends"),
    # A process of its own: it shares with the agent what the agent imports from it.
    "kvxfer.keeper": ("kvxfer.errors", "kvxfer.core", "kvxfer.keeper"),
    "kvxfer.agent": (
        "kvxfer.errors",
        "kvxfer.core",
        "kvxfer.policies",
        "kvxfer.keeper",
        "kvxfer.agent",
    ),
    # Optional: it looks at agents from outside, as a user's own code would.
    "kvxfer.observe": (
        "kvxfer.__version__",
        "kvxfer.errors",
        "kvxfer.core",
        "kvxfer.policies",
        "kvxfer.agent",
        "kvxfer.observe",
    ),
    "kvxfer.integrations": (
        "kvxfer.errors",
        "kvxfer.core",
        "kvxfer.policies",
        "kvxfer.agent",
        "kvxfer.backends",
        "kvxfer.integrations",
    ),
    "kvxfer.testing": (
        "kvxfer.errors",
        "kvxfer.core",
        "kvxfer.policies",
        "kvxfer.keeper",
        "kvxfer.agent",
        "kvxfer.backends",
        "kvxfer.testing",
    ),
    "kvxfer.cli": ("kvxfer",),
}

# Where a package of others may be imported at all; parts that no entry names may be used anywhere.
OWNERS = {
    "entrypoints": ("kvxfer.core.plugins",),
    "zmq": ("kvxfer.core.control", "kvxfer.core.control_*"),
    "tenacity": ("kvxfer.policies",),
    "prometheus_client": ("kvxfer.observe",),
    "opentelemetry": ("kvxfer.observe.tracing",),
    "rich": ("kvxfer.cli",),
    "typer": ("kvxfer.cli",),
    "matplotlib": ("kvxfer.cli.bench.plots",),
    "mori": ("kvxfer.backends.moriio", "kvxfer.testing.softrdma"),
    "nixl": ("kvxfer.backends.nixl",),
    "nixl_cu12": ("kvxfer.backends.nixl",),
    "nixl_cu13": ("kvxfer.backends.nixl",),
    "mooncake": ("kvxfer.backends.mooncake",),
    "vllm": ("kvxfer.integrations.vllm",),
}

# Never loaded by importing a module of ours. A vLLM connector has to subclass vLLM's own class.
ENGINES = ("torch", "mori", "nixl", "nixl_cu12", "nixl_cu13", "mooncake", "vllm")
AT_IMPORT = {"kvxfer.integrations.vllm": ("vllm",)}

STAND_ALONE = ("kvxfer.core.layout", "kvxfer.core.topology")


class When(enum.Enum):
    """When the statement runs."""

    IMPORT = "when the module is imported"
    CALL = "when a function is called"
    NEVER = "for type checkers only"


@dataclasses.dataclass(frozen=True)
class Import:
    importer: str
    line: int
    target: str
    when: When

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.target} {self.when.value}"


def within(name: str, parents: tuple[str, ...]) -> bool:
    """``name`` is one of ``parents`` or inside one; a trailing ``*`` stands for any ending."""
    return any(
        name == parent
        or name.startswith(parent + ".")
        or (parent.endswith("*") and name.startswith(parent[:-1]))
        for parent in parents
    )


def imports_of(module: str, source: str, *, is_package: bool = False) -> list[Import]:
    """Every import statement of a module, with the absolute name of what it names."""
    found: list[Import] = []

    def visit(node: ast.AST, when: When) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(module, node.lineno, name.name, when) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            for name in node.names:
                # "from a import b": b is a module or a name in a; as far as rules go, it is a.b.
                inside = base.partition(".")[0] == "kvxfer"
                target = f"{base}.{name.name}" if inside else base
                found.append(Import(module, node.lineno, target, when))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = When.CALL if when is When.IMPORT else when
            for child in ast.iter_child_nodes(node):
                visit(child, inner)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, When.NEVER)
            for child in node.orelse:
                visit(child, when)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, when)

    visit(ast.parse(source), When.IMPORT)
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def all_imports() -> tuple[Import, ...]:
    return tuple(
        found
        for name, path in modules()
        for found in imports_of(name, path.read_text(), is_package=path.name == "__init__.py")
    )


def layer_of(name: str) -> str:
    return max((layer for layer in LAYERS if within(name, (layer,))), key=len)


def breaks_layers(found: Import) -> bool:
    if not within(found.target, ("kvxfer",)) or found.when is When.NEVER:
        return False
    return not within(found.target, LAYERS[layer_of(found.importer)])


def breaks_owners(found: Import) -> bool:
    owners = OWNERS.get(found.target.partition(".")[0])
    if owners is None or found.when is When.NEVER:
        return False
    return not within(found.importer, owners)


def loads_engine(found: Import) -> bool:
    top = found.target.partition(".")[0]
    if found.when is not When.IMPORT or top not in ENGINES:
        return False
    return not any(
        within(found.importer, (place,)) and top in engines for place, engines in AT_IMPORT.items()
    )


def stands_not_alone(found: Import) -> bool:
    top = found.target.partition(".")[0]
    return within(found.importer, STAND_ALONE) and top in ("msgspec", "zmq", "tenacity")


def listed(broken: list[Import]) -> str:
    return "\n".join(map(str, broken))


def test_imports_point_one_way() -> None:
    """errors and core values <- transport <- policies <- agent; backends import core only."""
    broken = [found for found in all_imports() if breaks_layers(found)]
    assert not broken, listed(broken)


def test_no_backend_imports_another() -> None:
    """Backends share only modules whose name begins with an underscore."""
    broken = []
    for found in all_imports():
        if within(found.importer, ("kvxfer.backends",)) and within(
            found.target, ("kvxfer.backends",)
        ):
            mine, other = found.importer.split(".")[2:3], found.target.split(".")[2:3]
            if other and mine != other and not other[0].startswith("_"):
                broken.append(found)
    assert not broken, listed(broken)


def test_each_dependency_has_its_place() -> None:
    """Only core.plugins imports entrypoints, only core.control zmq, and so on."""
    broken = [found for found in all_imports() if breaks_owners(found)]
    assert not broken, listed(broken)


def test_no_module_loads_an_engine() -> None:
    """torch and the engines are never imported at module import time."""
    broken = [found for found in all_imports() if loads_engine(found)]
    assert not broken, listed(broken)


def test_layout_and_topology_stand_alone() -> None:
    """They need numpy and attrs, nothing else."""
    broken = [found for found in all_imports() if stands_not_alone(found)]
    assert not broken, listed(broken)


def test_there_is_something_to_check() -> None:
    """The rules above see the package: its modules and its imports are found."""
    names = {name for name, _ in modules()}
    assert {"kvxfer", "kvxfer.errors", "kvxfer.core.transport"} <= names
    assert any(found.target == "kvxfer.errors.ClosedError" for found in all_imports())


@pytest.mark.parametrize(
    ("importer", "source", "rule"),
    [
        ("kvxfer.core.x", "from kvxfer.policies import retry", breaks_layers),
        ("kvxfer.core.x", "from kvxfer import backends", breaks_layers),
        ("kvxfer.core.x", "from ..agent import Agent", breaks_layers),
        ("kvxfer.core.x", "def f():\n    import kvxfer.agent", breaks_layers),
        ("kvxfer.core.layout.x", "from kvxfer.core.batch import Batch", breaks_layers),
        ("kvxfer.backends.shm", "from kvxfer.agent import Agent", breaks_layers),
        ("kvxfer.errors", "from kvxfer.core import batch", breaks_layers),
        ("kvxfer.stray", "from kvxfer.core import batch", breaks_layers),
        ("kvxfer.agent.x", "import zmq.asyncio", breaks_owners),
        ("kvxfer.agent.x", "class C:\n    import entrypoints", breaks_owners),
        ("kvxfer.core.x", "import torch", loads_engine),
        ("kvxfer.core.x", "try:\n    from torch import nn\nexcept E:\n    pass", loads_engine),
        ("kvxfer.agent.x", "from vllm.config import VllmConfig", loads_engine),
        ("kvxfer.core.layout.x", "import msgspec", stands_not_alone),
    ],
)
def test_the_rules_can_fail(importer: str, source: str, rule: object) -> None:
    """Each of these statements breaks its rule."""
    assert callable(rule)
    assert [rule(found) for found in imports_of(importer, source)] == [True]


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("kvxfer.core.x", "from kvxfer.core.batch import Batch"),
        ("kvxfer.errors", "if TYPE_CHECKING:\n    from kvxfer.core.verdict import EngineError"),
        ("kvxfer.backends.nixl", "def f():\n    import nixl"),
        ("kvxfer.core.memory", "def f():\n    import torch"),
        ("kvxfer.integrations.vllm.connector", "from vllm.config import VllmConfig"),
        ("kvxfer.cli.demo", "from kvxfer import Agent"),
    ],
)
def test_the_rules_can_hold(importer: str, source: str) -> None:
    """Each of these statements keeps every rule."""
    for found in imports_of(importer, source):
        for rule in (breaks_layers, breaks_owners, loads_engine, stands_not_alone):
            assert not rule(found), rule.__name__
