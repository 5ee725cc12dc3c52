"""What users hand to an agent, checked before anything begins: a clear error on their thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kvxfer.agent.mailbox import canonical
from kvxfer.core.layout import Align, Blocks
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.errors import InvalidInputError

__all__ = [
    "alignment",
    "an_offer",
    "block_lists",
    "count",
    "endpoints",
    "items",
    "mapping",
    "observer",
    "payload",
    "rank_list",
    "readiness",
    "text_id",
    "timeout",
]

if TYPE_CHECKING:
    from kvxfer.core.observations import Observer

T = TypeVar("T")

_LONGEST_ID = 512


def _kind(value: object) -> str:
    return type(value).__name__


def text_id(name: str, value: object) -> str:
    """An id that can travel: 1 to 512 characters that UTF-8 can write."""
    if isinstance(value, str) and 0 < len(value) <= _LONGEST_ID:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(
                f"{name} has a character that UTF-8 cannot write: {value!r}"
            ) from None
        return value
    shown = f"{value!r:.60}" if isinstance(value, str) else _kind(value)
    raise InvalidInputError(f"{name} must be a text of 1 to {_LONGEST_ID} characters, not {shown}")


def observer(value: object) -> Observer:
    if not callable(value):
        raise InvalidInputError(
            f"an observer must be callable with one Observation, {_kind(value)} is not"
        )
    return value


def an_offer(value: object) -> Offer:
    if not isinstance(value, Offer):
        raise InvalidInputError(
            f"offer must be an Offer, not {_kind(value)}",
            next_step="make one of what travelled with Offer.from_dict or Offer.from_json",
        )
    return value


def items(name: str, values: object, kind: type[T]) -> tuple[T, ...]:
    """Several values of one type."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} must be several {kind.__name__}, not {_kind(values)}")
    found = tuple(values)
    for value in found:
        if not isinstance(value, kind):
            raise InvalidInputError(f"{name} must hold {kind.__name__} values, not {_kind(value)}")
    return found


def block_lists(values: object) -> tuple[Blocks, ...]:
    """One ``Blocks`` per group."""
    if isinstance(values, Blocks):
        return (values,)
    try:
        return items("blocks", values, Blocks)
    except InvalidInputError:
        raise InvalidInputError(
            f"blocks must be Blocks values, one per group, not {_kind(values)}",
            next_step="use Blocks.at(start, ids)",
        ) from None


def endpoints(name: str, values: object) -> tuple[Endpoint, ...]:
    """Peers: endpoints, or plain addresses of peers whose incarnation is not known."""
    if isinstance(values, (str, Endpoint)):
        values = (values,)
    elif isinstance(values, (bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} must be endpoints or addresses, not {_kind(values)}")
    found = []
    for value in values:
        if isinstance(value, str):
            found.append(Endpoint(address=value, incarnation=""))
        elif isinstance(value, Endpoint):
            found.append(value)
        else:
            raise InvalidInputError(f"{name} must hold endpoints or addresses, not {_kind(value)}")
        canonical(found[-1].address)
    return tuple(found)


def count(name: str, value: object, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise InvalidInputError(f"{name} must be an integer of at least {least}, not {value!r:.60}")
    return value


def timeout(name: str, value: object) -> float:
    """Seconds; infinity waits for as long as it takes, less than nothing not at all."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and math.isnan(value)):
        raise InvalidInputError(f"{name} must be a number of seconds, not {value!r:.60}")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf if value > 0 else 0.0  # type: ignore[operator]


def alignment(value: object) -> Align | None:
    if value is None or isinstance(value, Align):
        return value
    try:
        return Align(value)
    except ValueError:
        known = ", ".join(repr(a.value) for a in Align)
        raise InvalidInputError(f"align must be one of {known}, not {value!r:.60}") from None


def payload(value: object, most: int) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"the payload must be bytes, not {_kind(value)}")
    data = bytes(value)
    if len(data) > most:
        raise InvalidInputError(f"the payload has {len(data)} bytes: at most {most} fit")
    return data


def readiness(value: Any) -> Any:
    if value is not None and not callable(getattr(value, "query", None)):
        raise InvalidInputError(
            f"ready must have a method query(), as torch.cuda.Event has; {_kind(value)} has none"
        )
    return value


def rank_list(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(count("readers", rank) for rank in items("readers", value, int))


def mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidInputError(f"{name} must be a mapping by layer name, not {_kind(value)}")
    return value
