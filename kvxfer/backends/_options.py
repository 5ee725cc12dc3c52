"""Configuration from JSON: how every backend's config class reads a mapping.

A config class offers it in two lines::

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MyConfig:
        return config_from(cls, options)
"""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Mapping, Set
from typing import Any, TypeVar

import attrs

from kvxfer.errors import ConfigError

__all__ = ["config_from"]

C = TypeVar("C")


def config_from(config_type: type[C], options: Mapping[str, Any]) -> C:
    """A ``config_type`` (an attrs class) with ``options`` as its fields.

    Values are what JSON has: an enum is given by its value, a set or tuple as a list.  Fields that
    are left out keep their defaults.  Values that have their final type already (an enum's member)
    are taken as they are.

    Raises:
        ConfigError: ``options`` is no mapping; a key is no field, with the nearest one as a hint;
            a value has the wrong type, or the class refuses it.  Names field, expectation, value.
    """
    name = config_type.__name__
    if not isinstance(options, Mapping):
        raise ConfigError(f"{name} takes a mapping of options, not {options!r}")
    fields = {f.name: f for f in attrs.fields(config_type) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(config_type)
    values = {}
    for key, value in options.items():
        if key not in fields:
            raise _unknown(name, key, list(fields))
        values[key] = _value(f"{name}.{key}", hints.get(key, Any), value)
    try:
        return config_type(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # what attrs' own validators raise
        text = error.args[0] if error.args else error
        raise ConfigError(f"{name}: {text}") from error


def _unknown(name: str, key: object, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(
        f"{name} has no option {key!r}", next_step=f"{hint}It has {', '.join(sorted(known))}"
    )


def _value(where: str, hint: Any, value: Any) -> Any:
    """``value`` as the field's type ``hint`` wants it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        choices = typing.get_args(hint)
        if value is None and type(None) in choices:
            return None
        rest = [c for c in choices if c is not type(None)]
        if len(rest) != 1:  # nothing here to tell the members apart: the class decides
            return value
        hint = rest[0]
    plain = typing.get_origin(hint) or hint
    if not isinstance(plain, type):
        return value
    if issubclass(plain, enum.Enum):
        return _member(where, plain, value)
    if issubclass(plain, tuple | Set):
        if isinstance(value, str) or not isinstance(value, list | tuple | Set):
            raise ConfigError(f"{where} must be a list, not {value!r}")
        return _collection(where, plain, value)
    # To Python True is an integer; in a configuration it is a slip.
    accepted = (int, float) if plain is float else plain
    if plain in (bool, int, float, str) and (
        not isinstance(value, accepted) or (isinstance(value, bool) and plain is not bool)
    ):
        raise ConfigError(f"{where} must be {_WORDS[plain]}, not {value!r}")
    return value


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _collection(where: str, kind: Any, value: Any) -> Any:
    try:
        return kind(value)
    except TypeError as error:  # a list inside a set
        raise ConfigError(f"{where} cannot hold {value!r}: {error}") from error


def _member(where: str, kind: type[enum.Enum], value: Any) -> enum.Enum:
    if isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{where} must be one of {known}, not {value!r}") from None
