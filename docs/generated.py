"""The parts of the reference that are read out of the code while the documentation is built.

A page names a part in a comment, ``<!-- generated: configuration -->``, and its text takes the
comment's place.  ``tests/docs`` checks that nothing is left out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

__all__ = ["PARTS", "fill"]

_MARK = re.compile(r"<!-- generated: (\w+) -->")


def fill(text: str) -> str:
    """``text`` with its generated parts in place.

    Raises:
        KeyError: it names a part that there is not.
    """
    return _MARK.sub(lambda match: PARTS[match[1]](), text)


# ---- configuration -------------------------------------------------------------------------


def config_classes() -> list[type]:
    """Every attrs class that a user fills in to set something up, in the order of the page."""
    found: dict[str, type] = {}
    for module in _modules():
        for cls in vars(module).values():
            mine = isinstance(cls, type) and cls.__module__ == module.__name__
            if mine and attrs.has(cls) and is_configuration(cls):
                found[f"{cls.__module__}.{cls.__qualname__}"] = cls
    order = ("agent", "keeper", "policies", "core", "observe", "backends", "integrations")
    return sorted(
        found.values(), key=lambda c: (order.index(c.__module__.split(".")[1]), c.__name__)
    )


_NAMES = re.compile(r"(?!_).*(Config|Policy|Admission|Failover|Limits|Timeouts|Budget|Security)$")


def is_configuration(cls: type) -> bool:
    """By its name, and by having fields that can be given."""
    fields = [f for f in attrs.fields(cls) if f.init and not f.name.startswith("_")]  # type: ignore[arg-type]
    return bool(_NAMES.match(cls.__name__)) and bool(fields)


def _modules() -> Iterator[Any]:
    """The modules whose source has a class of such a name: others may need what is not here."""
    import kvxfer

    home = Path(kvxfer.__file__).parent
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        if parts[0] in ("testing", "cli"):
            continue
        classes = re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
        if any(_NAMES.match(name) for name in classes):
            yield importlib.import_module(".".join(("kvxfer", *parts)))


def configuration() -> str:
    """A section per class, a row per field."""
    return "\n\n".join(_section(cls) for cls in config_classes())


def _section(cls: type) -> str:
    about = inspect.getdoc(cls) or ""
    first = about.split("\n\n")[0]
    notes = {**_documented(about), **_after_fields(cls)}
    rows = [
        (f"`{f.name}`", f"`{_default(f)}`", _one_line(notes.get(f.name, "")))
        for f in attrs.fields(cls)  # type: ignore[arg-type]
        if f.init
    ]
    where = f"`{cls.__module__}.{cls.__qualname__}`"
    return f"## {cls.__name__}\n\n{where}. {_one_line(first)}\n\n" + _table(
        ("field", "default", "meaning"), rows
    )


def _default(field: Any) -> str:
    value = field.default
    if value is attrs.NOTHING:
        return "(required)"
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        if value.takes_self:
            return "(computed)"
        value = value.factory()
        if isinstance(value, frozenset):
            return "(computed)" if value else "empty"
        return type(value).__name__ + "()" if attrs.has(type(value)) else repr(value)
    name = getattr(value, "name", None)
    if hasattr(type(value), "__members__"):
        return f"{type(value).__name__}.{name}"
    return repr(value)


def _documented(about: str) -> dict[str, str]:
    """The ``Attributes:`` section of a docstring."""
    match = re.search(r"^(?:Attributes|Args):\n((?:[ ]{4}.*\n?|\n)*)", about, re.MULTILINE)
    if match is None:
        return {}
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(match[1]).splitlines():
        begins = re.match(r"(\w[\w, ]*): (.*)", line)
        if begins and not line.startswith(" "):
            name = begins[1]
            found[name] = begins[2]
        elif name:
            found[name] += " " + line.strip()
    return {one: text for names, text in found.items() for one in re.split(r",\s*", names)}


def _after_fields(cls: type) -> dict[str, str]:
    """The texts that stand after fields."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = inspect.cleandoc(text.value.value)
    return found


# ---- errors --------------------------------------------------------------------------------


def error_rules() -> str:
    """A table per backend, a row per rule, in the order of registration."""
    from kvxfer.policies.rules import builtin_rules

    parts = []
    for table in builtin_rules():
        rows = [
            (
                f"`{rule.name}`",
                _matched(rule),
                rule.kind.name,
                rule.action.name,
                "yes" if rule.retryable else "no",
                rule.drained.value.replace("_", " "),
            )
            for rule in table.rules
        ]
        title = "kvxfer's own, for every backend" if table.backend == "*" else table.backend
        headings = ("rule", "matches", "kind", "action", "retried", "proof")
        parts.append(f"## {title}\n\n" + _table(headings, rows))
    return "\n\n".join(parts)


def _matched(rule: Any) -> str:
    words = []
    if rule.exception:
        words.append(f"exception `{rule.exception}`")
    if rule.code is not None:
        words.append(f"code {rule.code}")
    if rule.pattern is not None:
        text = rule.pattern if isinstance(rule.pattern, str) else rule.pattern.pattern
        words.append(f"message `{_cell(text)}`")
    if rule.ops is not None:
        words.append("only " + ", ".join(sorted(op.name for op in rule.ops)))
    return ", ".join(words) or "anything"


def error_kinds() -> str:
    """The kinds, with what the code says of them."""
    from kvxfer import errors

    notes = _after_members(errors.ErrorKind)
    rows = [(f"`{kind.name}`", _one_line(notes.get(kind.name, ""))) for kind in errors.ErrorKind]
    return _table(("kind", "meaning"), rows)


def _after_members(cls: type) -> dict[str, str]:
    (body,) = (
        n.body for n in ast.parse(inspect.getsource(cls)).body if isinstance(n, ast.ClassDef)
    )
    return {
        member.targets[0].id: inspect.cleandoc(text.value.value)
        for member, text in pairwise(body)
        if isinstance(member, ast.Assign)
        and isinstance(member.targets[0], ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


# ---- the wire ------------------------------------------------------------------------------


def wire_messages() -> str:
    """A section per message type and per value inside one: fields, types, limits."""
    from kvxfer.core import wire

    parts, seen = [], set()
    for cls in wire.MESSAGES:
        parts.append(_struct(cls))
        seen.add(cls)
    inner = [
        cls
        for cls in vars(wire).values()
        if isinstance(cls, type)
        and hasattr(cls, "__struct_fields__")
        and not cls.__name__.startswith("_")
        and cls.__module__ == wire.__name__
        and cls not in seen
    ]
    return "\n\n".join([*parts, *map(_struct, inner)])


def _struct(cls: Any) -> str:
    import msgspec

    about = (inspect.getdoc(cls) or "").split("\n\n")[0]
    own = about if cls.__dict__.get("__doc__") else ""
    rows = [
        (
            f"`{field.encode_name}`",
            _type(cls.__annotations__.get(field.name, "")),
            "yes" if field.required else "no",
        )
        for field in msgspec.structs.fields(cls)
    ]
    text = f"### {cls.__name__}\n\n{_one_line(own)}\n\n"
    return text + (_table(("field", "type", "required"), rows) if rows else "No fields.")


def _type(annotation: object) -> str:
    return f"`{_cell(str(annotation))}`"


# ---- modules -------------------------------------------------------------------------------


def modules() -> str:
    """A table per package: each module and the first sentence of its text."""
    import kvxfer

    home = Path(kvxfer.__file__).parent
    folders = sorted({path.parent for path in home.rglob("*.py")})
    parts = []
    for folder in folders:
        name = ".".join(("kvxfer", *folder.relative_to(home).parts))
        rows = [(f"`{path.stem}`", _first_sentence(path)) for path in sorted(folder.glob("*.py"))]
        rows = [row for row in rows if row[0] != "`__init__`"]
        if rows:
            about = _first_sentence(folder / "__init__.py")
            parts.append(f"### {name}\n\n{about}\n\n" + _table(("module", "what it is"), rows))
    return "\n\n".join(parts)


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else ""
    first = _one_line((text or "").split("\n\n")[0])
    return re.split(r"(?<=\.) (?=[A-Z])", first)[0]


# ---- Markdown ------------------------------------------------------------------------------


def _one_line(text: str) -> str:
    """As one cell of a Markdown table; ``literals`` become `literals`."""
    return _cell(re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split())))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


PARTS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "error_kinds": error_kinds,
    "error_rules": error_rules,
    "modules": modules,
    "wire_messages": wire_messages,
}
