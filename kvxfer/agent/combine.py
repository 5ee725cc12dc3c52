"""Combines what the ranks of one instance report about one transfer. Pure."""

from __future__ import annotations

import attrs

from kvxfer.core.events import (
    BlockIds,
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    Gone,
    Quarantined,
    Received,
    Role,
    Sent,
)

__all__ = ["Combined"]

_TERMINAL = (Received, Sent, Declined, Expired, Failed)
_CONSUMER_ONLY = (Received, Gone)
_PRODUCER_ONLY = (Sent, Declined, Expired)


@attrs.define(kw_only=True)
class Combined:
    """One transfer over all ranks: published once, when every rank is terminal.

    A failure of one rank is the transfer's, and drained means that all ranks are.
    """

    role: Role
    transfer_id: str
    world_size: int
    ended: dict[int, Event] = attrs.field(factory=dict)
    undrained: set[int] = attrs.field(factory=set)
    published: bool = False

    @property
    def over(self) -> bool:
        """Published, and nothing can follow."""
        return self.published and not self.undrained

    def concerns(self, event: Event) -> bool:
        """Whether ``event`` speaks of this role."""
        if isinstance(event, (Failed, Drained, Quarantined)):
            return event.role is self.role
        if isinstance(event, _CONSUMER_ONLY):
            return self.role is Role.CONSUMER
        return isinstance(event, _PRODUCER_ONLY) and self.role is Role.PRODUCER

    def add(self, rank: int, event: Event) -> list[Event]:
        """Take one rank's event; returns what the transfer as a whole has to say now."""
        if isinstance(event, _TERMINAL):
            if rank in self.ended:
                return []  # first wins
            self.ended[rank] = event
            if isinstance(event, Failed) and not event.drained:
                self.undrained.add(rank)
            if len(self.ended) == self.world_size:
                self.published = True
                return [self._outcome()]
            return []
        if isinstance(event, Drained):
            self.undrained.discard(rank)
            if self.published and not self.undrained:
                return [attrs.evolve(event, blocks=self._blocks())]
            return []
        return [event]

    def _outcome(self) -> Event:
        events = [self.ended[rank] for rank in sorted(self.ended)]
        failed = [e for e in events if isinstance(e, Failed)]
        if failed:
            return attrs.evolve(failed[0], blocks=self._blocks(), drained=not self.undrained)
        for kind in (Expired, Declined):
            for event in events:
                if isinstance(event, kind):
                    return event
        first = events[0]
        if isinstance(first, Received):
            received = [e for e in events if isinstance(e, Received)]
            payload = next((e.payload for e in received if e.payload), b"")
            return attrs.evolve(first, nbytes=sum(e.nbytes for e in received), payload=payload)
        if isinstance(first, Sent):
            return attrs.evolve(first, nbytes=sum(e.nbytes for e in events if isinstance(e, Sent)))
        return first

    def _blocks(self) -> BlockIds:
        """Every block that any rank names, per group: the ids are the same on all ranks."""
        groups: list[dict[int, None]] = []
        for event in self.ended.values():
            if isinstance(event, Failed):
                for index, ids in enumerate(event.blocks):
                    if index == len(groups):
                        groups.append({})
                    groups[index].update(dict.fromkeys(ids))
        return tuple(tuple(group) for group in groups)
