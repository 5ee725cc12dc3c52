"""What a producer hands to a consumer, through a router if need be. JSON-serialisable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import attrs
import msgspec
import numpy as np

from kvxfer.core.layout._checks import int64_vector
from kvxfer.core.layout.blocks import Blocks
from kvxfer.core.trace import checked_traceparent, read_traceparent
from kvxfer.core.wire import Count, Name, RanksWire, Ref, Seconds, Token
from kvxfer.errors import InvalidInputError

__all__ = ["OFFER_VERSION", "Endpoint", "Offer"]

OFFER_VERSION = 1


def _bad(attribute: attrs.Attribute[Any], expected: str, value: object) -> InvalidInputError:
    return InvalidInputError(f"{attribute.name} must be {expected}, not {value!r:.80}")


def _text(low: int, high: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[str], value: object) -> None:
        if not isinstance(value, str) or not low <= len(value) <= high or not _writable(value):
            raise _bad(attribute, f"a text of {low} to {high} characters", value)

    return check


def _writable(text: str) -> bool:
    """Whether UTF-8 can write it: a lone surrogate cannot travel."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _bad(attribute, "an integer in 0..2**63-1", value)


def _seconds(_: object, attribute: attrs.Attribute[float], value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1e9:  # type: ignore[operator]
        raise _bad(attribute, "a number of seconds in 0..1e9", value)


def _tuple_of(kind: type) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not tuple or not all(isinstance(x, kind) for x in value):
            raise _bad(attribute, f"a tuple of {kind.__name__}", value)

    return check


def _sizes(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    fits = isinstance(value, Mapping) and all(
        isinstance(name, str) and type(size) is int for name, size in value.items()
    )
    if not fits:
        raise _bad(attribute, "a mapping of names to integers", value)


def _traceparent(value: str) -> str:
    return checked_traceparent("Offer.traceparent", value)


@attrs.frozen(kw_only=True)
class Endpoint:
    """One worker that can be dialled: its control address, its incarnation and its rank.

    ``rank`` is the worker's place in its instance, ``pp_rank * tp_size + tp_rank``.  ``ticket`` is
    there in offers, where keys are on: it lets whoever has it open and release that hold.
    """

    address: str = attrs.field(validator=_text(1, 512))
    incarnation: str = attrs.field(validator=_text(0, 64))
    """Empty: whoever answers there."""
    rank: int = attrs.field(default=0, validator=_count)
    ticket: str = attrs.field(default="", repr=False, validator=_text(0, 64))


@attrs.frozen(kw_only=True)
class Offer:
    """A held transfer, as its consumer needs to see it.

    Attributes:
        transfer_id: names the exchange of one request, on both sides.
        epoch: tells two holds of one transfer id apart; part of every reference.
        endpoints: the producer's workers, one per rank of its instance that holds blocks.
        sizes: the producer instance's sizes (``tp_size`` and so on); never guessed.
        lease: seconds for which the producer holds the blocks, from when it made the offer. A
            reader needs a grant before it posts, so the router's delay does no harm but to the
            chance of being in time.
        groups: the producer's blocks per group, with their positions in the request.
        fingerprint: of model, dtype and KV quantisation; must equal the reader's.
        traceparent: the trace context of the request that holds, or empty. Releases that do not
            know it pass it by; one that is damaged on its way is dropped.
    """

    transfer_id: str = attrs.field(validator=_text(1, 512))
    epoch: int = attrs.field(validator=_count)
    endpoints: tuple[Endpoint, ...] = attrs.field(validator=_tuple_of(Endpoint))
    sizes: Mapping[str, int] = attrs.field(validator=_sizes)
    lease: float = attrs.field(validator=_seconds)
    groups: tuple[Blocks, ...] = attrs.field(validator=_tuple_of(Blocks))
    fingerprint: str = attrs.field(validator=_text(0, 512))
    traceparent: str = attrs.field(default="", converter=_traceparent)

    def ref(self, endpoint: Endpoint) -> Ref:
        """How this hold is named towards one of its workers."""
        return Ref(self.transfer_id, endpoint.incarnation, self.epoch, endpoint.ticket)

    def to_dict(self) -> dict[str, Any]:
        """Builtins only: what a router may carry as JSON."""
        return {
            "version": OFFER_VERSION,
            "transfer_id": self.transfer_id,
            "epoch": self.epoch,
            "endpoints": [
                {"address": e.address, "incarnation": e.incarnation, "rank": e.rank}
                | ({"ticket": e.ticket} if e.ticket else {})
                for e in self.endpoints
            ],
            "sizes": dict(self.sizes),
            "lease": self.lease,
            "groups": [_group_to_dict(g) for g in self.groups],
            "fingerprint": self.fingerprint,
            **({"traceparent": self.traceparent} if self.traceparent else {}),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Offer:
        """Inverse of ``to_dict``; the data may come from anywhere.

        Raises:
            InvalidInputError: names the field that is missing, mistyped or out of range.
        """
        try:
            raw = msgspec.convert(data, _OfferWire)
        except _UNREADABLE as error:
            raise InvalidInputError(
                f"not an offer: {error}", next_step="pass Offer.to_dict() through unchanged"
            ) from None
        if raw.version != OFFER_VERSION:
            raise InvalidInputError(
                f"offer version {raw.version} is not {OFFER_VERSION}",
                next_step="run the same kvxfer release on both sides",
            )
        return cls(
            transfer_id=raw.transfer_id,
            epoch=raw.epoch,
            endpoints=tuple(
                Endpoint(address=e.address, incarnation=e.incarnation, rank=e.rank, ticket=e.ticket)
                for e in raw.endpoints
            ),
            sizes=dict(raw.sizes),
            lease=raw.lease,
            groups=tuple(_group_from_wire(g) for g in raw.groups),
            fingerprint=raw.fingerprint,
            traceparent=read_traceparent(raw.traceparent),
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Offer:
        """Inverse of ``to_json``. Raises ``InvalidInputError`` as ``from_dict`` does."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"not an offer: {error}") from None
        return cls.from_dict(data)


_UNREADABLE = (msgspec.ValidationError, LookupError, TypeError, ValueError, RecursionError)
"""What msgspec raises on data that is not what it should be: arrays and other objects with an
``__getitem__`` of their own bring their own errors."""


class _EndpointWire(msgspec.Struct):
    address: Name
    incarnation: Token
    rank: Count
    ticket: Annotated[str, msgspec.Meta(max_length=64)] = ""


class _GroupWire(msgspec.Struct):
    ids: list[int]
    start: int | None = None
    positions: list[int] | None = None
    holes: list[int] | None = None


class _OfferWire(msgspec.Struct):
    version: int
    transfer_id: Name
    epoch: Count
    endpoints: list[_EndpointWire]
    sizes: RanksWire
    lease: Seconds
    groups: list[_GroupWire]
    fingerprint: str
    traceparent: Any = ""
    """Not typed: a trace context that is damaged must not cost the offer."""


def _group_to_dict(blocks: Blocks) -> dict[str, Any]:
    group: dict[str, Any] = {"ids": blocks.ids.tolist()}
    if blocks.start is not None:
        group["start"] = blocks.start
    elif blocks.positions is not None:
        group["positions"] = blocks.positions.tolist()
    if blocks.holes is not None:
        group["holes"] = np.flatnonzero(blocks.holes).tolist()
    return group


def _group_from_wire(raw: _GroupWire) -> Blocks:
    ids = int64_vector("ids", raw.ids)
    placeholder = None
    if raw.holes:
        holes = int64_vector("holes", raw.holes)
        if int(holes.min()) < 0 or int(holes.max()) >= len(ids):
            raise InvalidInputError(f"offer names hole {int(holes.max())} of {len(ids)} blocks")
        # Whatever id the producer's engine uses for "no memory", -1 is no block id anywhere.
        ids[holes] = placeholder = -1
    if raw.start is not None:
        return Blocks.at(raw.start, ids, placeholder=placeholder)
    if raw.positions is not None:
        return Blocks.placed(raw.positions, ids, placeholder=placeholder)
    return Blocks.unplaced(ids, placeholder=placeholder)
