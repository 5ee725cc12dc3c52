"""What travels between prefill and decode, through a router: ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvxfer.core.offer import Endpoint, Offer
from kvxfer.errors import InvalidInputError

__all__ = ["Push", "Remote"]

_KEY = "kvxfer"
_LONGEST_ID = 256


@attrs.frozen
class Remote:
    """READ: the KV of a prompt's first ``tokens`` tokens, held by a producer."""

    offer: Offer
    tokens: int

    @property
    def transfer_id(self) -> str:
        return self.offer.transfer_id

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
        return cls(Offer.from_dict(value["offer"]), tokens)


@attrs.frozen
class Push:
    """WRITE: prefill pushes a prompt's KV to decode while it computes it.

    The router makes the id and sends both requests at once: to prefill with the addresses of all
    of decode's ranks, to decode without.
    """

    transfer_id: str
    to: tuple[Endpoint, ...] = ()

    def for_prefill(self) -> dict[str, Any]:
        """``kv_transfer_params`` for the prefill side."""
        to = [endpoint.address for endpoint in self.to]
        push = {"transfer_id": self.transfer_id, "to": to}
        return {"do_remote_decode": True, "do_remote_prefill": False, _KEY: {"push": push}}

    def for_decode(self) -> dict[str, Any]:
        """``kv_transfer_params`` for the decode side."""
        push = {"transfer_id": self.transfer_id}
        return {"do_remote_decode": False, "do_remote_prefill": True, _KEY: {"push": push}}

    @classmethod
    def to_addresses(cls, transfer_id: str, addresses: Sequence[str]) -> Push:
        """``addresses`` of decode's ranks, in their order.

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

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Push | None:
        """Inverse of both; None if the parameters speak of no push.

        Raises:
            InvalidInputError: names what is missing or malformed.
        """
        value = params.get(_KEY)
        push = value.get("push") if isinstance(value, Mapping) else None
        if push is None:
            return None
        if not isinstance(push, Mapping):
            raise InvalidInputError(f"push must be a mapping, not {push!r:.80}")
        made = cls.to_addresses(push.get("transfer_id", ""), push.get("to", ()))
        if params.get("do_remote_decode") and not made.to:
            raise InvalidInputError(
                f"push {made.transfer_id!r} names no address",
                next_step="give the addresses of decode's ranks under 'to', in the order of ranks",
            )
        return made
