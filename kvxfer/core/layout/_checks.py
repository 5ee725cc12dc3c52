"""Small checks that every value of this package shares. Errors name field, expectation, value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    import attrs

__all__ = [
    "INT64_MAX",
    "MAX_NAME",
    "MAX_PIECES",
    "Int32Array",
    "Int64Array",
    "int64_vector",
    "is_count",
    "is_name",
    "is_nonnegative",
]

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

INT64_MAX = 2**63 - 1
"""Offsets, sizes and ids are int64 end to end; numpy wraps silently beyond it."""

MAX_PIECES = 2**26
"""A plan of more pieces is refused: its vectors alone would take more than 1.5 GiB."""

MAX_NAME = 512
"""Longest layer, part or dtype name accepted, in characters. Names may come from a peer."""


def is_count(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    """attrs validator: an ``int`` of at least 1 (``bool`` is no count)."""
    _bounded(attribute.name, value, 1)


def is_nonnegative(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    """attrs validator: an ``int`` of at least 0."""
    _bounded(attribute.name, value, 0)


def is_name(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    """attrs validator: a non-empty ``str`` of at most ``MAX_NAME`` characters."""
    if type(value) is not str or not 0 < len(value) <= MAX_NAME:
        raise InvalidInputError(
            f"{attribute.name} must be a string of 1 to {MAX_NAME} characters, not {_short(value)}"
        )


def _bounded(field: str, value: object, low: int) -> None:
    if type(value) is not int:
        raise InvalidInputError(
            f"{field} must be an int of at least {low}, not {_short(value)} "
            f"({type(value).__name__})"
        )
    if not low <= value <= INT64_MAX:
        raise InvalidInputError(f"{field} must lie in {low}..2**63-1, not {value}")


def int64_vector(field: str, values: Any) -> Int64Array:
    """``values`` as a one-dimensional int64 array of its own.

    Raises:
        InvalidInputError: other dimensions, no integers, or a value that int64 cannot hold.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{field} must be a list of integers: {error}") from error
    if array.ndim != 1:
        raise InvalidInputError(
            f"{field} must be one flat list, not one of {array.ndim} dimensions",
            next_step="with several groups, pass one Blocks per group",
        )
    if array.dtype == np.int64:
        # A caller's array may change later, and the result is cached in keys: take a copy.
        return array.copy() if array is values or array.base is not None else array
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind in "iu" and (array.dtype != np.uint64 or int(array.max()) <= INT64_MAX):
        return array.astype(np.int64)
    for index, value in enumerate(values):  # only to name the culprit
        if isinstance(value, (int, np.integer)) and not -INT64_MAX - 1 <= int(value) <= INT64_MAX:
            raise InvalidInputError(f"{field}[{index}] is {int(value)}, beyond 64-bit integers")
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise InvalidInputError(f"{field}[{index}] is {_short(value)}: it must be an integer")
    raise InvalidInputError(f"{field} has dtype {array.dtype}: it must hold integers")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
