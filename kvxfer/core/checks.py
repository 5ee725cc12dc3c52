"""Validators for attrs classes of configuration: each names the field, the rule and the value."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import attrs

__all__ = ["at_least", "between", "seconds"]

_MOST = sys.float_info.max


def seconds(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A positive, finite number of seconds.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} must be a positive, finite number of "
            f"seconds, not {value!r:.60}"
        )


def at_least(low: int) -> Callable[[object, attrs.Attribute[Any], object], None]:
    """An integer of at least ``low``. The validator raises ``ConfigError``."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int or value < low:
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be an integer of at least "
                f"{low}, not {value!r:.60}"
            )

    return check


def between(low: int, high: int) -> Callable[[object, attrs.Attribute[Any], object], None]:
    """An integer from ``low`` to ``high``. The validator raises ``ConfigError``."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be an integer from {low} to "
                f"{high}, not {value!r:.60}"
            )

    return check
