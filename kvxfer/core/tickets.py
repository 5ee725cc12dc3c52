"""Tickets: what shows that a peer was handed an offer. Pure.

A release frees memory, and a peer that has nothing to read sends one without ever having said
hello.  So that no other peer can free it by naming it, an offer carries a ticket that only its
producer can make; a reference without it is refused where keys are on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import attrs

__all__ = ["TICKET_LENGTH", "Tickets"]

TICKET_LENGTH = 32
"""Characters: 128 bits in hexadecimal, beyond guessing."""


@attrs.frozen
class Tickets:
    """Makes and checks the tickets of one agent. Pickles; the key stays out of every text."""

    key: bytes = attrs.field(factory=lambda: secrets.token_bytes(32), repr=False)

    def of(self, transfer_id: str, epoch: int) -> str:
        """The ticket of one hold. About 3 us."""
        what = b"%d %s" % (epoch, transfer_id.encode("utf-8", "surrogatepass"))
        return hmac.new(self.key, what, hashlib.sha256).hexdigest()[:TICKET_LENGTH]

    def check(self, transfer_id: str, epoch: int, ticket: str) -> bool:
        """Whether ``ticket`` is the one of that hold."""
        mine = self.of(transfer_id, epoch)
        return hmac.compare_digest(mine.encode(), ticket.encode("utf-8", "surrogatepass"))
