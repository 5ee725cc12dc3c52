"""What an agent and its keeper say to each other, over a socket pair inside one machine.

Never over a network: so points in time travel here, of ``CLOCK_MONOTONIC``, which all processes of
one machine (and of one time namespace, which a child shares) read alike.

Agent to keeper: lists of orders, carried out in their order.  Keeper to agent: ``News``.  Both are
msgpack; a frame holds at most ``CHUNK`` entries, so that it fits into the socket's buffer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvxfer.core.wire import Ref
from kvxfer.errors import WireError

__all__ = [
    "CHUNK",
    "Again",
    "AuthRecipe",
    "Close",
    "Closed",
    "Finished",
    "Held",
    "News",
    "Opened",
    "Order",
    "PeerGone",
    "PeerIs",
    "Renewed",
    "Setup",
    "Sync",
    "Unwatch",
    "Watch",
    "decode_news",
    "decode_orders",
    "decode_setup",
    "encode",
]

CHUNK = 128
"""Entries per frame. One has up to 600 bytes (a transfer id of 512), the default buffer 208 KiB."""


class AuthRecipe(msgspec.Struct, frozen=True):
    """How the keeper makes the ``ChannelAuth`` of its agent again.

    ``factory`` is ``"module:function"``; it is called with ``argument``, which may be secret: it
    travels over the socket pair only.
    """

    factory: str
    argument: bytes


class Setup(msgspec.Struct, frozen=True):
    """The first frame. ``control`` holds the fields of a ``ControlConfig``."""

    incarnation: str
    control: dict[str, Any]
    auth: AuthRecipe | None
    retry: float
    beat_interval: float
    quiet_after: float
    patience: float


# ---- orders -----------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The agent holds this, or has extended it itself; ``ends_at`` is the end of its lease.

    ``ticket`` is what shows that a reader was handed the offer; empty without keys.
    """

    transfer: str
    epoch: int
    ticket: str
    lease: float
    ends_at: float


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A reader said that it is finished: grant it nothing more."""

    transfer: str
    epoch: int
    reader: str


class Again(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A reader that was finished was granted once more, by the agent."""

    transfer: str
    epoch: int
    reader: str


class Close(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Grant nothing more, and answer; but only if you have not granted beyond ``unless_after``.

    A ``Held`` that follows takes it back. ``number`` comes back in the answer.
    """

    transfer: str
    epoch: int
    number: int
    unless_after: float


class PeerIs(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A peer the agent has accepted, how it and its keeper (or "") are reached, and by the name of
    which key (or "") it is known."""

    incarnation: str
    version: int
    agent: str
    keeper: str
    key: str


class PeerGone(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    incarnation: str


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Keep this hold of a peer granted to us, until ``bound`` at the longest.

    ``seq`` is the agent's latest number of a request; see ``WatchTable.number_from``.
    """

    ref: Ref
    bound: float
    granted_until: float
    seq: int


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    ref: Ref


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Answer when all news that you have now are told. ``seq`` as in ``Watch``."""

    number: int
    seq: int


Order = Held | Finished | Again | Close | PeerIs | PeerGone | Watch | Unwatch | Sync


# ---- news -------------------------------------------------------------------------------------


class Closed(msgspec.Struct, frozen=True, array_like=True):
    """The answer to ``Close``: whether it is ``closed``, until when it was promised, and the number
    of the latest request of each reader that was granted."""

    transfer: str
    epoch: int
    number: int
    closed: bool
    granted_until: float
    readers: dict[str, int]


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """Somebody who was not reading is granted this now; ``seq`` is the number of the request."""

    transfer: str
    epoch: int
    reader: str
    seq: int


class Renewed(msgspec.Struct, frozen=True, array_like=True):
    """A peer's grant now lasts until ``until``; it was asked for at ``sent``."""

    ref: Ref
    until: float
    sent: float


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """One frame towards the agent. ``ready`` is the address the keeper listens on."""

    ready: str = ""
    renewed: list[Renewed] = []
    opened: list[Opened] = []
    """To be heard before ``closed``."""
    closed: list[Closed] = []
    quiet: list[str] = []
    """Peers that were not heard of for too long."""
    heard: list[str] = []
    """Quiet ones that were heard of again."""
    synced: int = 0
    counters: dict[str, int] = {}


_encoder = msgspec.msgpack.Encoder()
_setup = msgspec.msgpack.Decoder(Setup)
_orders = msgspec.msgpack.Decoder(list[Order])
_news = msgspec.msgpack.Decoder(News)


def encode(frame: Setup | list[Order] | News) -> bytes:
    """One frame."""
    return _encoder.encode(frame)


def decode_setup(frame: bytes) -> Setup:
    """Raises ``WireError``: no setup."""
    try:
        return _setup.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"malformed setup: {error}") from None


def decode_orders(frame: bytes) -> list[Order]:
    """Raises ``WireError``: no orders."""
    try:
        return _orders.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"malformed orders: {error}") from None


def decode_news(frame: bytes) -> News:
    """Raises ``WireError``: no news."""
    try:
        return _news.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"malformed news: {error}") from None
