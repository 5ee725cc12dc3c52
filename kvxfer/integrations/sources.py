"""Where the KV of a prompt comes from, as a router carries it: an offer, or the id of a push.

For any engine whose router passes JSON through. Both classes check what they read: it may come
from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from kvxfer.core.offer import Endpoint, Offer
from kvxfer.errors import InvalidInputError

__all__ = ["Push", "Remote", "Source"]

P = TypeVar("P", bound="Push")

_LONGEST_ID = 256


@attrs.frozen
class Remote:
    """READ: the KV of a prompt's first ``tokens`` tokens, held by a producer."""

    offer: Offer
    tokens: int

    @property
    def transfer_id(self) -> str:
        return self.offer.transfer_id

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"tokens": self.tokens, "offer": self.offer.to_dict()}

    @classmethod
    def from_dict(cls, value: object) -> Remote:
        """Inverse of ``to_dict``.

        Raises:
            InvalidInputError: names what is missing or malformed.
        """
        if not isinstance(value, Mapping) or "offer" not in value:
            raise InvalidInputError(
                "there is no offer",
                next_step="pass what the producer's response says through, unchanged",
            )
        tokens = value.get("tokens")
        if type(tokens) is not int or tokens < 1:
            raise InvalidInputError(f"tokens must be an integer of at least 1, not {tokens!r}")
        return cls(Offer.from_dict(value["offer"]), tokens)


@attrs.frozen
class Push:
    """WRITE: the producer pushes a prompt's KV while it computes it.

    The router makes the id and sends both requests at once: to the producer with the addresses of
    all of the consumer's ranks, to the consumer without.
    """

    transfer_id: str
    to: tuple[Endpoint, ...] = ()

    def to_dict(self, *, addresses: bool) -> dict[str, Any]:
        """Plain data, with or without the addresses."""
        to = {"to": [endpoint.address for endpoint in self.to]} if addresses else {}
        return {"transfer_id": self.transfer_id, **to}

    @classmethod
    def from_dict(cls: type[P], value: object) -> P:
        """Inverse of ``to_dict``.

        Raises:
            InvalidInputError: names what is missing or malformed.
        """
        if not isinstance(value, Mapping):
            raise InvalidInputError(f"push must be a mapping, not {value!r:.80}")
        return cls.to_addresses(value.get("transfer_id", ""), value.get("to", ()))

    @classmethod
    def to_addresses(cls: type[P], transfer_id: str, addresses: Sequence[str]) -> P:
        """``addresses`` of the consumer's ranks, in their order.

        Raises:
            InvalidInputError: the id or an address is no text, or too long.
        """
        if not isinstance(transfer_id, str) or not 0 < len(transfer_id) <= _LONGEST_ID:
            raise InvalidInputError(
                f"transfer_id must be a text of 1 to {_LONGEST_ID} characters, not "
                f"{transfer_id!r:.80}"
            )
        if isinstance(addresses, str) or not isinstance(addresses, Sequence):
            raise InvalidInputError(f"to must be a list of addresses, not {addresses!r:.80}")
        return cls(
            transfer_id,
            tuple(Endpoint(address=a, incarnation="", rank=r) for r, a in enumerate(addresses)),
        )


Source = Remote | Push
