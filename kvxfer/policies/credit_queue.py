"""Who waits for the credits of one queue, and whose turn it is. Values in, decisions out.

Fair on two levels: peers take turns, and within a peer its transfers.  So neither one big transfer
nor one peer can starve others: whoever begins to wait is served after every other peer, and every
other transfer of its own peer, has spent at most about two ``largest`` calls.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from kvxfer.core.timers import Timers
from kvxfer.errors import CapacityError
from kvxfer.policies.turns import Turns

if TYPE_CHECKING:
    from kvxfer.policies.admission import CreditLimit

__all__ = ["CreditQueue", "Grant", "QueueState", "Ticket"]

T = TypeVar("T")


class Ticket(Generic[T]):
    """One call that waits. ``pieces`` falls as the call is granted part by part."""

    __slots__ = ("asked_at", "item", "patience", "peer", "pieces", "transfer")

    def __init__(
        self, item: T, *, peer: Hashable, transfer: Hashable, pieces: int, patience: float
    ) -> None:
        """``item`` is the caller's own. ``patience``: seconds that its transfer may go unserved."""
        if pieces < 1:
            raise ValueError(f"a ticket for {pieces} pieces")
        self.item = item
        self.peer = peer
        self.transfer = transfer
        self.pieces = pieces
        self.patience = patience
        self.asked_at = 0.0


class Grant(Generic[T]):
    """Credits that a ticket got. They are back once ``CreditQueue.give_back`` had it."""

    __slots__ = ("epoch", "pieces", "queue", "ticket")

    def __init__(self, queue: CreditQueue[T], ticket: Ticket[T], pieces: int, epoch: int) -> None:
        self.queue = queue
        self.ticket = ticket
        self.pieces = pieces
        self.epoch = epoch


@attrs.frozen(kw_only=True)
class QueueState:
    """What people and metrics see of a queue. Counts are pieces, but for ``waiting``: calls."""

    name: str
    limit: int | None
    in_flight: int
    waiting: int
    waiting_pieces: int


class _Flow(Generic[T]):
    """The tickets of one transfer, oldest first."""

    __slots__ = ("served_at", "tickets")

    def __init__(self, now: float) -> None:
        self.tickets: collections.OrderedDict[Ticket[T], None] = collections.OrderedDict()
        self.served_at = now


class _Peer(Generic[T]):
    __slots__ = ("flows", "turns")

    def __init__(self) -> None:
        self.flows: dict[Hashable, _Flow[T]] = {}
        self.turns: Turns[Hashable] = Turns()


class CreditQueue(Generic[T]):
    """One queue of an engine. One thread at a time.

    ``in_flight`` counts pieces that were granted and not given back.  It never exceeds the limit
    of the moment in which something is granted.
    """

    def __init__(self, name: str, credit: CreditLimit, *, most_waiting: int = 65536) -> None:
        self.name = name
        self.credit = credit
        self.in_flight = 0
        self.waiting_pieces = 0
        self._most_waiting = most_waiting
        self._peers: dict[Hashable, _Peer[T]] = {}
        self._turns: Turns[Hashable] = Turns()
        self._paused: set[Hashable] = set()
        self._timers: Timers[Ticket[T]] = Timers()

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._timers)

    @property
    def idle(self) -> bool:
        return not self.in_flight and not self._timers

    @property
    def state(self) -> QueueState:
        return QueueState(
            name=self.name,
            limit=self.credit.limit,
            in_flight=self.in_flight,
            waiting=len(self),
            waiting_pieces=self.waiting_pieces,
        )

    # ---- waiting -----------------------------------------------------------------------------

    def ask(self, ticket: Ticket[T], now: float) -> None:
        """``ticket`` waits from now on.

        Raises:
            CapacityError: too many wait already.
        """
        if len(self) >= self._most_waiting:
            raise CapacityError(
                f"{len(self)} calls wait for the credits of {self.name}: no more may",
                next_step="send fewer requests here, or raise AdmissionPolicy.most_waiting",
            )
        peer = self._peers.get(ticket.peer)
        if peer is None:
            peer = self._peers[ticket.peer] = _Peer()
        flow = peer.flows.get(ticket.transfer)
        if flow is None:
            flow = peer.flows[ticket.transfer] = _Flow(now)
            peer.turns.enter(ticket.transfer)
        flow.tickets[ticket] = None
        ticket.asked_at = now
        self.waiting_pieces += ticket.pieces
        self._timers.set(ticket, now + ticket.patience)
        if ticket.peer not in self._paused:
            self._turns.enter(ticket.peer)

    def leave(self, ticket: Ticket[T]) -> bool:
        """``ticket`` waits no more; whether it did."""
        if ticket not in self._timers:
            return False
        self._timers.cancel(ticket)
        self.waiting_pieces -= ticket.pieces
        peer = self._peers[ticket.peer]
        flow = peer.flows[ticket.transfer]
        del flow.tickets[ticket]
        if not flow.tickets:
            del peer.flows[ticket.transfer]
            peer.turns.leave(ticket.transfer)
            if not peer.flows:
                del self._peers[ticket.peer]
                self._turns.leave(ticket.peer)
        return True

    def pause(self, peer: Hashable) -> None:
        """``peer`` cannot post for the moment: others go first, its tickets stay."""
        self._paused.add(peer)
        self._turns.leave(peer)

    def resume(self, peer: Hashable) -> None:
        """``peer`` can post again; those that never paused are fine."""
        self._paused.discard(peer)
        if peer in self._peers:
            self._turns.enter(peer)

    def expired(self, now: float) -> list[Ticket[T]]:
        """Tickets whose transfer got nothing for as long as their patience; they have left."""
        found = []
        for ticket in self._timers.pop_due(now):
            flow = self._peers[ticket.peer].flows[ticket.transfer]
            until = max(ticket.asked_at, flow.served_at) + ticket.patience
            self._timers.set(ticket, until)
            if until <= now:
                self.leave(ticket)
                found.append(ticket)
        return found

    def next_at(self) -> float | None:
        """When ``expired`` has to be asked again, at the earliest."""
        return self._timers.next_at()

    # ---- credits -----------------------------------------------------------------------------

    def grant(self, now: float) -> Grant[T] | None:
        """Credits for whose turn it is, for all of its call or for the first pieces of it.

        None: nobody waits, or there are too few credits for the next one.  Then nobody overtakes
        it, however small: it would never get in.
        """
        quantum = self.credit.largest or 1
        name = self._turns.first(self._cost_of_peer, quantum)
        if name is None:
            return None
        peer = self._peers[name]
        transfer = self._first_flow(peer)
        ticket = next(iter(peer.flows[transfer].tickets))
        pieces = self._pieces(ticket)
        limit = self.credit.limit
        if limit is not None and self.in_flight + pieces > limit:
            return None
        cost = self._cost(ticket)
        self._turns.spend(name, cost)
        peer.turns.spend(transfer, cost)
        peer.flows[transfer].served_at = now
        self.in_flight += pieces
        if pieces == ticket.pieces:
            self.leave(ticket)
        else:
            ticket.pieces -= pieces
            self.waiting_pieces -= pieces
        return Grant(self, ticket, pieces, self.credit.epoch)

    def give_back(self, grant: Grant[T]) -> None:
        """Nothing of what ``grant`` was for is in the queue any more. Once per grant."""
        self.in_flight -= grant.pieces

    # ---- inside ------------------------------------------------------------------------------

    def _pieces(self, ticket: Ticket[T]) -> int:
        largest = self.credit.largest
        return ticket.pieces if largest is None else min(ticket.pieces, largest)

    def _cost(self, ticket: Ticket[T]) -> int:
        # Without a largest call turns go by calls, which are of any size then.
        return 1 if self.credit.largest is None else self._pieces(ticket)

    def _first_flow(self, peer: _Peer[T]) -> Hashable:
        flows = peer.flows
        first = peer.turns.first(
            lambda transfer: self._cost(next(iter(flows[transfer].tickets))),
            self.credit.largest or 1,
        )
        assert first is not None  # a peer without flows is not in the table
        return first

    def _cost_of_peer(self, name: Hashable) -> int:
        peer = self._peers[name]
        return self._cost(next(iter(peer.flows[self._first_flow(peer)].tickets)))
