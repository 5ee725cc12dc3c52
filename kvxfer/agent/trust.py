"""With keys on: who may say what. Progress thread only.

The channel says under whose key a message came (``Inbound.peer``); everything else in it is the
sender's own word.  Three rules hold that word to the key:

* An incarnation belongs to the peer that introduced it with a hello.  Nobody else may speak as it,
  under whatever key.  All ranks, processes and keepers of an instance that share a name (not
  necessarily a key) are one peer.
* What is said about a hold or an accept must come from a side of it: its keeper's messages from
  the keeper, its reader's with the ticket out of the offer.  That works for a release of a peer
  that never said hello, because it had nothing to read.
* A rank speaks for itself: the ranks in a release or a seal are those of its hello.

Without keys nothing is known of anybody, and every message passes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvxfer.core import wire
from kvxfer.core.keys import split_peer
from kvxfer.core.tickets import Tickets
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.agent.context import Context
    from kvxfer.agent.links import Link

__all__ = ["Trust"]

_log = logging.getLogger("kvxfer.agent")

_PER_PEER = 8192
"""Incarnations remembered per peer, lately heard of last. One that floods us pushes out its own."""
_PLACE = ("tp_size", "tp_rank", "pp_size", "pp_rank", "dp_size", "dp_rank")
"""The part of ``ranks`` that says which rank somebody is; the rest follows the caches."""


class Trust:
    """One per agent. Bounded by the allow-list: ``_PER_PEER`` entries for each name in it."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.tickets = Tickets() if ctx.channel.authenticated else None
        """None without keys: then nothing is checked."""
        self._owner: dict[str, str] = {}
        self._known: dict[str, OrderedDict[str, None]] = {}
        self._warned: set[str] = set()

    def admits(self, sender: str, peer: str, body: wire.Message) -> bool:
        """Whether ``sender`` may be who the key's owner ``peer`` says it is. Refusals are counted.

        A hello that is admitted introduces its incarnations.
        """
        if self.tickets is None:
            return True
        if not peer:
            return self._refuse("unauthenticated")
        if self._owner.get(sender, peer) != peer:
            return self._refuse("impostor")
        if isinstance(body, wire.Hello):
            engines = [f"{t.name}:{t.incarnation}" for t in body.transports]
            places = [body.address]
            if body.keeper is not None and body.keeper.address:
                places.append(body.keeper.address)
            if any(self._owner.get(x, peer) != peer for x in engines):
                return self._refuse("impostor")
            if any(_name(place) != peer for place in places):
                self._warn(peer, places)
                return self._refuse("impostor")
            for incarnation in (sender, *engines):
                self._introduce(incarnation, peer)
        return True

    def allows(self, link: Link | None, sender: str, body: wire.Message) -> bool:
        """Whether that sender may say that. Refusals are counted."""
        if self.tickets is None:
            return True
        match body:
            case wire.Open():
                mine = [ref for ref in body.refs if ref.keeper == self._ctx.incarnation]
                if not all(self._has_ticket(ref) for ref in mine):
                    return self._refuse("no_ticket")
            case wire.Release() | wire.Decline():
                if body.ref.keeper == self._ctx.incarnation and not self._has_ticket(body.ref):
                    return self._refuse("no_ticket")
                return self._is_rank(link, body.ranks)
            case wire.Seal():
                return self._is_rank(link, body.ranks)
            case wire.Accept() | wire.Cancel() | wire.Gone() | wire.Sealed():
                if body.ref.keeper != sender:
                    return self._refuse("not_the_keeper")
        return True

    def ticket(self, transfer_id: str, epoch: int) -> str:
        """What goes into the offer of a hold of ours; empty without keys. Any thread."""
        return "" if self.tickets is None else self.tickets.of(transfer_id, epoch)

    def ref(self, transfer_id: str, epoch: int) -> wire.Ref:
        """How a hold of ours is named, as its offer names it."""
        return wire.Ref(transfer_id, self._ctx.incarnation, epoch, self.ticket(transfer_id, epoch))

    def same_peer(self, link: Link, address: str) -> bool:
        """Whether that link leads to whom ``address`` names."""
        name = _name(address)
        if self.tickets is None or not name:
            return True
        return self._owner.get(link.incarnation, name) == name or self._refuse("impostor")

    def _has_ticket(self, ref: wire.Ref) -> bool:
        tickets = self.tickets
        return tickets is None or tickets.check(ref.transfer, ref.epoch, ref.ticket)

    def _is_rank(self, link: Link | None, ranks: dict[str, int]) -> bool:
        if link is None or link.hello is None or not ranks:
            return True  # whoever has the ticket was told to speak; no ranks: those of the hello
        theirs = link.hello.ranks
        if any(ranks.get(name) != getattr(theirs, name) for name in _PLACE):
            return self._refuse("other_rank")
        return True

    def _introduce(self, incarnation: str, peer: str) -> None:
        known = self._known.setdefault(peer, OrderedDict())
        known[incarnation] = None
        known.move_to_end(incarnation)
        self._owner[incarnation] = peer
        if len(known) > _PER_PEER:
            oldest, _ = known.popitem(last=False)
            del self._owner[oldest]

    def _warn(self, peer: str, places: list[str]) -> None:
        """Most often nobody lies: two allow-lists give one key two names."""
        if peer not in self._warned and len(self._warned) < _PER_PEER:
            self._warned.add(peer)
            said = ", ".join(repr(_name(place)) for place in places)
            _log.warning(
                "a hello under the key that our allow-list names %r says that it is %s: refused; a "
                "key must have the same name in its own file and in every allow-list",
                peer,
                said,
            )

    def _refuse(self, why: str) -> bool:
        self._ctx.counters.count(f"messages.refused.{why}")
        return False


def _name(address: str) -> str:
    try:
        return split_peer(address)[1]
    except InvalidInputError:
        return ""
