"""Reading dicts that a peer sent: exact keys, exact types, nothing trusted."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, TypeVar

from kvxfer.core.layout._checks import MAX_NAME
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["enum_member", "fields", "items"]

E = TypeVar("E", bound=enum.Enum)


def fields(what: str, message: object, expected: Mapping[str, type]) -> dict[str, Any]:
    """A copy of ``message``, which must be a dict with exactly the expected keys and types.

    Raises:
        InvalidInputError: naming what is missing, unknown or of the wrong type.
    """
    if type(message) is not dict:
        raise InvalidInputError(f"{what} must be a dict, not {type(message).__name__}")
    missing = [key for key in expected if key not in message]
    if missing:
        raise InvalidInputError(f"{what} lacks {', '.join(missing)}")
    if len(message) != len(expected):
        unknown = sorted(repr(key)[:80] for key in message if key not in expected)
        raise InvalidInputError(f"{what} has unknown keys: {', '.join(unknown[:5])}")
    for key, kind in expected.items():
        value = message[key]
        if type(value) is not kind:  # bool is an int to isinstance, but no count
            raise InvalidInputError(
                f"{what}.{key} must be {kind.__name__}, not {type(value).__name__}"
            )
        if isinstance(value, str) and len(value) > MAX_NAME:
            raise InvalidInputError(f"{what}.{key} has {len(value)} characters, over {MAX_NAME}")
    return dict(message)


def enum_member(what: str, kind: type[E], value: str) -> E:
    """The member of ``kind`` with that value.

    Raises:
        InvalidInputError: there is none.
    """
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise InvalidInputError(f"{what} is {value[:80]!r}: it must be one of {known}") from None


def items(what: str, values: object, most: int) -> list[Any]:
    """A list of 1 to ``most`` entries.

    Raises:
        InvalidInputError: it is no list, or of another length.
    """
    if type(values) is not list or not 0 < len(values) <= most:
        size = f"{len(values)} entries" if isinstance(values, list) else type(values).__name__
        raise InvalidInputError(f"{what} must be a list of 1 to {most} entries, not {size}")
    return values
