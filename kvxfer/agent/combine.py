"""Combines what the ranks of one instance report about one transfer. Pure; times are arguments."""

from __future__ import annotations

from typing import Any

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
from kvxfer.errors import ErrorKind, TransferError

__all__ = ["Combined"]

_TERMINAL = (Received, Sent, Declined, Expired, Failed)
_CONSUMER_ONLY = (Received, Gone)
_PRODUCER_ONLY = (Sent, Declined, Expired)


@attrs.define(kw_only=True)
class Combined:
    """One transfer over all ranks: published once, when every rank is terminal.

    A failure of one rank is the transfer's, and drained means that all ranks are.  A rank that says
    nothing by the deadline counts as failed and not drained: what it still does is not known.
    """

    role: Role
    transfer_id: str
    world_size: int
    blocks: BlockIds = ()
    """What the transfer concerns, for ranks that cannot say it themselves."""
    tag: Any = None
    owners: tuple[str, ...] = ()
    ended: dict[int, Event] = attrs.field(factory=dict)
    undrained: set[int] = attrs.field(factory=set)
    published: bool = False
    timed_out: bool = False
    """Published with ranks silent: it concerns whatever they may have had to do with."""
    quarantined: bool = False
    """No word by the second deadline: out of use until it comes, or ``reclaim``."""

    @property
    def over(self) -> bool:
        """Published, and nothing can follow."""
        return self.published and not self.undrained

    @property
    def silent(self) -> list[int]:
        """Ranks that have not said how it ended."""
        return [rank for rank in range(self.world_size) if rank not in self.ended]

    def concerns(self, event: Event) -> bool:
        """Whether ``event`` speaks of this role."""
        if isinstance(event, (Failed, Drained, Quarantined)):
            return event.role is self.role
        if isinstance(event, _CONSUMER_ONLY):
            return self.role is Role.CONSUMER
        return isinstance(event, _PRODUCER_ONLY) and self.role is Role.PRODUCER

    def add(self, rank: int, event: Event) -> list[Event]:
        """Take one rank's event; returns what the transfer as a whole has to say now."""
        if not 0 <= rank < self.world_size:
            return []
        return [self._signed(e) for e in self._add(rank, event)]

    def _add(self, rank: int, event: Event) -> list[Event]:
        if isinstance(event, _TERMINAL):
            if rank in self.ended:
                return []  # first wins
            self.ended[rank] = event
            undrained = isinstance(event, Failed) and not event.drained
            if self.published:  # by the deadline: now this rank has spoken after all
                return [] if undrained else self._drained_one(rank, "report")
            if undrained:
                self.undrained.add(rank)
            if len(self.ended) == self.world_size:
                self.published = True
                return [self._outcome()]
            return []
        if isinstance(event, Drained):
            return self._drained_one(rank, event.drained_by)
        if isinstance(event, Quarantined):
            if self.quarantined:
                return []
            self.quarantined = True
            return [attrs.evolve(event, blocks=self._blocks())]
        return [event]

    def _drained_one(self, rank: int, by: str) -> list[Event]:
        known = rank in self.undrained
        self.undrained.discard(rank)
        if known and self.published and not self.undrained:
            return [self._drained(by)]
        return []

    def _drained(self, by: str) -> Drained:
        return Drained(
            transfer_id=self.transfer_id, role=self.role, blocks=self._blocks(), drained_by=by
        )

    def expire(self, seconds: float) -> list[Event]:
        """The deadline, ``seconds`` after the beginning, has passed with ranks silent."""
        if self.published:
            return []
        silent = self.silent
        self.published = self.timed_out = True
        self.undrained.update(silent)
        error = TransferError(
            f"ranks {silent} have not said within {seconds:.3f} s how it ended",
            kind=ErrorKind.TIMEOUT,
            next_step="check those workers, and that their reports arrive",
        )
        failed = [e for e in self.ended.values() if isinstance(e, Failed)]
        event = Failed(
            transfer_id=self.transfer_id,
            role=self.role,
            kind=failed[0].kind if failed else error.kind,
            error=failed[0].error if failed else error,
            blocks=self._blocks(),
            drained=False,
        )
        return [self._signed(event)]

    def quarantine(self) -> list[Event]:
        """Nor has it been drained by the second deadline."""
        if self.quarantined or self.over:
            return []
        self.quarantined = True
        reason = f"ranks {sorted(self.undrained)} have not said that it is drained"
        return [
            self._signed(
                Quarantined(
                    transfer_id=self.transfer_id,
                    role=self.role,
                    blocks=self._blocks(),
                    reason=reason,
                )
            )
        ]

    def reclaim(self) -> list[Event]:
        """The user takes the blocks back without proof."""
        self.undrained.clear()
        return [self._signed(self._drained("reclaim"))]

    def lose(self, rank: int) -> list[Event]:
        """The worker of that rank has ended: its memory went with it, nothing can land there."""
        if rank in self.ended:
            found = self._drained_one(rank, "worker ended")
            return [self._signed(event) for event in found]
        error = TransferError(f"the worker of rank {rank} has ended", kind=ErrorKind.PEER_LOST)
        event = Failed(
            transfer_id=self.transfer_id, role=self.role, kind=ErrorKind.PEER_LOST, error=error
        )
        return self.add(rank, event)

    def _signed(self, event: Event) -> Event:
        return attrs.evolve(event, tag=self.tag, owners=self.owners)

    def _outcome(self) -> Event:
        events = [self.ended[rank] for rank in sorted(self.ended)]
        failed = [e for e in events if isinstance(e, Failed)]
        if failed:
            return attrs.evolve(failed[0], blocks=self._blocks(), drained=not self.undrained)
        expired = [e for e in events if isinstance(e, Expired)]
        if expired:
            missing = sorted({rank for e in expired for rank in e.missing})
            return attrs.evolve(expired[0], missing=tuple(missing))
        for event in events:
            if isinstance(event, Declined):
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
        """Every block that any rank names, per group: the ids are the same on all ranks.

        A rank that says nothing, or says less, may concern all of them.
        """
        unknown = self.timed_out or any(
            isinstance(e, Failed) and not e.blocks for e in self.ended.values()
        )
        groups: list[dict[int, None]] = []
        named = [e.blocks for e in self.ended.values() if isinstance(e, Failed)]
        for blocks in [*named, *([self.blocks] if unknown else [])]:
            for index, ids in enumerate(blocks):
                if index == len(groups):
                    groups.append({})
                groups[index].update(dict.fromkeys(ids))
        return tuple(tuple(group) for group in groups)
