"""The desk at which calls wait for credits, for all queues of an agent.

A call asks before it is posted, gets its credits when its turn comes, and its credits come back
when its attempt is drained, or when nothing was posted after all.  Waiting blocks nothing: a call
at the desk is an entry in a table.
"""

from __future__ import annotations

import collections
import sys
from typing import TYPE_CHECKING

from kvxfer.core.timers import Timers
from kvxfer.policies.credit_queue import CreditQueue, QueueState, Ticket

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from kvxfer.agent.context import Context
    from kvxfer.agent.part import Call
    from kvxfer.policies.admission import AdmissionPolicy
    from kvxfer.policies.credit_queue import Grant

__all__ = ["Desk"]

_IDLE_QUEUES = 1024
"""Queues that are remembered while nothing is in them: an adaptive limit was learnt there."""


class Desk:
    """Progress thread only."""

    def __init__(self, ctx: Context, policy: AdmissionPolicy) -> None:
        self._ctx = ctx
        self._policy = policy
        self._queues: collections.OrderedDict[str, CreditQueue[Call]] = collections.OrderedDict()
        self._tickets: dict[Call, tuple[CreditQueue[Call], Ticket[Call]]] = {}
        self._changed: dict[CreditQueue[Call], None] = {}
        self._timers: Timers[CreditQueue[Call]] = Timers()

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._tickets)

    @property
    def states(self) -> tuple[QueueState, ...]:
        """Of the queues that are not idle."""
        return tuple(q.state for q in tuple(self._queues.values()) if not q.idle)

    def longest_wait(self, now: float) -> float:
        """Seconds for which the call that asked first has waited; 0 if none waits. Any thread."""
        first = next(iter(tuple(self._tickets.values())), None)
        return 0.0 if first is None else max(0.0, now - first[1].asked_at)

    def largest(self, capability: int | None) -> int:
        """Pieces of the largest call that a queue of such an engine grants at first."""
        largest = self._policy.begin(capability).largest
        return sys.maxsize if largest is None else largest

    # ---- calls -------------------------------------------------------------------------------

    def ask(
        self, call: Call, *, queue: str, capability: int | None, peer: Hashable, now: float
    ) -> None:
        """Have ``call`` granted by ``queue``, all at once or in parts, when its turn comes.

        Raises:
            CapacityError: too many calls wait for that queue already.
        """
        line = self._queue(queue, capability)
        ticket = Ticket(
            call,
            peer=peer,
            transfer=call.part.owner,
            pieces=len(call.batch),
            patience=self._ctx.timeouts.queue,
        )
        line.ask(ticket, now)
        self._tickets[call] = (line, ticket)
        self._touch(line)

    def withdraw(self, call: Call) -> bool:
        """``call`` does not wait any more; whether it did."""
        line, ticket = self._tickets.pop(call, (None, None))
        if line is None or ticket is None:
            return False
        line.leave(ticket)
        self._touch(line)  # it may have been the one that the others waited behind
        return True

    def give_back(self, grant: Grant[Call]) -> None:
        """What was granted is not in the queue any more."""
        grant.queue.give_back(grant)
        self._touch(grant.queue)

    def succeeded(self, grant: Grant[Call]) -> None:
        grant.queue.credit.succeeded(grant.pieces)

    def refused(self, grant: Grant[Call]) -> None:
        """The engine had no room for it."""
        credit = grant.queue.credit
        before = credit.limit
        credit.refused(grant.epoch)
        if credit.limit != before:
            self._ctx.counters.count("admission.limit_lowered")

    def pause(self, peer: Hashable, queues: Iterable[str]) -> None:
        """``peer`` cannot post for the moment: others get what is free."""
        for name in queues:
            line = self._queues.get(name)
            if line is not None:
                line.pause(peer)
                self._touch(line)

    def resume(self, peer: Hashable, queues: Iterable[str]) -> None:
        for name in queues:
            line = self._queues.get(name)
            if line is not None:
                line.resume(peer)
                self._touch(line)

    # ---- turns -------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Grant what can be granted, and let go who has waited too long."""
        for line in self._timers.pop_due(now):
            self._changed[line] = None
        changed, self._changed = self._changed, {}
        for line in changed:
            self._serve(line, now)
        next_at = self._timers.next_at()
        if next_at is not None:
            self._ctx.at(self, next_at)
        elif not self._changed:
            self._ctx.forget(self)

    def _serve(self, line: CreditQueue[Call], now: float) -> None:
        for ticket in line.expired(now):
            self._tickets.pop(ticket.item, None)
            self._ctx.counters.count("admission.timeout")
            ticket.item.waited_too_long(line.state, now - ticket.asked_at)
        counters = self._ctx.counters
        while (grant := line.grant(now)) is not None:
            call = grant.ticket.item
            if grant.pieces == len(call.batch):
                del self._tickets[call]
            else:
                counters.count("admission.cut")
            if now > grant.ticket.asked_at:
                counters.count("admission.waited")
            call.part.link.poster.granted(call, grant, now)
        next_at = line.next_at()
        if next_at is None:
            self._timers.cancel(line)
        else:
            self._timers.set(line, next_at)

    def _touch(self, line: CreditQueue[Call]) -> None:
        if len(line):
            self._changed[line] = None
            self._ctx.soon(self)

    def _queue(self, name: str, capability: int | None) -> CreditQueue[Call]:
        line = self._queues.get(name)
        if line is None:
            line = CreditQueue(
                name, self._policy.begin(capability), most_waiting=self._policy.most_waiting
            )
            self._queues[name] = line
            if len(self._queues) > _IDLE_QUEUES:
                for other in [n for n, q in self._queues.items() if q.idle and q is not line]:
                    del self._queues[other]
                    if len(self._queues) <= _IDLE_QUEUES:
                        break
        else:
            self._queues.move_to_end(name)
        return line
