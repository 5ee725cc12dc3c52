"""vLLM's ``kv_transfer_params``: what travels between prefill and decode, through a router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvxfer.errors import InvalidInputError
from kvxfer.integrations import sources
from kvxfer.integrations.sources import Remote, Source

__all__ = ["Push", "offer_params", "push_of", "source_of"]

_KEY = "kvxfer"


@attrs.frozen
class Push(sources.Push):
    """WRITE, as a router says it to vLLM. See ``kvxfer.integrations.sources.Push``."""

    def for_prefill(self) -> dict[str, Any]:
        """``kv_transfer_params`` for the prefill side."""
        push = {"push": self.to_dict(addresses=True)}
        return {"do_remote_decode": True, "do_remote_prefill": False, _KEY: push}

    def for_decode(self) -> dict[str, Any]:
        """``kv_transfer_params`` for the decode side."""
        push = {"push": self.to_dict(addresses=False)}
        return {"do_remote_decode": False, "do_remote_prefill": True, _KEY: push}


def offer_params(remote: Remote) -> dict[str, Any]:
    """``kv_transfer_params`` for the decode side; a router passes them through unchanged."""
    return {"do_remote_prefill": True, "do_remote_decode": False, _KEY: remote.to_dict()}


def push_of(params: Mapping[str, Any]) -> Push | None:
    """The push that they speak of, if any.

    Raises:
        InvalidInputError: names what is missing or malformed.
    """
    value = params.get(_KEY)
    if not isinstance(value, Mapping) or value.get("push") is None:
        return None
    push = Push.from_dict(value["push"])
    if params.get("do_remote_decode") and not push.to:
        raise InvalidInputError(
            f"push {push.transfer_id!r} names no address",
            next_step="give the addresses of decode's ranks under 'to', in the order of ranks",
        )
    return push


def source_of(params: Mapping[str, Any]) -> Source:
    """Where the decode side finds the prompt's KV.

    Raises:
        InvalidInputError: names what is missing or malformed.
    """
    return push_of(params) or Remote.from_dict(params.get(_KEY))
