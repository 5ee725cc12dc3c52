"""What travels from prefill to decode, through a router: ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvxfer.core.offer import Offer
from kvxfer.errors import InvalidInputError

__all__ = ["Remote"]

_KEY = "kvxfer"


@attrs.frozen
class Remote:
    """The KV of a prompt's first ``tokens`` tokens, held by a producer."""

    offer: Offer
    tokens: int

    def to_params(self) -> dict[str, Any]:
        """``kv_transfer_params`` for the decode side; a router passes them through unchanged."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            _KEY: {"tokens": self.tokens, "offer": self.offer.to_dict()},
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Remote:
        """Inverse of ``to_params``; the data may come from anywhere.

        Raises:
            InvalidInputError: names what is missing or malformed.
        """
        value = params.get(_KEY)
        if not isinstance(value, Mapping) or "offer" not in value:
            raise InvalidInputError(
                f"kv_transfer_params ask for remote prefill without an offer under {_KEY!r}",
                next_step="pass the kv_transfer_params of the prefill response through unchanged",
            )
        tokens = value.get("tokens")
        if type(tokens) is not int or tokens < 1:
            raise InvalidInputError(f"tokens must be an integer of at least 1, not {tokens!r}")
        offer = Offer.from_dict(value["offer"])
        if len(offer.groups) != 1:
            raise InvalidInputError(f"the offer has {len(offer.groups)} groups instead of one")
        return cls(offer, tokens)
